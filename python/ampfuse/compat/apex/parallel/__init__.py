"""``apex.parallel`` on ``torch.nn.parallel`` and ``torch.nn.SyncBatchNorm``."""

import ampfuse.optim
from ampfuse.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from ampfuse.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

if hasattr(ampfuse.optim, "LARC"):
    from ampfuse.compat.apex.parallel import LARC as LARC

    __all__ += ["LARC"]
