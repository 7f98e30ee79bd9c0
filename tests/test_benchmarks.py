"""The benchmarks: they run, every route arrives at the same weights, and their arithmetic is right.

Nothing here asserts how long anything took.
"""

from __future__ import annotations

import csv
import ctypes
import functools
import importlib
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
STEP_CSV = BENCHMARKS / "results" / "step_cpu.csv"


@pytest.fixture
def load(monkeypatch):
    """A module of the benchmarks by name, with small caches to flush and nothing to compile."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(importlib.import_module("harness"), "_last_level_cache_bytes", lambda _: 64)
    monkeypatch.setattr(importlib.import_module("routes"), "_COMPILED_AT_MOST", {"cpu": 0})
    return importlib.import_module


@pytest.fixture
def main(load, monkeypatch):
    """Runs a script with arguments."""

    def run(name, *arguments):
        module = load(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()

    return run


def records(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- shapes ---------------------------------------------------------------------------------------


def test_parameter_counts(load):
    shapes = load("shapes")
    assert sum(map(math.prod, shapes.resnet50())) == 25_557_032
    assert sum(map(math.prod, shapes.vit_b())) == 86_567_656
    assert sum(map(math.prod, shapes.gpt2_medium())) == 354_823_168


@pytest.mark.parametrize(("name", "theirs"), [("resnet50", "resnet50"), ("vit_b", "vit_b_16")])
def test_shapes_are_torchvisions(load, name, theirs):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        model = getattr(models, theirs)()
    expected = [tuple(param.shape) for param in model.parameters()]
    assert getattr(load("shapes"), name)() == expected


@pytest.mark.parametrize(
    ("name", "theirs"), [("resnet50", "resnet50"), ("vit_b", "vit_base_patch16_224")]
)
def test_shapes_are_timms(load, name, theirs):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(theirs)
    expected = sorted(tuple(param.shape) for param in model.parameters())
    assert sorted(getattr(load("shapes"), name)()) == expected


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "precision", "does", "least"),
    [
        ("AdamW", "bf16", "clip", 30),  # 2 + 2 + 8 + 16 + 2
        ("AdamW", "fp16", "noclip", 30),
        ("AdamW", "fp16", "alone", 28),
        ("AdamW", "fp32", "clip", 36),  # 4 + 4 + 8 + 16 + 4: the gradient is left unscaled
        ("AdamW", "fp32", "leave", 32),
        ("AdamW", "fp32", "alone", 28),
        ("SGD", "bf16", "clip", 22),  # 2 + 2 + 8 + 8 + 2
        ("SGD", "fp32", "alone", 20),
        ("LAMB", "fp16", "clip", 42),  # 30, and weight and moments read again
    ],
)
def test_bytes_of_a_step(load, optimizer, precision, does, least):
    case = load("workloads").Case(optimizer, "64M", precision, does)
    assert case.step_bytes == least
    weights = [torch.zeros(3, dtype=case.dtype)]
    assert load("routes").Ours(case, weights, weights).bytes_per_param == least


@pytest.mark.parametrize(
    ("optimizer", "precision", "does", "fused", "foreach"),
    [
        # copy 6, unscale 8, norm 4, clip 8, update 28 (foreach 80), copy back 6
        ("AdamW", "fp16", "clip", 60, 112),
        # copy 6, check 8, update 28 that writes gradients 4, copy back 6; foreach: unscale 8
        ("AdamW", "bf16", "noclip", 52, 100),
        ("AdamW", "bf16", "alone", 40, 92),
        ("AdamW", "fp32", "clip", 48, 100),
        ("AdamW", "fp32", "noclip", 40, 88),
        ("AdamW", "fp32", "alone", 28, 80),
        ("SGD", "fp16", "clip", 52, 76),
        ("SGD", "fp32", "alone", 20, 44),
    ],
)
def test_bytes_of_torchs_routes(load, optimizer, precision, does, fused, foreach):
    case = load("workloads").Case(optimizer, "64M", precision, does)
    weights = [torch.zeros(3, dtype=case.dtype)]
    counted = {
        name: peer.build(case, weights, weights).bytes_per_param
        for name, peer in load("routes").peers(case, torch.device("cpu")).items()
        if name.startswith("torch")
    }
    assert counted == {"torch fused": fused, "torch foreach": foreach}


def test_rows(load):
    harness = load("harness")
    times = {"ampfuse": [4.0, 1.0, 2.0, 3.0, 5.0, 6.0], "copy": [2.0], "peer": [7.0]}
    times = {name: values * (6 // len(values)) for name, values in times.items()}
    rows = harness.rows_of(
        torch.device("cpu"),
        times,
        params=1_000_000,
        bytes_per_param={"ampfuse": 30.0, "copy": 30.0},
        peers={"peer": "package 1.0"},
        case="name",
    )
    ours, copy, peer = rows
    assert (ours.median_ms, ours.p20_ms, ours.p80_ms, ours.min_ms, ours.n) == (3.5, 2, 5, 1, 6)
    assert ours.gb_per_s == 8.571  # 30e6 bytes in 3.5 ms
    assert copy.gb_per_s == 15.0
    assert (ours.share_of_copy, copy.share_of_copy) == (0.5714, 1.0)
    assert math.isnan(peer.gb_per_s)
    assert (ours.peer, peer.peer) == ("", "package 1.0")


# --- measuring ------------------------------------------------------------------------------------


class FakeClock:
    """Time is what the call adds to it."""

    now = 0.0

    def milliseconds(self, call, queueing_ms=0.0):
        start = self.now
        call()
        return self.now - start


def test_measure_takes_turns_and_leaves_out_what_is_not_the_call(load):
    clock, log = FakeClock(), []

    class Route:
        def prepare(self):
            log.append("prepare")
            clock.now += 100

        def __call__(self):
            log.append("route")
            clock.now += len(log)

    def bound():
        log.append("bound")
        clock.now += 1000
        return 7.5

    times = load("harness").measure(clock, {"route": Route(), "bound": bound}, repeats=2)
    assert log == ["prepare", "route", "bound"] * 4
    assert times == {"route": [8.0, 11.0], "bound": [7.5, 7.5]}  # after two rounds of warming up


def test_csv_round_trip(load, tmp_path):
    harness = load("harness")
    times = {"ampfuse": [1.0, 2.0], "copy": [1.0, 1.0]}
    moved = {"ampfuse": 30.0, "copy": 30.0}
    rows = harness.rows_of(
        torch.device("cpu"), times, params=9, bytes_per_param=moved, case="a, b", optimizer="SGD"
    )
    harness.write(tmp_path / "new" / "rows.csv", rows)
    assert harness.read(tmp_path / "new" / "rows.csv") == rows


def test_a_csv_without_the_newer_columns_is_read(load, tmp_path):
    old = tmp_path / "old.csv"
    old.write_text(
        "case,variant,threads,median_ms,p20_ms,p80_ms,min_ms,n,hardware,isa,torch,ampfuse,date\n"
        "c,ampfuse,2,2.5,2.0,3.0,1.0,11,cpu,avx2,2.14.1,0.1.0,2026-01-01\n"
    )
    (row,) = load("harness").read(old)
    assert (row.case, row.threads, row.median_ms, row.device) == ("c", 2, 2.5, "cpu")
    assert math.isnan(row.share_of_copy)


# --- step.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "AdamW 64M clip fp16",
        "AdamW 64M noclip bf16",
        "AdamW 64M clip fp32",
        "AdamW 64M alone fp32",
        "AdamW 64M alone bf16",
        "SGD 64M clip bf16",
        "SGD 64M noclip fp16",
        "AdamW vit-b-groups clip fp16",
        "AdamW 2000x500 clip bf16",
    ],
)
def test_every_route_takes_the_same_step(load, capsys, line):
    workloads, step = load("workloads"), load("step")
    optimizer, tensors, does, precision = line.split()
    case = workloads.Case(optimizer, tensors, precision, does, quick=True)
    rows = {row.variant: row for row in step.run(case, torch.device("cpu"), repeats=2)}
    wanted = ["ampfuse", "torch fused", "torch foreach"]
    if case.moves_memory:
        wanted += ["copy", "limit"]
    assert set(wanted) <= set(rows), capsys.readouterr().out
    for row in rows.values():
        assert (row.case, row.params, row.n) == (case.name, case.params, 2)
    ours = rows["ampfuse"]
    assert ours.bytes_per_param == case.step_bytes
    assert ours.gb_per_s == pytest.approx(
        case.params * case.step_bytes / ours.median_ms / 1e6, rel=0.01
    )
    if "copy" in rows:
        assert ours.share_of_copy == pytest.approx(ours.gb_per_s / rows["copy"].gb_per_s, rel=0.01)


def test_lamb_steps_as_timms(load, capsys):
    pytest.importorskip("timm")
    case = load("workloads").Case("LAMB", "64M", "bf16", quick=True)
    rows = {row.variant: row for row in load("step").run(case, torch.device("cpu"), repeats=2)}
    assert set(rows) == {"ampfuse", "copy", "limit", "timm Lamb"}, capsys.readouterr().out
    assert rows["timm Lamb"].peer.startswith("timm ")


def test_a_compiled_optimizer_is_a_route_of_few_tensors(load, monkeypatch):
    workloads, routes = load("workloads"), load("routes")
    monkeypatch.setattr(routes, "_COMPILED_AT_MOST", {"cpu": 4})
    for tensors, compiled in (("64M", True), ("2000x500", False), ("vit-b-groups", False)):
        case = workloads.Case("AdamW", tensors, "bf16")
        assert ("torch compiled" in routes.peers(case, torch.device("cpu"))) == compiled


class Wrong:
    """A route that arrives elsewhere."""

    bytes_per_param = 1.0

    def __init__(self, case, weights, gradients):
        self.params = [weight + 1 for weight in weights]

    def __call__(self):
        pass


def test_a_peer_that_does_not_run_is_named_and_left_out(load, monkeypatch, capsys):
    step, routes = load("step"), load("routes")

    def missing(*arguments):
        raise ImportError("No module named 'missing'")

    def broken(*arguments):
        raise RuntimeError("no such device")

    peers = {
        "missing": routes.Peer(missing, "missing"),
        "broken": routes.Peer(broken),
        "wrong": routes.Peer(Wrong),
        "other": routes.Peer(Wrong, agrees=False),
    }
    monkeypatch.setattr(step, "peers", lambda *arguments: peers)
    case = load("workloads").Case("AdamW", "2000x500", "bf16", quick=True)
    rows = step.run(case, torch.device("cpu"), repeats=2)
    assert [row.variant for row in rows] == ["ampfuse", "other"]
    said = capsys.readouterr().out
    assert "missing: not installed (No module named 'missing')" in said
    assert "broken: not run (RuntimeError: no such device)" in said
    assert "wrong: not run (AssertionError" in said


@pytest.mark.parametrize("does", ["clip", "noclip", "alone"])
@pytest.mark.parametrize("fused", [True, False], ids=["with a scaler", "no scaler drives it"])
def test_an_optimizer_on_the_parameters_themselves(load, monkeypatch, capsys, does, fused):
    step, routes = load("step"), load("routes")

    def build(case, weights, gradients):
        def make(params):
            return torch.optim.AdamW(params, fused=fused, **routes.OPTIONS["AdamW"])

        return routes.OnHalf(case, weights, gradients, make)

    monkeypatch.setattr(step, "peers", lambda *arguments: {"peer": routes.Peer(build)})
    case = load("workloads").Case("AdamW", "2000x500", "fp32", does, quick=True)
    rows = step.run(case, torch.device("cpu"), repeats=2)
    assert [row.variant for row in rows] == ["ampfuse", "peer"], capsys.readouterr().out


def test_peers_that_memory_does_not_hold_together_are_measured_apart(load, monkeypatch):
    step = load("step")
    monkeypatch.setattr(step, "_free_bytes", lambda device: 0)
    case = load("workloads").Case("AdamW", "2000x500", "bf16", quick=True)
    device = torch.device("cpu")
    rows = {row.variant: row.n for row in step.run(case, device, repeats=2)}
    torch_routes = {"torch fused", "torch foreach"}
    assert {name: rows[name] for name in torch_routes} == dict.fromkeys(torch_routes, 2)
    assert rows["ampfuse"] >= 4


def test_step_script(main, tmp_path, capsys):
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
    main("table", path)
    main("plot", path)
    assert "quick-sgd-64M-bf16" in capsys.readouterr().out
    for name in ("step.png", "step_roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no case's name holds 'nothing'"):
        main("step", "--only", "nothing", *options)


def test_every_case_has_its_own_name(load):
    cases = load("workloads").cases
    for device in ("cpu", "cuda"):
        names = [case.name for case in cases(device, wide=True)]
        assert len(set(names)) == len(names)
        assert {case.name for case in cases(device)} < set(names)


# --- host_time.py, o1_host.py, syncs.py ---------------------------------------------------------


def test_host_time_script(main, tmp_path):
    path = tmp_path / "host.csv"
    main("host_time", "--quick", "--repeats", 2, "--only", "fp16", "--csv", path)
    found = {(row["case"], row["variant"]) for row in records(path)}
    cases = [f"quick-adamw-2000x1-fp16-{kind}" for kind in ("same", "new")]
    variants = ["ampfuse", "ampfuse, without its core"]
    variants += ["torch fused", "torch foreach"]
    assert found == {(case, variant) for case in cases for variant in variants}
    main("table", path)
    main("plot", path)
    assert (tmp_path / "host.png").exists()
    assert not (tmp_path / "host_roofline.png").exists()  # no bandwidth in it


def test_sharded_host_script(main, tmp_path):
    path = tmp_path / "sharded.csv"
    main("sharded_host", "--quick", "--repeats", 2, "--csv", path)
    found = {(row["case"], row["variant"]) for row in records(path)}
    cases = [f"adamw-20x1-1ranks-{kind}" for kind in ("same", "new")]
    variants = ["ampfuse, whole", "ampfuse, shards", "torch fused, shards"]
    assert found == {(case, variant) for case in cases for variant in variants}


def test_o1_host_script(main, tmp_path):
    path = tmp_path / "o1.csv"
    main("o1_host", "--quick", "--repeats", 2, "--only", "mlp", "--csv", path)
    found = {(row["case"], row["variant"]) for row in records(path)}
    variants = ["torch.amp", "ampfuse O1", "ampfuse.compat", "ampfuse.compat, outside", "FP32"]
    assert found == {(f"mlp-{what}", name) for what in ("pass", "step") for name in variants}


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_o1_variants_train_alike_and_leave_the_process_as_it_was(load, model):
    o1_host, cpu = load("o1_host"), torch.device("cpu")
    o1_host.Training(model, cpu, True).prepare()
    before = torch.nn.functional.layer_norm
    variants = {name: make(model, cpu, True) for name, make in o1_host.VARIANTS.items()}
    losses = {}
    for name, variant in variants.items():
        variant.prepare()
        casts = "compat" in name
        assert (torch.nn.functional.layer_norm is not before) == casts
        for _ in range(2):
            variant()
        losses[name] = float(variant.loss().detach())
    assert torch.nn.functional.layer_norm is before
    for loss in losses.values():
        assert loss == pytest.approx(losses["FP32"], rel=0.02)


def test_new_gradients_are_other_tensors(load):
    host_time, routes = load("host_time"), load("routes")
    case = load("workloads").Case("AdamW", "2000x1", "fp16", quick=True)
    weights, gradients = load("step").tensors_of(case, torch.device("cpu"))
    peers = routes.peers(case, torch.device("cpu"))
    made = [routes.Ours(case, weights, gradients)]
    made += [peers[name].build(case, weights, gradients) for name in host_time._ROUTES]
    for route in made:
        new = host_time.NewGradients(route, gradients)
        new.prepare()
        new()
        before = [param.grad for param in route.params]
        new.prepare()
        after = [param.grad for param in route.params]
        assert not {g.data_ptr() for g in before} & {g.data_ptr() for g in after}
        for gradient, value in zip(after, gradients, strict=True):
            torch.testing.assert_close(gradient.float(), value.float())


def test_time_without_the_core_leaves_the_optimizer_as_it_was(load):
    host_time, routes = load("host_time"), load("routes")
    case = load("workloads").Case("AdamW", "2000x1", "bf16", quick=True)
    ours = routes.Ours(case, *load("step").tensors_of(case, torch.device("cpu")))
    ours()
    table = ours.optimizer._table
    before = [param.detach().clone() for param in ours.params]
    assert isinstance(host_time.WithoutCore(ours)(), float)
    assert ours.optimizer._table is table
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.params, strict=True))


def test_items_are_counted(load):
    value = torch.ones(())

    def step():
        for _ in range(3):
            value.item()

    assert load("syncs").count(step, torch.device("cpu"), steps=2) == (0, 0, 3)


def test_syncs_script(main, tmp_path):
    path = tmp_path / "syncs.csv"
    main("syncs", "--device", "cpu", "--steps", 2, "--csv", path)
    items = {row["variant"]: float(row["items"]) for row in records(path)}
    assert {name for name, number in items.items() if number} == {"torch fused", "torch foreach"}
    assert {"ampfuse O5", "ampfuse O4", "ampfuse GradScaler"} < set(items)


# --- cuDNN ----------------------------------------------------------------------------------------

CUDNN = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "include"


class Declared:
    """In the place of the library: what is passed must be what its headers declare."""

    def __init__(self):
        headers = "".join((CUDNN / f"cudnn_{name}.h").read_text() for name in ("ops", "graph"))
        self.headers = re.sub(r"/\*.*?\*/", "", headers, flags=re.S)
        self.called = []

    def __getattr__(self, name):
        declared = re.search(rf"\b{name}\(([^;]*)\);", self.headers)[1].split(",")

        def function(*arguments):
            self.called.append(name)
            for argument, parameter in zip(arguments, declared, strict=True):
                kind, pointer = parameter.split()[:-1], "*" in parameter
                if kind == ["double"]:
                    assert type(argument) is ctypes.c_double
                elif kind == ["size_t"] and not pointer:
                    assert type(argument) is ctypes.c_size_t
                elif kind == ["int"] or re.search(r"(Mode|Ops|Format|Type|Propagation)_t", kind[0]):
                    assert type(argument) is int
                else:  # an address or a handle, which is one too
                    assert argument is None or type(argument) in ADDRESSES
            return 0

        self.__dict__[name] = function
        return function


ADDRESSES = (ctypes.c_void_p, type(ctypes.byref(ctypes.c_int())))


@pytest.mark.skipif(not CUDNN.exists(), reason="this torch comes without cuDNN's headers")
@pytest.mark.parametrize("residual", [False, True])
def test_cudnn_is_called_as_its_headers_say(load, monkeypatch, residual):
    cudnn, library = load("cudnn_norm"), Declared()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90000)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    x = torch.randn(2, 8, 3, 3).half().contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="cuDNN differs from torch"):  # nothing was computed
        cudnn.CudnnNorm(x, residual)
    passes = [name for name in library.called if name.startswith("cudnnBatchNormalization")]
    assert passes == [f"cudnnBatchNormalization{way}Ex" for way in ("ForwardTraining", "Backward")]


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
def test_cudnn_computes_what_torch_does(load, residual):
    x = (
        torch.randn(4, 64, 14, 14, device="cuda")
        .half()
        .contiguous(memory_format=torch.channels_last)
    )
    load("cudnn_norm").CudnnNorm(x, residual)


# --- what is published ----------------------------------------------------------------------------


def test_table(load):
    harness, table = load("harness"), load("table")
    times = {
        "ampfuse": [2.0, 2.0],
        "copy": [1.5, 1.5],
        "limit": [1.6, 1.6],
        "torch fused": [5.0, 5.0],
        "torch foreach": [9.0, 9.0],
        "DeepSpeed CPUAdam": [2.2, 2.2],
    }
    rows = harness.rows_of(
        torch.device("cpu"),
        times,
        params=1_000_000,
        bytes_per_param={"ampfuse": 30.0, "copy": 30.0},
        peers={"DeepSpeed CPUAdam": "deepspeed 1"},
        case="c",
    )
    cells = table.cells("c", rows)
    assert cells["ampfuse, ms"] == "2.00 (2.00-2.00)"
    assert cells["ampfuse / limit"] == "1.25"
    assert cells["share of copy bandwidth"] == "75% of 20 GB/s"
    assert cells["fastest torch route, ms"] == "5.00 (5.00-5.00) fused"
    assert cells["ampfuse is faster by"] == "**2.5x**"
    assert cells["than others"] == "DeepSpeed CPUAdam 1.10x"
    few = [row for row in rows if row.variant in ("ampfuse", "copy")]
    header = "| step | threads | ampfuse, ms | share of copy bandwidth |"
    assert table.table(few).splitlines()[:2] == [header, "|---|---|---|---|"]


def documented(header):
    """The lines of the table in docs/benchmarks.md that starts with `header`."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    return text[text.index(header) :].split("\n\n")[0].splitlines()


