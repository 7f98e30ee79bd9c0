"""What the benchmarks share. But for what quality.py trains with, no module here or beside it
imports ampfuse at its top: a peer's process imports them too, and must never import ampfuse (see
``measuring.Worker``)."""
