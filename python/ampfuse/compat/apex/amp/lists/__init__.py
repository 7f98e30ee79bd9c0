"""The functions that O1 casts, by namespace. Names may be added before ``amp.initialize``."""

from ampfuse.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
