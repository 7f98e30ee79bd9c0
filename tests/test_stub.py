"""The stub of the extension says what the extension has: names, arguments and defaults."""

import ast
import re
import types
from pathlib import Path

import ampfuse
from ampfuse import _core

STUB = ast.parse(Path(ampfuse.__file__).with_name("_C.pyi").read_text())


def arguments(function):
    """{argument: default as source text, or None} of a definition in the stub, without self."""
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(plain) - len(spec.defaults)) + spec.defaults
    pairs = [
        *zip(plain, defaults, strict=True),
        *zip(spec.kwonlyargs, spec.kw_defaults, strict=True),
    ]
    found = {arg.arg: default and ast.unparse(default) for arg, default in pairs}
    found.pop("self", None)
    return found


def bound_arguments(callable_):
    """The same from a bound function: its docstring starts with pybind11's signature."""
    signature = callable_.__doc__.splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    found = {}
    # A comma inside brackets belongs to a type.
    for part in re.split(r", (?![^\[]*\])", inside) if inside else []:
        name, _, rest = part.partition(": ")
        if name not in ("self", "*", ""):
            found[name] = rest.partition(" = ")[2] or None
    return found


def definitions(body):
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def public(namespace, kind=object):
    found = {name: value for name, value in vars(namespace).items() if not name.startswith("_")}
    return {name for name, value in found.items() if isinstance(value, kind)}


def test_constants():
    stubs = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    assert stubs == public(_core.C, int)


def test_functions():
    stubs = definitions(STUB.body)
    assert set(stubs) == public(_core.C, types.BuiltinFunctionType)
    for name, stub in stubs.items():
        assert arguments(stub) == bound_arguments(getattr(_core.C, name)), name


def test_classes():
    stubs = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
    assert set(stubs) == public(_core.C, type)
    for class_name, stub in stubs.items():
        cls = getattr(_core.C, class_name)
        methods = definitions(stub.body)
        assert {name for name in methods if not name.startswith("_")} == public(cls)
        for name, method in methods.items():
            if not isinstance(vars(cls)[name], property):
                assert arguments(method) == bound_arguments(getattr(cls, name)), name


def test_everything_public_is_documented():
    for node in ast.walk(STUB):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and len(node.body) == 1:
            trivial = {"__len__", "param", "model", "name", "has_gradient"}
            assert ast.get_docstring(node) or node.name in trivial, node.name
