"""``optimizer._amp_stash``: apex's lists of half and FP32 parameters, read off the optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ampfuse.optim.masters import HALF_DTYPES, MasterParameter


class AmpOptimizerState:
    """Parameters by kind: ``*_groups`` are lists per param group, ``all_*`` flat.

    fp16 stands for both half types. Masters exist from ``initialize`` on, so nothing is lazy.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = True
        self.already_patched = True

    @property
    def params_have_scaled_gradients(self) -> bool:
        return bool(getattr(self._optimizer(), "has_scaled_gradients", False))

    def _groups(self) -> list[list[Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[MasterParameter]]:
        return [[p for p in g if isinstance(p, MasterParameter)] for g in self._groups()]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        return [[m.model_param for m in masters] for masters in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        def is_own_master(p: Tensor) -> bool:
            return not isinstance(p, MasterParameter) and p.dtype not in HALF_DTYPES

        return [[p for p in group if is_own_master(p)] for group in self._groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half weights: those behind masters, or where there are none, those stepped directly."""
        unmastered = [p for g in self._groups() for p in g if p.dtype in HALF_DTYPES]
        return unmastered or [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        return [p for group in self.fp32_from_fp32_groups for p in group]

    all_fp32_params = all_fp32_from_fp32_params


def add_stash(optimizer: Any) -> None:
    """Give `optimizer` the private names that recipes use before they load a checkpoint."""
    optimizer._amp_stash = AmpOptimizerState(optimizer)
    optimizer._lazy_init_maybe_master_weights = _nothing_to_do
    optimizer._master_params_to_model_params = _MasterToModel(optimizer)


def _nothing_to_do() -> None:
    """Masters were made by ``initialize``."""


class _MasterToModel:
    """Write the masters into the model's half weights now."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.param_table().publish_masters()
