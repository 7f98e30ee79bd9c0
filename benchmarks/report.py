"""The tables of docs/benchmarks.md from CSV files in benchmarks/results.

python benchmarks/report.py benchmarks/results/step_cpu.csv              # or of another script
python benchmarks/report.py benchmarks/results/experiments_e?_cpu.csv    # ``make_table --csv``

With ``--page docs/benchmarks.md`` the first writes into the page, too, where a comment there names
the file; "FILE, in short", as in README.md, is the table of five models. ``--figure docs/figures``
draws the figure of docs/index.md and of the README, of nets_cpu.csv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from harness.results import Row, parser_of, read


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    header, *body = ("| " + " | ".join(line) + " |" for line in (columns, *lines))
    return [header, "|---" * len(columns) + "|", *body]


# ---- steps against peers and the machine's limit -------------------------------------------------


def cells(case: str, rows: list[Row]) -> dict[str, str]:
    """One line of the table, by column: medians, with the 20th to 80th percentile."""
    by_variant = {row.variant: row for row in rows}
    ours, limit = by_variant["ampfuse"], by_variant.get("limit")
    torch_routes = [row for row in rows if row.variant.startswith("torch ")]
    best = min(torch_routes, key=attrgetter("median_ms"), default=None)
    others = [row for row in rows if row.peer]
    return {
        "step": case,
        "threads": str(ours.threads) if ours.device == "cpu" else "",
        "ampfuse, ms": _spread(ours),
        "the machine's limit, ms": _spread(limit),
        "ampfuse / limit": f"{ours.median_ms / limit.median_ms:.2f}" if limit else "",
        "share of copy bandwidth": ""
        if math.isnan(ours.share_of_copy)
        else f"{ours.share_of_copy:.0%} of {by_variant['copy'].gb_per_s:,.0f} GB/s",
        "fastest torch route, ms": f"{_spread(best)} {best.variant.removeprefix('torch ')}"
        if best
        else "",
        "ampfuse is faster by": f"**{_ratio(best, ours)}**" if best else "",
        "than others": ", ".join(f"{row.variant} {_ratio(row, ours)}" for row in others),
    }


def _ratio(theirs: Row, ours: Row) -> str:
    ratio = theirs.median_ms / ours.median_ms
    return f"{ratio:.1f}x" if ratio >= 1.2 else f"{ratio:.2f}x"


def _spread(row: Row | None, digits: int | None = None) -> str:
    """Median, 20th and 80th percentile; "" of a row that is not there."""
    if row is None:
        return ""
    if digits is None:
        digits = 1 if row.median_ms >= 10 else 2 if row.median_ms >= 1 else 3
    median, low, high = (f"{ms:.{digits}f}" for ms in (row.median_ms, row.p20_ms, row.p80_ms))
    return f"{median} ({low}-{high})"


def steps_table(rows: list[Row]) -> list[str]:
    """The cases that ampfuse has a row of, without empty columns."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.case, row.threads))]
    ours = [group for group in groups if any(row.variant == "ampfuse" for row in group)]
    lines = [cells(group[0].case, group) for group in ours]
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    return markdown(columns, [[line[column] for column in columns] for line in lines])


def variants_table(rows: list[Row]) -> list[str]:
    """A column for each variant: milliseconds, and the share of copy bandwidth."""
    variants = dict.fromkeys(row.variant for row in rows)
    several = len({row.threads for row in rows}) > 1
    lines = []
    for (case, threads), group in groupby(rows, key=lambda row: (row.case, row.threads)):
        found = {row.variant: row for row in group}
        case += f", {threads} threads" if several else ""
        lines.append([case, *(_spread_and_share(found.get(name)) for name in variants)])
    return markdown(["ms", *variants], lines)


def _spread_and_share(row: Row | None) -> str:
    share = "" if row is None or math.isnan(row.share_of_copy) else f", {row.share_of_copy:.0%}"
    return _spread(row) + share


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


def conditions_of(rows: list[Row], *, spread: bool = True) -> str:
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
_FLOATS = ("torch.amp, .float() loss", "O5, .float() loss")
_PARTS = (
    *(f"O5, torch's {part}" for part in ("loss", "norms", "activations", "clipping")),
    "O5, clipped",
)
_DRAWN = ("GPT", "BERT-small", "ViT-S/16", "ConvNeXt-T", "ResNet-50")


