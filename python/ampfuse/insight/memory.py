"""``amp.memory_report``: what a training holds now, by kind of memory.

What it would hold at another level or with other options: ``ampfuse.plan``, which shares the kinds
of memory and the sizes that follow from a model and its optimizer.
"""

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
from ampfuse.optim.options import RULES, check
from ampfuse.optim.param_groups import parameters, with_wrapped
from ampfuse.optim.state import storage_for
from ampfuse.torch_utils import eager_module

# The kinds of memory, in the order of tables.
KINDS = "weights gradients accumulators masters states average activations".split()
# Bytes per element: of the master of a half parameter, by `master_weights`; of an average.
_MASTER_BYTES = {False: 0, True: 4, "split": 2}
_AVERAGE_BYTES = 4
_KIND_OF_STATE = {"master_param": "masters", "master_remainder": "masters", "ema": "average"}


def memory_report(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any = None,
    *,
    budget: str | float | None = None,
) -> MemoryReport:
    """Report how many bytes a training of `model` holds now, by kind.

    Tensors that exist are measured: their storages, each once. Gradients, masters and states that
    do not (before the first step) are computed from the sizes of the parameters. What a training
    would hold at another level or with other options of the optimizer: :func:`ampfuse.plan`.

    Activations are what a forward pass in training mode keeps for its backward, casts of weights
    included. It runs on a copy with the same weights; nothing of yours changes. Accumulators are
    FP32 gradients of masters that have been read; those inside the optimizer are not shown.

    Arguments:
        model, optimizer: before or after ``amp.initialize``, before or after a step; on the meta
            device, too.
        batch: what `model` takes: a tensor, a tuple of arguments or a dict of keywords.
        budget: memory to compare the total with: "16GB", "15 GiB", or a number of bytes.

    Raises:
        TypeError, ValueError: an argument is not as above, or the optimizer is another model's.
        RuntimeError: with `batch`, a model that cannot be copied, such as one under FSDP.
    """
    check_types(model, optimizer, "amp.memory_report(model, optimizer, batch)")
    limit = None if budget is None else bytes_of(budget)
    model, inner = eager_module(model), with_wrapped(optimizer)[-1]
    algorithm, states = algorithm_of(inner), states_of(inner)
    check_owned(model, states, "Pass the model's own optimizer, or one module with all of them.")
    options = options_of(inner)
    if not isinstance(inner, AmpOptimizer):
        options["state_dtype"] = "parameter's"  # as torch has them
    measured, held = _measured(model, optimizer), held_bytes(model, states, options)
    expected = {kind for kind in KINDS if held[kind] and not measured[kind]}
    held |= {kind: count for kind, count in measured.items() if count}
    if batch is not None:
        held["activations"] = _activations(model, batch)
    notes = ["~ expected: not allocated yet"] if expected else []
    if not (algorithm or measured["states"]):
        notes.append(f"The states of {type(inner).__name__} are missing before its first step.")
    if algorithm and algorithm.has_scratch:
        notes.append(
            f"During a step {type(inner).__name__} takes up to {size(step_bytes(inner))} more, "
            "when the activations are freed."
        )
    elements = sum(parameter.numel() for parameter in model.parameters())
    heading = f"{type(inner).__name__}, {elements:,} parameters"
    return MemoryReport(heading, elements, limit, held, expected, notes)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The result of :func:`memory_report`; ``print`` shows it as a table.

    `held` has the bytes by kind, `expected` the kinds that were computed and not measured;
    `budget` is in bytes or None, and `parameters` counts elements.
    """

    heading: str
    parameters: int
    budget: int | None
    held: Mapping[str, int]
    expected: Set[str]
    notes: Sequence[str]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())

    def table(self) -> str:
        """A row for each kind and for the total: bytes, and bytes a parameter."""
        lines = [["", "memory", "bytes a parameter"]]
        for kind, count in {**self.held, "total": self.total}.items():
            if count:
                about = "~" if kind in self.expected else ""
                per_parameter = f"{count / self.parameters:.2f}"
                lines.append([kind, about + size(count), about + per_parameter])
        if self.budget is not None:
            fits = "yes" if self.total <= self.budget else "no"
            lines.append([f"fits {size(self.budget)}", fits, ""])
        return "\n".join([self.heading, *aligned(lines, left=(0,)), *self.notes])

    __str__ = table


def size(count: float) -> str:
    """``"15.4 GB"``, of 1000 MB each."""
    power = sum(count >= 1000**power for power in (1, 2, 3, 4))
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def bytes_of(budget: Any) -> int:
    """The number of bytes that ``"16GB"``, ``"15 GiB"`` or a number means. Raises ValueError."""
    number = budget
    if isinstance(budget, str) and (parts := re.fullmatch(r"(\d+\.?\d*) *([kMGT])(i?)B", budget)):
        number = float(parts[1]) * (1024 if parts[3] else 1000) ** (1 + "kMGT".index(parts[2]))
    if not (isinstance(number, (int, float)) and 0 < number < float("inf")):
        raise ValueError(f'budget must be a number of bytes or such as "15 GiB", got {budget!r}')
    return int(number)


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """The options of the optimizer that take memory."""
    options = {name: getattr(optimizer, name, None) for name in ("state_dtype", "ema_decay")}
    return options | {"master_weights": getattr(optimizer, "master_weights", False)}


# How many states a parameter has, and the `state_dtype` of its group, if that has one of its own.
States = tuple[int, str | None]


def states_of(optimizer: Optimizer) -> dict[Tensor, States]:
    """The states that the optimizer's kernel has for each parameter of the model."""
    states: dict[Tensor, States] = {}
    for group in optimizer.param_groups:
        algorithm = algorithm_of(optimizer, group)
        count = len(algorithm.states_in(group)) if algorithm else 0
        each = count, group.get("state_dtype")
        states |= {getattr(param, "model_param", param): each for param in group["params"]}
    return states


