"""Modules of ampfuse by their files: a peer's process must not import the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2] / "python/ampfuse"


def load(file: str) -> Any:
    """The module in `file` of the package, which imports no other module of it."""
    name = f"ampfuse_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, _PACKAGE / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.compile look there
    spec.loader.exec_module(module)
    return module
