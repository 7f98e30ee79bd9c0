"""The tables of docs/benchmarks.md from CSV files in benchmarks/results.

    python benchmarks/report.py benchmarks/results/step_cpu.csv              # or another script's
    python benchmarks/report.py benchmarks/results/experiments_e?_cpu.csv    # ``make_table --csv``

``--page docs/benchmarks.md`` also writes where a comment in the page names the file, or "FILE, in
short" for the table of five models. ``--figure docs/figures`` draws the figure of nets_cpu.csv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from harness.options import parser_of
from harness.results import Row, read

Group = dict[str, Row]  # the rows of one line, by variant
Columns = dict[str, Callable[[Group], str]]  # the cell of a line, by the header


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    header, *body = ("| " + " | ".join(line) + " |" for line in (columns, *lines))
    return [header, "|---" * len(columns) + "|", *body]


def table(head: str, groups: Iterable[tuple[str, Group]], columns: Columns) -> list[str]:
    """A line for each of the `groups`, which come with their labels; without empty columns."""
    labels, found = zip(*groups, strict=True)
    cells = {header: [cell(group) for group in found] for header, cell in columns.items()}
    cells = {header: texts for header, texts in cells.items() if any(texts)}
    return markdown([head, *cells], [*zip(labels, *cells.values(), strict=True)])


def spread(row: Row | None, digits: int | None = None) -> str:
    """Median, 20th and 80th percentile; "" of a row that is not there."""
    if row is None:
        return ""
    if digits is None:
        digits = 1 if row.median_ms >= 10 else 2 if row.median_ms >= 1 else 3
    median, low, high = (f"{ms:.{digits}f}" for ms in (row.median_ms, row.p20_ms, row.p80_ms))
    return f"{median} ({low}-{high})"


# ---- steps against peers and the machine's limit -------------------------------------------------


def best_of_torch(group: Group) -> Row | None:
    routes = [row for name, row in group.items() if name.startswith("torch ")]
    return min(routes, key=attrgetter("median_ms"), default=None)


def ratio(theirs: Row | None, group: Group) -> str:
    """Their time over ampfuse's."""
    if theirs is None:
        return ""
    value = theirs.median_ms / group["ampfuse"].median_ms
    return f"{value:.1f}x" if value >= 1.2 else f"{value:.2f}x"


def _over_limit(group: Group) -> str:
    limit = group.get("limit")
    return f"{group['ampfuse'].median_ms / limit.median_ms:.2f}" if limit else ""


def _share_of_copy(group: Group) -> str:
    share = group["ampfuse"].share_of_copy
    return "" if math.isnan(share) else f"{share:.0%} of {group['copy'].gb_per_s:,.0f} GB/s"


def _fastest_route(group: Group) -> str:
    best = best_of_torch(group)
    return f"{spread(best)} {best.variant.removeprefix('torch ')}" if best else ""


STEPS: Columns = {
    "threads": lambda by: str(by["ampfuse"].threads) if by["ampfuse"].device == "cpu" else "",
    "ampfuse, ms": lambda by: spread(by["ampfuse"]),
    "the machine's limit, ms": lambda by: spread(by.get("limit")),
    "ampfuse / limit": _over_limit,
    "share of copy bandwidth": _share_of_copy,
    "fastest torch route, ms": _fastest_route,
    "ampfuse is faster by": lambda by: (gain := ratio(best_of_torch(by), by)) and f"**{gain}**",
    "than others": lambda by: ", ".join(
        f"{name} {ratio(row, by)}" for name, row in by.items() if row.peer
    ),
}


def _grouped(rows: Sequence[Row]) -> list[Group]:
    groups = groupby(rows, key=attrgetter("case", "threads"))
    return [{row.variant: row for row in group} for _, group in groups]


def steps_table(rows: Sequence[Row]) -> list[str]:
    """The cases that ampfuse has a row of."""
    groups = [by for by in _grouped(rows) if "ampfuse" in by]
    return table("step", [(by["ampfuse"].case, by) for by in groups], STEPS)


