"""Change a script's imports of apex to ``ampfuse.compat.apex``, and nothing else in it."""

from __future__ import annotations

import ast
import io
import re

from ampfuse.compat.names import TOP, is_left_out

HERE = "ampfuse.compat.apex"


def rewrite_imports(source: str) -> str:
    """`source` with its imports of ``apex``, ``amp_C`` and ``apex_C`` rewritten.

    Names stay bound as they were, so no other line has to change. Formatting, comments and line
    ends stay. Imports of what is not in ampfuse stay too, with what is imported in one ``from``
    with it.

    Raises:
        SyntaxError: `source` is no Python.
    """
    tree = ast.parse(source)
    positions = _Positions(source)
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_all_here(node):
            start = positions.first_name_after(node)
            first = (node.module or "").split(".")[0]
            edits.append((start, start + len(first), here(first)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_here(alias.name):
                    start = positions.offset(alias.lineno, alias.col_offset)
                    assert alias.end_lineno is not None
                    assert alias.end_col_offset is not None
                    end = positions.offset(alias.end_lineno, alias.end_col_offset)
                    edits.append((start, end, _alias(alias)))
    for start, end, new in sorted(edits, reverse=True):
        source = source[:start] + new + source[end:]
    ast.parse(source)
    return source


def is_here(module: str) -> bool:
    """Whether `module` is apex's, or one of its extensions, and not left out of ampfuse."""
    return module.split(".")[0] in TOP and not is_left_out(module)


def here(module: str) -> str:
    """Where `module`, apex's or one of its extensions, is in ampfuse."""
    top, *parts = module.split(".")
    return ".".join([HERE, *parts] if top == "apex" else [HERE, top, *parts])


def _is_all_here(node: ast.ImportFrom) -> bool:
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return node.level == 0 and all(map(is_here, names))


def _alias(alias: ast.alias) -> str:
    top, *parts = alias.name.split(".")
    if alias.asname is None and parts:  # binds the top, which has all its modules here
        return f"{here(top)} as {top}"
    return f"{here(alias.name)} as {alias.asname or top}"


class _Positions:
    """Places in a source text, which ast gives as lines and bytes, as offsets into it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._starts = [0]
        # Python's lines end at \n, \r and \r\n; str.splitlines knows more ends.
        for line in io.StringIO(source, newline=""):
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column_in_bytes: int) -> int:
        start, end = self._starts[line - 1], self._starts[line]
        before = self._source[start:end].encode()[:column_in_bytes]
        return start + len(before.decode())

    def first_name_after(self, node: ast.ImportFrom) -> int:
        """Where the module's name starts, after ``from``."""
        found = re.compile(r"from[\s\\]+").match(
            self._source, self.offset(node.lineno, node.col_offset)
        )
        assert found is not None
        return found.end()
