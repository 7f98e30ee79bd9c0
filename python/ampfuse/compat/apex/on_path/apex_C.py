"""``import apex_C`` in a spawned process: replaces this module by ampfuse's."""

from ampfuse.compat.apex.installing import take_names

take_names()
