"""What the reports are given, checked; and random numbers that they leave as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFunction = Callable[[nn.Module, Any], Tensor]


def check_types(model: Any, optimizer: Any, call: str) -> None:
    """Raise TypeError, which has the right `call`, unless these are a module and an optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}; {call}")
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be one torch.optim.Optimizer, not {kind}; {call}")


def check_owned(model: nn.Module, stepped: Collection[Tensor], remedy: str) -> None:
    """Raise ValueError unless what an optimizer steps are parameters of `model`."""
    known = set(map(id, model.parameters()))
    if strange := sum(id(weight) not in known for weight in stepped):
        raise ValueError(
            f"{strange} of the {len(stepped)} tensors that the optimizer steps are no parameters "
            f"of the model. {remedy}"
        )


def loss_of(loss_function: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    """``loss_function(model, batch)``; what is no such function raises a TypeError that says so."""
    ran: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: ran.append(True))
    try:
        return loss_function(model, batch)
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
