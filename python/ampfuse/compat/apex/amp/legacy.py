"""``amp.init``: the interface before ``initialize``, which casts everything in the process."""

from __future__ import annotations

import torch

from ampfuse import half_ops
from ampfuse.amp import session as sessions
from ampfuse.amp.function_casts import install_registered
from ampfuse.amp.policy import O1, O4
from ampfuse.compat.apex.amp import patches
from ampfuse.compat.apex.amp._amp_state import _amp_state
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Cast every operation as O1 does, until the handle's ``_deactivate()``.

    A second call replaces the first.

    Arguments:
        enabled: False gives a handle that does nothing.
        loss_scale: ignored, as in apex: ``wrap_optimizer`` makes a scale per loss.
        enable_caching: kept as ``handle.has_cache``; no cast is kept outside models.
        verbose: kept as ``handle.verbose``; no cast is logged.
        allow_banned: compute ``F.binary_cross_entropy`` of half tensors in FP32; else it raises.
        patch_type: float16, or bfloat16 as in ROCm/apex.
    """
    former = getattr(_amp_state, "handle", None)
    if isinstance(former, AmpHandle) and not former.models:
        former._deactivate()
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    policy = O4 if patch_type == torch.bfloat16 else O1
    casts_cpu = not torch.accelerator.is_available()
    session = sessions.Session(policy, everywhere=True, casts_cpu=casts_cpu)
    if casts_cpu:
        half_ops.follow(policy)
    sessions.set_latest(session)
    install_registered()
    patches.install(allow_banned)
    _amp_state.handle = AmpHandle(session, (), enable_caching, verbose)
    return _amp_state.handle
