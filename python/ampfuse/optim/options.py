"""The options that every fused optimizer has beside torch's arguments."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from typing_extensions import Unpack as Unpack  # typing has it from Python 3.11 on

StateMode = Literal["fp32", "bf16", "8bit"]
STATE_MODES: tuple[StateMode, ...] = ("fp32", "bf16", "8bit")


class Options(TypedDict, total=False):
    """Keyword arguments of every fused optimizer, beside torch's.

    Arguments:
        master_weights: keep an FP32 master (``state[p]["master_param"]``) for each half parameter,
            update that and round it into the parameter. Without, half parameters are updated in
            their own precision, and small updates are lost. ``"split"``: the master is the half
            weight and 16 more bits (``state[p]["master_remainder"]``, int16), 2 bytes a parameter
            less. Of a BF16 weight every FP32 master is held exactly; the weight is the nearest,
            and in a tie the one away from zero. Of an FP16 weight every master from 2**-16 up to
            65504, where larger ones are held; smaller ones to within 2**-40.
        state_dtype: how states of a parameter's shape are kept: ``"fp32"`` (the default),
            ``"bf16"``, rounded stochastically, or ``"8bit"``, in blocks of 128 elements with a
            scale each (SGD, Adam, AdamW, Adagrad, Lion). Parameters of fewer than 4,096 elements
            keep FP32 instead of 8 bits. ``state_dtype`` in a parameter group goes first.
        rounding: ``"stochastic"`` rounds BF16 parameters without masters up or down at random, so
            that small updates count in the mean (others to nearest); ``"nearest"`` is the default.
        seed: of all random bits, 0 to 2**32 - 1. They depend on it, the parameter's place, its
            step count and the element alone: not on device, threads or a resume.
        ema_decay: keep an exponential moving average of each parameter, ``avg += (1 - decay) *
            (p - avg)`` after each step, in FP32 (``state[p]["ema"]``); see ``swap_ema``.
        max_grad_norm: clip all gradients to this L2 norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_``; a non-finite gradient then skips the step.
        skip_nonfinite: skip the step if a gradient holds inf or NaN. A GradScaler and dynamic loss
            scaling do so anyway.
        unscale_grads: after a step that a GradScaler drives, FP32 gradients read unscaled (and not
            clipped), as with torch's fused optimizers; a skipped step leaves them as they were, and
            half ones stay scaled. False: the step writes 4 bytes less per element, and
            ``.grad`` stays multiplied by the loss scale.
    """

    master_weights: bool | Literal["split"]
    state_dtype: StateMode
    rounding: Literal["nearest", "stochastic"]
    seed: int
    ema_decay: float | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    unscale_grads: bool


class WithOptions:
    """Mixin: the options as attributes, which start at their defaults."""

    master_weights: bool | Literal["split"] = False
    state_dtype: StateMode = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    ema_decay: float | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    unscale_grads: bool = True

    def _set_options(self, options: Options) -> None:
        """Set those that a constructor was given. Raises TypeError and ValueError."""
        for name, value in options.items():
            if name not in Options.__annotations__:
                call = f"{type(self).__name__}.__init__()"
                raise TypeError(f"{call} got an unexpected keyword argument {name!r}")
            is_flag = isinstance(getattr(WithOptions, name), bool) and not isinstance(value, str)
            setattr(self, name, bool(value) if is_flag else value)
        if (norm := self.max_grad_norm) is not None and not norm > 0:
            raise ValueError(f"max_grad_norm is {norm}; it has to be positive, or None")
        check_choice("master_weights", self.master_weights, (True, False, "split"))
        check_choice("state_dtype", self.state_dtype, STATE_MODES)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.master_weights:
            raise ValueError(
                "rounding='stochastic' is for BF16 parameters without masters, and master_weights "
                f"is {self.master_weights!r}: masters lose nothing. Leave one of the two out."
            )
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**32):
            raise ValueError(f"seed is {self.seed!r}; it has to be an integer from 0 to 2**32 - 1")
        decay = self.ema_decay
        if decay is not None and not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ValueError(f"ema_decay is {decay!r}; it has to be in [0, 1), or None")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError for a value of an option that is none of `choices`."""
    if value not in choices:
        known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ValueError(f"{name} is {value!r}; it has to be {known}")
