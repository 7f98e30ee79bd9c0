"""What the optimizers with Adam's moments share."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def moment_hyper(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that all of the Adam family have, for ``_hyper``."""
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "weight_decay": float(group["weight_decay"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "uncorrected": not group.get("bias_correction", True),
    }


def check_range(*, lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for what no optimizer of the Adam family takes, in torch's words."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
