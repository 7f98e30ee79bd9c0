"""``apex.parallel`` on ``torch.nn.parallel`` and ``torch.nn.SyncBatchNorm``."""

from ampfuse.compat.apex.parallel import LARC
from ampfuse.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from ampfuse.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
