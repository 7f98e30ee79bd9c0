"""README and docs/: their tables are those of the CSVs, their links lead somewhere."""

import csv
import importlib
import inspect
import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import is_typeddict

import pytest
import torch
from torch import nn

from programs import ranks

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
OTHER_MACHINES = (ROOT / "docs" / "other_machines.md").read_text()
API = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
MODULES = ("ampfuse", *(f"ampfuse.{name}" for name in "amp optim nn ops graphs insight".split()))
MODULES += ("ampfuse.nn.functional", "ampfuse.doctor")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def records(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def table(text, header):
    """The lines of the table that starts with `header`, without the header's two."""
    return text[text.index(header) :].split("\n\n")[0].splitlines()[2:]


def cells(lines):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def report(monkeypatch):
    """benchmarks/report.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("report")


@pytest.fixture
def nets(report):
    return report.read(RESULTS / "nets_cpu.csv")


def test_tables_of_training_steps_are_those_of_the_csvs(report, nets):
    cpus = BENCHMARKS.partition("## GPUs")[0]
    tables = [(cpus, lines) for lines in report.nets_tables(nets)]
    headers = [header for _, (header, *_) in tables]
    assert headers == re.findall(r"\| net \|.*\|", cpus)
    times, _, *others = report.nets_tables(report.read(RESULTS / "nets_transformers_epyc.csv"))
    tables += [(OTHER_MACHINES, lines) for lines in (times, *others)]
    for text, machine in zip(OTHER_MACHINES.split("## A Xeon"), ("epyc", "xeon"), strict=True):
        paths = RESULTS.glob(f"experiments_e?_{machine}.csv")
        rows = [row for path in paths for row in records(path)]
        tables.append((text, report.experiments_table(rows)))
    for text, (header, _, *lines) in tables:
        assert table(text, header) == lines


def test_readme_shows_steps_of_the_csv(report, nets):
    """Five nets, without O4 and with the gain over torch.amp alone."""
    times, *_ = report.nets_tables(nets)
    measured, shown = cells(times[2:]), cells(table(README, "| net |"))
    assert len(shown) == 5
    assert all(line in [row[:4] + row[5:7] for row in measured] for line in shown)


def test_figure_is_that_of_the_csv(report, nets):
    for theme in ("light", "dark"):
        svg = (ROOT / "docs" / "figures" / f"training_steps_{theme}.svg").read_text()
        assert svg == report.nets_figure(nets, theme)


def test_demo_table_is_that_of_the_csv():
    lines = cells(table(BENCHMARKS, "| level | precision | time, s |"))
    for (level, _, *shown), row in zip(lines, records(RESULTS / "demo_cpu.csv"), strict=True):
        assert level == row["method"]
        assert shown == [
            f"{float(row['time_s_mean']):.1f}",
            f"{float(row['images_per_s_mean']):,.0f}",
            f"{float(row['memory_mb_mean']):.0f}",
            f"{float(row['accuracy_pct_mean']):.1f} %",
            row["skipped_steps"],
            f"{float(row['scale']):,.0f}",
        ]


def test_conv_nets_table_is_that_of_the_csv():
    rows = [r for r in records(RESULTS / "conv_nets_epyc.csv") if r["optimizer"]]
    lines = cells(table(OTHER_MACHINES, "| network, images, batch | FP32"))
    groups = groupby(rows, key=lambda row: row["case"])
    for (net, *shown), (case, group) in zip(lines, groups, strict=True):
        side, batch = re.search(r"-(\d+)-batch(\d+)$", case).groups()
        assert net.endswith(f", {side}x{side}, {batch}")
        by_variant = {row["variant"]: row for row in group}
        times = {name: float(row["median_ms"]) for name, row in by_variant.items()}
        gain = times["torch.amp"] / times["O5, fused"]
        compared = ("torch.amp", "O5, fused", "O5, recomputed")
        memory = [float(by_variant[name]["memory_mib"]) for name in compared]
        expected = [*(f"{time:.0f}" for time in times.values()), f"{gain:.2f}x"]
        assert shown == [*expected, *(f"{mib:.0f}" for mib in memory)]


def test_readme_script_trains():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(16, 4)
    loss = nn.functional.mse_loss
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(x, x[:, :2])] * 40,
        "loss_function": lambda output, target: loss(output.float(), target),
    }
    before = loss(model(x), x[:, :2]).item()
    exec(code, names)
    assert loss(model(x), x[:, :2]).item() < 0.1 * before


@pytest.mark.slow
def test_the_loop_on_shards_goes_on_on_any_number_of_ranks(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"## A whole loop.*?```python\n(.*?)```", page, re.DOTALL)
    script, folder = tmp_path / "loop.py", tmp_path / "checkpoints"
    script.write_text(code.replace('Path("checkpoints")', f"Path({str(folder)!r})"))
    lines = ranks(2, script)[0].splitlines()
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines]
    assert losses[0] > losses[1] > losses[2]
    (folder / "30" / ".metadata").unlink()  # as of one that was killed while it wrote
    assert ranks(2, script)[0].splitlines() == lines[2:]
    shutil.rmtree(folder / "30")
    (alone,) = ranks(1, script)
    norms = [re.findall(r"norm ([\d.]+)", line)[0] for line in (alone, lines[2])]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-2)


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_sections(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not section or section in anchors(target), link


@pytest.mark.parametrize(
    ("name", "title"), [("from_apex.md", "from-apex"), ("from_torch_amp.md", "from-torchamp")]
)
def test_migration_pages_link_their_sections(name, title):
    page = ROOT / "docs" / name
    assert anchors(page) - set(re.findall(r"\]\(#(.*?)\)", page.read_text())) == {title}


def entries():
    """The full names that the reference has an entry of."""
    module = ""
    for directive, name in re.findall(r"^\.\. ([\w:]+):: ([\w.]+)", API, re.MULTILINE):
        if directive == "currentmodule":
            module = name
        elif directive == "automodule":
            yield name
        else:
            yield name if name.startswith("ampfuse.") else f"{module}.{name}"


def test_every_public_name_has_an_entry():
    public = {f"{m}.{name}" for m in MODULES for name in importlib.import_module(m).__all__}
    frameworks = (ROOT / "python" / "ampfuse" / "integrations").glob("[!_]*.py")
    missing = public - set(entries())
    missing |= {f.stem for f in frameworks if f"ampfuse.integrations.{f.stem}" not in API}
    assert not missing, f"docs/api has no entry for {sorted(missing)}"


@pytest.mark.parametrize("module", MODULES)
def test_entries_tell_of_every_parameter(module):
    module = importlib.import_module(module)
    for name in module.__all__:
        item = getattr(module, name)
        if not callable(item):
            continue
        text = inspect.getdoc(item) or ""
        assert text, f"{name} has no docstring"
        # Classes that users do not make themselves tell of attributes instead.
        if text.startswith("As :func:") or (inspect.isclass(item) and "Arguments:" not in text):
            continue
        parameters = (
            item.__annotations__ if is_typeddict(item) else inspect.signature(item).parameters
        )
        untold = [p for p in parameters if not re.search(rf"\b{p}\b", text)]
        assert not untold, f"{name}: its docstring does not tell of {untold}"
