"""``apex.multi_tensor_apply``: call an operation on lists of tensors."""

from ampfuse.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)
