"""Modules that the benchmarks share. Except for what quality.py trains with, no module here or of a
script imports ampfuse at its top, because processes of peers import them (``measuring.Worker``).
"""
