"""The report as one HTML page: no script, no network, light and dark by the reader's setting."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ampfuse.insight.diagnosis.kinds import LABELS
from ampfuse.insight.diagnosis.report import SHOWN_ADVICE, Report

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
  --paper: #ffffff; --card: #f5f7f9; --edge: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #323a44;
  --paper: #0f1318; --card: #1a2027; --edge: #0f1318; } }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 58rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p.verdict { font-size: 1.15rem; margin: .3rem 0 .8rem; }
p.soft, .soft { color: var(--soft); font-size: .88rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg rect { stroke: var(--edge); stroke-width: .6; }
ol.advice { list-style: none; padding: 0; margin: 0; display: grid; gap: .7rem; }
ol.advice li { background: var(--card); border-radius: .6rem; padding: .8rem 1rem;
  display: grid; grid-template-columns: 6.5rem 1fr; gap: 1rem; align-items: center; }
.gain { font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.gain small { display: block; font-size: .75rem; font-weight: 400; color: var(--soft); }
.advice b { display: block; }
code { font: .85rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
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
    parts = [
        f"<h1>{_text(report.script)}</h1>",
        f'<p class="verdict">{_text(report.sentence)}.</p>',
        f'<p class="soft">{_text(report.conditions)}.</p>',
        "<h2>Where the time of a step goes</h2>",
        _bar(report),
        _shares(report),
        "<h2>One step, from its begin to its end</h2>",
        _strip(report),
        "<h2>What pays most</h2>",
        _advice(report),
        f'<p class="soft">{_text(report.bound)} Gains are of the whole step, each alone.</p>',
    ]
    if report.waits:
        parts.append("<h2>Lines that wait for a GPU, or would</h2>")
        columns = ("line", "call", "a step", "ms")
        cells = ((w.line, w.call, f"{w.calls:g}", f"{w.ms:.2f}") for w in report.waits)
        parts.append(_table(columns, cells, numbers=2, code=1))
    if report.notes:
        parts.append("<h2>Shapes and layouts</h2>")
        parts += [f"<p><code>{_text(note)}</code></p>" for note in report.notes]
    parts.append("<h2>Operations that take most</h2>")
    head = ("operation", "shapes", "kind", "a step", "ms")
    rows = (
        (row.name, row.shapes, row.detail or LABELS[row.kind],
         f"{row.calls:g}", f"{row.ms:.2f}")
        for row in report.operations
    )  # fmt: skip
    parts.append(_table(head, rows, numbers=2, code=2))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(report.script)}: where the time goes</title><style>{_STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text)


def _bar(report: Report) -> str:
    """All shares next to each other; those that are wide enough carry their number."""
    rects, x = [], 0.0
    for share in report.shares:
        width = 1000 * share.share
        label = f"{share.label}: {share.share:.1%}, {share.ms:.2f} ms"
        rects.append(_rect(x, width, 46, share.kind, label))
        if width > 50:
            rects.append(
                f'<text x="{x + width / 2:.1f}" y="64" text-anchor="middle">'
                f"{share.share:.0%}</text>"
            )
        x += width
    said = ", ".join(f"{share.label} {share.share:.0%}" for share in report.shares)
    return _svg(70, "".join(rects), f"Shares of a step: {said}")


def _strip(report: Report) -> str:
    end = report.strip[-1][1] if report.strip else 1.0
    scale = 1000 / end
    rects = [
        _rect(a * scale, (b - a) * scale, 46, kind, f"{LABELS[kind]}: {a:.2f} to {b:.2f} ms")
        for a, b, kind in report.strip
    ]
    ticks = [
        f'<text x="{250 * part}" y="64" text-anchor="{anchor}">{end * part / 4:.3g} ms</text>'
        for part, anchor in enumerate(("start", "middle", "middle", "middle", "end"))
    ]
    said = "Kinds of work in the order in which they run, in the colours of the table above"
    caption = '<p class="soft">The profiled step of median length, from the end of one optimizer '
    caption += "step to the end of the next; what runs in the middle of each 400th.</p>"
    return _svg(70, "".join(rects + ticks), said) + caption


def _svg(height: int, content: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="{_text(label)}">{content}</svg>'
    )


def _rect(x: float, width: float, height: int, kind: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="0" width="{max(width, 0.3):.2f}" height="{height}" '
        f'fill="{_COLORS[kind]}"><title>{_text(title)}</title></rect>'
    )


def _shares(report: Report) -> str:
    rows = "".join(
        f'<tr><td><span class="key" style="background:{_COLORS[share.kind]}"></span>'
        f'{_text(share.label)}</td><td class="n">{share.share:.1%}</td>'
        f'<td class="n">{share.ms:.2f} ms</td></tr>'
        for share in report.shares
    )
    return f"<table>{rows}</table>"


def _advice(report: Report) -> str:
    if not report.advice:
        return "<p>Nothing known here pays.</p>"
    items = "".join(
        f'<li><span class="gain">{one.gain:.2f}x<small>{one.basis}</small></span>'
        f"<span><b>{_text(one.title)}</b><code>{_text(one.how)}</code></span></li>"
        for one in report.advice[:SHOWN_ADVICE]
    )
    return f'<ol class="advice">{items}</ol>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int, code: int) -> str:
    """The first `code` columns are code, the last `numbers` are numbers."""
    first = len(head) - numbers
    tags = [' class="n"' if place >= first else "" for place in range(len(head))]
    line = "".join(f"<th{tag}>{_text(cell)}</th>" for tag, cell in zip(tags, head, strict=True))
    body = ""
    for row in rows:
        shown = [
            f"<code>{_text(cell)}</code>" if place < code else _text(cell)
            for place, cell in enumerate(row)
        ]
        cells = zip(tags, shown, strict=True)
        body += "<tr>" + "".join(f"<td{tag}>{cell}</td>" for tag, cell in cells) + "</tr>"
    return f'<div class="scroll"><table><tr>{line}</tr>{body}</table></div>'