def by_network(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each network by variant; without networks of a run that was cut off."""
    networks: dict[str, dict[str, Row]] = {}
    for row in rows:
        networks.setdefault(row.case, {})[row.variant] = row
    return {
        network: by for network, by in networks.items() if "O5" in by and by.keys() & {*_TORCHS}
    }


def fastest(by: dict[str, Row]) -> tuple[Row, Row]:
    """torch.amp's and O5's."""
    torchs, ours = (
        [by[variant] for variant in variants if variant in by] for variants in (_TORCHS, _OURS)
    )
    return min(torchs, key=attrgetter("median_ms")), min(ours, key=attrgetter("median_ms"))


def networks_table(
    networks: dict[str, dict[str, Row]],
    variants: Sequence[str],
    unit: str = "ms",
    of: Sequence[str] = (),
    cell: Callable[[Row | None], str] | None = None,
) -> list[str]:
    """Times or memory of those of `variants` that were measured; networks that have one of `of`."""
    variants = [variant for variant in variants if any(variant in by for by in networks.values())]
    cell = cell or (_whole if unit == "ms" else _mib)
    found = [network for network, by in networks.items() if not of or by.keys() & {*of}]
    lines = [
        [network, *(cell(networks[network].get(variant)) for variant in variants)]
        for network in found
    ]
    return markdown(["model", *(f"{variant}, {unit}" for variant in variants)], lines)


def times_table(
    networks: dict[str, dict[str, Row]],
    others: Sequence[str] = (),
    cell: Callable[[Row | None], str] | None = None,
) -> list[str]:
    """Of the variants that were measured, and how much faster O5 is at its fastest."""
    both = map(fastest, networks.values())
    gains = []
    for theirs, ours in both:
        mark = "**" * (ours.p80_ms < theirs.p20_ms)  # beyond the spread of both
        gains.append(f"{mark}{theirs.median_ms / ours.median_ms:.2f}x{mark} |")
    lines = networks_table(networks, ["FP32", *_TORCHS, *_OURS, *others], cell=cell)
    columns = [lines[0] + " gain, fastest against fastest |", lines[1] + "---|"]
    return columns + [f"{line} {gain}" for line, gain in zip(lines[2:], gains, strict=True)]


def in_short(rows: list[Row]) -> list[str]:
    """The table of five networks, and a sentence on who is faster, beyond the spread of both."""
    networks = {
        network: by for network, by in by_network(rows).items() if network.split(" (")[0] in _DRAWN
    }
    found: dict[str, list[str]] = {"faster": [], "as fast within the spread": [], "slower": []}
    for network, by in networks.items():
        theirs, ours = fastest(by)
        place = 1 - (ours.p80_ms < theirs.p20_ms) + (ours.p20_ms > theirs.p80_ms)
        gain = theirs.median_ms / ours.median_ms
        found[[*found][place]].append(f"{network.split(' (')[0]} ({gain:.2f}x)")
    said = "; ".join(f"{place} for {', '.join(gains)}" for place, gains in found.items() if gains)
    return [
        *times_table(networks, cell=lambda row: _number(row.median_ms) if row else ""),
        "",
        f"The gain compares the fastest columns of O5 and torch.amp: ampfuse is {said}.",
        conditions_of([row for by in networks.values() for row in by.values()], spread=False),
    ]


def network_tables(rows: list[Row]) -> list[list[str]]:
    """Of times and gains; of what O5's time is spent on; of memory; of variants beside O5."""
    networks, shares_of_kinds = by_network(rows), []
    for network, by in networks.items():
        shares = [by[kind].median_ms / by["O5"].median_ms if kind in by else 0 for kind in _KINDS]
        shares_of_kinds.append([network, *(f"{share:.0%}" for share in (*shares, sum(shares)))])
    return [
        times_table(networks, ["O4", "O2"]),
        markdown(["model", *_KINDS, "together"], shares_of_kinds),
        networks_table(networks, ["FP32", *_TORCHS[:3], *_OURS[:2], *_WAYS], "MiB"),
        *(
            networks_table(networks, [*beside, *variants], of=variants)
            for beside, variants in (
                (["O5"], _WAYS),
                (["torch.amp", "O5"], _FLOATS),
                (["O5"], _PARTS),
            )
            if any(variant in by for variant in variants for by in networks.values())
        ),
    ]


def _mib(row: Row | None) -> str:
    return "" if row is None else f"{row.memory_mib:,.0f}"


def _whole(row: Row | None) -> str:
    return _spread(row, 0 if row is not None and row.median_ms >= 100 else 1)


def _number(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


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
