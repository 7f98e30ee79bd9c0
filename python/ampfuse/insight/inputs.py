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


def check_types(model: Any, optimizer: Any) -> None:
    """Raise TypeError unless these are a module and an optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one torch.optim.Optimizer, not {optimizer!r:.60}.")


def check_owned(model: nn.Module, stepped: Collection[Tensor], remedy: str) -> None:
    """Raise ValueError unless what an optimizer steps are parameters of `model`."""
    known = set(map(id, model.parameters()))
    if strange := sum(id(weight) not in known for weight in stepped):
        raise ValueError(
            f"{strange} of the {len(stepped)} tensors that the optimizer steps are no parameters "
            f"of the model. {remedy}"
        )


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
