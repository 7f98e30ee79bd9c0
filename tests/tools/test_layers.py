"""A private name (`_x`) is used in its own package only. Lint says which layer may import which."""

import ast
from pathlib import Path

import ampfuse

ROOT = Path(ampfuse.__file__).parent


def module_file(module):
    return ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")


def home(module):
    """The folder in which private names of `module` may be used."""
    path = module_file(module)
    return path.parent if path.is_file() else path.with_suffix("")


def used_names(path):
    """The names (module, name) that a file uses of our modules, imported or as ``module.name``."""
    modules = {}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ampfuse"):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            if module_file(module).is_file():
                yield module, node.attr


def test_private_names_stay_at_home():
    seen, outside = 0, []
    for path in sorted(ROOT.rglob("*.py")):
        for module, name in used_names(path):
            seen += 1
            private = name.startswith("_") and not name.endswith("__")
            if private and home(module) not in path.parents:
                outside.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert seen > 900
    assert outside == []
