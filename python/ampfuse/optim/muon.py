"""Muon for matrices and AdamW for the rest, in one fused step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ampfuse import _core
from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.newton_schulz import JORDAN, SLICE, matrix_dtype, orthogonalized, polynomials_of
from ampfuse.optim.options import COUNT, Options, Rule, Unpack, check, is_number, one_of
from ampfuse.optim.sharding import Gathered, is_sharded

_ALGORITHMS = {"muon": "muon", "adamw": "adam"}
# The defaults of a group of AdamW, which are torch's.
_ADAMW = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "decoupled_weight_decay": True,
}
# The keys of a group of Muon that torch's does not have.
_SHAPING: dict[str, Any] = {"split": 1, "transposed": False, "flatten": None}

_RULES = {
    "ns_coefficients": Rule(
        lambda value: value == "polar_express" or (len(value) == 3 and all(map(is_number, value))),
        "three numbers, or 'polar_express'",
    ),
    "ns_steps": Rule(lambda value: isinstance(value, int) and 0 <= value < 100, "from 0 to 99"),
    "eps": COUNT,
    "adjust_lr_fn": one_of("original", "match_rms_adamw", "spectral_unclamped", None),
    "split": Rule(
        lambda value: value >= 1 if isinstance(value, int) else all(size >= 1 for size in value),
        "a number of equal parts, or their sizes",
    ),
    "transposed": one_of(True, False),
    "flatten": one_of(True, False, None),
}


class Muon(FusedOptimizer, torch.optim.Muon, algorithm="muon", replaces=torch.optim.Muon):
    """Muon for matrices and AdamW for the rest, fused: a drop-in for `torch.optim.Muon`.

    Jordan et al., https://kellerjordan.github.io/posts/muon; arXiv:2502.16982. Each matrix moves by
    the orthogonalized momentum, ``U V^T`` of its singular value decomposition, roughly. Formula and
    state (``momentum_buffer``) are torch's, with FP32 momentum. Matrix products are in FP16 on
    CUDA, in BF16 on CPUs that multiply it faster, else in FP32; see newton_schulz.py. State dicts
    load both ways.

    Unlike torch's it takes all parameters of a model, in one step that is skipped or clipped as a
    whole: ``Muon(ampfuse.optim.muon_groups(model), lr=0.02)``. Options of a parameter group:

    - ``algorithm``: ``"muon"``, the default, or ``"adamw"``, with AdamW's ``betas``, ``eps``,
      ``weight_decay`` and ``amsgrad``, whose defaults are torch's;
    - ``flatten``: True: a weight is one matrix, its first dimension by all others; False: a batch
      of matrices, its last two dimensions. The default is True for 4 dimensions and more
      (convolutions) and False for 3 (experts);
    - ``transposed``: matrices are stored with inputs first, as in GPT-2's ``Conv1D``;
    - ``split``: the number of matrices that the outputs consist of, such as 3 for a fused ``qkv``,
      or a list of their sizes.

    Arguments:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in torch.
        ns_coefficients: as in torch; or ``"polar_express"``, of arXiv:2505.16932.
        options: see :class:`ampfuse.optim.Options`.

    A step temporarily takes memory for the updates, 2 bytes per element of a matrix (4 where
    products are in FP32), twice that for the matrices of one shape, and three slices of these for
    products; :func:`ampfuse.amp.memory_report` reports the total.

    Raises:
        ValueError: a vector in a group of Muon; an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | str = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())

    def algorithm_in(self, group: dict[str, Any]) -> Algorithm:
        return ALGORITHMS[_ALGORITHMS[group.get("algorithm", "muon")]]

    _group_choices = ("state_dtype", "algorithm", *_SHAPING)

    def _init_base(self, params: ParamsT, arguments: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, arguments)  # torch's only accepts matrices

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        algorithm = param_group.get("algorithm", "muon")
        check("algorithm", algorithm, one_of(*_ALGORITHMS))
        more = _ADAMW if algorithm == "adamw" else _SHAPING
        super().add_param_group({"algorithm": algorithm, **more, **param_group})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group.get("algorithm", "muon") != "muon":
            return
        for name, rule in _RULES.items():
            if name in group:
                check(name, group[name], rule)
        for param in group["params"]:
            if param.ndim < 2:
                raise ValueError(
                    "Muon only supports parameters of 2 and more dimensions, got shape "
                    f"{tuple(param.shape)}. Put it into a group with algorithm='adamw', or let "
                    "ampfuse.optim.muon_groups(model) make the groups."
                )
            matrices_of(_meta(param) if is_sharded(param) else param.detach(), group)

    def _between_stages(self) -> Callable[[list[int]], Callable[[], None]]:
        """Give Muon's rows scratch memory, which is orthogonalized between the two stages."""
        rows, table = self._rows, self._rows.existing_table()
        scratch = {
            row: _core.C.empty_laid_out_as(param := table.param(row), matrix_dtype(param.device))
            for row in range(len(rows.params))
            if rows.algorithm_of(row).has_scratch
        }
        table.set_scratch(list(scratch.items()))

        def between(stepped: list[int]) -> Callable[[], None]:
            gathered = self._gathered({row: scratch[row] for row in stepped})
            matrices = {row: scratch[row] for row in stepped if not is_sharded(rows.params[row])}
            for each in gathered:
                matrices |= each.wait()
            with torch.autocast(table.param(0).device.type, enabled=False):
                orthogonalize((matrices[row], rows.group_of(row)) for row in sorted(matrices))
            for each in gathered:
                each.give_back()  # while other rows are updated

            def finish() -> None:
                for each in gathered:
                    each.take_back()

            return finish

        return between

    def _gathered(self, scratch: dict[int, Tensor]) -> list[Gathered]:
        """For each mesh, shards on their way to the ranks that orthogonalize the matrices."""
        rows = self._rows
        by_mesh: dict[Any, dict[int, Any]] = defaultdict(dict)
        for row in scratch:
            param: Any = rows.params[row]
            if is_sharded(param):
                by_mesh[param.device_mesh][row] = param

        def cost(row: int) -> float:
            views = matrices_of(_meta(rows.params[row]), rows.group_of(row))
            return sum(len(view) * min(view.shape[1:]) * view[0].numel() for view in views)

        return [
            Gathered(mesh, like, scratch, {row: cost(row) for row in like})
            for mesh, like in by_mesh.items()
        ]


