"""``apex.fp16_utils.FP16_Optimizer``: an optimizer with masters and a loss scale of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.amp.scale_loss import scaled_pass
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.compat.apex.amp.stash import AmpOptimizerState
from ampfuse.compat.apex.fp16_utils import fp16_checkpoint
from ampfuse.optim import upgrade
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import FLOAT_DTYPES


def _of_the_wrapped(name: str) -> Any:
    """An attribute that is the wrapped optimizer's."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


# An Optimizer, unlike apex's: learning-rate schedulers ask for one. Everything but what is defined
# here is the wrapped optimizer's, so Optimizer.__init__ is not called.
class FP16_Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer of half parameters; it steps FP32 masters of them.

        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        ...
        optimizer.zero_grad()
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()

    Arguments:
        init_optimizer: any ``torch.optim.Optimizer``, changed in place: its half parameters are
            replaced by FP32 masters, and it becomes a subclass of its class.
        static_loss_scale: the scale, unless `dynamic_loss_scale`. A static scale never skips.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_loss_scale``,
            ``max_loss_scale`` of :class:`ampfuse.amp.LossScaler`.
        verbose: accepted and without effect; read ``overflow`` to know.

    Attributes:
        optimizer: the wrapped optimizer.
        fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: half parameters, their masters,
            and FP32 parameters, as lists of lists; flat under ``all_fp16_params``,
            ``all_fp32_from_fp16_params``, ``all_fp32_from_fp32_params``.

    Raises:
        TypeError: a trainable parameter is neither float32, float16 nor bfloat16.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        _check_dtypes(init_optimizer)
        upgrade(init_optimizer, master_weights=True)
        self.optimizer: Any = init_optimizer
        self._lists = AmpOptimizerState(init_optimizer)
        self.verbose = verbose
        self.first_closure_call_this_step = True  # always, as between apex's steps
        self._overflow: Tensor | bool = False
        if dynamic_loss_scale:
            self.set_loss_scaler(LossScaler("dynamic", **(dynamic_loss_args or {})))
        else:
            self.set_loss_scaler(LossScaler(static_loss_scale))

    def set_loss_scaler(self, scaler: LossScaler) -> None:
        """Use `scaler` from now on; a dynamic one makes overflows skip the step."""
        self.loss_scaler = scaler
        self.dynamic_loss_scale = scaler.dynamic
        self.optimizer.skip_on_overflow = scaler.dynamic

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_lists"):  # not there yet
            raise AttributeError(name)
        source = self._lists if hasattr(type(self._lists), name) else self.optimizer
        return getattr(source, name)

    # --- the loop -----------------------------------------------------------------------------

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = False, set_to_none: bool | None = None
    ) -> None:
        """Zero the gradients of masters and model, or drop them; both names mean the same."""
        drop = set_grads_to_None if set_to_none is None else set_to_none
        self.optimizer.zero_grad(set_to_none=drop)
        self.optimizer.found_inf_flag.zero_()

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """``loss.backward()`` with the loss scaled, and the masters' gradients from it.

        Several calls add up. With ``update_master_grads=False`` the gradients stay scaled until a
        call without it, or until :meth:`update_master_grads`.
        """
        with scaled_pass(
            loss, [self.optimizer], self.loss_scaler, not update_master_grads, False
        ) as scaled:
            scaled.backward(retain_graph=retain_graph)
        if update_master_grads:
            self._remember_overflow()

    def update_master_grads(self) -> None:
        """Unscale the gradients left scaled, look for overflow and adapt the scale."""
        optimizer, scaler = self.optimizer, self.loss_scaler
        device = optimizer.param_table().param(0).device
        if optimizer.has_scaled_gradients:
            with scaled_pass(torch.zeros((), device=device), [optimizer], scaler, False, False):
                pass
        else:  # somebody's own backward of loss * optimizer.loss_scale
            optimizer.end_backward(scaler.snapshot(device), scaler.dynamic)
            scaler.update([optimizer.found_inf_flag])
        self._remember_overflow()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model; nothing after an overflow.

        A closure has to call this object's ``zero_grad`` and ``backward`` and return the loss. It
        is repeated while it overflows.

        Raises:
            RuntimeError: the closure overflows at the smallest scale too.
        """
        if closure is None:
            return None if self._overflow is True else self.optimizer.step()

        # The wrapped step brings the model up to the masters before each evaluation.
        def repeated() -> Any:
            while True:
                scale = self.loss_scale
                loss = closure()
                if not self.overflow:
                    return loss
                if self.loss_scale >= scale:
                    raise RuntimeError(
                        f"The closure overflows at a loss scale of {scale}, the smallest allowed. "
                        "The inf or NaN is in the forward pass or in the loss itself."
                    )
                self.optimizer.found_inf_flag.zero_()

        return self.optimizer.step(repeated)

    # --- gradients and overflow ---------------------------------------------------------------

    def _remember_overflow(self) -> None:
        dynamic = self.loss_scaler.dynamic
        self._overflow = self.optimizer.found_inf_flag.clone() if dynamic else False

    @property
    def overflow(self) -> bool:
        """Whether the latest gradients overflowed a dynamic scale. Waits for the device."""
        return bool(self._overflow)

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._overflow = bool(value)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the FP32 gradients to `max_norm`.

        Returns:
            Their norm before clipping; -1 after an overflow.
        """
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(parameters(self), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The FP32 gradients, as lists per param group; None, with a word, after an overflow."""
        if self.overflow:
            print("The latest gradients overflowed: there are no master gradients to look at.")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.param_groups
        ]

    # --- what the wrapped optimizer holds ------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    state = _of_the_wrapped("state")
    param_groups = _of_the_wrapped("param_groups")
    add_param_group = _of_the_wrapped("add_param_group")

    # --- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """apex's keys with plain data: it loads with ``weights_only=True``.

        ``fp32_from_fp16`` holds the masters.
        """
        return fp16_checkpoint.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict`, or apex's, returned; masters in place.

        Raises:
            ValueError: the state belongs to parameters of another number or shape.
        """
        fp16_checkpoint.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("An FP16_Optimizer does not pickle; save its state_dict() instead.")


def _check_dtypes(optimizer: torch.optim.Optimizer) -> None:
    for param in parameters(optimizer):
        if param.requires_grad and param.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"A parameter of shape {tuple(param.shape)} is {param.dtype}; FP16_Optimizer "
                "takes float16, bfloat16 and float32 ones."
            )
