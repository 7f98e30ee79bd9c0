"""What every optimizer under amp shares.

`AmpOptimizer` is a mixin over a ``torch.optim.Optimizer``. The fused optimizers add a step of their
own (fused.py), any other optimizer keeps its own (generic.py).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from ampfuse import plugs
from ampfuse.optim import left_scaled
from ampfuse.optim.checkpoints import Checkpoints
from ampfuse.optim.gradients import Gradients
from ampfuse.optim.inner import with_inner
from ampfuse.optim.layerwise import Layerwise
from ampfuse.optim.skip_watch import SkipWatch

if TYPE_CHECKING:
    from ampfuse._C import ParamTable
    from ampfuse.insight.meter import Meter


class LastStep:
    """What an optimizer's last step decided, as device tensors; reading one is what waits.

    Attributes (each a 0-dim tensor on the parameters' device, copied at the time of asking):
        skipped: float32, 1 if the step was skipped because a gradient held inf or NaN, else 0.
        grad_norm: float32, the L2 norm of the unscaled gradients before clipping; NaN if they were
            not finite. Known only if the step inspected gradients (scaling, clipping).
        loss_scale: float32, the scale the gradients were made with.
    """

    def __init__(self, table: ParamTable) -> None:
        self._table = table

    def _field(self, name: str) -> Tensor:
        return self._table.state_field(name).clone()

    @property
    def skipped(self) -> Tensor:
        return self._field("skip")

    @property
    def grad_norm(self) -> Tensor:
        return self._field("grad_norm")

    @property
    def loss_scale(self) -> Tensor:
        return self._field("loss_scale")

    def overflow(self) -> dict[str, Any] | None:
        """Where the latest overflow was, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped so far).
        """
        row = int(self._table.state_field("last_bad_row"))
        if row < 0:
            return None
        bits = int(self._table.state_field("last_bad_bits"))
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if bits > 0x7F800000 else "inf",
            "skipped_steps": int(self._table.state_field("skipped_steps")),
        }


class AmpOptimizer(Gradients, Checkpoints):
    """Mixin: an optimizer that amp can scale, inspect and skip.

    Its public methods are what the rest of ampfuse works with: `param_table`, the passes of
    :class:`Gradients`, the masters of :class:`Checkpoints`. Other attributes have names that no
    optimizer is likely to have, as this goes in front of classes of other people too.
    """

    # torch.amp.GradScaler then hands over `grad_scale` and `found_inf` instead of unscaling.
    _step_supports_amp_scaling = True

    # Under amp: whether an overflow skips the step (dynamic scaling) or not (a static scale).
    skip_on_overflow: bool = True

    # A 1 on the device while steps are rehearsed: each is skipped, whatever its gradients are.
    _rehearsal: Tensor | None = None
    # Set by LARC for the time of a step of its own.
    _layerwise: Layerwise | None = None
    _skip_watch: SkipWatch | None = None
    _meter: Meter | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A wrapper that gives itself its optimizer's class (Lightning, Fabric) hands all on.

        Else it would inherit our methods, and they would work on a table of its own.
        """
        super().__init_subclass__(**kwargs)
        wrapper = cls.__bases__[0]
        if hasattr(wrapper, "__getattr__") and not issubclass(wrapper, Optimizer):
            for name in set(dir(cls)) - set(dir(wrapper)):
                setattr(cls, name, property(operator.attrgetter(f"_optimizer.{name}")))

    @property
    def last_step(self) -> LastStep:
        """What the last step decided; see :class:`LastStep`."""
        return LastStep(self.param_table())

    @property
    def meter(self) -> Meter:
        """Counts what half precision does to each tensor, once it is called; see :class:`Meter`."""
        if self._meter is None:
            self._meter = plugs.at("optimizer.meter")(self)
        return self._meter

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step to the L2 norm `max_norm`.

        Returns:
            The norm of all unscaled gradients before clipping: float32, 0-dim, on the device.
        """
        raise NotImplementedError

    # --- the decisions of a step ----------------------------------------------------------------

    def _check_gradients_are_unscaled(self) -> None:
        if self.in_backward:
            raise RuntimeError(
                "step() was called inside the scale_loss context, where gradients are still "
                "scaled. Call optimizer.step() after the with block."
            )
        if self._left_scaled:
            left_scaled.warn_if_used(self)

    def _verdict(self, max_norm: float) -> dict[str, Any]:
        """Arguments for ``ParamTable.update`` and ``decide``: what to inspect, whether to skip."""
        found_inf = self.__dict__.get("found_inf")
        if "found_inf" in self.__dict__:  # a GradScaler drives this step
            inspect, skip = found_inf is None, True
        elif self._under_amp:
            inspect = skip = self.skip_on_overflow
        else:
            inspect, skip = self.skip_nonfinite, self.skip_nonfinite or max_norm > 0
        if self._rehearsal is not None:
            found_inf, skip = self._rehearsal, True
        return {
            "found_inf": found_inf,
            "max_norm": max_norm,
            "inspect": inspect,
            "skip_nonfinite": skip,
        }

    def _watch_skips(self) -> None:
        """After a step: tell of skipped ones; raise if training has stopped without a word."""
        if not (self._under_amp and self.skip_on_overflow):
            return
        if self._skip_watch is None:
            self._skip_watch = SkipWatch()
        session = self.__dict__.get("_amp_session")
        tell = session is not None and session.tells_skips
        self._skip_watch.after_step(self._known_table(), tell=tell)


def amp_optimizers(optimizer: Any) -> list[AmpOptimizer]:
    """Those that amp knows among `optimizer` and what it wraps, the innermost last."""
    return [one for one in with_inner(optimizer) if isinstance(one, AmpOptimizer)]


def takes_scale(optimizer: Any) -> TypeGuard[AmpOptimizer]:
    """Whether its step unscales, inspects and skips by itself."""
    return isinstance(optimizer, AmpOptimizer) and optimizer._step_supports_amp_scaling


@contextlib.contextmanager
def driven(optimizer: AmpOptimizer, **by: Tensor | None) -> Iterator[None]:
    """Steps in the block have a GradScaler's ``grad_scale`` and ``found_inf``, as torch has it."""
    for name, value in by.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:  # the next step may be made without a scaler
        for name in by:
            delattr(optimizer, name)
