"""The parameter groups of a model for Muon: which weights are matrices, and how they are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ampfuse.optim.muon import SHAPING

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *_CONVOLUTIONS, *_RECURRENT)
# Names of fused projections, in lower case: of queries, keys and values; of two halves.
_QKV = "qkv qkv_proj qkv_linear to_qkv wqkv c_attn in_proj in_proj_weight query_key_value".split()
_HALVES = "kv kv_proj to_kv wkv gate_up gate_up_proj w13".split()
# Names in modules and configurations of the numbers of heads, and of the size of one.
_HEADS = "num_heads num_attention_heads n_heads n_head nhead heads".split()
_KV_HEADS = "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_n_heads kv_heads".split()
_HEAD_DIM = "head_dim head_size d_head dim_head".split()
# Words in names of parameters of unknown modules: of tables, and of matrices.
_TABLE = re.compile(
    r"embed|bias|token|(^|_)(emb|wte|wpe|tok|pos\w*|table\w*|vocab\w*|log|scale)(_|\d|$)"
)
_PRODUCT = re.compile(
    r"weight|proj|kernel|expert"
    r"|(^|_)(w[a-z]?|wqkv|qkv|kv|matri\w+|linear|fc|dense|lora|moe)(_|\d|$)"
)


class MuonGroups(list[dict[str, Any]]):
    """Parameter groups; ``print`` shows the algorithm of each parameter, and the reason."""

    def __init__(self, groups: list[dict[str, Any]], reasons: dict[str, str]) -> None:
        super().__init__(groups)
        self._reasons = reasons

    def __str__(self) -> str:
        lines = []
        for group in self:
            elements = sum(param.numel() for param in group["params"])
            count = len(group["params"])
            options = [f"{key}={group[key]}" for key in SHAPING if key in group]
            heading = ", ".join([group["algorithm"], *options])
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            lines.append(f"{heading}: {tensors}, {elements:,} elements")
            lines += [f"  {name}: {self._reasons[name]}" for name in group["param_names"]]
        return "\n".join(lines)


def muon_groups(
    model: nn.Module,
    *,
    heads: Collection[str] | None = None,
    split: Mapping[str, int | list[int]] | None = None,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> MuonGroups:
    """Parameter groups for :class:`ampfuse.optim.Muon`, of all parameters that are trained.

    Muon gets the weights of linear, recurrent and convolutional layers, and 3-D weights of experts
    as batches. For a parameter of another module the name decides: matrices (``weight``, ``w1``,
    ``up_proj``) go to Muon, all others (``wte``, ``A_log``) to AdamW. As in the papers, AdamW also
    gets embeddings and weights tied to them, the model's head, biases, norms, and weights with a
    side of length 1, such as positions or depthwise convolutions. ``print(muon_groups(model))``
    shows the algorithm of each parameter, and the reason. ::

        groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-4, "weight_decay": 0.01})
        optimizer = ampfuse.optim.Muon(groups)

    Arguments:
        heads: names of modules that are heads. By default these are the linear layers with an
            output for each row of an embedding; none, if a layer shares the embedding's weight;
            without either those called ``head``, ``lm_head`` or ``classifier``, else the last one.
        split: by the last name of a module or parameter, how many projections are fused in it, or
            their sizes. 1 gives Muon a parameter whose name does not say what it is. By default
            fused projections (``qkv_proj``, ``gate_up_proj``, the gates of an LSTM) are split where
            sizes are known: from the numbers of heads in the module or in a ``config``, from the
            next layer, or from three times as many outputs as inputs. Where they are not known,
            the weight is one matrix, and ``print`` says so.
        muon, adamw: further options of their groups.

    Raises:
        ValueError: the model has no module or parameter of a name in `heads` or `split`.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    split = split or {}
    last_names = {name.rpartition(".")[2] for name in [*modules, *parameters]}
    for what, names, known in (("heads", heads or (), modules), ("split", split, last_names)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} has {name!r}, but nothing in the model has that name")
    tables: dict[str, Any] = {name: each for name, each in modules.items() if _is_embedding(each)}
    tied = {table.weight: "an embedding" for table in tables.values()}
    of_heads = dict.fromkeys(heads, "the head") if heads is not None else _heads(modules, tables)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    reasons = {}
    for name, param in parameters.items():
        if not param.requires_grad:
            continue
        weight = _Weight(modules, name, param)
        why_adamw = tied.get(param) or weight.why_adamw(split) or of_heads.get(weight.owner)
        if why_adamw is not None:
            group = {"algorithm": "adamw", **(adamw or {})}
            reasons[name] = why_adamw
        else:
            options, reasons[name] = weight.muon_options(split)
            group = {"algorithm": "muon", **(muon or {}), **options}
        key = tuple(map(repr, group.items()))
        into = groups.setdefault(key, {"params": [], "param_names": [], **group})
        into["params"].append(param)
        into["param_names"].append(name)
    # Muon's groups come first.
    ordered = sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")
    return MuonGroups(ordered, reasons)


