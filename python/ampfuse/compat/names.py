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


def counterparts(name: str) -> tuple[str, str]:
    """What `name` (``"apex.amp.initialize"``) becomes in ampfuse and in plain torch."""
    return _ROWS[_row(name)]


def is_left_out(name: str) -> bool:
    """Whether ampfuse leaves out `name`, or what it is in, on purpose."""
    return not counterparts(name)[0]


def instead_of(name: str) -> str:
    """What takes the place of `name`, which is not in ampfuse."""
    if _row(name) in TOP:
        return "torch's own modules"
    return ", or ".join(filter(None, counterparts(name)))


def _row(name: str) -> str:
    parts = name.split(".")
    starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(start for start in starts if start in _ROWS)
