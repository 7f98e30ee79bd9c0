"""The tables of docs/benchmarks.md from CSV files in benchmarks/results.

python benchmarks/report.py benchmarks/results/step_cpu.csv              # or of another script
python benchmarks/report.py benchmarks/results/experiments_e?_cpu.csv    # ``make_table --csv``

With ``--page docs/benchmarks.md`` the first writes into the page, too, where a comment there names
the file. With ``--figure docs/figures`` it draws the figure of docs/index.md and of the README, of
nets_cpu.csv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from itertools import groupby
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
    best = min(torch_routes, key=lambda row: row.median_ms, default=None)
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
    """Of the cases that ampfuse has a row of; without the columns that have nothing to say."""
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
        tables += nets_tables(others)
    elif others:
        tables.append(variants_table(others))
    lines = [line for table in tables for line in (*table, "")]
    row = rows[0]
    peers = dict.fromkeys(row.peer for row in rows)
    conditions = [row.hardware, row.isa, f"torch {row.torch}", f"ampfuse {row.ampfuse}", *peers]
    count = min(row.n for row in rows)
    under = (
        f"{', '.join(filter(None, [*conditions, row.date]))}. "
        f"Median of {count}{' or more' * any(row.n > count for row in rows)}, "
        "20th to 80th percentile."
    )
    return [*lines, under]


def fill(page: Path, path: Path) -> None:
    """Write the report of a file into the page: between a comment with its name and one "end"."""
    head, comment, rest = page.read_text().partition(f"<!-- {path.name} -->\n")
    if comment:
        tail = rest[rest.index("<!-- end -->") :]
        lines = "\n".join(report_of(read(path)))
        page.write_text(f"{head}{comment}\n{lines}\n\n{tail}")


# ---- training steps of nets ----------------------------------------------------------------------

_NETS = {
    "gpt": "GPT",
    "bert_small": "BERT-small",
    "vit_small_patch16_224": "ViT-S/16",
    "convnext_tiny": "ConvNeXt-T",
    "lstm_tagger": "LSTM tagger",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "vgg16": "VGG16",
    "wrn16_4": "WRN-16-4",
    "seresnext50_32x4d": "SE-ResNeXt50",
    "densenet161": "DenseNet-161",
}
_KINDS = ("products", "attention", "convolutions")
_WAYS = ["net", "unfused, ms", "fused, ms", "recomputed, ms", "tensors, MiB: unfused"]
_WAYS += ["fused", "recomputed"]
_PARTS = [f"O5, torch's {part}" for part in ("loss", "norms", "activations")]
_PARTS += ["O5, clipped", "O5, torch's clipping"]


def by_net(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each net by variant; a net as "ViT-S/16 (batch 8, 224x224)"."""
    nets: dict[str, dict[str, Row]] = {}
    for row in rows:
        net, side, batch = row.case.rsplit("-", 2)
        image = row.optimizer == "SGD" or net.startswith(("vit", "convnext"))
        size = f"{side}x{side}" if image else f"sequence {side}"
        nets.setdefault(f"{_NETS[net]} (batch {batch}, {size})", {})[row.variant] = row
    return nets


def nets_tables(rows: list[Row]) -> list[list[str]]:
    """Of times and gains; of what O5's time and memory are spent on; of fusing; of its parts."""
    arms = ["FP32", "torch.amp", "torch.amp, compiled", "O4", "O5"]
    times, spent, fused, parts = [], [], [], []
    seen = {row.variant for row in rows}
    arms += [arm for arm in ("O5, compiled", "O2", "O5, graphed") if arm in seen]
    for net, by in by_net(rows).items():
        if not {"FP32", "torch.amp", "O5"} <= by.keys():  # a run that was cut off
            continue
        o5 = by["O5"].median_ms
        gains = [f"**{by[arm].median_ms / o5:.2f}x**" for arm in arms[1:3] if arm in by]
        times.append([net, *(_whole(by.get(arm)) for arm in arms), *gains])
        kinds = [by[kind].median_ms if kind in by else 0.0 for kind in _KINDS]
        memory = [f"{by[arm].memory_mib:,.0f}" for arm in ("FP32", "torch.amp", "O5")]
        spent.append([net, *(f"{kind / o5:.0%}" for kind in (*kinds, sum(kinds))), *memory])
        if "O5, unfused" in by:
            ways = [by.get(name) for name in ("O5, unfused", "O5", "O5, recomputed")]
            memory = ["" if way is None else f"{way.memory_mib:,.0f}" for way in ways]
            fused.append([net, *map(_whole, ways), *memory])
        if any(part in by for part in _PARTS):
            parts.append([net, _whole(by["O5"]), *(_whole(by.get(part)) for part in _PARTS)])
    gains = ["O5 against torch.amp", "against compiled"]
    return [
        markdown(["net", *(f"{arm}, ms" for arm in arms), *gains], times),
        markdown(["net", *_KINDS, "together", "tensors, MiB: FP32", "torch.amp", "O5"], spent),
        markdown(_WAYS, fused),
        *([markdown(["net", *(f"{arm}, ms" for arm in ("O5", *_PARTS))], parts)] if parts else []),
    ]