def _is_embedding(module: nn.Module) -> bool:
    """Whether it is an embedding: torch's, or one by its name, as in Megatron and vLLM."""
    own = module._parameters.get("weight")
    return own is not None and own.ndim == 2 and "Embedding" in type(module).__name__


def _heads(modules: Mapping[str, nn.Module], tables: Mapping[str, Any]) -> dict[str, str]:
    """The names of the heads, with the reason for each; `tables` are the embeddings."""
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    weights = {module.weight for module in tables.values()}
    if any(module.weight in weights for module in linear.values()):
        return {}  # tied: an embedding's weight is AdamW's already
    vocabularies = {
        len(module.weight): name
        for name, module in tables.items()
        if not re.search(r"pos|wpe|type|segment|bias", name.rpartition(".")[2])
    }
    as_wide = [name for name, module in linear.items() if len(module.weight) in vocabularies]
    # A numbered layer of that width is a head only if it is the last one.
    last = [*linear][-1:]
    outside = [name for name in as_wide if name in last or not re.search(r"(^|\.)\d", name)]
    if outside:
        embedding = {name: vocabularies[len(linear[name].weight)] for name in outside}
        return {
            name: f"the head: as many outputs as {embedding[name]} has rows" for name in outside
        }
    by_name = re.compile(r"([a-z_]+\.)*(head|lm_head|classifier|(lm_)?heads\.\d+)")
    if named := list(filter(by_name.fullmatch, linear)):
        return dict.fromkeys(named, "the head, by its name")
    return dict.fromkeys(last, "the head: the last linear layer")


