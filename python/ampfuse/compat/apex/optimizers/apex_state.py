"""State dicts of apex's fused optimizers: steps counted per group, and groups of few keys."""

from __future__ import annotations

from typing import Any

import torch

from ampfuse.optim.masters import MASTERS


def as_torch(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], *, by_group: bool
) -> dict[str, Any]:
    """`state_dict`, of apex or torch, with torch's keys; `state_dict` itself is not changed.

    What a saved group does not say is taken from `param_groups`, the optimizer's own. The step of a
    group counts for parameters whose state has none, unless they are to be counted `by_group`.
    """
    state = {key: dict(value) for key, value in state_dict["state"].items()}
    groups = []
    saved_groups = state_dict["param_groups"]
    for i, saved in enumerate(saved_groups):
        own = param_groups[i] if len(saved_groups) == len(param_groups) else {}
        group = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        group.update(saved)
        step = None if by_group else group.get("step")
        for key in group["params"]:
            # Without a moment there is nothing that a count could belong to.
            moments = state.get(key, {}).keys() - MASTERS
            if step is not None and moments and "step" not in moments:
                state[key]["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(()).clone()
        groups.append(group)
    return {**state_dict, "state": state, "param_groups": groups}
