"""The line that apex printed for every overflow, without waiting for the device.

What a pass found is copied to the host and read when it has arrived: at once on the CPU, some
passes later on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ampfuse.amp import session as sessions
from ampfuse.optim.skip_watch import Sample

# Of passes that nobody has told of yet: the scaler's number; flags of its optimizers and its scale.
_passes: deque[tuple[int, Sample]] = deque()


def after_pass(session: sessions.Session, loss_id: int, optimizers: Sequence[Any]) -> None:
    """Take in a backward pass that has ended, and print what is known of this and earlier ones."""
    scaler = session.loss_scalers[loss_id]
    if not (scaler.dynamic and session.verbosity == 1):  # from 2 on amp.scale_loss tells
        return
    scale = scaler.current
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    flags = [optimizer.pass_found_inf_flag for optimizer in optimizers]
    _passes.append((loss_id, Sample(scale, *flags)))
    while _passes and _passes[0][1].has_arrived():
        number, sample = _passes.popleft()
        new_scale, *found_inf = sample.values()
        if any(found_inf):
            print(
                f"Gradient overflow.  Skipping step, loss scaler {number} reducing loss scale to "
                f"{new_scale}"
            )
