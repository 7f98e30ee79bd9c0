"""README and docs/: their tables are those of the CSVs, their links lead somewhere."""

import csv
import importlib
import inspect
import re
import shlex
import shutil
from itertools import groupby
from pathlib import Path
from typing import is_typeddict

import pytest
import torch

from ampfuse import optim
from ampfuse._core import build_info
from programs import ranks

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
OTHER_MACHINES = (ROOT / "docs" / "other_machines.md").read_text()
API = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
MODULES = ("ampfuse", *(f"ampfuse.{name}" for name in "amp optim nn ops graphs insight".split()))
MODULES += ("ampfuse.doctor",)
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
def by_network(report):
    return importlib.import_module("harness.network_tables").by_network


@pytest.fixture
def networks(report):
    return report.read(RESULTS / "nets_cpu.csv")


def test_tables_of_training_steps_are_those_of_the_csvs(report):
    rows = report.read(RESULTS / "nets_transformers_epyc.csv")
    epyc, _, xeon = OTHER_MACHINES.split("## A Xeon")
    fused = epyc.partition("## Muon")[0]
    shown = [lines for lines in report.network_tables(rows) if lines[0] in fused]
    assert [header for header, *_ in shown] == re.findall(r"\| model \|.*\|", fused)
    tables = [(epyc, lines) for lines in shown]
    for text, machine in ((epyc, "epyc"), (xeon, "xeon")):
        paths = RESULTS.glob(f"experiments_e?_{machine}.csv")
        experiments = [row for path in paths for row in records(path)]
        tables.append((text, report.experiments_table(experiments)))
    for text, (header, _, *lines) in tables:
        assert table(text, header) == lines


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/other_machines.md"])
def test_pages_have_the_tables_of_the_csvs(report, page, tmp_path):
    """Wherever a comment names one, there or not: what report.py would write."""
    copy, text = tmp_path / "page.md", (ROOT / page).read_text()
    copy.write_text(text)
    named = {name.partition(",")[0] for name in re.findall(r"<!-- (\S+\.csv.*) -->", text)}
    for name in sorted(named):
        report.fill(copy, RESULTS / name)
    assert named & {"nets_cpu.csv", "nets_xeon.csv"}
    assert copy.read_text() == text


def test_pages_have_tables_that_no_comment_marks(report):
    quality = importlib.import_module("quality")
    _, _, *lines = report.steps_table(report.read(RESULTS / "step_cpu.csv"))
    assert table(BENCHMARKS, "| step | threads |") == lines
    for page, file in (("benchmarks", "fused_accuracy"), ("frameworks", "frameworks_epyc")):
        _, _, *lines = quality.table(records(RESULTS / f"{file}.csv"))
        assert table((ROOT / "docs" / f"{page}.md").read_text(), "| task | variant |") == lines


def row_of(case, variant, low, median, high):
    conditions = dict.fromkeys(("hardware", "isa", "torch", "ampfuse", "date"), "")
    times = {"p20_ms": low, "median_ms": median, "p80_ms": high, "min_ms": low}
    return {"case": case, "variant": variant, "threads": 2, "n": 9, **times, **conditions}


def test_who_is_faster_is_said_of_the_fastest_variants_beyond_their_spread(report):
    steps = {
        "GPT": [("torch.amp", 9, 10, 11), ("torch.amp, expert", 5, 6, 7), ("O5", 3, 4, 4.9)],
        "ViT-S/16": [("torch.amp", 5, 6, 7), ("O5", 8, 9, 9), ("O5, compiled", 4, 5, 5.1)],
        "ResNet-50": [("torch.amp", 4, 5, 6), ("O5", 6.1, 8, 9), ("O5, captured", 7, 10, 11)],
        "VGG16": [("torch.amp", 4, 5, 6), ("O5", 1, 1, 1)],  # not one of the five
        "BERT-small": [("torch.amp", 4, 5, 6)],  # cut off
    }
    rows = [
        report.Row(**row_of(f"{network} (batch 8)", *variant))
        for network, variants in steps.items()
        for variant in variants
    ]
    header, _, *lines = report.in_short(rows)
    variants = ["torch.amp", "torch.amp, expert", "O5", "O5, compiled", "O5, captured"]
    assert cells([header])[0][1:-1] == [f"{variant}, ms" for variant in variants]
    assert [line[-1] for line in cells(lines[:3])] == ["**1.50x**", "1.20x", "0.62x"]
    assert (
        "ampfuse is faster for GPT (1.50x); as fast within the spread for ViT-S/16 (1.20x); "
        "slower for ResNet-50 (0.62x)." in lines[4]
    )


def test_compiled_steps_of_the_csv_take_the_memory_of_eager_ones(by_network, networks):
    for network, by in by_network(networks).items():
        if "O5, compiled" in by:
            assert by["O5, compiled"].memory_mib <= 1.05 * by["O5"].memory_mib, network