def orthogonalize(weights: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Orthogonalize all matrices in place, by the options of their groups, in batches."""
    by_shape = defaultdict(list)
    for weight, group in weights:
        coefficients = group["ns_coefficients"]
        if not isinstance(coefficients, str):
            coefficients = tuple(coefficients)
        for view in matrices_of(weight, group):
            rows, columns = view.shape[1:]
            factor = _rate_factor(rows, columns, group)
            how = coefficients, group["ns_steps"], float(group["eps"]), factor
            by_shape[rows, columns, how].append(view)
    for (_, _, (coefficients, steps, eps, factor)), views in by_shape.items():
        batch = torch.cat(views).contiguous()
        result = orthogonalized(batch, polynomials_of(coefficients, steps), eps, factor)
        torch._foreach_copy_(views, list(result.split([len(view) for view in views])))


def step_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The most temporary memory of a step: updates, and the products of one shape."""
    updates, batches = 0, defaultdict[Any, int](int)
    for group in optimizer.param_groups:
        if group.get("algorithm", "muon") != "muon":
            continue
        for param in group["params"]:
            itemsize = matrix_dtype(param.device).itemsize
            updates += param.numel() * itemsize
            for view in matrices_of(_meta(param), group):
                batches[view.shape[1:]] += view.numel() * itemsize
    # The batch, its result, and three of a slice: twice the matrices, and Gram matrices.
    products = max(batches.values(), default=0)
    return updates + 2 * products + 3 * min(products, 4 * max(SLICE.values()))


def _rate_factor(rows: int, columns: int, group: dict[str, Any]) -> float:
    """The factor of the learning rate for the shape of a matrix, by torch's `adjust_lr_fn`."""
    outputs, inputs = (columns, rows) if group.get("transposed") else (rows, columns)
    how = group["adjust_lr_fn"]
    if 0 in (rows, columns):
        return 1.0
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    ratio = outputs / inputs
    return math.sqrt(ratio if how == "spectral_unclamped" else max(1.0, ratio))


def _meta(param: Tensor) -> Tensor:
    """A tensor without memory of the whole shape of `param`."""
    return torch.empty(param.shape, device="meta")


def matrices_of(weight: Tensor, group: dict[str, Any]) -> list[Tensor]:
    """Views of `weight`, (batch, rows, columns) each, that together have every element once.

    Raises ValueError if `weight` does not fit the options of the group.
    """
    shape = tuple(weight.shape)
    flatten = group.get("flatten")
    if weight.ndim != 3 if flatten is None else flatten:
        # In memory order: orthogonalization does not depend on the order of columns.
        order = sorted(range(1, weight.ndim), key=weight.stride, reverse=True)
        batch = weight.permute(0, *order)
        wanted: tuple[int, ...] = (1, shape[0], math.prod(shape[1:]))
    else:
        batch, wanted = weight, (math.prod(shape[:-2]), *shape[-2:])
    try:
        batch = batch.view(wanted)
    except RuntimeError:
        raise ValueError(
            "Muon only supports parameters that are contiguous or channels_last, got shape "
            f"{shape} with strides {weight.stride()}"
        ) from None
    split = group.get("split", 1)
    side = 2 if group.get("transposed") else 1
    outputs = batch.shape[side]
    sizes = [outputs // split] * split if isinstance(split, int) else list(split)
    if sum(sizes) != outputs:
        raise ValueError(
            f"split={split!r} does not fit a parameter of shape {shape}, which has {outputs} "
            "outputs"
        )
    return list(batch.split(sizes, side))


# --- which parameters are Muon's, and which AdamW's -----------------------------------------------

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
            options = [f"{key}={group[key]}" for key in _SHAPING if key in group]
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
            group, reasons[name] = {"algorithm": "adamw", **(adamw or {})}, why_adamw
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
        of = {name: vocabularies[len(linear[name].weight)] for name in outside}
        return {name: f"the head: as many outputs as {of[name]} has rows" for name in outside}
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
            self.owner, own_name = path, inside.partition(".")[0]
        self._param, self._name, self._module = param, own_name, modules[self.owner]
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