def _whole(row: Row | None) -> str:
    return _spread(row, 0 if row is not None and row.median_ms >= 100 else 1)


_ARMS = {"FP32": "FP32", "torch.amp": "BF16 by torch.amp", "O5": "BF16 by ampfuse"}
_DRAWN = ("GPT", "BERT-small", "ViT-S/16", "ConvNeXt-T", "ResNet-50")
# Text, and a colour for each arm.
_THEMES = {
    "light": ("#24292f", "#b0b7c0", "#7a8694", "#2f6fdd"),
    "dark": ("#d5d9df", "#555d68", "#8b96a5", "#6ea3ff"),
}
_WIDTH, _BAR = 520, 15


def nets_figure(rows: list[Row], theme: str) -> str:
    """An SVG: milliseconds of a training step as bars, of five nets."""
    text, *colours = _THEMES[theme]
    nets = {name.split(" (")[0]: by for name, by in by_net(rows).items()}
    drawn = {name: [nets[name][arm].median_ms for arm in _ARMS] for name in _DRAWN}
    scale = 330 / max(map(max, drawn.values()))
    parts, y = [], 0
    for place, (arm, colour) in enumerate(zip(_ARMS.values(), colours, strict=True)):
        x = (0, 70, 235)[place]
        parts.append(f'<rect x="{x}" y="2" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="12">{arm}</text>')
    for name, steps in drawn.items():
        y += 34 if not y else 14
        parts.append(f'<text x="0" y="{y + 27}">{name}</text>')
        for ms, colour in zip(steps, colours, strict=True):
            bar = f'<rect x="105" y="{y}" width="{ms * scale:.0f}" height="{_BAR - 2}" rx="2"'
            parts.append(f'{bar} fill="{colour}"/>')
            parts.append(f'<text x="{111 + ms * scale:.0f}" y="{y + 11}">{ms:.0f} ms</text>')
            y += _BAR
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 12}" width="{_WIDTH}"'
    )
    font = f'font-family="system-ui, sans-serif" font-size="13" fill="{text}"'
    return "\n".join([f"{head} {font}>", *parts, "</svg>\n"])


# ---- training steps of the experiments -----------------------------------------------------------

_NAMES = {
    "vgg16": "VGG16, 32x32 (E1)",
    "wrn28_10": "WRN-28-10, 32x32 (E2)",
    "resnet18": "ResNet-18, 224x224 (E4)",
    "mlp": "MLP (E5)",
}
_COLUMNS = (
    *("experiment", "batch", "FP32, ms", "torch.amp BF16, ms", "O5, ms", "O5 against FP32"),
    *("against torch.amp", "memory, MB: FP32", "torch.amp", "O5"),
)


def experiments_table(rows: list[dict[str, str]]) -> list[str]:
    """Mean milliseconds of a training step and the standard deviation of the repeats' means."""
    rows = sorted(rows, key=lambda row: (row["recipe"], row["model"], int(row["batch_size"])))
    lines = []
    for (model, batch), group in groupby(rows, key=lambda row: (row["model"], row["batch_size"])):
        by_method = {row["method"]: row for row in group}
        arms = [by_method[name] for name in ("fp32", "amp-bf16", "O5")]
        means, deviations = (
            [1e3 * float(row[column] or 0) / int(row["iterations"]) for row in arms]
            for column in ("time_s_mean", "time_s_std")
        )
        times = [f"{mean:.0f} ± {std:.0f}" for mean, std in zip(means, deviations, strict=True)]
        gains = [f"**{mean / means[2]:.1f}x**" for mean in means[:2]]
        memory = [f"{float(row['memory_mb_mean']):,.0f}" for row in arms]
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
                svg.write_text(nets_figure(rows, theme))
            continue
        print("\n".join(report_of(rows)))
        if options.page is not None:
            fill(options.page, path)


if __name__ == "__main__":
    main()