def test_readme_says_what_the_gpus_csvs_have(report, by_network):
    text = " ".join(README.partition("Most of the gain")[2].split())
    for case, by in by_network(report.read(RESULTS / "nets_cuda.csv")).items():
        amp, plain, fused = (by[variant] for variant in ("torch.amp", "O5, unfused", "O5"))
        network = case.partition(" (")[0]
        gain = f"{amp.median_ms / plain.median_ms:.2f}x"
        assert f"| {network} | {gain} | {amp.memory_mib:,.0f} | {fused.memory_mib:,.0f} |" in text
        if compiled := by.get("torch.amp, compiled"):
            assert f"{compiled.median_ms:.1f} against {fused.median_ms:.1f} ms ({network})" in text
            both = compiled.median_ms / by["O5, compiled"].median_ms
            assert f"{both:.2f}x ({network})" in text.partition("Where it helps little")[2]
    steps = {
        row.variant: row.median_ms
        for row in report.read(RESULTS / "step_cuda.csv")
        if row.case == "adamw-gpt2-medium-bf16"
    }
    assert f"takes {steps['ampfuse']:.3g} ms, and {steps['torch fused']:.3g} ms" in text


def test_readme_trains_as_its_tables_were_measured(report):
    """The example has every option that the figures need."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    figures = README.partition("## What you gain")[2]
    for option in ('opt_level="O5"', "fuse=True"):
        assert option in code
        assert option in figures
    assert code.count("memory_format=torch.channels_last") == 2
    assert "channels-last" in figures


def test_figure_is_that_of_the_csv(report, networks):
    for theme in ("light", "dark"):
        svg = (ROOT / "docs" / "figures" / f"training_steps_{theme}.svg").read_text()
        assert svg == report.network_figure(networks, theme)


def test_plans_table_is_that_of_the_csv():
    page = (ROOT / "docs/memory.md").read_text()
    rows = list(csv.DictReader((ROOT / "benchmarks/results/plan.csv").open()))
    off = [float(row["planned_mib"]) / float(row["measured_mib"]) - 1 for row in rows]
    assert f"Of {len(rows)} plans, {sum(abs(each) <= 0.05 for each in off)} are within 5 %" in page
    for row, each in zip(rows, off, strict=True):
        case = f"{row['case']}, H200" if row["device"] == "cuda" else row["case"]
        lines = [line for line in page.splitlines() if line.startswith(f"| {case} |")]
        cell = f" {float(row['planned_mib']):,.0f} ({100 * each:+.1f} %) |"
        cell = cell.replace("-", "\N{MINUS SIGN}")
        is_mode = re.search("compiled|split|8bit|no masters", row["variant"])
        assert cell in lines[bool(is_mode)], row


def test_language_model_table_is_that_of_the_csvs():
    page = (ROOT / "docs/memory.md").read_text()
    rows = records(RESULTS / "language_cpu.csv")
    losses = {row["variant"]: row["loss"] for row in records(RESULTS / "language_losses.csv")}
    lines = cells(table(page, "| | tokens/s |"))
    assert [row["variant"] for row in rows] == list(losses)
    for (_, *shown), row in zip(lines, rows, strict=True):
        rates = [128 / float(row[key]) * 1e3 for key in ("median_ms", "p80_ms", "p20_ms")]
        assert shown == [
            "{:.0f} ({:.0f} to {:.0f})".format(*rates),
            f"{float(row['memory_mib']) / 1024:.2f}",
            f"{float(row['bytes_per_param']):.1f}",
            f"{float(losses[row['variant']]):.3f}",
        ]


def test_demo_table_is_that_of_the_csv():
    lines = cells(table(BENCHMARKS, "| level | precision | time, s |"))
    for (level, _, *shown), row in zip(lines, records(RESULTS / "demo_cpu.csv"), strict=True):
        assert level == row["variant"]
        assert shown == [
            f"{float(row['time_s_mean']):.1f}",
            f"{float(row['images_per_s_mean']):,.0f}",
            f"{float(row['memory_mb_mean']):.0f}",
            f"{float(row['accuracy_pct_mean']):.1f} %",
            row["skipped_steps"],
            f"{float(row['scale']):,.0f}",
        ]


def test_conv_networks_table_is_that_of_the_csv():
    rows = [r for r in records(RESULTS / "conv_nets_epyc.csv") if r["optimizer"]]
    lines = cells(table(OTHER_MACHINES, "| network, images, batch | FP32"))
    groups = groupby(rows, key=lambda row: row["case"])
    for (network, *shown), (case, group) in zip(lines, groups, strict=True):
        side, batch = re.search(r"-(\d+)-batch(\d+)$", case).groups()
        assert network.endswith(f", {side}x{side}, {batch}")
        by_variant = {row["variant"]: row for row in group}
        times = {name: float(row["median_ms"]) for name, row in by_variant.items()}
        gain = times["torch.amp"] / times["O5, fused"]
        compared = ("torch.amp", "O5, fused", "O5, recomputed")
        memory = [float(by_variant[name]["memory_mib"]) for name in compared]
        expected = [*(f"{time:.0f}" for time in times.values()), f"{gain:.2f}x"]
        assert shown == [*expected, *(f"{mib:.0f}" for mib in memory)]


def test_readme_script_trains(caplog):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    with caplog.at_level("INFO", "ampfuse.amp"):
        exec(code, names)
    assert "1 of 1 places fused" in caplog.text
    assert names["model"][0][0].weight.dtype == torch.bfloat16
    assert names["loss"].item() < 0.3  # of log(2)


@pytest.mark.slow
def test_the_loop_on_shards_goes_on_on_any_number_of_ranks(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"## A whole loop.*?```python\n(.*?)```", page, re.DOTALL)
    script, folder = tmp_path / "loop.py", tmp_path / "checkpoints"
    script.write_text(code.replace('Path("checkpoints")', f"Path({str(folder)!r})"))
    lines = ranks(2, script)[0].stdout.splitlines()
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines]
    assert losses[0] > losses[1] > losses[2]
    (folder / "30" / ".metadata").unlink()  # as of one that was killed while it wrote
    assert ranks(2, script)[0].stdout.splitlines() == lines[2:]
    shutil.rmtree(folder / "30")
    (alone,) = ranks(1, script)
    norms = [re.findall(r"norm ([\d.]+)", line)[0] for line in (alone.stdout, lines[2])]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_samples_are_of_this_version(page):
    """What commands print; the conditions of a measurement are in no block."""
    for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        versions = set(re.findall(r"ampfuse (\d+\.\d+\.\d+)", block))
        assert versions <= {build_info.VERSION}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_name_their_language(page):
    """Without one, the site colours shell commands and output as Python."""
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert all(fences[::2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pip_is_not_told_a_name_that_pypi_does_not_have(page):
    """Until there is a release: a folder, a file or an address works."""
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"pip install ([^`\n]*)", text):
        for word in shlex.split(command, comments=True):
            assert not re.fullmatch(r"ampfuse(\[\w+\])?([=<>~].*)?", word), command


# What people search for, and the page that answers.
ERRORS = {
    "cannot import name 'amp' from 'apex'": "from_apex.md",
    "No module named 'apex'": "from_apex.md",
    "Attempting to unscale FP16 gradients": "from_torch_amp.md",
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_that_people_search_for_are_found_as_they_are(error):
    assert error in (ROOT / "docs" / ERRORS[error]).read_text()


def test_what_others_have_and_ampfuse_too_is_not_denied():
    page = (ROOT / "docs" / "from_others.md").read_text()
    for name, *_, ours in cells(re.findall(r"^\|.*\|$", page, re.MULTILINE)):
        assert name not in optim.__all__ or not ours.startswith("no")


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


# What CONTRIBUTING.md says of an addition, an example of it, and the most files that it may cost.
ADDITIONS = {
    "an optimizer": ("lion", r"\b(Lion|LionOp|lion)\b", 6),
    "a storage type": ("8bit", r"8bit|kSigned8", 8),
    "a fused layer": ("norm", r"\blayer_norm\b|/norm\.h|ops(\(\))?\.norm\b", 7),
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_additions_cost_few_files(addition):
    name, pattern, most = ADDITIONS[addition]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition(f"## How to add {addition}\n")[2].partition("\n## ")[0]
    files = [line.strip("`").replace("NAME", name) for line, _ in cells(table(section, "| file"))]
    words = dict(enumerate("Five Six Seven Eight Nine Ten".split(), 5))
    assert f"\n{words[len(files)]} files change" in section
    assert len(files) <= most
    for file in files:
        assert re.search(pattern, (ROOT / file).read_text()), file


def test_functions_that_contributors_meet_are_there():
    called = re.findall(r"`(\w+)\([^`]*\)`", (ROOT / "CONTRIBUTING.md").read_text())
    files = [file for folder in ("csrc", "python/ampfuse") for file in (ROOT / folder).rglob("*.*")]
    code = [file.read_text() for file in files if file.suffix in (".h", ".cpp", ".cuh", ".py")]
    defined = {name for text in code for name in re.findall(r"\w+(?=\()", text)}
    assert {*called} - defined == {"help"}  # Python's


@pytest.mark.parametrize(
    ("identifier", "folders", "most"),
    [
        (r"\bLion(Op)?\b|\blion\b", ["csrc", "python/ampfuse/optim"], 4),
        (r"\bkRandomBFloat16\b", ["csrc"], 6),  # BF16 states
        (r"\b(norm_ops|NormBackward|NormWeights)\b", ["csrc"], 3),
    ],
    ids=["Lion", "BF16 states", "norms"],
)
def test_few_files_name_what_was_added(identifier, folders, most):
    """In code: comments and docstrings may."""
    files = []
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.*")):
        if file.suffix in (".h", ".cpp", ".cu", ".cuh", ".py"):
            comment = r"//[^\n]*" if file.suffix != ".py" else r'""".*?"""|#[^\n]*'
            if re.search(identifier, re.sub(comment, "", file.read_text(), flags=re.DOTALL)):
                files.append(file)
    assert 0 < len(files) <= most, files


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
        if inspect.isclass(item) and "Arguments:" not in text:
            continue
        parameters = (
            item.__annotations__ if is_typeddict(item) else inspect.signature(item).parameters
        )
        untold = [p for p in parameters if not re.search(rf"\b{p}\b", text)]
        assert not untold, f"{name}: its docstring does not tell of {untold}"
