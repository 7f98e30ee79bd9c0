"""Write python/ampfuse/_C.pyi, the stub of the extension, from the extension itself.

    python buildtools/stub.py           writes it
    python buildtools/stub.py --print   shows it

Signatures are those that pybind11 puts into docstrings; ``help(ampfuse._core.C)`` shows the rest of
these. ``tests/core/test_stub.py`` says when the stub is stale.
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

STUB = Path(__file__).parents[1] / "python" / "ampfuse" / "_C.pyi"
HEAD = '''# Written by buildtools/stub.py; see csrc/torch/bind*.cpp.
"""{doc}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
'''
# From pybind11's words for types to Python's, in order.
WORDS = (
    (r"typing\.Supports(Int|Float) \| typing\.SupportsIndex", lambda m: m[1].lower()),
    (r"collections\.abc\.", ""),
    (r"Callable(?!\[)", "Callable[..., Any]"),
    (r"torch\.Tensor", "Tensor"),
    (r"ampfuse\._C\w*\.", ""),
    (r"\bobject\b|\bhandle\b", "Any"),
    (r"\bdict\b(?!\[)", "dict[str, Any]"),
    (r"\blist\b(?!\[)", "list[Any]"),
)


def stub(module: ModuleType) -> str:
    """The text of the stub, before a formatter."""
    functions, classes = [], []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            classes.append(_class(value))
        elif callable(value):
            functions.append(_function(value))
    doc = inspect.cleandoc(module.__doc__ or "")
    return "\n".join([HEAD.format(doc=doc), *functions, *classes])


def _class(cls: type[Any]) -> str:
    lines = [f"class {cls.__name__}:"]
    for name, value in vars(cls).items():
        if name.startswith("_") and name not in ("__init__", "__len__"):
            continue
        if isinstance(value, property):
            result = re.sub(r".* -> (?:.*\.)?", "", value.fget.__doc__).strip()
            lines.append(f"    @property\n    def {name}(self) -> {result}: ...")
        elif callable(value) and value.__doc__.startswith(name):  # else it is object's own
            lines.append(_function(value, depth=1))
    return "\n".join(lines)


def _function(function: Any, depth: int = 0) -> str:
    signature = function.__doc__.partition("\n")[0]
    for pattern, word in WORDS:
        signature = re.sub(pattern, word, signature)
    signature = re.sub(r"\(self: \w+", "(self", signature)
    return f"{'    ' * depth}def {signature}: ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--print", action="store_true", help="show it, and write nothing")
    options = parser.parse_args()
    from ampfuse import _core

    text = stub(_core.C)
    if options.print:
        print(text)
    else:
        STUB.write_text(text)


if __name__ == "__main__":
    main()
