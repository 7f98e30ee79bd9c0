"""Find what a script uses of apex."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from types import ModuleType

from ampfuse.compat.names import TOP, counterparts, instead_of
from ampfuse.migrate.imports import here, is_here

_IMPORTERS = ("import_module", "find_spec", "__import__")
_BY_STRING = (
    "imported by its name in a string, which --write leaves: call ampfuse.compat.apex.install() "
    "before, or name ampfuse.compat.apex there",
    "torch.amp, in code of its own",
)


@dataclasses.dataclass(frozen=True)
class Use:
    """One use, at `line`: `name` in apex, and what it becomes.

    Attributes:
        available: whether ``ampfuse.compat.apex`` has it.
    """

    line: int
    name: str
    ampfuse: str
    torch: str
    available: bool = True


def find_uses(source: str) -> list[Use]:
    """The uses of apex and its extensions in `source`, in the order of its lines.

    Imported names are followed, under other names too. A module's name in a string is found where
    it stands in a call of ``import_module``, ``find_spec`` or ``__import__``.

    Raises:
        SyntaxError: `source` is no Python.
    """
    finder = _Finder()
    finder.visit(ast.parse(source))
    return sorted(set(finder.uses), key=lambda use: (use.line, use.name))


class _Finder(ast.NodeVisitor):
    def __init__(self) -> None:
        self.uses: list[Use] = []
        self._names: dict[str, str] = {}  # a name in the script -> what it is in apex

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            if top in TOP:
                self._names[alias.asname or top] = alias.name if alias.asname else top
                self._add(alias.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.split(".")[0] not in TOP:
            return
        for alias in node.names:
            name = f"{module}.{alias.name}"
            self._add(alias.lineno, name)
            if alias.name == "*":
                self._star(module)
            else:
                self._names[alias.asname or alias.name] = name

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._names and isinstance(node.ctx, ast.Load):
            self._add(node.lineno, self._names[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root, *parts = _chain(node) or [""]
        if root in self._names:
            name = ".".join([self._names[root], *parts])
            self._add(node.lineno, _known_part(name))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        is_importer = (_chain(node.func) or [""])[-1] in _IMPORTERS
        if not (is_importer and node.args and isinstance(node.args[0], ast.Constant)):
            return
        name = str(node.args[0].value)
        if name.split(".")[0] in TOP:
            self.uses.append(Use(node.lineno, name, *_BY_STRING, _is_available(name)))

    def _star(self, module: str) -> None:
        found = _module(module)
        public = getattr(found, "__all__", [n for n in dir(found) if not n.startswith("_")])
        self._names |= {name: f"{module}.{name}" for name in public}

    def _add(self, line: int, name: str) -> None:
        available = _is_available(name)
        texts = counterparts(name) if available else ("not in ampfuse", instead_of(name))
        self.uses.append(Use(line, name, *texts, available))


def _chain(node: ast.AST) -> list[str]:
    """``["a", "b", "c"]`` for ``a.b.c``; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(names)]


def _module(name: str) -> object | None:
    try:
        return importlib.import_module(here(name))
    except ImportError:
        return None


def _known_part(name: str) -> str:
    """`name` up to what is apex's: in ``amp.state_dict.keys`` the last part is Python's."""
    top, *parts = name.split(".")
    found, known = _module(top), top
    for part in parts:
        if not isinstance(found, ModuleType):
            break
        found, known = getattr(found, part, None), f"{known}.{part}"
    return known


def _is_available(name: str) -> bool:
    name = name.removesuffix(".*")
    parent, _, last = name.rpartition(".")
    return is_here(name) and (_module(name) is not None or hasattr(_module(parent), last))
