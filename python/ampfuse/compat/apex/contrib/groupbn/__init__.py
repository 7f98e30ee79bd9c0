"""``apex.contrib.groupbn``: batch norm for images whose channels are the last dimension."""

from ampfuse.compat.apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
