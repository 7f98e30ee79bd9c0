"""Notice an optimizer that amp does not know, before it steps on gradients with a loss scale.

Watched is what none of amp's optimizers holds: of the models, and of what else the first loss
reaches. Nobody may step on it, or only after a backward pass of its own. So what a scaled pass
leaves there is remembered, and told when an optimizer steps on it. For that there is torch's hook
on every step, from the first such gradient on; until then torch is left alone.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ampfuse.amp.scaler import LossScaler
from ampfuse.optim import AmpOptimizer
from ampfuse.optim.inner import parameters, with_inner
from ampfuse.optim.left_scaled import is_unchanged, leaves, mark_of
from ampfuse.optim.masters import gradient_as_it_is
from ampfuse.optim.shards import is_sharded

_watched = WeakIdKeyDictionary()  # parameters, with what messages call them
# Of these, the gradient that a scaled pass left, as a weak reference.
_scaled = WeakIdKeyDictionary()
_followed: weakref.WeakSet[LossScaler] = weakref.WeakSet()  # scalers whose loss was looked at


def watch(named: Iterable[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """From now on, those parameters that `optimizers` do not hold.

    But no shards: torch moves and casts those by an exchange of tensors, which a weak reference to
    one forbids.
    """
    held = _leaves(optimizers)
    for name, parameter in named:
        if id(parameter) not in held and not is_sharded(parameter):
            _watched.setdefault(parameter, name)


@contextlib.contextmanager
def noticed(loss: Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A backward pass of `loss`, scaled for `optimizers`: remember what it leaves to others."""
    if scaler not in _followed and loss.requires_grad:
        _followed.add(scaler)
        watch(_reached_by(loss), optimizers)
    before = [(parameter, mark_of(parameter)) for parameter in _watched]
    yield
    held = _leaves(optimizers) if before else set()
    for parameter, old in before:
        mark = mark_of(parameter)
        if id(parameter) in held:  # by now
            _scaled.pop(parameter, None)
        elif mark is not None and not is_unchanged(parameter, old):
            _scaled[parameter] = mark[0]
            if not _hook:
                _hook.append(register_optimizer_step_pre_hook(_before_step))


def _leaves(optimizers: Sequence[Optimizer]) -> set[int]:
    every = [one for optimizer in optimizers for one in with_inner(optimizer)]
    return {id(leaf) for one in every for leaf in leaves(one)}


def _reached_by(loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the graph of `loss`."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield f"of shape {tuple(leaf.shape)}", leaf
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


_hook: list[RemovableHandle] = []  # on every step, from the first such gradient on


def forget() -> None:
    """Take the hook away, until the next such gradient."""
    while _hook:
        _hook.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A step that is traced would ask this while it compiles, and not again.
    if torch.compiler.is_compiling() or isinstance(optimizer, AmpOptimizer) or not _scaled:
        return
    for parameter in parameters(optimizer):
        gradient = _scaled.get(parameter, lambda: None)()
        if gradient is None or gradient is not gradient_as_it_is(parameter):
            continue
        warnings.warn(
            f"{type(optimizer).__name__} steps on gradients that are still multiplied by the loss "
            f"scale: it did not go through amp.initialize, and the loss of a scale_loss block "
            f"reaches its parameter {_watched[parameter]}. Give it to amp.initialize beside the "
            "others, and list it in scale_loss: amp.initialize(model, [optimizer, this_one]), "
            "amp.scale_loss(loss, [optimizer, this_one]). Then its gradients are unscaled, and an "
            "overflow skips the steps of both.",
            stacklevel=3,
        )
        for told in parameters(optimizer):
            _watched.pop(told, None)
            _scaled.pop(told, None)
        return