def variants_table(rows: Sequence[Row]) -> list[str]:
    """A column for each variant: milliseconds, and the share of copy bandwidth."""

    def cell(variant: str, by: Group) -> str:
        row = by.get(variant)
        share = "" if row is None or math.isnan(row.share_of_copy) else f", {row.share_of_copy:.0%}"
        return spread(row) + share

    several, groups = len({row.threads for row in rows}) > 1, []
    for by in _grouped(rows):
        row = next(iter(by.values()))
        groups.append((row.case + f", {row.threads} threads" * several, by))
    return table("ms", groups, {row.variant: partial(cell, row.variant) for row in rows})


def report_of(rows: list[Row]) -> list[str]:
    """Tables of the rows of one file, and the conditions they were measured under."""
    cases = {row.case for row in rows if row.variant == "ampfuse"}
    steps = [row for row in rows if row.case in cases]
    tables = [steps_table(steps)] if steps else []
    ours = [row for row in steps if row.variant.startswith("ampfuse")]
    if any(row.variant != "ampfuse" for row in ours):  # memory modes, metered steps
        tables.append(variants_table(ours))
    others = [row for row in rows if row.case not in cases]
    if any(row.variant == "O5" for row in others):
        tables += network_tables(others)
    elif others:
        tables.append(variants_table(others))
    lines = [line for table in tables for line in (*table, "")]
    return [*lines, conditions_of(rows)]


def conditions_of(rows: Sequence[Row], *, spread: bool = True) -> str:
    """Where, with what and when they were measured; and what cells have, with `spread` or not."""
    count = min(row.n for row in rows)
    columns = ("{hardware}", "{isa}", "torch {torch}", "ampfuse {ampfuse}", "{peer}", "{date}")
    values = dict.fromkeys(column.format(**vars(row)) for column in columns for row in rows)
    return (
        f"{', '.join(filter(None, values))}. "
        f"Median of {count}{' or more' * any(row.n > count for row in rows)}"
        f"{', 20th to 80th percentile' * spread}."
    )


def fill(page: Path, path: Path) -> None:
    """Write the report of a file into the page: between a comment with its name and one "end"."""
    for name, make in ((path.name, report_of), (f"{path.name}, in short", in_short)):
        head, comment, rest = page.read_text().partition(f"<!-- {name} -->\n")
        if comment:
            tail = rest[rest.index("<!-- end -->") :]
            lines = "\n".join(make(read(path)))
            page.write_text(f"{head}{comment}{lines}\n{tail}")


# ---- training steps of models --------------------------------------------------------------------

