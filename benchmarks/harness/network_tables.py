"""Tables and a figure of training steps of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from .results import Row
from .tables import Columns, Group, conditions_of, spread, table

_TORCHS = ("torch.amp", "torch.amp, compiled", "torch.amp, expert", "torch.amp, expert, captured")
_OURS = ("O5", "O5, compiled", "O5, captured", "O5, compiled and captured")
_KINDS = ("products", "attention", "convolutions")
_WAYS = ("O5, unfused", "O5, recomputed")
_PARTS = [f"O5, torch's {part}" for part in ("loss", "norms", "activations", "clipping")]
# The last tables: columns that all models have, and columns of which a table's model has at least
# one.
_COMPARED_WITH_O5 = (
    (["O5"], _WAYS),
    (["torch.amp", "O5"], ["torch.amp, .float() loss", "O5, .float() loss"]),
    (["O5"], [*_PARTS, "O5, clipped"]),
)
_DRAWN = ("GPT", "BERT-small", "ViT-S/16", "ConvNeXt-T", "ResNet-50")


def by_network(rows: Sequence[Row]) -> dict[str, Group]:
    """The rows of each network by variant; without networks of a run that was cut off."""
    networks: dict[str, Group] = {}
    for row in rows:
        networks.setdefault(row.case, {})[row.variant] = row
    return {name: by for name, by in networks.items() if "O5" in by and by.keys() & {*_TORCHS}}


def fastest(by: Group) -> tuple[Row, Row]:
    """torch.amp's and O5's."""
    both = ([by[name] for name in names if name in by] for names in (_TORCHS, _OURS))
    theirs, ours = (min(rows, key=attrgetter("median_ms")) for rows in both)
    return theirs, ours


def _compared(ours: Row, theirs: Row) -> str:
    """Who is faster beyond the spread of both, from ours' side."""
    if ours.p80_ms < theirs.p20_ms:
        return "faster"
    return "slower" if ours.p20_ms > theirs.p80_ms else "as fast within the spread"


def _whole(row: Row) -> str:
    return spread(row, 0 if row.median_ms >= 100 else 1)


def _number(row: Row) -> str:
    return f"{row.median_ms:.0f}" if row.median_ms >= 100 else f"{row.median_ms:.1f}"


def _mib(row: Row) -> str:
    return f"{row.memory_mib:,.0f}"


def _variants(names: Sequence[str], unit: str, cell: Callable[[Row], str]) -> Columns:
    def text(name: str, by: Group) -> str:
        return cell(by[name]) if name in by else ""

    return {f"{name}, {unit}": partial(text, name) for name in names}


def _gain(by: Group) -> str:
    theirs, ours = fastest(by)
    mark = "**" if _compared(ours, theirs) == "faster" else ""
    return f"{mark}{theirs.median_ms / ours.median_ms:.2f}x{mark}"


def _times(others: Sequence[str], cell: Callable[[Row], str]) -> Columns:
    columns = _variants(["FP32", *_TORCHS, *_OURS, *others], "ms", cell)
    return columns | {"gain, fastest against fastest": _gain}


def _shares(by: Group) -> list[float]:
    return [by[kind].median_ms / by["O5"].median_ms if kind in by else 0 for kind in _KINDS]


_SHARES: Columns = {
    kind: lambda by, i=i: f"{_shares(by)[i]:.0%}" for i, kind in enumerate(_KINDS)
} | {"together": lambda by: f"{sum(_shares(by)):.0%}"}


def network_tables(rows: Sequence[Row]) -> list[list[str]]:
    """Tables of times and gains, shares of O5's time, memory, and variants compared with O5."""
    groups = by_network(rows).items()
    memory = _variants(["FP32", *_TORCHS[:3], *_OURS[:2], *_WAYS], "MiB", _mib)
    tables = [
        table("model", groups, _times(["O4", "O2"], _whole)),
        table("model", groups, _SHARES),
        table("model", groups, memory),
    ]
    for all_have, some_have in _COMPARED_WITH_O5:
        if having := [(name, by) for name, by in groups if by.keys() & {*some_have}]:
            tables.append(table("model", having, _variants([*all_have, *some_have], "ms", _whole)))
    return tables


def in_short(rows: Sequence[Row]) -> list[str]:
    """The table of five networks, and a sentence on who is faster, beyond the spread of both."""
    groups = by_network(rows).items()
    groups = [(name, by) for name, by in groups if name.split(" (")[0] in _DRAWN]
    found: dict[str, list[str]] = {"faster": [], "as fast within the spread": [], "slower": []}
    for name, by in groups:
        theirs, ours = fastest(by)
        gain = theirs.median_ms / ours.median_ms
        found[_compared(ours, theirs)].append(f"{name.split(' (')[0]} ({gain:.2f}x)")
    said = "; ".join(f"{place} for {', '.join(gains)}" for place, gains in found.items() if gains)
    return [
        *table("model", groups, _times((), _number)),
        "",
        f"The gain compares the fastest columns of O5 and torch.amp: ampfuse is {said}.",
        conditions_of([row for _, by in groups for row in by.values()], spread=False),
    ]


_BARS = ("FP32", "torch.amp at its fastest", "ampfuse at its fastest")
# Text, and a colour for each variant.
THEMES = {
    "light": ("#24292f", "#b0b7c0", "#7a8694", "#2f6fdd"),
    "dark": ("#d5d9df", "#555d68", "#8b96a5", "#6ea3ff"),
}
_WIDTH, _BAR = 520, 15


def network_figure(rows: list[Row], theme: str) -> str:
    """An SVG: milliseconds of a training step as bars, of five models."""
    text, *colours = THEMES[theme]
    networks = {name.split(" (")[0]: by for name, by in by_network(rows).items()}
    chosen = {name: (networks[name]["FP32"], *fastest(networks[name])) for name in _DRAWN}
    drawn = {name: [row.median_ms for row in three] for name, three in chosen.items()}
    scale = 330 / max(map(max, drawn.values()))
    parts, y = [], 0
    for x, variant, colour in zip((0, 70, 265), _BARS, colours, strict=True):
        parts.append(f'<rect x="{x}" y="2" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="12">{variant}</text>')
    for name, steps in drawn.items():
        y += 34 if not y else 14
        parts.append(f'<text x="0" y="{y + 27}">{name}</text>')
        for ms, colour in zip(steps, colours, strict=True):
            bar = f'<rect x="105" y="{y}" width="{ms * scale:.0f}" height="{_BAR - 2}" rx="2"'
            parts.append(f'{bar} fill="{colour}"/>')
            parts.append(f'<text x="{111 + ms * scale:.0f}" y="{y + 11}">{ms:.0f} ms</text>')
            y += _BAR
    size = f'viewBox="0 0 {_WIDTH} {y + 12}" width="{_WIDTH}"'
    font = f'font-family="system-ui, sans-serif" font-size="13" fill="{text}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([head, *parts, "</svg>\n"])
