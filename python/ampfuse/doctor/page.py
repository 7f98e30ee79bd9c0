"""The report as one HTML page: no script, no network, light and dark by the reader's setting."""

from __future__ import annotations

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
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0f1318; } }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 58rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
figure { display: flex; margin: 0; }
figure div { overflow: hidden; text-align: center; }
figure i { display: block; height: 3rem; border-right: 1px solid var(--paper); }
pre, table { font: .85rem/1.4 ui-monospace, monospace; white-space: pre-wrap; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
span { display: inline-block; width: .75rem; height: .75rem; margin: 0 .4rem 0 1rem; }
"""


def as_html(report: Report) -> str:
    """The page, as one string: the shares as a figure, what the terminal says, the operations."""
    title = escape(report.script)
    keys = "".join(
        f'<span style="background:{_COLORS[kind]}"></span>{escape(LABELS[kind])}'
        for kind in dict.fromkeys(share.kind for share in report.shares)
    )
    rows = [("operation", "shapes", "kind", "a step", "ms")]
    for row in report.operations:
        kind = row.detail or LABELS[row.kind]
        rows.append((row.name, row.shapes, kind, f"{row.calls:g}", f"{row.ms:.2f}"))
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: where the time goes</title><style>{_STYLE}</style>"
        f"<body><h1>{title}</h1>{_figure(report)}<p>{keys}</p><pre>{escape(str(report))}</pre>"
        f"<h2>Operations that take most</h2><table>{table}</table></body></html>\n"
    )


def _figure(report: Report) -> str:
    """All shares next to each other; those that are wide enough carry their number."""
    said = ", ".join(f"{share.label} {share.share:.0%}" for share in report.shares)
    bars = "".join(
        f'<div style="width:{share.share:.3%}" '
        f'title="{escape(f"{share.label}: {share.share:.1%}, {share.ms:.2f} ms")}">'
        f'<i style="background:{_COLORS[share.kind]}"></i>'
        f"{f'{share.share:.0%}' if share.share > 0.05 else ''}</div>"
        for share in report.shares
    )
    return f'<figure role="img" aria-label="{escape(f"Shares of a step: {said}")}">{bars}</figure>'