def held_bytes(
    model: nn.Module, states: Mapping[Tensor, States], options: Mapping[str, Any]
) -> dict[str, int]:
    """Bytes by kind, from the sizes of the tensors and the `options` of the optimizer."""
    held = dict.fromkeys(KINDS, 0)
    storage = options.get("state_dtype") or "fp32"
    for tensor in (*model.parameters(), *model.buffers()):
        elements, nbytes = tensor.numel(), tensor.nbytes
        held["weights"] += nbytes
        if not tensor.requires_grad:
            continue
        held["gradients"] += nbytes
        if tensor in states:
            if tensor.itemsize == 2:
                held["masters"] += elements * _MASTER_BYTES[options["master_weights"]]
            if options.get("ema_decay") is not None:
                held["average"] += elements * _AVERAGE_BYTES
            count, of_group = states[tensor]
            if storage in STORAGES:  # otherwise a state has the parameter's type
                wanted = of_group or storage
                check("state_dtype", wanted, RULES["state_dtype"])
                nbytes = storage_for(wanted, tensor).nbytes(elements)
            held["states"] += count * nbytes
    return held


def _measured(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by kind."""
    masters = [param for param in parameters(optimizer) if isinstance(param, MasterParameter)]
    by_kind: list[tuple[str, Any]] = [
        ("weights", [*model.parameters(), *model.buffers()]),
        ("gradients", [gradient_as_it_is(parameter) for parameter in model.parameters()]),
        ("masters", masters),
        ("accumulators", [gradient_as_it_is(master) for master in masters]),
    ]
    for state in (state for each in with_wrapped(optimizer) for state in each.state.values()):
        by_kind += [(_KIND_OF_STATE.get(name, "states"), value) for name, value in state.items()]
    held, seen = dict.fromkeys(KINDS, 0), set()
    for kind, tensors in by_kind:
        for storage in _storages(tensors):
            if storage._cdata not in seen:
                held[kind] += storage.nbytes()
                seen.add(storage._cdata)
    return held


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in pytree.tensors(value):
        parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
        yield from (part.untyped_storage() for part in parts)


def _activations(model: nn.Module, batch: Any) -> int:
    """Bytes that a forward pass keeps for its backward."""
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            reference = StorageWeakRef(storage)
            kept[reference.cdata] = reference, storage.nbytes()
        return tensor.detach()  # an output itself would keep its own graph alive

    # A copy on the same weights: modes, buffers and what else a forward changes are its own.
    try:
        model = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    except Exception as error:  # such as FSDP's
        raise RuntimeError(
            "The activations cannot be measured, because the model cannot be copied. Leave out "
            f"batch. ({error})"
        ) from error
    if not model.training:
        model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with same_random_numbers(), torch.enable_grad(), hooks:
        output = output_of(model, batch)
    for storage in _storages([*model.parameters(), *model.buffers()]):
        kept.pop(storage._cdata, None)
    # Tensors that the backward of `output` does not need are gone.
    total = sum(nbytes for reference, nbytes in kept.values() if not reference.expired())
    del output
    return total
