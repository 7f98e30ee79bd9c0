"""``optimizer._amp_stash``: apex's lists of half and FP32 parameters, read off the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampfuse.optim.masters import HALF_DTYPES, MasterParameter


def _of_groups(has: Callable[[Tensor], bool], what: Callable[[Any], Tensor] = lambda p: p) -> Any:
    """`what` of the parameters that it `has`, as lists per param group."""
    return property(lambda self: [[what(p) for p in g if has(p)] for g in self._groups()])


def _flat(groups: str) -> Any:
    return property(lambda self: [p for group in getattr(self, groups) for p in group])


def _is_master(p: Tensor) -> bool:
    return isinstance(p, MasterParameter)


class AmpOptimizerState:
    """Parameters by kind: ``*_groups`` are lists per param group, ``all_*`` flat.

    fp16 stands for both half types. Masters exist from ``initialize`` on, so nothing is lazy.
    """

    lazy_init_called = True
    already_patched = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _groups(self) -> list[list[Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]

    @property
    def params_have_scaled_gradients(self) -> bool:
        return bool(getattr(self._optimizer(), "has_scaled_gradients", False))

    def publish_masters(self) -> None:
        """Write the masters into the model's half weights now."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.param_table().masters.publish()

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half weights: those behind masters, or where there are none, those stepped directly."""
        unmastered = [p for g in self._groups() for p in g if p.dtype in HALF_DTYPES]
        return unmastered or [p for group in self.fp16_groups for p in group]

    fp32_from_fp16_groups = _of_groups(_is_master)
    fp16_groups = _of_groups(_is_master, lambda p: p.model_param)
    fp32_from_fp32_groups = _of_groups(lambda p: not _is_master(p) and p.dtype not in HALF_DTYPES)
    all_fp32_from_fp16_params = _flat("fp32_from_fp16_groups")
    all_fp32_from_fp32_params = _flat("fp32_from_fp32_groups")
    all_fp32_params = all_fp32_from_fp32_params


def add_stash(optimizer: Any) -> None:
    """Give `optimizer` the private names that recipes use before they load a checkpoint."""
    stash = AmpOptimizerState(optimizer)
    optimizer._amp_stash = stash
    optimizer._lazy_init_maybe_master_weights = _nothing_to_do
    optimizer._master_params_to_model_params = stash.publish_masters


def _nothing_to_do() -> None:
    """Masters were made by ``initialize``."""
