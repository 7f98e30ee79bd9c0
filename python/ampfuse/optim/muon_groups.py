"""Which parameters of a model are matrices for Muon, and which are AdamW's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *_CONVOLUTIONS, *_RECURRENT)
# What models call fused projections, in lower case: of queries, keys and values; of two halves.
_QKV = "qkv qkv_proj qkv_linear to_qkv wqkv c_attn in_proj in_proj_weight query_key_value".split()
_HALVES = "kv kv_proj to_kv wkv gate_up gate_up_proj w13".split()
# What modules and configurations call the numbers of heads, and the size of one.
_HEADS = "num_heads num_attention_heads n_heads n_head nhead heads".split()
_KV_HEADS = "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_n_heads kv_heads".split()
_HEAD_DIM = "head_dim head_size d_head dim_head".split()
# Words in names of parameters that are no layer's: of tables, and of what is multiplied.
_TABLE = re.compile(
    r"embed|bias|token|(^|_)(emb|wte|wpe|tok|pos\w*|table\w*|vocab\w*|log|scale)(_|\d|$)"
)
_PRODUCT = re.compile(
    r"weight|proj|kernel|expert"
    r"|(^|_)(w[a-z]?|wqkv|qkv|kv|matri\w+|linear|fc|dense|lora|moe)(_|\d|$)"
)


class MuonGroups(list[dict[str, Any]]):
    """Parameter groups; ``print`` shows what went where, and why."""

    def __init__(self, groups: list[dict[str, Any]], reasons: dict[str, str]) -> None:
        super().__init__(groups)
        self._reasons = reasons

    def __str__(self) -> str:
        lines = []
        for group in self:
            elements = sum(param.numel() for param in group["params"])
            count = len(group["params"])
            options = [
                f"{key}={group[key]}" for key in ("split", "transposed", "flatten") if key in group
            ]
            heading = ", ".join([group["algorithm"], *options])
            lines.append(f"{heading}: {count} tensor{'s' * (count > 1)}, {elements:,} elements")
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

    Muon has the weights of linear, recurrent and convolutional layers, and 3-D weights of experts
    as batches. Of a parameter that belongs to no such layer the name decides: what is multiplied
    (``weight``, ``w1``, ``up_proj``) is Muon's, all else (``wte``, ``A_log``) AdamW's. AdamW also
    has, as in the papers, embeddings and what is tied to them, the model's head, biases, norms, and
    what has a side of length 1, as positions or a convolution of each channel by itself.
    ``print(muon_groups(model))`` shows where each parameter went, and why. ::

        groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-4, "weight_decay": 0.01})
        optimizer = ampfuse.optim.Muon(groups)

    Arguments:
        heads: names of modules that are heads. By default these are the linear layers with an
            output for each row of an embedding; none, if a layer shares the embedding's weight;
            without either those called ``head``, ``lm_head`` or ``classifier``, else the last one.
        split: of a module or parameter, by its last name, how many projections are fused in it, or
            the sizes of these. 1 gives Muon a parameter whose name does not say what it is. By
            default fused projections (``qkv_proj``, ``gate_up_proj``, the gates of an LSTM) are
            split where sizes are known: by the numbers of heads in the module or in a ``config``,
            by the layer behind, or by three times as many outputs as inputs. Where they are not,
            the weight is one matrix, and ``print`` says so.
        muon, adamw: further options of their groups.

    Raises:
        ValueError: a name in `heads` or `split` is no module's or parameter's.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    asked = dict(split or {})
    last_names = {name.rpartition(".")[2] for name in [*modules, *parameters]}
    for what, names, known in (("heads", heads or (), modules), ("split", asked, last_names)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} names {name!r}, and the model has nothing of that name")
    found = dict.fromkeys(heads, "the head") if heads is not None else _heads(modules)
    tied = {module.weight: "an embedding" for module in modules.values() if _is_embedding(module)}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    reasons = {}
    for name, param in parameters.items():
        if not param.requires_grad:
            continue
        weight = _Weight(modules, name, param)
        reason = (
            tied.get(param) or weight.why_adamw(weight.part in asked) or found.get(weight.owner)
        )
        group: dict[str, Any] = {"algorithm": "adamw", **(adamw or {})}
        if reason is None:
            reason = f"{tuple(param.shape)}, of a {weight.kind}"
            group = {"algorithm": "muon", **(muon or {}), **weight.seen_as()}
            if weight.part in asked:
                group["split"] = asked[weight.part]
            elif (parts := weight.parts()) is not None:
                sizes, how = parts
                group |= {"split": sizes} if sizes else {}
                reason = f"{reason}, {how}"
        key = tuple(map(repr, group.items()))
        into = groups.setdefault(key, {"params": [], "param_names": [], **group})
        into["params"].append(param)
        into["param_names"].append(name)
        reasons[name] = reason
    # All of one algorithm side by side.
    ordered = sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")
    return MuonGroups(ordered, reasons)


def _is_embedding(module: nn.Module) -> bool:
    """Of torch, or by its name, as in Megatron and vLLM."""
    own = module._parameters.get("weight")
    return own is not None and own.ndim == 2 and "Embedding" in type(module).__name__


def _heads(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The names of the heads, and by what they are known."""
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    tables: dict[str, Any] = {
        name: module for name, module in modules.items() if _is_embedding(module)
    }
    weights = {module.weight for module in tables.values()}
    if any(module.weight in weights for module in linear.values()):
        return {}  # tied: an embedding's weight is AdamW's already
    vocabularies = {
        len(module.weight): name
        for name, module in tables.items()
        if not re.search(r"pos|wpe|type|segment|bias", name.rpartition(".")[2])
    }
    as_wide = [name for name, module in linear.items() if len(module.weight) in vocabularies]
    # Numbered layers of that width may be any, but for the last one.
    last = [*linear][-1:]
    outside = [name for name in as_wide if name in last or not re.search(r"(^|\.)\d", name)]
    if outside:
        return {
            name: f"the head: as many outputs as {vocabularies[len(linear[name].weight)]} has rows"
            for name in outside
        }
    named = [
        name
        for name in linear
        if re.fullmatch(r"([a-z_]+\.)*(head|lm_head|classifier|(lm_)?heads\.\d+)", name)
    ]
    if named:
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
            self.owner, own_name = path, inside.partition(".")[0]
        self._param, self._name, self._module = param, own_name, modules[self.owner]
        self.kind = type(self._module).__name__
        outer, _, last_name = self.owner.rpartition(".")
        self.part = last_name if own_name == "weight" else own_name
        # Whose attributes tell of it: a layer knows its own sizes alone.
        self._home = modules[outer] if own_name == "weight" else self._module
        self._root = modules[""]

    def why_adamw(self, is_asked_for: bool) -> str | None:
        """Why it is not Muon's; None if it is."""
        param, kind = self._param, self.kind
        if param.ndim < 2:
            return "a vector"
        if isinstance(self._module, _CONVOLUTIONS):
            return "a convolution of each channel by itself" if param.shape[1] == 1 else None
        if 1 in param.shape:
            return "a side of length 1"
        # Layers of others, by the name of their class.
        is_layer = re.search(r"(Linear|Dense|Conv(\d[dD])?)$", kind)
        if isinstance(self._module, _LAYERS) or (is_layer and self._name == "weight"):
            return None
        if "Norm" in kind:
            return "a norm"
        if "Embedding" in kind and self._name == "weight":
            return "an embedding"
        if is_asked_for:
            return None
        # In a list, and in a layer that is not known, the name is that of the module.
        name = self.part if self.part.isidentifier() else self.owner.rpartition(".")[2]
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        if _TABLE.search(name):
            return "a table or a scale, by its name"
        experts = param.ndim == 3 and re.search("expert|moe", f"{self.owner} {kind}".lower())
        if self._name == "weight" or is_layer or experts or _PRODUCT.search(name):
            return None
        return (
            "of no layer, and its name does not say that it is multiplied; "
            f"split={{{self.part!r}: 1}} makes it Muon's"
        )

    def seen_as(self) -> dict[str, Any]:
        """How its matrices lie, where that is not what Muon takes it for."""
        if isinstance(self._module, _CONVOLUTIONS):
            return {"flatten": True} if self._param.ndim == 3 else {}
        # transformers' layer of GPT-2, which it need not be here to know; and experts.
        turned = self.kind == "Conv1D" or self._inputs_first() is True
        return {"transposed": True} if turned else {}

    def _inputs_first(self) -> bool | None:
        """Whether 3-D weights have inputs before outputs; None if nothing tells."""
        if self._param.ndim != 3:
            return None
        told = getattr(self._module, "is_transposed", None)  # as transformers' experts say
        if isinstance(told, bool):
            return told
        # A gated layer has two outputs for each input of the layer behind it.
        count, a, b = self._param.shape
        others = {tuple(p.shape) for p in self._module.parameters(recurse=False)}
        if others & {(count, b / 2, a), (count, b, 2 * a)}:
            return True
        return False if others & {(count, b, a / 2), (count, 2 * b, a)} else None

    def parts(self) -> tuple[int | list[int] | None, str] | None:
        """If projections are fused in it, their sizes (None if not known) and the reason."""
        seen, shape, name = self.seen_as(), self._param.shape, self.part.lower()
        in_batch = self._param.ndim == 3 and "flatten" not in seen
        outputs, inputs = shape[-2:] if in_batch else (shape[0], math.prod(shape[1:]))
        if "transposed" in seen:
            outputs, inputs = inputs, outputs
        if isinstance(self._module, _RECURRENT):
            gates = outputs // self._module.hidden_size
            return (gates, "its gates") if gates > 1 and "hr" not in name else None
        if name in _HALVES and outputs % 2 == 0:
            is_known = not in_batch or self._inputs_first() is not None
            if is_known and getattr(self._module, "is_concatenated", True) is True:
                return 2, "its halves"
        # Those of query_key_value lie side by side for each head.
        if name in _QKV and name != "query_key_value":
            for queries, reason in self._queries(name, outputs, inputs):
                keys, odd = divmod(outputs - queries, 2)
                if keys > 0 and not odd and queries % keys == 0:
                    sizes = 3 if keys == queries else [queries, keys, keys]
                    return sizes, f"queries, keys and values {reason}"
        if name in (*_QKV, *_HALVES) and (outputs > inputs or name != "in_proj"):
            return None, (
                "taken whole: it is called as fused projections are, and nothing tells their sizes "
                f"or order; split={{{self.part!r}: [...]}} does"
            )
        return None

    def _queries(self, name: str, outputs: int, inputs: int) -> Iterator[tuple[int, str]]:
        """How many outputs may be queries, and what tells so; keys and values share the rest."""
        heads, keys, size = map(self._number, (_HEADS, _KV_HEADS, _HEAD_DIM))
        if heads:
            size = size or (outputs // (heads + 2 * keys) if keys else inputs // heads)
            rest = outputs - heads * size
            if size and rest % (2 * size) == 0 and keys in (0, rest // (2 * size)):
                yield heads * size, f"of {heads} heads"
        # The layer behind takes values, one for each query. (That of a Mamba block takes others.)
        behind = {
            tuple(m.weight.shape)
            for m in self._home.children()
            if isinstance(m, nn.Linear) and m.weight is not self._param
        }
        takes = {shape[1] for shape in behind if shape[0] == inputs}
        if len(takes) == 1 and name != "in_proj":
            yield takes.pop(), "by the layer behind"
        if outputs == 3 * inputs:
            yield inputs, "of its inputs' size"

    def _number(self, names: list[str]) -> int:
        """The first of `names` that the module around it or a configuration has; 0 if none."""
        scopes = (self._home, *(getattr(m, "config", None) for m in (self._home, self._root)))
        found = (getattr(scope, name, None) for scope in scopes for name in names)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), 0)
