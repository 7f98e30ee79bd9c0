"""The script's own operations, timed again as they were and in another dtype, layout or shape.

An estimate for one machine and one script should come from these. Shapes, strides, types and
options of the inputs are those of the profile; the values are random numbers between 0 and 1.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ampfuse.doctor.trace import DTYPES, Event
from ampfuse.measuring import instant, milliseconds, wait_for


@dataclass(frozen=True)
class Input:
    """A tensor to make: its sizes, its strides (in elements), its type."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device) -> Tensor:
        reach = 1 + sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True) if d)
        if self.dtype.is_floating_point:
            values = torch.rand(reach, device=device).to(self.dtype)
        else:
            values = torch.zeros(reach, dtype=self.dtype, device=device)  # a valid index anywhere
        return values.as_strided(self.dims, self.strides)

    @property
    def is_image(self) -> bool:
        return len(self.dims) == 4 and self.dtype.is_floating_point


@dataclass
class Operation:
    """Calls of one operation with equal inputs, in a step of the script.

    Attributes:
        detail: of matrix work its type and what computes it.
        event: one of the calls.
        overload: what to call with `arguments` and `keywords`; None if the profile does not say it.
    """

    name: str
    kind: str
    event: Event
    detail: str = ""
    calls: float = 0.0
    ms: float = 0.0
    overload: Callable[..., Any] | None = None
    arguments: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> str:
        """Those of the tensors that it was given: ``"100x509, 509x1021"``."""
        dims = (dims for dims in self.event.dims if dims and all(isinstance(n, int) for n in dims))
        return ", ".join("x".join(map(str, sizes)) for sizes in dims)

    @property
    def inputs(self) -> list[Input]:
        return [value for value in self.arguments if isinstance(value, Input)]

    def with_inputs(self, *changes: Callable[[Input], Input]) -> Operation | None:
        """It with other inputs; None if `changes` leave them as they are."""
        arguments = self.arguments
        for change in changes:
            arguments = [change(v) if isinstance(v, Input) else v for v in arguments]
        return None if arguments == self.arguments else replace(self, arguments=arguments)

    def run(self, device: torch.device) -> Callable[[], object]:
        call = self.overload
        assert call is not None
        made = [v.make(device) if isinstance(v, Input) else v for v in self.arguments]
        return lambda: call(*made, **self.keywords)


def key(event: Event) -> tuple[str, str]:
    """Equal for operations that do the same work."""
    return event.name, repr((event.dims, event.strides, event.types, event.values))


def callable_one(event: Event) -> Event:
    """`event`, or the operation around it that chooses an implementation by dtype and layout."""
    while event.parent and event.parent.name in ("aten::convolution", "aten::_convolution"):
        event = event.parent
    return event


def operation(event: Event, kind: str) -> Operation:
    """What `event` was, with how to call it, unless the profile does not say (lists of tensors).

    What wrote into a tensor that it was given (``out=``) is called without.
    """
    found = Operation(event.name, kind, event)
    space, _, name = event.name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), name, None) if name else None
    calls = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    for extra, call in itertools.product((0, 1), calls):
        schema = call._schema.arguments
        if len(schema) + extra != len(event.types) or any(a.is_out for a in schema):
            continue
        given = zip(schema, event.types, event.dims, event.strides, event.values, strict=False)
        with contextlib.suppress(ValueError, SyntaxError):
            pairs = [(each, _value(str(each.type), *facts)) for each, *facts in given]
            found.arguments = [value for each, value in pairs if not each.kwarg_only]
            found.keywords = {each.name: value for each, value in pairs if each.kwarg_only}
            found.overload = call
            break
    return found


def _value(wanted: str, kind: str, dims: Any, strides: Any, text: str) -> Any:
    """The argument of type `wanted`. Raises ValueError or SyntaxError if these facts give none."""
    if kind in DTYPES and wanted in ("Tensor", "Optional[Tensor]"):
        return Input(tuple(dims), tuple(strides), DTYPES[kind])
    if kind in ("Scalar", "ScalarList") and text and "Tensor" not in wanted:
        return float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
    if not kind and wanted.startswith("Optional"):
        return None
    raise ValueError(f"no {wanted} from {kind} {text}")


def to_dtype(half: torch.dtype, kind: str) -> Callable[[Input], Input]:
    """FP32 inputs in `half`; statistics and weights of a normalisation stay, as amp keeps them."""

    def change(given: Input) -> Input:
        stays = given.dtype != torch.float32 or (kind == "norm" and len(given.dims) < 2)
        return given if stays else replace(given, dtype=half)

    return change


def to_channels_last(given: Input) -> Input:
    if not given.is_image:
        return given
    _, c, h, w = given.dims
    return replace(given, strides=(h * w * c, 1, w * c, c))


def race(
    calls: Sequence[Callable[[], object]], device: torch.device, rounds: int = 7
) -> list[float]:
    """Milliseconds of each of `calls`, the least of rounds in which they take turns.

    The least, as whatever else the machine does adds to it. Each turn lasts two milliseconds or so,
    that the clock does not count.
    """

    def turn(call: Callable[[], object], count: int) -> float:
        begin = instant(device)
        for _ in range(count):
            call()
        end = instant(device)
        wait_for(device)
        return milliseconds(begin, end) / count

    for call in calls:
        turn(call, 1)  # torch and its libraries choose and compile
    counts = [max(1, min(50, int(2.0 / turn(call, 1)))) for call in calls]
    turns = [[turn(*each) for each in zip(calls, counts, strict=True)] for _ in range(rounds)]
    return [min(times) for times in zip(*turns, strict=True)]


def speed_ratios(
    original: Operation, variants: Sequence[Operation], device: torch.device
) -> list[float | None]:
    """Time of each of `variants` over that of `original`; None for one that torch refuses."""
    runs: list[Callable[[], object] | None] = []
    with torch.no_grad():
        for one in (original, *variants):
            run = None
            with contextlib.suppress(RuntimeError, NotImplementedError, IndexError, TypeError):
                made = one.run(device)
                made()
                run = made
            runs.append(run)
        if runs[0] is None:
            return [None] * len(variants)
        times = iter(race([run for run in runs if run], device))
        base = next(times)
        return [next(times) / base if run else None for run in runs[1:]]
