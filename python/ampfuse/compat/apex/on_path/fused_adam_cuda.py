"""``import fused_adam_cuda`` in a spawned process: replaces this module by ampfuse's."""

from ampfuse.compat.apex.installing import take_names

take_names()