def test_the_documentation_has_the_table_of_the_csv(load):
    lines = load("table").table(load("harness").read(STEP_CSV)).splitlines()
    assert documented("| step | threads |") == lines


def test_the_documentation_has_the_accuracies_of_the_csv(load):
    pytest.importorskip("sklearn")
    fused = load("fused_accuracy")
    lines = fused.lines(load("harness").read(fused._CSV, fused.Row))
    assert documented("| network | level |")[2:] == lines


@pytest.mark.slow
def test_accuracies_with_and_without_fused_batch_norms(load, main, monkeypatch, tmp_path, capsys):
    """Two seeds of trainings that are all but none."""
    for package in ("sklearn", "torchvision", "timm"):
        pytest.importorskip(package)
    fused = load("fused_accuracy")
    short = "--recipe e2 --model wrn10_1 --data digits --image-size 8 --iterations 2"
    settings = functools.partial(fused.Settings, epochs=1, width=8)
    for name, value in {
        "_CSV": tmp_path / "results" / "fused.csv",
        "_SEEDS": 2,
        "_PLAIN": ("O0", "O5"),
        "_FUSED": ("O5",),
        "_E2": f"{short} --batch-size 8 --repeats 2 --device cpu --quiet --arm".split(),
        "Settings": settings,
    }.items():
        monkeypatch.setattr(fused, name, value)
    main("fused_accuracy")
    rows = load("harness").read(fused._CSV, fused.Row)
    arms = [("O0", 0, 0), ("O0", 0, 1), *(("O5", f, seed) for f in (0, 1) for seed in (0, 1))]
    assert [(r.network, r.level, r.fused, r.seed) for r in rows] == [
        (network, *arm) for network in ("demo", "wrn10_1") for arm in arms
    ]
    assert all(0 <= row.test_accuracy <= 1 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.sh")))
def test_shell_scripts_parse(name):
    subprocess.run(["bash", "-n", BENCHMARKS / name], check=True)


def test_the_gate_runs_benchmarks_that_exist():
    gate = (BENCHMARKS / "gpu_gate.sh").read_text()
    names = re.findall(r"\bpart \w+ \S+ measure (\w+) \w+", gate)
    assert {"step", "host_time", "syncs"} <= set(names)
    assert all((BENCHMARKS / f"{name}.py").exists() for name in names)


@pytest.fixture
def gate(tmp_path):
    """gate(PARTS, **environment): runs the script where every tool does nothing, and says so."""
    tools = tmp_path / "tools"
    tools.mkdir()
    # What the stand-ins do: "fail NAME" fails, "hang NAME" does not end, of any of their arguments.
    # What a compiler is told to make is there then, and what a program is to run must be.
    stand_in = f"""#!/bin/sh
        for word in $FAIL; do case "$(basename "$0") $*" in *$word*) exit 3 ;; esac; done
        for word in $HANG; do case "$(basename "$0") $*" in *$word*) sleep 60 ;; esac; done
        case "$*" in *units.py*) exec {sys.executable} "$@" ;; esac
        echo "$(basename "$0") $*" | head -n 1
        for word; do
            case "$0 $before" in */nvcc" "-o) cp "$0" "$word" ;; esac
            case $word in */test_core) [ -x "$word" ] || exit 4 ;; esac
            before=$word
        done"""
    for name in ("python3", "cmake", "nvcc", "nvidia-smi", "compute-sanitizer", "ncu"):
        (tools / name).write_text(stand_in)
        (tools / name).chmod(0o755)

    def run(parts, **environment):
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        environment |= {"PARTS": parts, "PATH": path, "PYTHON": "python3"}
        environment |= {"OUT": str(tmp_path / "out"), "BUILD": os.path.relpath(tmp_path, ROOT)}
        program = [BENCHMARKS / "gpu_gate.sh"]
        result = subprocess.run(
            program, capture_output=True, text=True, env={**os.environ, **environment}
        )
        with tarfile.open(tmp_path / "out" / "gpu_gate.tar.gz") as archive:
            names = {Path(name).name for name in archive.getnames()}
            summary = archive.extractfile("./summary.txt").read().decode()
        found = re.findall(r"^(\w+) +([A-Z]{2,}|ok) ", summary, re.MULTILINE)
        assert {f"{name}.log" for name, status in found if status != "SKIPPED"} <= names
        assert len(list((tmp_path / "out").iterdir())) <= 8
        return result.returncode, dict(found)

    return run


def test_the_gate_runs_all_its_parts(gate):
    script = (BENCHMARKS / "gpu_gate.sh").read_text()
    parts = re.search(r"^PARTS=\$\{PARTS:-([^}]*)\}", script, re.MULTILINE)[1].split()
    code, found = gate(" ".join(parts))
    assert found == dict.fromkeys(["machine", *parts], "ok")
    assert code == 0


@pytest.mark.parametrize("part", ["core", "memcheck", "racecheck", "initcheck"])
def test_each_part_of_the_gate_has_the_tests_of_the_core(gate, tmp_path, part):
    """Built by the part itself, or brought along, and then no compiler is asked."""
    assert gate(part) == (0, {"machine": "ok", part: "ok"})
    built = tmp_path / "core"
    brought = built.rename(tmp_path / "brought")
    assert gate(part, CORE=str(brought), FAIL="nvcc") == (0, {"machine": "ok", part: "ok"})
    assert not built.exists()


def test_what_fails_or_hangs_in_the_gate_keeps_no_other_from_running(gate):
    code, found = gate("build tests core", FAIL="cmake", HANG="test_gpu.py", LIMIT="1")
    assert found == {"machine": "ok", "build": "FAILED", "tests": "TIMEOUT", "core": "ok"}
    assert code == 2


def test_what_the_gate_does_first(gate):
    """In eight minutes, whatever hangs; and its parts add up in one archive over several runs."""
    script = (BENCHMARKS / "gpu_gate.sh").read_text()
    body = script[script.index("if wanted first") : script.index("if wanted build")]
    seconds = [int(number) for number in re.findall(r"\bpart \w+ (\d+) ", body)]
    assert sum(seconds) + 20 <= 8 * 60
    _, first = gate("first")
    assert set(first) == {"machine", "build", "core", "tests", "step_first", "counters"}
    assert set(gate("syncs")[1]) == {*first, "syncs"}
