"""Shared by the reports: arguments that are checked, findings, and tables as text."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFunction = Callable[[nn.Module, Any], Tensor]


def check_types(model: Any, optimizer: Any, how: str) -> None:
    """Raise TypeError, which says `how` to call, unless these are a module and an optimizer."""
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(value, kind):
            kinds = f"one {kind.__name__}, not {type(value).__name__}"
            raise TypeError(f"{name} must be {kinds}: write {how}.")


def check_owned(model: nn.Module, stepped: Collection[Tensor], suggestion: str) -> None:
    """Raise ValueError unless the `stepped` tensors of an optimizer are parameters of `model`."""
    known = set(map(id, model.parameters()))
    if strange := sum(id(weight) not in known for weight in stepped):
        raise ValueError(
            f"{strange} of the {len(stepped)} tensors in the optimizer are not parameters of the "
            f"model. {suggestion}"
        )


def output_of(model: nn.Module, batch: Any) -> Any:
    """Call `model` with a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple) else (batch,)))


def loss_of(loss_function: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    """``loss_function(model, batch)``; raises TypeError unless it is such a function and
    returns a loss."""
    ran: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: ran.append(True))
    try:
        loss = loss_function(model, batch)
    except (AttributeError, TypeError) as error:
        if ran:
            raise
        raise TypeError(
            f"loss_function(model, batch) failed before the model ran: {error}. Pass a function of "
            "the model and the batch that returns the loss, such as lambda model, batch: "
            "criterion(model(batch[0]), batch[1])."
        ) from error
    finally:
        hook.remove()
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {list(loss.shape)}"
        what += "" if loss.requires_grad else " that requires no gradient"
    raise TypeError(
        "loss_function(model, batch) must return the loss, a tensor of one element that requires "
        f"a gradient; it returned {what}."
    )


def one_line(error: Exception) -> str:
    """The first line of the error's message, with the next one if it ends with a colon; the error's
    type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """After the block torch, Python and NumPy draw what they would have drawn without it."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


# --- findings and text ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that would help.

    Attributes:
        kind: which rule found it, such as "stale" or "fused optimizer".
        suggestion: what to do.
        where: the tensor; "" for a whole step.
        found: the measurement, as text.
        gain: how many times as fast a step gets by it; None if it is not about time.
    """

    kind: str
    suggestion: str
    where: str = ""
    found: str = ""
    gain: float | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.found, self.suggestion) if part)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def figures(value: float, count: int) -> str:
    """`value` with `count` significant figures; large ones whole: ``"33.1"``, ``"1050"``; above a
    million as a power of ten."""
    return f"{value:.0f}" if 10**count - 0.5 <= value < 1e6 else f"{value:.{count}g}"


def aligned(lines: Sequence[Sequence[str]], *, left: Container[int]) -> list[str]:
    """Lines of cells as text: the columns of `left` begin alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
