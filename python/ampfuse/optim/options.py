"""The options that every fused optimizer takes in addition to torch's, and the checks of values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict

from torch import Tensor
from typing_extensions import Unpack as Unpack  # typing has it from Python 3.11 on

from ampfuse._schema import STORAGES


class Options(TypedDict, total=False):
    """Keyword arguments of every fused optimizer, in addition to torch's, and its attributes.

    A changed attribute takes effect at the next step; `master_weights`, `state_dtype` and
    `rounding` are fixed after the first one. A parameter group may have its own `state_dtype`; any
    other option in a group raises ValueError, when it is added or at the next step.

    Arguments:
        master_weights: keep an FP32 master (``state[p]["master_param"]``) for each half parameter,
            update that and round it into the parameter. Without masters half parameters are updated
            in their own precision, and small updates are lost. ``"split"``: the master is the half
            weight and 16 more bits (``state[p]["master_remainder"]``, int16), which takes 2 bytes
            per parameter less. With a BF16 weight it holds every FP32 value exactly; the weight is
            the nearest, and in a tie the one away from zero. With an FP16 weight it holds values
            from 2**-16 to 65504 exactly, smaller ones to within 2**-40, and 65504 for larger ones.
        state_dtype: how states of a parameter's shape are stored: ``"fp32"`` (the default),
            ``"bf16"``, rounded stochastically, or (SGD, Adam, AdamW, Adagrad, Lion, Muon)
            ``"8bit"``, in blocks of 128 elements with a scale each. Parameters of fewer than 4,096
            elements keep FP32 instead of 8 bits.
            ``state_dtype`` in a parameter group takes precedence.
        rounding: ``"stochastic"`` rounds BF16 parameters without masters up or down at random, so
            that small updates count in the mean (others to nearest); ``"nearest"`` is the default.
        seed: seed of all random bits, 0 to 2**32 - 1. They depend only on it, the parameter's
            position, its step count and the element: not on device, threads or a resume.
        ema_decay: keep an exponential moving average of each parameter, ``avg += (1 - decay) *
            (p - avg)`` after each step, in FP32 (``state[p]["ema"]``); see ``swap_ema``.
        max_grad_norm: clip all gradients to this L2 norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_``; a non-finite gradient then skips the step.
        skip_nonfinite: skip the step if a gradient holds inf or NaN: nothing changes then, and
            the logger "ampfuse.optim" warns. Unless the step inspects the gradients anyway, this
            reads them once more. None, the default, is True, but False under amp at O0 to O3.
            A GradScaler, dynamic loss scaling and clipping skip in any case.
        skip_spikes: skip a step whose gradient norm lies more than so many standard deviations
            above the mean, both of the norm's logarithm over applied steps: all of them up to the
            100th, then with weights that decay by 0.99 a step. No step is skipped before the
            100th, and the deviation counts as 0.1 at least. Unless the step inspects the gradients
            anyway, this reads them once more. None, the default, skips none.
        max_skipped_steps: raise RuntimeError when so many steps in a row were skipped, on a GPU
            some steps later. None: never.
        unscale_grads: after a step under a GradScaler, FP32 gradients read unscaled (and not
            clipped), as with torch's fused optimizers; a skipped step leaves them as they were, and
            half ones stay scaled. False: the step writes 4 bytes less per element, and
            ``.grad`` stays multiplied by the loss scale.

    Raises:
        TypeError: from the constructor, a parameter that is not float32, float16 or bfloat16.
        ValueError: an argument out of range, or ``differentiable=True``.
    """

    master_weights: bool | Literal["split"]
    state_dtype: str
    rounding: Literal["nearest", "stochastic"]
    seed: int
    ema_decay: float | None
    max_grad_norm: float | None
    skip_nonfinite: bool | None
    skip_spikes: float | None
    max_skipped_steps: int | None
    unscale_grads: bool


class OptionDefaults:
    """The attributes of every optimizer under amp that hold its :class:`Options`."""

    master_weights: bool | Literal["split"] = False
    state_dtype: str = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    ema_decay: float | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool | None = None
    skip_spikes: float | None = None
    max_skipped_steps: int | None = 100
    unscale_grads: bool = True


class Rule(NamedTuple):
    """A condition on a value, and its description; `accepts` may raise for a wrong type."""

    accepts: Callable[[Any], bool]
    words: str


def one_of(*choices: Any) -> Rule:
    *most, last = map(repr, choices)
    return Rule(lambda value: value in choices, f"{', '.join(most)} or {last}")


def is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)


IS_BOOL = one_of(True, False)
NUMBER = Rule(is_number, "a number")
POSITIVE = Rule(lambda value: 0 < value < math.inf, "positive and finite")
ABOVE_0 = Rule(lambda value: value > 0, "positive")
COUNT = Rule(lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError, which names `name`, for a value that breaks `rule`."""
    try:
        is_valid = rule.accepts(value)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # such as "1" > 0
        is_valid = False
    if not is_valid:
        is_large = isinstance(value, Tensor) and value.numel() > 1
        what = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_large else repr(value)
        raise ValueError(f"{name} is {what}; it must be {rule.words}")


RULES = {
    "master_weights": one_of(True, False, "split"),
    "state_dtype": one_of(*STORAGES),
    "rounding": one_of("nearest", "stochastic"),
    "seed": Rule(
        lambda value: isinstance(value, int) and 0 <= value < 2**32,
        "an integer from 0 to 2**32 - 1",
    ),
    "ema_decay": Rule(lambda value: value is None or 0 <= value < 1, "in [0, 1), or None"),
    "max_grad_norm": Rule(lambda value: value is None or value > 0, "positive, or None"),
    "skip_nonfinite": one_of(True, False, None),
    "skip_spikes": Rule(
        lambda value: value is None or (value is not True and 0 < value < math.inf),
        "positive and finite, or None",
    ),
    "max_skipped_steps": Rule(
        lambda value: value is None or (type(value) is int and value > 0),
        "a positive integer, or None",
    ),
    "unscale_grads": IS_BOOL,
}
# Options where 1 and 0 count as True and False.
BOOL_OPTIONS = {"master_weights", "skip_nonfinite", "unscale_grads"}
# Options that rows are made with.
FIXED = {"master_weights", "rounding"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong value, or for options that exclude each other."""
    for name, value in options.items():
        check(name, value, RULES[name])
    masters = options.get("master_weights", False)
    if options.get("rounding") == "stochastic" and masters:
        raise ValueError(
            "rounding='stochastic' is for BF16 parameters without masters, but master_weights "
            f"is {masters!r}. Leave one of the two out."
        )


def changed_too_late(what: str, old: Any, new: Any) -> str:
    return (
        f"{what} cannot change from {old!r} to {new!r} after the optimizer was first used. Save "
        "the state, create an optimizer with the new value and load it there."
    )
