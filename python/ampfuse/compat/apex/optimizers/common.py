"""The base of apex's fused optimizers."""

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

# Options for which apex takes any value.
_FLAGS = frozenset(
    "decoupled_weight_decay bias_correction grad_averaging init_zero reg_inside_moment "
    "use_nvlamb wd_after_momentum".split()
)
_NOT_OURS = ("params", "param_names", "step")  # of a group whose state is loaded


class ApexOptimizer(FusedOptimizer, own_step=False):
    """Mixin: ``zero_grad`` with apex's default, and state dicts of apex, torch and ampfuse.

    From the first step on ``param_groups[i]["step"]`` is there: the largest of the steps applied to
    the group's parameters, float32 and 0-dim on their device.
    """

    set_grad_none = True
    skip_by_default = False
    _not_in_groups = frozenset()  # apex's groups have names of ours
    _copied = (
        *FusedOptimizer._copied,
        *"set_grad_none capturable materialize_master_grads most_recent_scale".split(),
        *"scale_set_by_backward _first_step _reduced_precision_dtype _of_2019".split(),
    )

    # Options of ours that groups have, and our constructors do not.
    _in_groups: tuple[str, ...] = ()

    def construct(
        self, params: Any, *, amsgrad: Any = False, set_grad_none: bool = True, **options: Any
    ) -> None:
        """Run our constructor with `options`; `amsgrad` is a RuntimeError."""
        if amsgrad:
            name = type(self).__name__
            raise RuntimeError(f"{name} does not support AMSGrad; ampfuse.optim.Adam does.")
        self.set_grad_none = set_grad_none
        options |= {name: bool(options[name]) for name in _FLAGS & options.keys()}
        in_groups = {name: options.pop(name) for name in self._in_groups}
        super().__init__(params, **options)
        for name, value in in_groups.items():
            self.set_in_groups(name, value)

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """The flag that ``amp_C``'s operations take; our own step has another."""
        device = next((param.device for param in parameters(self)), None)
        return torch.zeros(1, dtype=torch.int32, device=device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # The base's by name: hooks that torch has put on classes in between would run once more.
        result = FusedOptimizer.step(self, closure)
        if self.algorithm.uses_count:
            groups = self.param_groups
            counts = self.param_table().steps().split([len(group["params"]) for group in groups])
            for group, steps in zip(groups, counts, strict=True):
                if len(steps):
                    group["step"] = steps.amax()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients or zero them; by default as `set_grad_none` said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's, torch's and ampfuse's state dicts.

        Options that a saved group lacks stay. apex's count of a group is that of its parameters.
        """
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        groups, saved_groups = [], state_dict["param_groups"]
        if len(self.param_groups) != len(saved_groups):
            return super().load_state_dict(state_dict)  # torch raises the error
        for own, saved in zip(self.param_groups, saved_groups, strict=True):
            inherited = {k: v for k, v in own.items() if k not in _NOT_OURS}
            group = {**inherited, **saved}
            groups.append(group)
            # A step of a subclass's own counts by group.
            uncounted = 0 if self.algorithm.uses_count else None
            step = group.get("step", uncounted) if is_fused(self) else None
            counts = [state[key]["step"] for key in group["params"] if "step" in state.get(key, {})]
            is_ahead = bool(counts) and step is not None and step > max(counts)
            for key in group["params"] if step is not None else ():
                # Without a moment there is nothing that a count could belong to.
                has_moments = state.get(key, {}).keys() - {*MASTERS, "step"}
                if has_moments and (is_ahead or "step" not in state[key]):
                    count = torch.as_tensor(step, dtype=torch.float32).reshape(())
                    state[key]["step"] = count.clone()
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def set_in_groups(self, name: str, value: Any) -> None:
        """A property of every group, of those to come too."""
        self.defaults[name] = value
        for group in self.param_groups:
            group.setdefault(name, value)


def of_groups(key: str, read: Callable[[Any], Any], write: Callable[[Any], bool] = bool) -> Any:
    """An attribute of apex's optimizers that each parameter group has as an entry, new ones too."""

    def assign(self: ApexOptimizer, value: Any) -> None:
        for group in (self.defaults, *self.param_groups):
            group[key] = write(value)

    return property(lambda self: read(self.param_groups[0][key]), assign)


def stepped_by_grad_scaler(
    optimizer: Any, driver: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """A step in this block unscales and skips by torch's GradScaler ``driver["grad_scaler"]``.

    It is among the keywords: torch's GradScaler warns of a parameter of that name, as apex's.
    """
    grad_scaler = driver.pop("grad_scaler", None)
    if driver:
        name = type(optimizer).__name__
        raise TypeError(f"{name}.step got an unexpected argument {next(iter(driver))!r}")
    if grad_scaler is None:
        return contextlib.nullcontext()
    flags = grad_scaler._check_inf_per_device(optimizer).values()
    found_inf = sum(flag.reshape(()) for flag in flags)  # 0 if the scaler saw no gradient
    grad_scale = grad_scaler._get_scale_async()
    return under_grad_scaler(optimizer, grad_scale=grad_scale, found_inf=found_inf)
