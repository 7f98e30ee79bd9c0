"""The options that every fused optimizer has beside torch's arguments."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import Unpack as Unpack  # typing has it from Python 3.11 on


class Options(TypedDict, total=False):
    """Keyword arguments of every fused optimizer, beside torch's.

    Arguments:
        master_weights: keep an FP32 master (``state[p]["master_param"]``) for each half parameter,
            update that and round it into the parameter. Without, half parameters are updated in
            their own precision, and small updates are lost.
        max_grad_norm: clip all gradients to this L2 norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_``; a non-finite gradient then skips the step.
        skip_nonfinite: skip the step if a gradient holds inf or NaN. A GradScaler and dynamic loss
            scaling do so anyway.
        unscale_grads: after a step that a GradScaler drives, FP32 gradients read unscaled (and not
            clipped), as with torch's fused optimizers; a skipped step leaves them as they were, and
            half ones always stay scaled. False: the step writes 4 bytes less per element, and
            ``.grad`` stays multiplied by the loss scale.
    """

    master_weights: bool
    max_grad_norm: float | None
    skip_nonfinite: bool
    unscale_grads: bool


class WithOptions:
    """Mixin: the options as attributes, which start at their defaults."""

    master_weights: bool = False
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    unscale_grads: bool = True

    def _set_options(self, options: Options) -> None:
        """Set those that a constructor was given. Raises TypeError and ValueError."""
        for name, value in options.items():
            if name not in Options.__annotations__:
                call = f"{type(self).__name__}.__init__()"
                raise TypeError(f"{call} got an unexpected keyword argument {name!r}")
            setattr(self, name, bool(value) if isinstance(getattr(self, name), bool) else value)
        if (norm := self.max_grad_norm) is not None and not norm > 0:
            raise ValueError(f"max_grad_norm is {norm}; it has to be positive, or None")
