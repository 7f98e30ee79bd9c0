"""Muon for matrices and AdamW for the rest, in one fused step."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
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
SHAPING: dict[str, Any] = {"split": 1, "transposed": False, "flatten": None}

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
        self._construct(locals(), by_torchs=False)  # torch's only accepts matrices

    def algorithm_in(self, group: dict[str, Any]) -> Algorithm:
        return ALGORITHMS[_ALGORITHMS[group.get("algorithm", "muon")]]

    _group_choices = ("state_dtype", "algorithm", *SHAPING)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        algorithm = param_group.get("algorithm", "muon")
        check("algorithm", algorithm, one_of(*_ALGORITHMS))
        more = _ADAMW if algorithm == "adamw" else SHAPING
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
        groups, scratch = rows.groups(), {}
        for row, group in enumerate(groups):
            if self.algorithm_in(group).has_scratch:
                param = table.param(row)
                scratch[row] = _core.C.empty_laid_out_as(param, matrix_dtype(param.device))
        table.set_scratch(list(scratch.items()))

        def between(stepped: list[int]) -> Callable[[], None]:
            gathered = self._gathered({row: scratch[row] for row in stepped}, groups)
            matrices = {row: scratch[row] for row in stepped if not is_sharded(rows.params[row])}
            for each in gathered:
                matrices |= each.wait()
            with torch.autocast(table.param(0).device.type, enabled=False):
                orthogonalize((matrices[row], groups[row]) for row in sorted(matrices))
            for each in gathered:
                each.give_back()  # while other rows are updated

            def finish() -> None:
                for each in gathered:
                    each.take_back()

            return finish

        return between

    def _gathered(self, scratch: dict[int, Tensor], groups: list[Any]) -> list[Gathered]:
        """For each mesh, shards on their way to the ranks that orthogonalize the matrices."""
        rows = self._rows
        by_mesh: dict[Any, dict[int, Any]] = defaultdict(dict)
        for row in scratch:
            param: Any = rows.params[row]
            if is_sharded(param):
                by_mesh[param.device_mesh][row] = param

        def cost(row: int) -> float:
            views = matrices_of(_meta(rows.params[row]), groups[row])
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
    updates, slice_, batches = 0, 0, defaultdict[Any, int](int)
    for group in optimizer.param_groups:
        if group.get("algorithm", "muon") != "muon":
            continue
        for param in group["params"]:
            itemsize = matrix_dtype(param.device).itemsize
            slice_ = SLICE.get(param.device.type, SLICE["cpu"])
            updates += param.numel() * itemsize
            for view in matrices_of(_meta(param), group):
                batches[view.shape[1:]] += view.numel() * itemsize

    def products(shape: tuple[int, ...], size: int) -> int:
        """The batch, its result, and the most of two: the result in slices, and three of a slice
        (twice the matrices, and Gram matrices)."""
        return 2 * size + max(size, 3 * min(size, 4 * max(slice_, math.prod(shape))))

    return updates + max(itertools.starmap(products, batches.items()), default=0)


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
        batch = weight
        wanted = (math.prod(shape[:-2]), *shape[-2:])
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
