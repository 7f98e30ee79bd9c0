"""What the optimizers with Adam's moments share."""

from __future__ import annotations

from typing import Any


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
