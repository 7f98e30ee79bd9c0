"""What the optimizers of ``apex.optimizers`` have in common."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.optim.base import under_grad_scaler
from ampfuse.optim.fused import FusedOptimizer, is_fused
from ampfuse.optim.masters import MASTERS
from ampfuse.optim.param_groups import parameters

_NOT_OURS = ("params", "param_names", "step")  # of a group whose state is loaded


class ApexOptimizer(FusedOptimizer, own_step=False):
    """Mixin: ``zero_grad`` with apex's default, and state dicts of apex, torch and ampfuse.

    From the first step on ``param_groups[i]["step"]`` is there: the largest of the steps applied to
    the group's parameters, float32 and 0-dim on their device.
    """

    set_grad_none = True
    # Divides the gradients of the next step. (In apex both are attributes of FusedSGD.)
    most_recent_scale = 1.0
    scale_set_by_backward = False
    skip_by_default = False
    _not_in_groups = frozenset()  # apex's groups contain keys that are optimizer-wide options here
    _copied = (*FusedOptimizer._copied, "set_grad_none")

    def __init__(
        self, params: Any, *, amsgrad: Any = False, set_grad_none: bool = True, **options: Any
    ) -> None:
        """Run our constructor with its `options`; `amsgrad` raises RuntimeError."""
        if amsgrad:
            name = type(self).__name__
            raise RuntimeError(f"{name} does not support AMSGrad; ampfuse.optim.Adam does.")
        self.set_grad_none = set_grad_none
        super().__init__(params, **options)

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """The flag that ``amp_C``'s operations take; our own step has another."""
        device = next((param.device for param in parameters(self)), None)
        return torch.zeros(1, dtype=torch.int32, device=device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Not super(): torch hooks the step of each class that was instantiated, and a base's hooks
        # would run a second time.
        result = FusedOptimizer.step(self, closure)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        if self.algorithm.uses_count:
            groups = self.param_groups
            counts = self.param_table().steps().split([len(group["params"]) for group in groups])
            for group, steps in zip(groups, counts, strict=True):
                if len(steps):
                    group["step"] = steps.amax()
        return result

    def _gradient_scale(self) -> tuple[Tensor | None, bool, bool]:
        if self.most_recent_scale == 1:
            return super()._gradient_scale()
        device = self._rows.params[0].device
        scale = torch.full((), self.most_recent_scale, dtype=torch.float32, device=device)
        scaler = self.__dict__.get("grad_scale")
        return (scale if scaler is None else scale * scaler), False, False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients or zero them; by default as `set_grad_none` said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's, torch's and ampfuse's state dicts.

        Options that a saved group lacks stay. apex's count of a group is that of its parameters.
        """
        saved_groups = state_dict["param_groups"]
        if len(self.param_groups) != len(saved_groups):
            return super().load_state_dict(state_dict)  # torch raises the error
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        groups = []
        for own, saved in zip(self.param_groups, saved_groups, strict=True):
            inherited = {k: v for k, v in own.items() if k not in _NOT_OURS}
            groups.append({**inherited, **saved})
            if is_fused(self):  # a step of a subclass's own counts by group
                self._count_by_parameter(groups[-1], state)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def _count_by_parameter(self, group: dict[str, Any], state: dict[Any, Any]) -> None:
        """Write a saved group's count into its parameters' state, unless theirs is ahead."""
        step = group.get("step", 0 if self.algorithm.uses_count else None)
        if step is None:
            return
        counts = [state[key]["step"] for key in group["params"] if "step" in state.get(key, {})]
        is_ahead = bool(counts) and step > max(counts)
        for key in group["params"]:
            # Without a moment there is nothing that a count could belong to.
            has_moments = state.get(key, {}).keys() - {*MASTERS, "step"}
            if has_moments and (is_ahead or "step" not in state[key]):
                count = torch.as_tensor(step, dtype=torch.float32).reshape(())
                state[key]["step"] = count.clone()

    def set_in_groups(self, name: str, value: Any) -> None:
        """A property of every group, of those to come too."""
        self.defaults[name] = value
        for group in self.param_groups:
            group.setdefault(name, value)


def group_option(key: str, read: Callable[[Any], Any], write: Callable[[Any], bool] = bool) -> Any:
    """An attribute of apex's optimizers that each parameter group has as an entry, new ones too."""

    def assign(self: ApexOptimizer, value: Any) -> None:
        for group in (self.defaults, *self.param_groups):
            group[key] = write(value)

    return property(lambda self: read(self.param_groups[0][key]), assign)


def stepped_by_grad_scaler(
    optimizer: Any, kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """A step in this block unscales and skips by torch's GradScaler ``kwargs["grad_scaler"]``.

    `step` takes it through ``**kwargs``: torch's GradScaler warns about a parameter called
    `grad_scaler`.
    """
    grad_scaler = kwargs.pop("grad_scaler", None)
    if kwargs:
        name = type(optimizer).__name__
        raise TypeError(f"{name}.step got an unexpected argument {next(iter(kwargs))!r}")
    if grad_scaler is None or not grad_scaler.is_enabled():
        return contextlib.nullcontext()
    flags = grad_scaler._check_inf_per_device(optimizer).values()
    found_inf = sum(flag.reshape(()) for flag in flags)  # 0 if the scaler saw no gradient
    grad_scale = grad_scaler._get_scale_async()
    return under_grad_scaler(optimizer, grad_scale=grad_scale, found_inf=found_inf)
