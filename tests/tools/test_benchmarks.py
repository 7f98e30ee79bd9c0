"""The benchmarks run, every route arrives at the same weights, CSV files are read as written, and
medians and percentiles are right.

Nothing here asserts how long anything took.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import re
import subprocess
import sys
import tarfile
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases import NEEDS_BF16
from programs import python

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
CPU = torch.device("cpu")
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.fixture
def load(monkeypatch):
    """A module of the benchmarks by name, with small caches to flush and nothing to compile."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    measuring = importlib.import_module("harness.measuring")
    monkeypatch.setattr(measuring, "COLD_BYTES", 64)
    monkeypatch.setattr(measuring, "_SETTLING_S", 0)
    monkeypatch.setattr(importlib.import_module("harness.routes"), "_COMPILED_AT_MOST", {"cpu": 0})
    monkeypatch.setattr(importlib.import_module("harness.limits"), "_ELEMENTS", {"cpu": 1 << 12})
    return importlib.import_module


@pytest.fixture
def here(load, monkeypatch):
    """Workers run in this process."""
    measuring = load("harness.measuring")

    class Here(measuring.Worker):
        def __init__(self, device, host=False, with_ampfuse=False):
            measuring._begin(device, host, True)

        def submit(self, function, *arguments):
            return SimpleNamespace(result=lambda: function(*arguments))

        def shutdown(self, **options):
            pass

    for name in ("step", "nets", "layers", "language"):
        monkeypatch.setattr(load(name), "Worker", Here)
    return Here


