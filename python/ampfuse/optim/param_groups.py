"""Parameter groups: what is in them, and their hyper-parameters on the way to the table."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._schema import Algorithm
from ampfuse.optim.options import NUMBER, Rule, check, is_number, one_of

if TYPE_CHECKING:
    from ampfuse._C import ParamTable


def check_optimizer(value: Any, call: str) -> None:
    """Raise TypeError, which shows how to write `call`, unless `value` is or wraps an optimizer."""
    if not hasattr(value, "param_groups"):
        raise TypeError(
            f"{call.partition('(')[0]} takes the optimizer, not {type(value).__name__}: "
            f"write {call}."
        )


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of `optimizer`, in the order of its groups."""
    for _, param in with_groups(optimizer):
        yield param


def is_empty(optimizer: Any) -> bool:
    """Whether there are groups, all without parameters, which may be added later."""
    groups = optimizer.param_groups
    return bool(groups) and not any(group["params"] for group in groups)


def with_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The parameters of `optimizer`, each after its group."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield group, param


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """`optimizer`, and the optimizers among its attributes, at any depth, each once."""
    optimizers = [optimizer]
    for outer in optimizers:
        for value in vars(outer).values():
            inner = _optimizers_in(value)
            optimizers.extend(one for one in inner if all(one is not each for each in optimizers))
    return optimizers


def _optimizers_in(value: Any) -> list[Optimizer]:
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Optimizer)]


_IS_BOOL_OR_NONE = one_of(True, False, None)  # None is False to torch
_PAIR = Rule(lambda pair: len(pair) == 2 and all(map(is_number, pair)), "two numbers")
_NORM = one_of(2, math.inf, 0)  # 0 is apex's name of inf


def check_hyper(algorithm: Algorithm, group: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong value in a group, or among a constructor's arguments."""
    _check_types(algorithm, group)
    _check_range(_kernel_hyper(algorithm, group))


def _check_types(algorithm: Algorithm, group: Mapping[str, Any]) -> None:
    for hyper in algorithm.hypers:
        if hyper.key is None or hyper.key not in group:
            continue
        rule = NUMBER if hyper.index is None else _PAIR
        if hyper.is_flag:
            rule = _NORM if hyper.off == 2 else _IS_BOOL_OR_NONE
        check(hyper.key, group[hyper.key], rule)
    switch = algorithm.last_state_if
    if switch in group and all(hyper.key != switch for hyper in algorithm.hypers):
        check(str(switch), group[str(switch)], _IS_BOOL_OR_NONE)


def _kernel_hyper(algorithm: Algorithm, group: Mapping[str, Any]) -> dict[str, Any]:
    """The values that kernels get from a checked group; ``lr`` may be a tensor."""
    return {hyper.name: hyper.of(group) for hyper in algorithm.hypers}


# Values that are at least 0: torch's name in messages, and the exclusive upper end.
_RANGES = {
    "lr": ("learning rate", math.inf),
    "beta1": ("beta parameter at index 0", 1.0),
    "beta2": ("beta parameter at index 1", 1.0),
    **{name: (f"{name} value", math.inf) for name in ("momentum", "weight_decay", "lr_decay")},
    "eps": ("epsilon value", math.inf),
}


def _check_range(hyper: Mapping[str, Any]) -> None:
    """Raise ValueError, with torch's message, for a value of `_kernel_hyper` out of its range."""
    for name, value in hyper.items():
        words, end = _RANGES.get(name, (name, None))
        if not (value == value if end is None else 0.0 <= value < end):
            raise ValueError(f"Invalid {words}: {value}")


def _check_tensor_rate(rate: Any) -> None:
    """Raise ValueError for a learning rate on the CPU out of its range, if `rate` is a tensor.

    One on another device is not read, as that would wait for the device.
    """
    if isinstance(rate, Tensor) and rate.is_cpu:
        _check_range({"lr": rate.item()})


class Component:
    """Base of the objects that work for one optimizer. They do not keep it alive."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None after it is gone."""
        return self._optimizer()


class _Sent(NamedTuple):
    """The values of a group that were sent to the table."""

    rows: tuple[int, int] = (0, 0)
    size: int = 0  # the number of keys in the group
    values: Sequence[Any] = ()  # of the group
    may_change: bool = True  # in place: some are lists, or tensors that the host reads
    lr: Tensor | None = None
    hyper: Mapping[str, Any] | None = None

    def is_of(self, rows: tuple[int, int], size: int, values: Sequence[Any]) -> bool:
        """Whether the group is as it was sent."""
        is_same = self.rows == rows and self.size == size and not self.may_change
        return is_same and all(map(is_, values, self.values))


class Hypers(Component):
    """Sends hyper-parameters of an optimizer's groups to the table, when they change."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._sent: list[_Sent] = []
        self._sent_with: list[Any] = []  # options of the optimizer

    def forget(self) -> None:
        """Send everything again at the next step."""
        self._sent = []

    def send(self, table: ParamTable) -> None:
        """Give the table what has changed. Raises ValueError for a wrong value."""
        optimizer = self.optimizer
        options = [optimizer.seed, optimizer.ema_decay, optimizer.state_dtype, optimizer._layerwise]
        if options != self._sent_with:
            self._sent, self._sent_with = [], options
        end = 0
        for i, group in enumerate(optimizer.param_groups):
            begin, end = end, end + len(group["params"])
            values = list(map(group.get, optimizer.algorithm_in(group).keys))
            sent = self._sent[i] if i < len(self._sent) else _Sent()
            if not sent.is_of((begin, end), len(group), values):
                self._sent[i : i + 1] = [self._resend(table, i, (begin, end), values, sent)]
            elif sent.lr is not None:
                _check_tensor_rate(sent.lr)

    def _resend(
        self, table: ParamTable, i: int, rows: tuple[int, int], values: list[Any], sent: _Sent
    ) -> _Sent:
        """Give the table the values of group `i`, if they differ from those `sent` before."""
        optimizer = self.optimizer
        group, on_device = optimizer.param_groups[i], optimizer._on_device
        may_change = optimizer._has_options(group)
        _check_types(optimizer.algorithm_in(group), group)
        optimizer._states.follow_group(i, group)
        lr, hyper = self.of(group)
        if sent.rows != rows or sent.lr is not lr or sent.hyper != hyper:
            table.set_hyper(*rows, lr, hyper, on_device[i] if on_device else {})
        may_change |= any(value is not lr and not _is_constant(value) for value in values)
        return _Sent(rows, len(group), values, may_change, lr, hyper)

    def of(self, group: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
        """The learning rate, if the kernel reads it from a tensor on the device, and the others.

        Raises ValueError for a value out of its range.
        """
        optimizer = self.optimizer
        hyper = _kernel_hyper(optimizer.algorithm_in(group), group)
        lr = hyper["lr"]
        device = optimizer._rows.params[0].device if isinstance(lr, Tensor) else None
        on_device = device is not None and lr.device == device and lr.dtype == torch.float32
        hyper["lr"] = 0.0 if on_device else float(lr)
        _check_range(hyper)
        _check_tensor_rate(lr)
        if optimizer.seed:
            hyper["seed"] = float(optimizer.seed)
        if optimizer.ema_decay is not None:
            hyper["ema_decay"] = float(optimizer.ema_decay)
        if optimizer._layerwise is not None:
            hyper.update(dataclasses.asdict(optimizer._layerwise), layerwise=True)
        return (lr if on_device else None), hyper


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return not any(isinstance(each, Tensor) for each in value)
    return not isinstance(value, (Tensor, list))
