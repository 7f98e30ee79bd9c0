"""The tables of docs/benchmarks.md from CSV files in benchmarks/results.

    python benchmarks/report.py benchmarks/results/step_cpu.csv              # or another script's
    python benchmarks/report.py benchmarks/results/experiments_e?_cpu.csv    # ``make_table --csv``

``--page docs/benchmarks.md`` also writes where a comment in the page names the file, or "FILE, in
short" for the table of five models. ``--figure docs/figures`` draws the figure of nets_cpu.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from harness.network_tables import THEMES, in_short, network_figure, network_tables
from harness.options import parser_of
from harness.results import Record, Row, read, records_of
from harness.tables import conditions_of, markdown, steps_table, variants_table

_NAMES = {
    "vgg16": "VGG16, 32x32 (E1)",
    "wrn28_10": "WRN-28-10, 32x32 (E2)",
    "resnet18": "ResNet-18, 224x224 (E4)",
    "mlp": "MLP (E5)",
}


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


def fill(page: Path, path: Path) -> None:
    """Write the report of a file, or that there is none, into the page: between a comment with its
    name and one "end"."""
    for name, make in ((path.name, report_of), (f"{path.name}, in short", in_short)):
        head, comment, rest = page.read_text().partition(f"<!-- {name} -->\n")
        if comment:
            tail = rest[rest.index("<!-- end -->") :]
            lines = "\n".join(make(read(path))) if path.exists() else "Not measured yet."
            page.write_text(f"{head}{comment}{lines}\n{tail}")


def experiments_table(rows: Sequence[Record]) -> list[str]:
    """Mean milliseconds of a training step and the standard deviation of the repeats' means."""
    columns = ["experiment", "batch", "FP32, ms", "torch.amp BF16, ms", "O5, ms"]
    columns += ["O5 against FP32", "against torch.amp", "memory, MB: FP32", "torch.amp", "O5"]
    rows = sorted(rows, key=lambda row: (row["recipe"], row["model"], int(row["batch_size"])))
    lines = []
    for (model, batch), group in groupby(rows, itemgetter("model", "batch_size")):
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
    return markdown(columns, lines)


def print_experiments(paths: Sequence[Path]) -> None:
    """The table of their rows, and the conditions they were measured under."""
    rows = [row for path in paths for row in records_of(path)]
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
            for theme in THEMES:
                svg = options.figure / f"training_steps_{theme}.svg"
                svg.write_text(network_figure(rows, theme))
            continue
        print("\n".join(report_of(rows)))
        if options.page is not None:
            fill(options.page, path)


if __name__ == "__main__":
    main()
