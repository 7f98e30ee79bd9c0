"""``import apex`` in a spawned process: replaces this module by ampfuse's."""

from ampfuse.compat.apex.install import register_modules

register_modules()
