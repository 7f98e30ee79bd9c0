"""The state object that scripts reach for as ``apex.amp._amp_state``."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ampfuse.amp import master_params as master_params
from ampfuse.amp import session as sessions
from ampfuse.compat.apex.amp.scaler import LossScaler


class AmpState:
    """What the latest ``initialize`` (or ``init``) set up.

    Attributes:
        opt_properties: the level and overrides in force, a ``frontend.Properties``. As in apex,
            ``hasattr`` tells whether there was an ``initialize``.
        handle: turns O1's casts off and on, and drops cached casts. There from then on too.
        verbosity, min_loss_scale, max_loss_scale: as given to ``initialize``.
        allow_incoming_model_not_fp32: to set: accept half parameters that no master will back.
        hard_override: to set: contradictory options warn instead of raising RuntimeError, and half
            parameters are accepted.
    """

    opt_properties: Any
    handle: Any

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One per loss, of the latest ``initialize``.

        Raises:
            AttributeError: there was none.
        """
        try:
            return sessions.latest().loss_scalers  # type: ignore[return-value]
        except RuntimeError as error:  # hasattr() asks
            raise AttributeError(str(error)) from None


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """RuntimeError with `message`; a warning if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    warnings.warn(f"{message} (hard_override is set: done nevertheless)", stacklevel=3)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print `message` if verbosity is positive; with `rank0`, on rank 0 only."""
    if _amp_state.verbosity > 0 and not (rank0 and int(os.environ.get("RANK", "0")) > 0):
        print(message)
