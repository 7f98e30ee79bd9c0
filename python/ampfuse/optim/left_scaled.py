"""Notice an optimizer that ``scale_loss`` was not told of, before it steps on scaled gradients.

A backward pass may reach parameters of an optimizer that is not listed for it. In a GAN that is
meant, and those gradients are dropped before they are used. Where the optimizer was forgotten, they
are as many times too large as the loss scale says, and without a word training goes wrong.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import gradient_as_it_is, leaf_of
from ampfuse.uncompiled import uncompiled

# A gradient, as long as it lives, and its version: another version is another value.
Mark = tuple[weakref.ref[Tensor], int]


@contextlib.contextmanager
def noticed(optimizers: Sequence[Any]) -> Iterator[None]:
    """A backward pass of other optimizers: remember what it changes in `optimizers`."""
    before = [list(map(mark_of, leaves(optimizer))) for optimizer in optimizers]
    yield
    for optimizer, marks in zip(optimizers, before, strict=True):
        changed = {
            i: mark
            for i, (leaf, old) in enumerate(zip(leaves(optimizer), marks, strict=False))
            if not is_unchanged(leaf, old) and (mark := mark_of(leaf)) is not None
        }
        optimizer._ledger.left_scaled = {**optimizer._ledger.left_scaled, **changed}


def warn_if_used(optimizer: Any) -> None:
    """Warn if gradients that :func:`noticed` remembered are there still, about to be used."""
    left, optimizer._ledger.left_scaled = optimizer._ledger.left_scaled, {}
    now = list(leaves(optimizer))
    names = optimizer.parameter_names()
    used = [names[i] for i, mark in left.items() if i < len(now) and is_unchanged(now[i], mark)]
    if used:
        warnings.warn(
            f"{len(used)} gradient(s), the first of {used[0]}, come from a scale_loss block that "
            f"did not list this {type(optimizer).__name__}, so they are still multiplied by the "
            "loss scale. List every optimizer whose parameters a loss reaches: "
            "amp.scale_loss(loss, [optimizer_a, optimizer_b]). If they are not wanted, as "
            "in a GAN, call zero_grad() before the next backward pass.",
            stacklevel=4,
        )


def leaves(optimizer: Any) -> Iterator[Tensor]:
    """What autograd gives the gradients of `optimizer` to."""
    return map(leaf_of, parameters(optimizer))


@uncompiled  # as code around a compiled backward pass may be
def mark_of(leaf: Tensor) -> Mark | None:
    """The gradient that autograd wrote."""
    gradient = gradient_as_it_is(leaf)
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


@uncompiled
def is_unchanged(leaf: Tensor, mark: Mark | None) -> bool:
    """Whether `leaf` has the gradient, and that the value, of `mark`."""
    gradient = gradient_as_it_is(leaf)
    if gradient is None or mark is None:
        return gradient is mark
    return mark[0]() is gradient and mark[1] == gradient._version
