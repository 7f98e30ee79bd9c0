"""What each name of apex becomes in ampfuse and in plain torch: the rows of ``names.csv``.

The longest row that a name starts with is its own. One that says nothing of ampfuse leaves the name
out on purpose; then the other column says what takes its place.
"""

from __future__ import annotations

import csv
from pathlib import Path

EXTENSIONS = ("amp_C", "apex_C", "fused_adam_cuda")
TOP = ("apex", *EXTENSIONS)  # the modules that scripts written for apex import

with open(Path(__file__).with_suffix(".csv"), newline="", encoding="utf-8") as _file:
    _ROWS = {name: (ampfuse, torch) for name, ampfuse, torch in csv.reader(_file)}


def instead_of(name: str) -> str:
    """What takes the place of `name` (``"apex.contrib.fmha"``), which is not in ampfuse."""
    parts = name.split(".")
    starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    row = next(start for start in starts if start in _ROWS)
    return "torch's own modules" if row in TOP else ", or ".join(filter(None, _ROWS[row]))
