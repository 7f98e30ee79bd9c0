"""``apex.optimizers`` on :mod:`ampfuse.optim`: the classes translate arguments and state dicts."""

from ampfuse.compat.apex.optimizers.common import HAS_ALL_FLAGS
from ampfuse.compat.apex.optimizers.fused_adam import FusedAdam
from ampfuse.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]

if HAS_ALL_FLAGS:
    from ampfuse.compat.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
    from ampfuse.compat.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
    from ampfuse.compat.apex.optimizers.fused_mixed_precision_lamb import (
        FusedMixedPrecisionLamb as FusedMixedPrecisionLamb,
    )
    from ampfuse.compat.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad

    __all__ += ["FusedAdagrad", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"]
