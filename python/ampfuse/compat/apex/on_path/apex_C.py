"""Leads ``import apex_C`` to ampfuse's, where this folder is on ``sys.path``."""

from ampfuse.compat.apex.installing import take_names

take_names()
