"""``apex.optimizers`` on :mod:`ampfuse.optim`: the classes translate arguments and state dicts."""

from ampfuse.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from ampfuse.compat.apex.optimizers.fused_adam import FusedAdam
from ampfuse.compat.apex.optimizers.fused_lamb import FusedLAMB
from ampfuse.compat.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from ampfuse.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from ampfuse.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
