"""Change a script's imports of apex to ``ampfuse.compat.apex``, and nothing else in it."""

from __future__ import annotations

import ast
import itertools
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
    data = source.encode()  # ast counts bytes; and their lines end as Python's do, no others
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _is_all_here(node):
            start = starts[node.lineno - 1] + node.col_offset
            found = re.compile(rb"from[\s\\]+(\w+)").match(data, start)
            assert found is not None
            edits.append((*found.span(1), here(found[1].decode())))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_here(alias.name):
                    assert alias.end_lineno is not None
                    assert alias.end_col_offset is not None
                    start = starts[alias.lineno - 1] + alias.col_offset
                    end = starts[alias.end_lineno - 1] + alias.end_col_offset
                    edits.append((start, end, _alias(alias)))
    for start, end, new in sorted(edits, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


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
