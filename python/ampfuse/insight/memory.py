"""``amp.memory_report``: what a training holds, by kind, now and in each mode, and what fits."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ampfuse import pytree
from ampfuse._schema import STORAGES
from ampfuse.amp.casts import eager_module, is_affine_batch_norm
from ampfuse.dtypes import HALF_DTYPES
from ampfuse.insight.reporting import (
    aligned,
    check_owned,
    check_types,
    output_of,
    same_random_numbers,
)
from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.fused import algorithm_of
from ampfuse.optim.masters import MasterParameter, gradient_as_it_is
from ampfuse.optim.muon import step_bytes
from ampfuse.optim.param_groups import parameters, with_wrapped
from ampfuse.optim.state import storage_for

KINDS = "weights gradients masters states accumulators average activations".split()
# The modes, by the optimizer's options; one that names masters has half weights, as O2 and O5 have.
MODES: dict[str, dict[str, Any]] = {
    "8bit": {"state_dtype": "8bit"},
    "masters": {"master_weights": True},
    "masters+8bit": {"master_weights": True, "state_dtype": "8bit"},
    "split": {"master_weights": "split"},
    "split+bf16": {"master_weights": "split", "state_dtype": "bf16"},
    "split+8bit": {"master_weights": "split", "state_dtype": "8bit"},
    "split+8bit+ema": {"master_weights": "split", "state_dtype": "8bit", "ema_decay": 0.999},
    "stochastic": {"master_weights": False, "rounding": "stochastic"},
}
# Bytes an element: of a half parameter's master, of an average.
_MASTER, _AVERAGE = {False: 0, True: 4, "split": 2}, 4
_KIND_OF_STATE = {"master_param": "masters", "master_remainder": "masters", "ema": "average"}


def memory_report(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any = None,
    *,
    budget: str | float = "16GB",
) -> MemoryReport:
    """What a training of `model` holds, by kind: now, and in each mode that would change it.

    "Now" is measured: storages of tensors that are there, each once. Gradients, masters and states
    that are not (before the first step) are computed, as the modes are. Where all weights are FP32,
    modes of half weights are those of O2 and O5, and FP32 activations count half.

    Activations are what a forward pass in training mode keeps for its backward, casts of weights
    included. It runs on a copy with the same weights; nothing of yours changes. Accumulators are
    FP32 gradients of masters that have been read; those inside the optimizer are not shown.

    Arguments:
        model, optimizer: before or after ``amp.initialize``, before or after a step.
        batch: what `model` takes: a tensor, a tuple of arguments or a dict of keywords.
        budget: memory to compare with: "16GB", "15 GiB", or a number of bytes.

    Raises:
        TypeError, ValueError: an argument is not as above, or the optimizer is another model's.
    """
    check_types(model, optimizer, "amp.memory_report(model, optimizer, batch)")
    limit = bytes_of(budget)
    model, inner = eager_module(model), with_wrapped(optimizer)[-1]
    fused = algorithm_of(inner)
    states = counts_of_states(inner)
    check_owned(model, states, "Pass the model's own optimizer, or one module with all of them.")
    found = _measured(model, optimizer)
    kept, wide = (0, 0) if batch is None else _activations(model, batch)
    masters = getattr(inner, "master_weights", False)
    options = {name: getattr(inner, name, None) for name in ("state_dtype", "ema_decay")}
    if not isinstance(inner, AmpOptimizer):
        options["state_dtype"] = "parameter's"  # as torch has them
    given = {"activations": kept} if fused else {"activations": kept, "states": found["states"]}
    computed = held_bytes(model, states, {"master_weights": masters, **options}) | given
    held = {"now": {kind: found[kind] or computed[kind] for kind in KINDS}}
    expected = {("now", k) for k in KINDS[:-1] if computed[k] and not found[k]}
    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    for mode, changes in MODES.items() if fused else [("masters", MODES["masters"])]:
        if fused and changes.get("state_dtype", "fp32") not in fused.storages:
            continue
        casts = "master_weights" in changes and not is_half
        new = held_bytes(model, states, {"master_weights": masters, **changes}, casts) | given
        new["activations"] -= casts * wide // 2
        if new not in (computed, *held.values()):
            held[mode] = new
            expected |= {(mode, "activations")} if casts and wide else set()
    notes = ["~ expected: not allocated yet, or in another dtype then"] if expected else []
    if not (fused or found["states"]):
        notes.append(f"The states of {type(inner).__name__} are missing before its first step.")
    if fused and fused.has_scratch:
        notes.append(
            f"During a step {type(inner).__name__} takes up to {size(step_bytes(inner))} more, "
            "when the activations are freed."
        )
    elements = sum(parameter.numel() for parameter in model.parameters())
    heading = f"{type(inner).__name__}, {elements:,} parameters"
    return MemoryReport(heading, elements, limit, held, expected, notes)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What :func:`memory_report` found; ``print`` shows it as a table.

    `held` has the bytes by mode ("now" or a name of `MODES`) and kind, `expected` the modes and
    kinds of which they were neither measured nor follow from sizes alone; `budget` is in bytes, and
    `parameters` counts elements.
    """

    heading: str
    parameters: int
    budget: int
    held: Mapping[str, Mapping[str, int]]
    expected: Set[tuple[str, str]]
    notes: Sequence[str]

    def table(self) -> str:
        """A row for each kind, in bytes a parameter, and totals; a column for each mode."""
        rows = {kind: [held[kind] for held in self.held.values()] for kind in KINDS}
        lines = [["bytes a parameter", *self.held]]
        for kind, row in rows.items():
            marks = ["~" * ((mode, kind) in self.expected) for mode in self.held]
            cells = [f"{each / self.parameters:.2f}" if each else "-" for each in row]
            if any(row):
                lines.append([kind, *map("".join, zip(marks, cells, strict=True))])
        totals = [sum(held.values()) for held in self.held.values()]
        lines.append(["together", *(f"{total / self.parameters:.2f}" for total in totals)])
        fits = ("yes" if total <= self.budget else "no" for total in totals)
        lines += [["total", *map(size, totals)], [f"fits {size(self.budget)}", *fits]]
        return "\n".join([self.heading, *aligned(lines, left=(0,)), *self.notes])

    __str__ = table


