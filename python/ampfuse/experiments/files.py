"""The files of results: JSON, names, a place to put them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ampfuse.command_line import cannot_write
from ampfuse.experiments.config import UsageError
from ampfuse.files import atomic


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON, with None in place of what JSON cannot say (NaN, infinity)."""
    text = json.dumps(finite(value), indent=1, allow_nan=False)
    with atomic(path) as file:
        file.write(text.encode() + b"\n")


def finite(value: Any) -> Any:
    """`value` with None for every float that is NaN or infinite."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def file_name(text: str) -> str:
    """`text` as a part of a path on any system: "Tesla T4/x" becomes "Tesla T4-x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError if `folder` cannot take files; asked before hours are spent on them."""
    if problem := cannot_write(folder):
        raise UsageError(f"{option}: {problem}")
