"""The demo: a small network learns handwritten digits at O0 to O5, and the levels are compared.

It uses ampfuse as any script would; :mod:`ampfuse.demo.train` is the part to read. Run it with
``ampfuse demo`` or ``python -m ampfuse.demo``.
"""
