"""The tables of docs/benchmarks.md from CSV files in benchmarks/results.

    python benchmarks/report.py benchmarks/results/step_cpu.csv              # or another script's
    python benchmarks/report.py benchmarks/results/experiments_e?_cpu.csv    # ``make_table --csv``

``--page docs/benchmarks.md`` also writes where a comment in the page names the file, or "FILE, in
short" for the table of five models. ``--figure docs/figures`` draws the figure of nets_cpu.csv.
"""

from __future__ import annotations

from pathlib import Path

from harness.experiment_tables import print_experiments
from harness.network_tables import THEMES, in_short, network_figure, network_tables
from harness.options import parser_of
from harness.results import Row, read
from harness.step_tables import steps_table, variants_table
from harness.tables import conditions_of


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
