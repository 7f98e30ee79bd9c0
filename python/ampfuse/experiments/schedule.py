"""Learning-rate schedules, functions of the step number: a resumed run needs no state of theirs."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer


def factor(schedule: str, step: int, total: int, warmup: float = 0.0) -> float:
    """What the peak rate is multiplied by in step `step` (from 0) of `total`.

    Over the first `warmup` (a share of the run) the rate climbs linearly. Then it stays
    ("constant"), falls to 0 in a line ("linear") or along a cosine ("cosine"; Loshchilov and
    Hutter, 2017), or drops to a tenth at each third of the run ("steps"; the ImageNet example's 30
    of 90 epochs).
    """
    climb = math.ceil(warmup * total)
    if step < climb:
        return (step + 1) / climb
    share = (step - climb) / max(1, total - climb)
    shapes = {
        "constant": 1.0,
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "steps": 0.1 ** int(3 * share),
    }
    return shapes[schedule]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Write `lr` into every group; into its tensor where it is one (a captured step reads that)."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
