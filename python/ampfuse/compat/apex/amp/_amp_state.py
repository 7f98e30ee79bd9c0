"""The state that scripts reach for: ``apex.amp._amp_state`` and ``optimizer._amp_stash``."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ampfuse.amp import master_params as master_params
from ampfuse.amp import session as sessions
from ampfuse.optim.masters import MasterParameter
from ampfuse.torch_utils import HALF_DTYPES

if TYPE_CHECKING:
    from ampfuse.compat.apex.amp.scaler import LossScaler


class AmpState:
    """The settings of the latest ``initialize`` (or ``init``)."""

    # The level and overrides in force, and the handle of O1's casts. Unset before the first call.
    opt_properties: Any
    handle: Any
    # The arguments of initialize.
    verbosity = 1
    min_loss_scale: float | None = None
    max_loss_scale = 2.0**24
    # For scripts to set. With hard_override contradictory options warn and do not raise; either one
    # accepts half parameters.
    hard_override = False
    allow_incoming_model_not_fp32 = False

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One per loss, of the latest ``initialize``; AttributeError if there was none."""
        try:
            return sessions.latest().loss_scalers  # type: ignore[return-value]
        except RuntimeError as error:  # hasattr() asks
            raise AttributeError(str(error)) from None


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """RuntimeError with `message`; a warning if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    warnings.warn(f"{message} (hard_override is set: continuing anyway)", stacklevel=3)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print `message` if verbosity is positive; with `rank0`, on rank 0 only."""
    if _amp_state.verbosity > 0 and not (rank0 and _rank() > 0):
        print(message)


def _rank() -> int:
    """The number of this process: of the process group, or else of torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _flat(groups: str) -> Any:
    """The parameters of the lists `groups`, in one list."""
    return property(lambda self: [p for group in getattr(self, groups) for p in group])


class AmpOptimizerState:
    """Parameters by kind, fp16 for half types: ``*_groups`` per param group, ``all_*`` flat."""

    lazy_init_called = already_patched = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _select(self, is_wanted: Callable[[Any], bool]) -> list[list[Any]]:
        """The parameters that are wanted, by group; none of an optimizer that is gone."""
        groups = getattr(self._optimizer(), "param_groups", [])
        return [[p for p in group["params"] if is_wanted(p)] for group in groups]

    @property
    def params_have_scaled_gradients(self) -> bool:
        return bool(getattr(self._optimizer(), "has_scaled_gradients", False))

    def publish_masters(self) -> None:
        """Write the masters into the model's half weights now."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.param_table().masters.publish()

    def make_masters(self) -> None:
        """Nothing: ``initialize`` has made them."""

    @property
    def fp32_from_fp16_groups(self) -> list[list[MasterParameter]]:
        """Masters."""
        return self._select(lambda p: isinstance(p, MasterParameter))

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Half weights that have masters."""
        return [[master.model_param for master in g] for g in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Trainable FP32 weights of the model."""

        def is_fp32_weight(param: Tensor) -> bool:
            is_wanted = param.requires_grad and param.dtype not in HALF_DTYPES
            return is_wanted and not isinstance(param, MasterParameter)

        return self._select(is_fp32_weight)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Trainable half weights: those with masters, or else those that are stepped directly."""
        stepped = self._select(lambda p: p.requires_grad and p.dtype in HALF_DTYPES)
        return [p for group in stepped for p in group] or [p for g in self.fp16_groups for p in g]

    all_fp32_from_fp16_params = _flat("fp32_from_fp16_groups")
    all_fp32_from_fp32_params = all_fp32_params = _flat("fp32_from_fp32_groups")


def add_stash(optimizer: Any) -> None:
    """Give `optimizer` the private names that recipes use before they load a checkpoint."""
    optimizer._amp_stash = AmpOptimizerState(optimizer)
    optimizer._master_params_to_model_params = optimizer._amp_stash.publish_masters
    optimizer._lazy_init_maybe_master_weights = optimizer._amp_stash.make_masters