class _Weight:
    """A parameter, and the modules that it belongs to.

    Attributes:
        owner: the name of its module; of a parametrized weight, of the layer.
        kind: the class of that.
        part: what `split` calls it.
    """

    def __init__(self, modules: Mapping[str, nn.Module], name: str, param: Tensor) -> None:
        path, _, inside = name.partition(".parametrizations.")
        self.owner, _, own_name = path.rpartition(".")
        if inside:
            self.owner = path
            own_name = inside.partition(".")[0]
        self._param = param
        self._name = own_name
        self._module = modules[self.owner]
        self.kind = type(self._module).__name__
        outer, _, last_name = self.owner.rpartition(".")
        self.part = last_name if own_name == "weight" else own_name
        # The module with attributes such as num_heads: a layer only has its own sizes.
        self._home = modules[outer] if own_name == "weight" else self._module
        self._root = modules[""]

    def why_adamw(self, split: Mapping[str, Any]) -> str | None:
        """The reason why AdamW gets it; None if Muon does. `split` gives Muon unknown matrices."""
        param, kind = self._param, self.kind
        if param.ndim < 2:
            return "a vector"
        if isinstance(self._module, _CONVOLUTIONS):
            return "a convolution of each channel by itself" if param.shape[1] == 1 else None
        if 1 in param.shape:
            return "a side of length 1"
        # Third-party layers, by the name of their class.
        is_layer = re.search(r"(Linear|Dense|Conv(\d[dD])?)$", kind)
        if isinstance(self._module, _LAYERS) or (is_layer and self._name == "weight"):
            return None
        if "Norm" in kind:
            return "a norm"
        if "Embedding" in kind and self._name == "weight":
            return "an embedding"
        if self.part in split:
            return None
        # In a list, and in an unknown layer, the module has the name.
        name = self.part if self.part.isidentifier() else self.owner.rpartition(".")[2]
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        if _TABLE.search(name):
            return "a table or a scale, by its name"
        experts = param.ndim == 3 and re.search("expert|moe", f"{self.owner} {kind}".lower())
        if self._name == "weight" or is_layer or experts or _PRODUCT.search(name):
            return None
        return (
            "not of a known layer, and not a matrix by its name; "
            f"split={{{self.part!r}: 1}} gives it to Muon"
        )

    def muon_options(self, split: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The options of its group of Muon, and a description of its matrices."""
        options, shape = self._storage(), f"{tuple(self._param.shape)}, of a {self.kind}"
        if self.part in split:
            return {**options, "split": split[self.part]}, shape
        sizes, how = self._projections()
        if sizes is not None:
            options["split"] = sizes
        return options, f"{shape}, {how}" if how else shape

    def _storage(self) -> dict[str, Any]:
        """The options that say how its matrices are stored."""
        if isinstance(self._module, _CONVOLUTIONS):
            return {"flatten": True} if self._param.ndim == 3 else {}
        # transformers' layer of GPT-2, by its name, as transformers may be missing; and experts.
        turned = self.kind == "Conv1D" or self._inputs_first() is True
        return {"transposed": True} if turned else {}

    def _inputs_first(self) -> bool | None:
        """Whether 3-D weights have inputs before outputs; None if it is unknown."""
        if self._param.ndim != 3:
            return None
        declared = getattr(self._module, "is_transposed", None)  # by transformers' experts
        if isinstance(declared, bool):
            return declared
        # A gated layer has two outputs for each input of the next layer.
        count, a, b = self._param.shape
        others = {tuple(p.shape) for p in self._module.parameters(recurse=False)}
        if others & {(count, b / 2, a), (count, b, 2 * a)}:
            return True
        return False if others & {(count, b, a / 2), (count, 2 * b, a)} else None

    def _projections(self) -> tuple[int | list[int] | None, str]:
        """The sizes of projections that are fused in it, and the reason.

        None if it is one matrix, with the reason where its sizes would be needed.
        """
        storage, shape, name = self._storage(), self._param.shape, self.part.lower()
        in_batch = self._param.ndim == 3 and "flatten" not in storage
        outputs, inputs = shape[-2:] if in_batch else (shape[0], math.prod(shape[1:]))
        if "transposed" in storage:
            outputs, inputs = inputs, outputs
        if isinstance(self._module, _RECURRENT):
            gates = outputs // self._module.hidden_size
            return (gates, "its gates") if gates > 1 and "hr" not in name else (None, "")
        if name in _HALVES and outputs % 2 == 0:
            is_known = not in_batch or self._inputs_first() is not None
            if is_known and getattr(self._module, "is_concatenated", True) is True:
                return 2, "its halves"
        # In query_key_value they are interleaved by head.
        if name in _QKV and name != "query_key_value":
            for queries, reason in self._queries(name, outputs, inputs):
                keys, odd = divmod(outputs - queries, 2)
                if keys > 0 and not odd and queries % keys == 0:
                    sizes = 3 if keys == queries else [queries, keys, keys]
                    return sizes, f"queries, keys and values {reason}"
        if name in (*_QKV, *_HALVES) and (outputs > inputs or name != "in_proj"):
            return None, (
                "one matrix: fused projections by its name, whose sizes and order are unknown; "
                f"split={{{self.part!r}: [...]}} gives them"
            )
        return None, ""

    def _queries(self, name: str, outputs: int, inputs: int) -> Iterator[tuple[int, str]]:
        """Possible numbers of queries, with reasons; keys and values share the other outputs."""
        heads, keys, size = map(self._number, (_HEADS, _KV_HEADS, _HEAD_DIM))
        if heads:
            size = size or (outputs // (heads + 2 * keys) if keys else inputs // heads)
            rest = outputs - heads * size
            if size and rest % (2 * size) == 0 and keys in (0, rest // (2 * size)):
                yield heads * size, f"of {heads} heads"
        # The next layer takes values, one for each query. (That of a Mamba block takes others.)
        following = {
            tuple(m.weight.shape)
            for m in self._home.children()
            if isinstance(m, nn.Linear) and m.weight is not self._param
        }
        takes = {shape[1] for shape in following if shape[0] == inputs}
        if len(takes) == 1 and name != "in_proj":
            yield takes.pop(), "by the next layer"
        if outputs == 3 * inputs:
            yield inputs, "of its inputs' size"

    def _number(self, names: list[str]) -> int:
        """The first of `names` that its outer module or a configuration has; 0 if none."""
        scopes = (self._home, *(getattr(m, "config", None) for m in (self._home, self._root)))
        values = (getattr(scope, name, None) for scope in scopes for name in names)
        return next((n for n in values if isinstance(n, int) and not isinstance(n, bool)), 0)
