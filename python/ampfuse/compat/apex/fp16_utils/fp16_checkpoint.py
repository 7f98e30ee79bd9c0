"""The state dict of ``FP16_Optimizer``: apex's keys, holding plain data and no objects."""

from __future__ import annotations

from typing import Any

from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.compat.apex.fp16_utils.loss_scaler import DynamicLossScaler


def save(optimizer: Any) -> dict[str, Any]:
    scaler = optimizer.loss_scaler
    return {
        "loss_scaler": {**scaler.state_dict(), "dynamic": scaler.dynamic},
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "first_closure_call_this_step": optimizer.first_closure_call_this_step,
        "optimizer_state_dict": optimizer.optimizer.state_dict(),
        "fp32_from_fp16": [
            [m.detach() for m in group] for group in optimizer.fp32_from_fp16_groups
        ],
    }


def load(optimizer: Any, state: dict[str, Any]) -> None:
    masters = [master for group in optimizer.fp32_from_fp16_groups for master in group]
    saved = [master for group in state["fp32_from_fp16"] for master in group]
    if [m.shape for m in masters] != [m.shape for m in saved]:
        raise ValueError(
            f"The state holds {len(saved)} master weights, this optimizer has {len(masters)}, or "
            "their shapes differ: it was saved from another model. Nothing was loaded."
        )
    scaling = _scaling(state["loss_scaler"])
    LossScaler.check_state(scaling)
    optimizer.optimizer.load_state_dict(state["optimizer_state_dict"])
    for master, value in zip(masters, saved, strict=True):
        exact = value.detach().to(device=master.device, dtype=master.dtype, copy=True)
        optimizer.optimizer.restore_master(master, {}, exact)
    dynamic = bool(state["dynamic_loss_scale"])
    if dynamic != optimizer.dynamic_loss_scale:
        optimizer.set_loss_scaler(LossScaler("dynamic" if dynamic else scaling["loss_scale"]))
    optimizer.loss_scaler.load_state_dict(scaling)
    optimizer.overflow = state["overflow"]
    optimizer.first_closure_call_this_step = state["first_closure_call_this_step"]


def _scaling(saved: Any) -> dict[str, Any]:
    """The state of a scaler, which may have been saved as an object."""
    if isinstance(saved, dict):
        return saved
    if isinstance(saved, LossScaler):
        return saved.state_dict()
    since = 0  # the older scalers of fp16_utils
    if isinstance(saved, DynamicLossScaler):
        since = (saved.cur_iter - saved.last_overflow_iter - 1) % saved.scale_window
    return {"loss_scale": saved.cur_scale, "unskipped": since}