@pytest.fixture
def main(load, monkeypatch):
    """Runs a script with arguments."""

    def run(name, *arguments):
        module = load(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()

    return run


@pytest.fixture
def traced(monkeypatch):
    """torch.compile only traces, in packages too."""
    compiled = torch.compile

    def trace(call, mode=None, **options):
        return compiled(call, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", trace)
    yield
    torch.compiler.reset()


def records(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def run_step(load, here, case):
    """The rows of `case` by variant."""
    clock = load("harness.measuring").Clock
    options = SimpleNamespace(repeats=2, no_compile=False, modes=False, meter=False, skips=False)
    with here(CPU) as worker:
        rows = load("step").run(case, clock(CPU), worker, options)
    return {row.variant: row for row in rows}


def test_rows_have_medians_percentiles_and_rates(load):
    times = {"ampfuse": [4.0, 1.0, 2.0, 3.0, 5.0, 6.0], "copy": [2.0] * 6, "peer": [7.0] * 6}
    moved, peers = {"ampfuse": 30.0, "copy": 30.0}, {"peer": "package 1.0"}
    more = {"params": 1_000_000, "bytes_per_param": moved, "peers": peers, "case": "name"}
    ours, copy, peer = load("harness.results").rows_of(CPU, times, **more)
    assert (ours.median_ms, ours.p20_ms, ours.p80_ms, ours.min_ms, ours.n) == (3.5, 2, 5, 1, 6)
    assert (ours.gb_per_s, copy.gb_per_s) == (8.571, 15.0)  # 30e6 bytes in 3.5 ms, and in 2
    assert (ours.share_of_copy, copy.share_of_copy) == (0.5714, 1.0)
    assert math.isnan(peer.gb_per_s)
    assert (ours.peer, peer.peer) == ("", "package 1.0")


def test_the_limit_counts_the_copy_of_the_update(load, monkeypatch):
    """Also if nothing has measured the copy: 8 bytes copied at 1 ms, 2 read at 4 ms."""
    limits = load("harness.limits")
    loops = [lambda: None], lambda: None, 1
    monkeypatch.setattr(limits, "_cpu_loops", lambda: loops)
    of_copy_and_read = {loops[0][0]: 2.0, loops[1]: 4.0}
    clock = SimpleNamespace(device=CPU, milliseconds=lambda call, _: of_copy_and_read[call])
    bounds = limits.bounds(clock, 10, 8.0, 2.0)
    assert (bounds["limit"](), bounds["copy"](), bounds["limit"]()) == (160, 100, 160)


def test_a_peers_process_imports_no_ampfuse():
    """It imports the script; ``quality`` and ``plan`` measure no speed."""
    code = (
        "import importlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'ampfuse' not in sys.modules, name"
    )
    end = python("-c", code, BENCHMARKS, *sorted({*SCRIPTS} - {"quality", "plan"}))
    assert end.returncode == 0, end.stderr


def test_a_worker_that_died_keeps_no_other_from_being_measured(load):
    measuring = load("harness.measuring")
    worker = measuring.Worker(CPU)
    future = Future()
    future.set_exception(BrokenProcessPool("a process died"))
    worker.submit = lambda *_: future
    with pytest.raises(measuring.WorkerError, match="a process died"):
        worker.variant(torch.ones, 1)
    worker.clear()


def test_new_rows_replace_those_of_the_same_key(load, tmp_path):
    """In their order, or where they were; rows of variants that a case no longer has go."""
    results = load("harness.results")
    path = tmp_path / "new" / "rows.csv"
    for case, milliseconds in (("b", 1.0), ("other", 2.0), ("a, 1", 3.0), ("b", 4.0)):
        rows = results.rows_of(CPU, {"ampfuse": [milliseconds] * 2}, case=case)
        results.put(path, [*map(asdict, rows)], ["case"], [("a, 1",), ("b",)])
    found = [(row.case, row.median_ms) for row in results.read(path)]
    assert found == [("a, 1", 3.0), ("b", 4.0), ("other", 2.0)]

    options = SimpleNamespace(csv=tmp_path / "rows.csv", only=[""])
    for run in (
        [("a", {"O5": [1.0], "O4": [2.0]}), ("b", {"O5": [3.0]})],
        [("c", {"O5": [4.0]}), ("a", {"O5": [5.0]}), ("a", {"FP32": [6.0]})],
    ):
        added = results.Results(options)
        for case, times in run:
            added.add(results.rows_of(CPU, times, case=case))
    found = [(row.case, row.variant, row.median_ms) for row in results.read(options.csv)]
    assert found == [("a", "O5", 5), ("a", "FP32", 6), ("b", "O5", 3), ("c", "O5", 4)]


def test_a_csv_without_the_newer_columns_is_read(load, tmp_path):
    old = tmp_path / "old.csv"
    old.write_text(
        "case,variant,threads,median_ms,p20_ms,p80_ms,min_ms,n,hardware,isa,torch,ampfuse,date\n"
        "c,ampfuse,2,2.5,2.0,3.0,1.0,11,cpu,avx2,2.14.1,0.1.0,2026-01-01\n"
    )
    (row,) = load("harness.results").read(old)
    assert (row.case, row.threads, row.median_ms, row.device) == ("c", 2, 2.5, "cpu")
    assert math.isnan(row.share_of_copy)


@pytest.mark.parametrize(
    "line",
    [
        "AdamW 64M clip fp16",
        "AdamW 64M clip fp32",
        "AdamW 64M alone fp32",
        "AdamW 64M alone bf16",
        "SGD 64M clip bf16",
        "AdamW resnet50 clip bf16",
        "AdamW 2000x500 clip bf16",
    ],
)
def test_every_route_takes_the_same_step(load, here, traced, capsys, line):
    optimizer, tensors, does, precision = line.split()
    wanted = {"ampfuse", "torch fused", "torch foreach"}
    if tensors == "resnet50":
        pytest.importorskip("torchvision")
    case = load("harness.cases").Case(optimizer, tensors, precision, does, quick=True)
    rows = run_step(load, here, case)
    if case.moves_memory:
        wanted |= {"copy", "limit"}
    assert wanted <= set(rows), capsys.readouterr().out
    beside = [name for name in rows if name.split()[0] not in ("ampfuse", "copy", "limit")]
    for row in rows.values():
        assert (row.case, row.params) == (case.name, case.params)
        assert row.n == (2 if row.variant in beside else 2 * len(beside))
    assert rows["ampfuse"].bytes_per_param == case.step_bytes


def test_the_step_script_measures(main, here, tmp_path, capsys):
    path = tmp_path / "step.csv"
    options = ["--quick", "--repeats", 2, "--threads", 1, "--csv", path]
    main("step", "--only", "sgd-64M-bf16", *options)
    rows = records(path)
    assert {row["case"] for row in rows} == {"quick-sgd-64M-bf16"}
    assert {row["variant"] for row in rows} >= {"ampfuse", "copy", "limit", "torch fused"}
    for row in rows:
        assert (row["optimizer"], row["dtype"], row["does"]) == ("SGD", "bf16", "clip")
        assert row["hardware"]
        assert row["torch"] == torch.__version__
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
    main("report", path)
    assert "| quick-sgd-64M-bf16 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no case's name holds 'nothing'"):
        main("step", "--only", "nothing", *options)


def test_the_layers_script_measures(main, here, tmp_path):
    path = tmp_path / "layers.csv"
    main("layers", "--quick", "--threads", 1, "--only", "rows-384", "--csv", path)
    assert [row["variant"] for row in records(path)] == ["torch", "fused", "copy"]


def test_the_language_script_measures_what_is_installed(
    load, main, here, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("transformers")
    monkeypatch.setitem(load("language").VARIANTS, "bitsandbytes AdamW8bit", Missing)
    path = tmp_path / "language.csv"
    options = ["--quick", "--repeats", 2, "--threads", 1, "--csv", path, "--only"]
    main("language", *options, "bitsandbytes", "O5, split")
    assert [row["variant"] for row in records(path)] == ["O5, split, 8bit"]
    reason = "not run (ImportError: No module named 'bitsandbytes')"
    assert f"bitsandbytes AdamW8bit: {reason}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no case's name holds 'nothing'"):
        main("language", *options, "nothing")


class Missing:
    def __init__(self, *arguments):
        raise ImportError("No module named 'bitsandbytes'")


def test_steps_of_the_host_are_measured(main, here, tmp_path):
    path = tmp_path / "host.csv"
    main("step", "--host", "--quick", "--repeats", 2, "--only", "fp16", "--csv", path)
    measured = {(row["case"], row["variant"]) for row in records(path)}
    variants = ["ampfuse", "torch fused", "torch foreach"]
    cases = [f"quick-adamw-2000x1-fp16-{kind}" for kind in ("same", "new")]
    assert measured == {(case, variant) for case in cases for variant in variants}
    main("report", path)


@pytest.mark.slow
@NEEDS_BF16  # or torch's variants take minutes
def test_levels_of_the_host_and_parts_of_a_network_are_measured(main, here, traced, tmp_path):
    path = tmp_path / "nets.csv"
    main("nets", "--host", "--quick", "--csv", path)
    assert {row["case"] for row in records(path)} == {"mlp-step", "transformer-step"}
    main("nets", "--quick", "--parts", "--only", "resnet18", "--csv", path)
    variants = {row["variant"] for row in records(path)}
    assert variants > {"FP32", "O5", "O5, recomputed", "O5, clipped", "convolutions"}
    main("report", path)


@pytest.mark.parametrize("network", ["gpt", pytest.param("wrn16_4", marks=pytest.mark.slow)])
def test_every_variant_of_a_network_takes_the_same_step(load, traced, network):
    """Its first loss and the update are those of FP32, as far as BF16 goes."""
    pytest.importorskip("transformers")
    nets = load("nets")
    losses_of = {}
    options = SimpleNamespace(host=False, device=CPU, parts=True, no_compile=False)
    variants = {
        name: variant
        for name, variant in nets.variants_of(network, options).items()
        if name not in nets.KINDS
    }
    assert {"torch.amp, expert", "O5, compiled", "O5, torch's loss", "O4"} < set(variants)
    for name, make in variants.items():
        torch.compiler.reset()
        step = make(network, True, CPU)
        losses = []
        for _ in range(3):
            losses.append(step.loss(step.x, step.y).item())
            step()
        losses_of[name] = torch.tensor(losses)
    assert not torch.allclose(losses_of["FP32"][2], losses_of["FP32"][0], rtol=0.01)
    for name, losses in losses_of.items():
        expected = losses_of["O5, clipped" if "clipp" in name else "FP32"]
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0, msg=name)


SMALL_LAYERS = ("norm-8-4", "norm-16-4-residual", "rows-96", "rms-768", "gelu_tanh-3072")


@pytest.mark.parametrize("case", [*SMALL_LAYERS, "silu-11008-gated"])
def test_a_fused_layer_computes_what_torchs_do(load, monkeypatch, case):
    layers = load("layers")
    monkeypatch.setattr(layers, "ROWS", dict.fromkeys(layers.ROWS, (8, 64)))
    small = layers.layer_of(case, "cpu")._replace(count=1)
    monkeypatch.setattr(layers, "layer_of", lambda *_: small)
    plain, fused = (layers.Call(case, variant, CPU) for variant in ("torch", "fused"))
    for y, expected in zip(
        fused.outputs(plain.layers[0]), plain.outputs(plain.layers[0]), strict=True
    ):
        torch.testing.assert_close(y, expected, atol=0.02, rtol=0.02)
    plain()
    fused()


@pytest.mark.parametrize(
    ("task", "variant"),
    [
        ("text", "BF16, stochastic"),
        pytest.param("wide-resnet", "split, 8bit", marks=pytest.mark.slow),
        pytest.param("wrn16_4", "O5, fused", marks=pytest.mark.slow),
        pytest.param("wrn16_4, Muon", "O5, split, 8bit", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_a_curve_with_the_trained_network_at_its_end(
    load, monkeypatch, tmp_path, task, variant
):
    pytest.importorskip("sklearn")
    quality = load("quality")
    monkeypatch.setattr(load("harness.data"), "_TEXT", 40_000)
    data = tuple(x[:32] for x in quality.TASKS[task].data())
    if task.startswith("wrn"):
        data = tuple(x[..., :8, :8] if x.dim() == 4 else x for x in data)
    short = quality.TASKS[task]._replace(steps=51, batch=2, data=lambda: data)
    monkeypatch.setitem(quality.TASKS, task, short)
    rows = quality.train(task, variant, 0)
    assert [row["step"] for row in rows] == [*range(2, 51, 2), 51]
    assert all(row["loss"] > 0 for row in rows)
    assert [math.isnan(row["accuracy"]) for row in rows] == [True] * 25 + [False]
    path = tmp_path / "rows.csv"
    quality.save(path, rows)
    quality.save(path, rows)
    assert len(records(path)) == 26
    (line,) = quality.table(records(path))[2:]
    assert line.startswith(f"| {task} | {variant} | {rows[-1]['loss']:.4g} (")
    assert line.endswith(" | yes, yes |")


def test_a_csv_fills_in_where_a_comment_names_it(load, tmp_path):
    results, page = load("harness.results"), tmp_path / "page.md"
    text = "Before.\n<!-- a.csv -->\n{}<!-- end -->\n\nAfter.\n<!-- end -->\n"
    page.write_text(text.format("old\n"))
    for name in ("a.csv", "a.csv", "other.csv"):
        (row,) = results.rows_of(CPU, {"fused": [20.0] * 3}, case="b")
        results.write(tmp_path / name, [asdict(row)])
        load("report").fill(page, tmp_path / name)
    head, table, tail = re.split(r"(?<=a.csv -->\n)|(?=<!-- end -->\n\n)", page.read_text())
    assert head + tail == text.format("")
    assert table.count("| b | 20.0 (20.0-20.0) |") == 1
    (tmp_path / "a.csv").unlink()
    load("report").fill(page, tmp_path / "a.csv")
    assert page.read_text() == text.format("Not measured yet.\n")


def test_shell_scripts_parse():
    for script in BENCHMARKS.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)


GATE = (BENCHMARKS / "gpu_gate.sh").read_text()
CALLS = dict(re.findall(r'^  \[(\d)\]="(.*)"$', GATE, re.MULTILINE))


def test_the_gate_asks_for_the_packages_of_the_experiments():
    training = (ROOT / "python/ampfuse/experiments/sweep.py").read_text()
    (checked,) = re.findall(r'check_installed\("experiments", (.*)\)', training)
    (asked,) = re.findall(r"^experiments\(\) {\n  needs_packages (.*)", GATE, re.MULTILINE)
    assert {*asked.split(",")} == {*re.findall(r"\w+", checked)}


def test_the_counters_are_taken_of_calls_that_run(load, monkeypatch):
    """On small tensors; and ncu runs the script itself."""
    counters = load("counters")
    monkeypatch.setattr(load("layers"), "BATCH", {"cpu": 1})
    calls = counters.calls(CPU, replace(counters.CASE, quick=True))
    assert len([call() for call in calls]) == 5
    command = counters.command()
    assert command[0] == "ncu"
    assert command[-3:] == [sys.executable, counters.__file__, "--profiled"]


TOOL = """#!/bin/sh
basename "$0"
for word; do
  case $word in benchmarks/* | docs/* | tests/*) ls "$word" || exit ;; esac
done
"""


@pytest.mark.parametrize("call", CALLS)
def test_each_call_of_the_gate_runs_its_parts_in_nine_minutes(call, tmp_path):
    """With tools that print their names, and fail where a file that they are given is not there."""
    parts = dict(part.split(":") for part in CALLS[call].split())
    assert sum(map(int, parts.values())) <= 9 * 60
    assert list(parts)[:2] == ["machine", "build"]  # it may be another machine than before
    names = ("python3", "cmake", "nvidia-smi", "compute-sanitizer", "ncu", "nvcc")
    tools = [tmp_path / "tools" / name for name in names]
    tools.append(tmp_path / "ampfuse_gpu_tests")
    for tool in tools:
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(TOOL)
        tool.chmod(0o755)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "step_cuda.csv").touch()
    environment = {"PATH": f"{tools[0].parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"OUT": str(tmp_path / "out"), "BUILD": os.path.relpath(tmp_path, ROOT)}
    run = [BENCHMARKS / "gpu_gate.sh", call]
    end = subprocess.run(run, capture_output=True, text=True, env={**os.environ, **environment})
    assert end.returncode == 0, end.stdout
    with tarfile.open(tmp_path / "out" / "gpu_gate.tar.gz") as archive:
        files = {Path(name).name for name in archive.getnames()}
        summary = archive.extractfile("./summary.txt").read().decode()
    assert re.findall(r"^(\w+) +ok ", summary, re.MULTILINE) == [*parts]
    assert {f"{name}.log" for name in parts} < files
