"""Which combinations of a test's parameters quick runs make."""

from collections import defaultdict
from itertools import combinations

import pytest


def choose_combinations(items):
    """Mark as exhaustive the combinations of a test's parameters that quick runs can do without: in
    quick runs each n values of a test marked `covers(n)` meet, and in emulation each value occurs.
    (It is several times slower than the CPU's kernels, and test_cpp.py compares each kernel with
    those.) The choice depends on nothing but the parameters: ``pytest --collect-only -q FILE``
    lists the combinations that run, and ``pytest -m '' ID`` runs any one. For example:

        parameters: x in (a, b, c), y in (1, 2): a-1, a-2, b-1, b-2, c-1, c-2
        covers(1) keeps a-1, b-2 and c-1, in which each value occurs;
        covers(2) keeps all six, because each pair of values occurs in one alone.
    """
    tables = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            device, mark = item.callspec.params.get("device"), item.get_closest_marker("covers")
            if device == "emulated" or mark:
                n = 1 if device == "emulated" else mark.args[0]
                tables[item.parent, item.originalname, device, n].append(item)
    for (*_, n), combined in tables.items():
        for item in superfluous(combined, n):
            item.add_marker(pytest.mark.exhaustive)


def superfluous(items, n):
    """The items that need not run for each `n` values to meet: again and again the first of those
    with the most new meetings of `n` values is kept, until none is left."""
    values = [[(name, id(v)) for name, v in item.callspec.params.items()] for item in items]
    meetings = [set(combinations(row, min(n, len(row)))) for row in values]
    items, uncovered = list(items), set().union(*meetings)
    while uncovered:
        most = max(range(len(items)), key=lambda i: len(meetings[i] & uncovered))
        uncovered -= meetings[most]
        items[most] = None
    return list(filter(None, items))
