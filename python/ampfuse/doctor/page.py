"""The report as one HTML page: no script, no network, light and dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ampfuse.doctor.kinds import LABELS
from ampfuse.doctor.report import Report

# Colours after Okabe and Ito, told apart by colour-blind readers too; every one is also named.
_COLORS = dict(
    zip(
        LABELS,
        "#D55E00 #8A6D3B #E69F00 #AD1457 #0072B2 #56B4E9 #C0A000 #009E73 #CC79A7 #B15928 "
        "#6A3D9A #4E6E81 #7F7F7F".split(),
        strict=True,
    )
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4;
  --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #323a44;
  --paper: #0f1318; } }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 58rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
.soft { color: var(--soft); font-size: .88rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg rect { stroke: var(--paper); stroke-width: .6; }
code { font: .85rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem;
  margin-right: .5rem; }
"""


def as_html(report: Report) -> str:
    """The page, as one string."""
    title = escape(report.script)
    shares = [
        (_key(share.kind) + escape(share.label), f"{share.share:.1%}", f"{share.ms:.2f}")
        for share in report.shares
    ]
    advice = [
        (escape(one.found), f"<b>{escape(one.kind)}</b>", _code(one.remedy))
        for one in report.advice[:3]
    ]
    notes = [(_code(one.where), escape(one.found), escape(one.remedy)) for one in report.notes]
    operations = [
        (_code(row.name), _code(row.shapes), escape(row.detail or LABELS[row.kind]),
         f"{row.calls:g}", f"{row.ms:.2f}")
        for row in report.operations
    ]  # fmt: skip
    parts = [
        f"<h1>{title}</h1><p>{escape(report.sentence)}.</p>",
        f'<p class="soft">{escape(report.conditions)}.</p>',
        "<h2>Where the time of a step goes</h2>" + _bar(report),
        _table(("", "share", "ms"), shares, numbers=2),
        "<h2>What pays most</h2>",
        _table(("gain", "what", "how"), advice) if advice else "<p>Nothing known here pays.</p>",
        f'<p class="soft">{escape(report.bound)} Gains are of the whole step, each alone.</p>',
        "<h2>Also</h2>" + _table(("where", "what", "remedy"), notes) if notes else "",
        "<h2>Operations that take most</h2>",
        _table(("operation", "shapes", "kind", "a step", "ms"), operations, numbers=2),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: where the time goes</title><style>{_STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _key(kind: str) -> str:
    return f'<span class="key" style="background:{_COLORS[kind]}"></span>'


def _bar(report: Report) -> str:
    """All shares next to each other; those that are wide enough carry their number."""
    parts, x = [], 0.0
    for share in report.shares:
        width = 1000 * share.share
        label = escape(f"{share.label}: {share.share:.1%}, {share.ms:.2f} ms")
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{max(width, 0.3):.2f}" height="46" '
            f'fill="{_COLORS[share.kind]}"><title>{label}</title></rect>'
        )
        if width > 50:
            middle = f'x="{x + width / 2:.1f}" y="64" text-anchor="middle"'
            parts.append(f"<text {middle}>{share.share:.0%}</text>")
        x += width
    said = ", ".join(f"{share.label} {share.share:.0%}" for share in report.shares)
    label = escape(f"Shares of a step: {said}")
    return f'<svg viewBox="0 0 1000 70" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    """Cells are HTML; the last `numbers` columns are numbers."""
    first = len(head) - numbers

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="n"' if place >= first else "" for place in range(len(cells))]
        columns = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in columns) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div><table>{line(head, 'th')}{body}</table></div>"