_TORCHS = ("torch.amp", "torch.amp, compiled", "torch.amp, expert", "torch.amp, expert, captured")
_OURS = ("O5", "O5, compiled", "O5, captured", "O5, compiled and captured")
_KINDS = ("products", "attention", "convolutions")
_WAYS = ("O5, unfused", "O5, recomputed")
# Columns of the last tables, and of those the variants of which a model has to have one.
_BESIDE = (
    (("O5",), _WAYS),
    (("torch.amp", "O5"), ("torch.amp, .float() loss", "O5, .float() loss")),
    (
        ("O5",),
        (
            *(f"O5, torch's {part}" for part in ("loss", "norms", "activations", "clipping")),
            "O5, clipped",
        ),
    ),
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
    mark = "**" * (ours.p80_ms < theirs.p20_ms)  # beyond the spread of both
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
    """Tables of times and gains; of the shares of O5's time; of memory; of variants beside O5."""
    groups = by_network(rows).items()
    memory = _variants(["FP32", *_TORCHS[:3], *_OURS[:2], *_WAYS], "MiB", _mib)
    tables = [
        table("model", groups, _times(["O4", "O2"], _whole)),
        table("model", groups, _SHARES),
        table("model", groups, memory),
    ]
    for beside, names in _BESIDE:
        if having := [(name, by) for name, by in groups if by.keys() & {*names}]:
            tables.append(table("model", having, _variants([*beside, *names], "ms", _whole)))
    return tables


def in_short(rows: Sequence[Row]) -> list[str]:
    """The table of five networks, and a sentence on who is faster, beyond the spread of both."""
    groups = by_network(rows).items()
    groups = [(name, by) for name, by in groups if name.split(" (")[0] in _DRAWN]
    found: dict[str, list[str]] = {"faster": [], "as fast within the spread": [], "slower": []}
    for name, by in groups:
        theirs, ours = fastest(by)
        place = 1 - (ours.p80_ms < theirs.p20_ms) + (ours.p20_ms > theirs.p80_ms)
        gain = theirs.median_ms / ours.median_ms
        found[[*found][place]].append(f"{name.split(' (')[0]} ({gain:.2f}x)")
    said = "; ".join(f"{place} for {', '.join(gains)}" for place, gains in found.items() if gains)
    return [
        *table("model", groups, _times((), _number)),
        "",
        f"The gain compares the fastest columns of O5 and torch.amp: ampfuse is {said}.",
        conditions_of([row for _, by in groups for row in by.values()], spread=False),
    ]


_BARS = ("FP32", "torch.amp at its fastest", "ampfuse at its fastest")
# Text, and a colour for each variant.
_THEMES = {
    "light": ("#24292f", "#b0b7c0", "#7a8694", "#2f6fdd"),
    "dark": ("#d5d9df", "#555d68", "#8b96a5", "#6ea3ff"),
}
_WIDTH, _BAR = 520, 15


def network_figure(rows: list[Row], theme: str) -> str:
    """An SVG: milliseconds of a training step as bars, of five models."""
    text, *colours = _THEMES[theme]
    networks = {name.split(" (")[0]: by for name, by in by_network(rows).items()}
    chosen = {name: (networks[name]["FP32"], *fastest(networks[name])) for name in _DRAWN}
    drawn = {name: [row.median_ms for row in three] for name, three in chosen.items()}
    scale = 330 / max(map(max, drawn.values()))
    parts, y = [], 0
    for place, (variant, colour) in enumerate(zip(_BARS, colours, strict=True)):
        x = (0, 70, 265)[place]
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


# ---- training steps of the experiments -----------------------------------------------------------

_NAMES = {"vgg16": "VGG16, 32x32 (E1)", "wrn28_10": "WRN-28-10, 32x32 (E2)"}
_NAMES |= {"resnet18": "ResNet-18, 224x224 (E4)", "mlp": "MLP (E5)"}
_COLUMNS = (
    *("experiment", "batch", "FP32, ms", "torch.amp BF16, ms", "O5, ms", "O5 against FP32"),
    *("against torch.amp", "memory, MB: FP32", "torch.amp", "O5"),
)


def experiments_table(rows: list[dict[str, str]]) -> list[str]:
    """Mean milliseconds of a training step and the standard deviation of the repeats' means."""
    rows = sorted(rows, key=lambda row: (row["recipe"], row["model"], int(row["batch_size"])))
    lines = []
    for (model, batch), group in groupby(rows, key=lambda row: (row["model"], row["batch_size"])):
        by_variant = {row["variant"]: row for row in group}
        variants = [by_variant[name] for name in ("fp32", "amp-bf16", "O5")]
        means, deviations = (
            [1e3 * float(row[column] or 0) / int(row["iterations"]) for row in variants]
            for column in ("time_s_mean", "time_s_std")
        )
        times = [f"{mean:.0f} ± {std:.0f}" for mean, std in zip(means, deviations, strict=True)]
        gains = [f"**{mean / means[2]:.1f}x**" for mean in means[:2]]
        memory = [f"{float(row['memory_mb_mean']):,.0f}" for row in variants]
        lines.append([_NAMES.get(model, model), batch, *times, *gains, *memory])
    return markdown(_COLUMNS, lines)


def print_experiments(paths: Sequence[Path]) -> None:
    """The table of their rows, and the conditions they were measured under."""
    rows = []
    for path in paths:
        with open(path, newline="") as file:
            rows += csv.DictReader(file)
    print("\n".join(experiments_table(rows)))
    row = rows[0]
    print(
        f"\n{row['device']}, torch {row['torch']}, ampfuse {row['ampfuse']}, {row['date'][:10]}. "
        f"Mean and standard deviation of {row['n']} runs; memory is the process's."
    )


def main() -> None:
    """Prints the tables that fit the files."""
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="CSV files, of one kind")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument("--figure", type=Path, metavar="FOLDER", help="draw training steps there")
    options = parser.parse_args()
    if "recipe" in options.files[0].read_text().partition("\n")[0].split(","):
        return print_experiments(options.files)
    for path in options.files:
        rows = read(path)
        if options.figure is not None:
            for theme in _THEMES:
                svg = options.figure / f"training_steps_{theme}.svg"
                svg.write_text(network_figure(rows, theme))
            continue
        print("\n".join(report_of(rows)))
        if options.page is not None:
            fill(options.page, path)


if __name__ == "__main__":
    main()