def size(count: float) -> str:
    """``"15.4 GB"``, of 1000 MB each."""
    power = sum(count >= 1000**power for power in (1, 2, 3, 4))
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def bytes_of(budget: Any) -> int:
    """What ``"16GB"``, ``"15 GiB"`` or a number says. Raises ValueError."""
    number = budget
    if isinstance(budget, str) and (parts := re.fullmatch(r"(\d+\.?\d*) *([kMGT])(i?)B", budget)):
        number = float(parts[1]) * (1024 if parts[3] else 1000) ** (1 + "kMGT".index(parts[2]))
    if not (isinstance(number, (int, float)) and 0 < number < float("inf")):
        raise ValueError(f'budget must be a number of bytes or such as "15 GiB", got {budget!r}')
    return int(number)


def counts_of_states(optimizer: Optimizer) -> dict[Tensor, int]:
    """By parameter of the model, how many states of its shape the optimizer's kernel has."""
    states: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        algorithm = algorithm_of(optimizer, group)
        count = len(algorithm.states_in(group)) if algorithm else 0
        states |= {getattr(param, "model_param", param): count for param in group["params"]}
    return states


def held_bytes(
    model: nn.Module, states: Mapping[Tensor, int], options: Mapping[str, Any], casts: bool = False
) -> dict[str, int]:
    """Bytes by kind; `casts`: with the weights of O2 and O5."""
    held, sizes = dict.fromkeys(KINDS, 0), {}
    for module in model.modules():
        to_half = casts and not is_affine_batch_norm(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            sizes[tensor] = 2 if to_half and tensor.is_floating_point() else tensor.itemsize
    for tensor, itemsize in sizes.items():
        elements = tensor.numel()
        held["weights"] += elements * itemsize
        held["gradients"] += elements * itemsize * tensor.requires_grad
        if tensor in states and tensor.requires_grad:
            held["masters"] += elements * _MASTER[options["master_weights"]] * (itemsize == 2)
            held["average"] += elements * _AVERAGE * bool(options.get("ema_decay"))
            name = options.get("state_dtype") or "fp32"
            of_torch = name not in STORAGES  # in the parameter's type
            nbytes = itemsize * elements if of_torch else storage_for(name, tensor).nbytes(elements)
            held["states"] += states[tensor] * nbytes
    return held


def _measured(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by kind."""
    masters = [param for param in parameters(optimizer) if isinstance(param, MasterParameter)]
    found: list[tuple[str, Any]] = [
        ("weights", [*model.parameters(), *model.buffers()]),
        ("gradients", [gradient_as_it_is(parameter) for parameter in model.parameters()]),
        ("masters", masters),
        ("accumulators", [gradient_as_it_is(master) for master in masters]),
    ]
    for state in (state for each in with_wrapped(optimizer) for state in each.state.values()):
        found += [(_KIND_OF_STATE.get(name, "states"), value) for name, value in state.items()]
    held, seen = dict.fromkeys(KINDS, 0), set()
    for kind, tensors in found:
        for storage in _storages(tensors):
            held[kind] += storage.nbytes() * (storage._cdata not in seen)
            seen.add(storage._cdata)
    return held


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in pytree.tensors(value):
        parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
        yield from (part.untyped_storage() for part in parts)


def _activations(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Bytes that a forward pass keeps for its backward, and those of them in FP32 tensors."""
    kept: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            reference = StorageWeakRef(storage)
            kept[reference.cdata] = reference, storage.nbytes(), tensor.dtype == torch.float32
        return tensor.detach()  # an output itself would keep its own graph alive

    # A copy on the same weights: modes, buffers and what else a forward changes are its own.
    model = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    if not model.training:
        model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with same_random_numbers(), torch.enable_grad(), hooks:
        output = output_of(model, batch)
    for storage in _storages([*model.parameters(), *model.buffers()]):
        kept.pop(storage._cdata, None)
    # What `output` does not need in its backward is gone.
    alive = [entry[1:] for entry in kept.values() if not entry[0].expired()]
    del output
    return sum(count for count, _ in alive), sum(count for count, is_wide in alive if is_wide)
