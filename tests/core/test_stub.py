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
