"""The stub of the extension is what the extension says of itself."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from ampfuse import _core

SCRIPT = Path(__file__).parents[2] / "buildtools" / "stub.py"
spec = importlib.util.spec_from_file_location("stub", SCRIPT)
stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stub)


def test_the_stub_is_not_stale():
    if torch.__version__ < "2.13":
        pytest.skip("the pybind11 of this torch writes types in other words")
    written = ast.dump(ast.parse(stub.STUB.read_text()))
    assert written == ast.dump(ast.parse(stub.stub(_core.C))), "run buildtools/stub.py"


def documented():
    """What the extension has, by name, and what it says of it beside a signature."""
    for name, value in vars(_core.C).items():
        if name.startswith("_") or not callable(value):
            continue
        if not isinstance(value, type):
            yield name, value.__doc__.partition("\n")[2]
            continue
        yield name, value.__doc__
        for member, of in vars(value).items():
            if isinstance(of, property):
                yield f"{name}.{member}", of.__doc__
            elif (
                callable(of)
                and (of.__doc__ or "").startswith(f"{member}(self")
                and member != "__len__"
            ):
                yield f"{name}.{member}", of.__doc__.partition("\n")[2]


def test_everything_public_is_documented():
    assert [name for name, text in documented() if not (text or "").strip()] == []
