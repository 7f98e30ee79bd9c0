"""The doctor's findings on scripts with known answers, on bad ones, and on traces by hand."""

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

import programs
from ampfuse import hardware
from ampfuse.__main__ import main
from ampfuse.doctor import examine, report, watch
from ampfuse.doctor.profile import CLOSURE, STEP, Event, Operation, Profile
from ampfuse.doctor.report import Report, Share
from cases import NEEDS_BF16

CPU = torch.device("cpu")
HEAD = """
import itertools, time
import torch
from torch import nn
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __init__(self, seconds): self.seconds = seconds
    def __len__(self): return 10_000
    def __getitem__(self, i): time.sleep(self.seconds(i)); return torch.randn(16)
def train(model, inputs, optimizer=torch.optim.SGD, **options):
    optimizer = optimizer(model.parameters(), lr=1e-4, **options)
    for x in inputs if isinstance(inputs, DataLoader) else itertools.repeat(inputs):
        yield optimizer
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""

SLOW_DATA = """
for _ in train(nn.Linear(16, 16), DataLoader(Slow(lambda i: 0.002), batch_size=4)): pass
"""
SLOW_LOOP = "for _ in train(nn.Linear(16, 16), torch.randn(4, 16)): time.sleep(0.005)"
# Already BF16, so half precision cannot help; many products for each weight that is updated.
MATRIX = """
layer, x = nn.Linear(1024, 1024, bias=False).bfloat16(), torch.randn(1536, 1024).bfloat16()
for _ in train(nn.Sequential(*[layer] * 8), x): pass
"""
CASTS = """
x = torch.randn(1600, 1000)
for _ in train(nn.Linear(4, 4), torch.randn(2, 4)):
    y = x
    for _ in range(10): y = y.bfloat16().float()
"""
OPTIMIZER = """
model, x = nn.Embedding(40_000, 32), torch.zeros(4, dtype=torch.int64)
for _ in train(model, x, torch.optim.Adam, foreach=False): pass
"""


def see(code, tmp_path, monkeypatch, steps=8):
    """The doctor's report on a script, which it stops."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HEAD + code)
    names = {"__name__": "__main__"}
    with examine(warmup=2, steps=steps, stop=True, script="train.py") as report:
        exec(compile(path.read_text(), str(path), "exec"), names)
    assert report.problem is None
    assert sum(share.ms for share in report.shares) == pytest.approx(report.step_ms)
    assert min(share.ms for share in report.shares) >= 0
    return report


LESS = "less Python, fewer and larger operations"


@pytest.mark.parametrize(
    ("code", "kind", "bottleneck", "advice"),
    [
        (SLOW_DATA, "data", "data loading", "faster loading"),
        (SLOW_LOOP, "python", "the host", LESS),
        # Without the instructions its BF16 products take five minutes.
        pytest.param(*(MATRIX, "matrix", "arithmetic", None), marks=[pytest.mark.slow, NEEDS_BF16]),
        (CASTS, "cast", "memory", "fewer casts"),
        (OPTIMIZER, "optimizer", "memory", "fused optimizer"),
    ],
)
def test_bottlenecks_on_programs_with_known_answers(
    code, kind, bottleneck, advice, tmp_path, monkeypatch
):
    for _ in range(4):  # another process may have had the core for longer than a step takes
        report = see(code, tmp_path, monkeypatch)
        gains = {one.kind: one.gain for one in report.advice}
        assert list(gains.values()) == sorted(gains.values(), reverse=True)
        worth_it = [name for name, gain in gains.items() if gain > 1.2]
        advised = advice in worth_it if advice else not worth_it
        if report.bottleneck == bottleneck and report.share_of(kind) > 0.5 and advised:
            break
    else:
        pytest.fail(str(report))
    assert f"bound by {bottleneck}: " in str(report)
    if advice is None:  # in half already
        assert [s.label[13:17] for s in report.shares if s.kind == "matrix"] == ["BF16"]
        assert report.half_limit < 1.1
        assert "No change that the doctor knows" in report.sentence


@pytest.mark.parametrize("call", ["step(closure)", "step(closure=closure)"])
def test_closures_are_not_the_optimizer(call, tmp_path, monkeypatch):
    code = f"""
model, x = nn.Linear(16, 16), torch.ones(4, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    time.sleep(0.005)
    loss = model(x).sum()
    time.sleep(0.015)
    loss.backward()
    return loss
while True: assert optimizer.{call}.shape == ()
"""
    for _ in range(4):  # another process may have had the core
        report = see(code, tmp_path, monkeypatch)
        assert "doctor" not in str(report)  # the doctor's own annotations are no operations
        if report.share_of("python") > 0.5:
            break
    else:
        pytest.fail(str(report))


SYNCS = """
model, seen = nn.Linear(16, 16), torch.zeros(4)
for optimizer in train(model, torch.ones(4, 16), torch.optim.Adam):
    if model.weight.sum().item() > 1e9: break  # one
    mask = seen > 0
    chosen = seen[mask]  # two
    seen[mask] = 0.0  # a fill
    total = sum(float(x) for x in seen)  # three
"""


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_lines_that_synchronize_are_named(kind, tmp_path, monkeypatch):
    """Not those in torch's optimizer, whose step counts are on the CPU."""
    code = SYNCS if kind == "eager" else SYNCS.replace("model.weight.sum()", "read()").replace(
        "for optimizer", "read = torch.compile(lambda: model.weight.sum(), backend='eager')\n"
        "for optimizer", 1)  # fmt: skip
    report = see(code, tmp_path, monkeypatch, steps=1)
    line = {text.strip(): n for n, text in enumerate((HEAD + code).splitlines(), 1)}
    places = [re.search(r"train.py:(\d+): (.*)  \((\d) x (\w+)\)", w) for w in report.syncs]
    assert all(line[one[2]] == int(one[1]) for one in places)
    assert {(int(one[3]), one[4]) for one in places} == {
        (1, "_local_scalar_dense"),
        (4, "_local_scalar_dense"),
        (1, "index"),
    }
    assert "Lines that would synchronize with a GPU, in a step:" in str(report)


ATTENTION = """
from torch.nn.functional import scaled_dot_product_attention as attention
q = nn.Parameter(torch.randn(2, 2, 24, 8))
optimizer = torch.optim.SGD([q], lr=0.1)
while True:
    attention(q, q, q, MORE).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("more", ["is_causal=True", "attn_mask=torch.ones(24, 24).tril().bool()"])
def test_backends_of_attention_are_compared(more, tmp_path, monkeypatch):
    """Another is advised only if all its calls are faster, and by enough of a step."""
    measured, real = [], report.measure_attention
    for flash, math, advised in (
        ([4e3, 5e3], [1e3, 3e3], True),
        ([4e3, 5e3], [1e3, 4.5e3], False),
        ([4e-6, 5e-6], [1e-6, 3e-6], False),
        ([], [], False),  # none computes it here
    ):
        times = {"flash": flash, "math": math} if flash else {}

        def measure(event, device, times=times):
            measured.append(real(event, device))
            return times

        monkeypatch.setattr(report, "measure_attention", measure)
        examined = see(ATTENTION.replace("MORE", more), tmp_path, monkeypatch, steps=1)
        assert "Attention of 2x2x24x8, FP32: flash computes it." in str(examined)
        assert ("No backend could be measured" in str(examined)) is (not times)
        assert [one.kind for one in examined.advice if "attention" in one.kind] == (
            ["attention by math"] if advised else []
        )
    for times in measured:
        assert set(times) == {"flash", "math"}
        assert all(len(ms) == 5 and min(ms) > 0 for ms in times.values())


def test_attention_is_measured_as_it_was_called(monkeypatch):
    """Masks, dropout, scale and what is causal, by the operator's schema."""
    seen = []
    monkeypatch.setattr(
        report,
        "scaled_dot_product_attention",
        lambda *args, **options: seen.append((args, options)) or sum(args[:3]),
    )
    dims, none = [[2, 2, 6, 4]] * 3, [""] * 3
    strides, kinds = [[48, 4, 8, 1]] * 3, ["c10::BFloat16"] * 3
    name = "aten::_scaled_dot_product_efficient_attention"
    event = Event(
        name,
        dims=[*dims, [2, 1, 6, 6], [], [], [], []],
        strides=[*strides, [36, 36, 6, 1], [], [], [], []],
        types=[*kinds, "bool", "Scalar", "Scalar", "Scalar", ""],
        values=[*none, "", "True", "0.25", "True", "0.5"],
    )
    report.measure_attention(event, CPU)
    (query, _, _, mask), options = seen[0]
    assert query.stride() == (48, 4, 8, 1)
    assert query.dtype == torch.bfloat16
    assert mask.shape == (2, 1, 6, 6)
    assert mask.dtype == torch.bool
    expected = {"dropout_p": 0.25, "is_causal": True, "scale": 0.5, "enable_gqa": False}
    assert options == expected


def test_of_backends_that_cannot_compute_an_attention_nothing_is_said():
    """Only math has dropout on a CPU; torch warns of the others."""
    tensor = {"dims": [[2, 2, 6, 4]] * 3, "strides": [[48, 24, 4, 1]] * 3, "types": ["float"] * 3}
    values = ["", "", "", "", "0.25", "False"]
    event = Event("aten::_scaled_dot_product_attention_math", values=values, **tensor)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert report.measure_attention(event, CPU).keys() == {"math"}
    assert not said


# --- Advice -------------------------------------------------------------------------------------


CUDA = torch.device("cuda")
FULL, HALF = ["float"] * 2, ["c10::Half"] * 2
ADAMW = torch.optim.AdamW


def case(ms, types=FULL, device=CPU, **known):
    """A report on a step of 10 ms, `ms` by kinds, each of one operation on tensors of `types`."""
    operations = [Operation(Event("", types=types), kind, ms=took) for kind, took in ms.items()]
    shares = [Share(kind, "", took, took / 10) for kind, took in ms.items()]
    return Report(step_ms=10.0, device=device, shares=shares, operations=operations, **known)


@pytest.mark.parametrize(
    ("known", "kind", "found"),
    [
        (case({"data": 5.0}), "faster loading", "at most 2.00x"),
        (case({"data": 0.4}), None, None),  # too little
        (case({"optimizer": 4.0}, optimizers={ADAMW}), "fused optimizer", "about 1.25x"),
        (case({"optimizer": 4.0}, optimizers={torch.optim.Rprop}), None, None),
        (case({"matrix": 6.0, "norm": 2.0}), "BF16 (O5)", "about 1.67x"),
        (case({"matrix": 0.9, "memory": 8.0}), None, None),  # half is not for that alone
        (case({"matrix": 6.0}, types=HALF), None, None),
        (case({"matrix": 6.0}, device=CUDA), "FP16 (O2)", "about 1.43x"),
        (case({"host": 5.0}, device=CUDA), "one launch for a whole step", "at most 2.00x"),
        (case({"host": 2.0, "python": 3.0}), LESS, "at most 2.00x"),
        (case({"communication": 5.0}), "less communication", "at most 2.00x"),
        (case({"layout": 9.99}), "fewer transpositions", "at most 100.00x"),
    ],
)
def test_advice_fits_the_finding(known, kind, found, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    advice = [(one.kind, one.found) for one in report.find(known)]
    assert advice == ([] if kind is None else [(kind, found)])


def test_units_of_the_cpu_decide_about_half_precision(monkeypatch):
    product = Event("aten::mm", types=["c10::BFloat16"] * 2)
    for flag, units, advised in (
        ("avx2", "no matrix units", 0),
        ("avx512_bf16", "no matrix units", 1),
        ("amx_bf16", "AMX", 1),
    ):
        monkeypatch.setattr(hardware, "cpu_flags", lambda flag=flag: {flag})
        assert product.units == units
        assert len(report.find(case({"matrix": 9.0}))) == advised


def test_the_bound_of_half_precision_is_told():
    for types, limit, share in ((FULL, 2.0, "40%"), (HALF, 1.0, "0%")):
        known = case({"matrix": 4.0, "norm": 2.0}, types=types)
        assert known.half_limit == pytest.approx(limit)
        known.problem = None
        said = f"At most {limit:.2f}x from half precision, if the FP32 matrix work ({share} of"
        assert said in str(known)


# --- Scripts that are not as they should be -----------------------------------------------------


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """The command in this process: its exit status, and what it wrote to stdout and stderr.

    With `code`, on a script that can `train` a number of steps and goes on with that.
    """

    def run(*arguments, code=None):
        monkeypatch.setattr(sys, "argv", ["ampfuse"])
        monkeypatch.setattr(sys, "path", [*sys.path])
        if code is not None:
            (tmp_path / "train.py").write_text(SMALL + code)
            arguments = (*arguments, tmp_path / "train.py")
        try:
            status = main(["doctor", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        return (status, *capfd.readouterr())

    return run


SMALL = """
import os, sys
import torch
print(__name__, sys.argv[1:], sys.path[0], os.getcwd())
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
def train(steps):
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('my own')", 1, "the script failed after 0 optimizer steps"),
        ("train(3); sys.exit(7)", 7, "failed after 3 optimizer steps (exit status 7)"),
        ("sys.exit('my own')", 1, "the script failed"),
        ("sys.stdin = open(os.devnull); input()", 1, "failed"),
        ("", 1, "no torch.optim.Optimizer made a step in this process"),
        ("train(3); sys.exit()", 1, "ended after 3 optimizer steps; 9 are needed"),
        ("train(6)", 1, "ended after 6 optimizer steps; 9 are needed: reduce warmup and steps"),
        ("with torch.profiler.profile(): train(9)", 1, "the script runs torch's profiler itself"),
    ],
)
def test_scripts_that_cannot_be_examined_end_with_a_line(code, status, said, command):
    exit_status, out, err = command("--warmup", 2, "--steps", 3, code=code)
    assert exit_status == status
    (line,) = (line for line in err.splitlines() if line.startswith("ampfuse doctor: "))
    assert said in line
    assert "__main__ []" in out
    assert ("my own" in code) == ("my own" in err)
    assert "runpy" not in err


def test_script_that_trains_in_a_child(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SMALL + "os.fork() and os.wait() or (train(99), sum(range(10**7)), print('+'))")
    done = programs.python("-m", "ampfuse", "doctor", "--warmup", 2, "--steps", 3, path)
    assert done.returncode == 1
    assert "+" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "if other processes train, use `with ampfuse.doctor.examine():` around" in done.stderr


def test_script_is_run_as_python_runs_it_and_cleans_up(tmp_path):
    """It cannot catch the end by accident. In an interpreter that ends as they do."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 1")
    (folder / "train.py").write_text(
        f"{SMALL}\nimport atexit, beside\natexit.register(print, 'atexit ran')\n"
        "try:\n    train(10**9)\n"
        "except Exception: print('caught')\n"
        "finally: print('finally ran')\n"
    )
    arguments = ("--warmup", "1", "--steps", "2", "project/train.py")
    done = subprocess.run(
        [sys.executable, "-m", "ampfuse", "doctor", *arguments, "--help", "-m", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        check=True,
    )
    first, second, *_, last = done.stdout.splitlines()
    assert first == f"__main__ ['--help', '-m', 'x'] {folder} {tmp_path}"
    assert (second, last) == ("finally ran", "atexit ran")
    assert "project/train.py: " in done.stdout
    assert done.stderr == ""


def test_modules_run_from_the_folder_they_are_in(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SMALL + "print(open('data').read())")
    (tmp_path / "data").write_text("relative")
    _, out, _ = command("-m", "package.train", "--lr")
    assert out == f"__main__ ['--lr'] {tmp_path} {tmp_path}\nrelative\n"


def test_steps_are_those_of_the_optimizer_that_trains(command):
    """Not those of one that a script tries before, or that steps more seldom."""
    code = (
        "train(2)\nseldom = optimizer\noptimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(30):\n    train(3)\n    seldom.step()\n"
    )
    status, out, err = command("--warmup", 3, "--steps", 3, code=code)
    assert status == 0, err
    assert "(mean of 3," in out


def test_script_goes_on_when_asked(command):
    code = "train(20); print('its own end'); sys.exit(3)"
    status, out, _ = command("--warmup", 1, "--steps", 2, "--go-on", code=code)
    assert status == 3
    assert out.index("its own end") < out.index("ms a step")


def test_wrong_arguments_are_told(command):
    for arguments, said in (
        (["missing.py"], "no such file: missing.py"),
        (["--steps", "0", __file__], "must be at least 1, got 0"),
    ):
        status, _, err = command(*arguments)
        assert status == 2
        assert said in err
        assert err.count("\n") == 1


def test_context_lets_training_and_random_numbers_be():
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = torch.get_rng_state()
    with examine(warmup=1, steps=2) as report:
        assert "nothing was measured yet" in str(report)
        assert report.half_limit == report.gain_of(1.0) == 1.0
        assert "1.00x" in report.bound
        assert report.bottleneck in report.sentence
        for _ in range(12):
            weight.grad = torch.ones(4)
            optimizer.step()
    assert report.problem is None
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 12 * 0.1))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="at least 1"), examine(steps=0):
        pass
    with pytest.raises(KeyError), examine():
        raise KeyError


def test_all_times_of_steps_are_of_one_clock(monkeypatch):
    """On a GPU the host's would say when work was queued."""

    class Clock:
        def __init__(self, device):
            self.device, self.marks = device, []

        def resume(self):
            self.marks = []

        def mark(self):
            self.marks.append(10.0 * (len(self.marks) + 1))

        def flush(self):
            return self.marks

    monkeypatch.setattr(watch, "StepClock", Clock)
    optimizer = torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=0.1)
    with examine(warmup=1, steps=3) as report:
        for _ in range(8):
            optimizer.step()
    assert (report.fastest_ms, report.step_ms, report.slowest_ms) == (10.0, 20.0, 30.0)


# --- Of a trace, by hand ------------------------------------------------------------------------


def host(name, start, dur, tid=1, cat="cpu_op", **facts):
    return {
        "ph": "X", "name": name, "ts": start, "dur": dur, "tid": tid, "cat": cat, "args": facts,
    }  # fmt: skip


def kernel(name, start, dur, of, stream=7, cat="kernel"):
    return host(name, start, dur, cat=cat, stream=stream, **{"External id": of})


def step_mark(end):
    return host(STEP, end - 10, 10, cat="user_annotation")


def us(*records):
    """Microseconds a step, by kind."""
    profile, times = Profile(records), {}
    for (kind, _), took in profile.times.items():
        times[kind] = times.get(kind, 0.0) + took / profile.steps
    return {kind: round(took, 3) for kind, took in times.items() if took}


HALF_INPUTS = {"Input type": ["c10::Half"] * 2, "Input Dims": [[8, 8]] * 2}


def test_the_time_of_a_gpu_counts():
    """The GPU's own work counts; while it idles, it waits for the host, or for data."""
    assert us(
        step_mark(0),
        host("enumerate(DataLoader)#_It.__next__", 0, 300, cat="user_annotation"),
        host("aten::mm", 310, 20, **{"External id": 1}, **HALF_INPUTS),
        host("aten::relu", 340, 20, **{"External id": 2}, **HALF_INPUTS),
        # Autograd's thread; this one does nothing meanwhile.
        host("autograd::engine::evaluate_function: MmBackward0", 400, 100, tid=2),
        host("aten::mm", 410, 20, tid=2, **{"External id": 3}, **HALF_INPUTS),
        host("aten::item", 700, 300, **{"External id": 4}),
        host("cudaStreamSynchronize", 710, 280, cat="cuda_runtime"),
        step_mark(1100),
        kernel("sm80_xmma_gemm_f16f16_tensorop", 350, 200, of=1),
        kernel("vectorized_elementwise_kernel", 550, 50, of=2),
        kernel("ampere_h16816gemm", 620, 180, of=3),
        kernel("ncclDevKernel_AllReduce", 700, 200, of=0, stream=9),
        kernel("Memcpy DtoH (Device -> Pageable)", 900, 10, of=4, cat="gpu_memcpy"),
    ) == {
        "matrix": 200.0 + 180.0,
        "memory": 50.0,
        "communication": 100.0,  # what no other kernel hides
        "sync": 10.0,
        "data": 300.0,
        "host": 50.0 + 20.0 + 190.0,  # until the first kernel, between two, and after the copy
    }


def test_what_several_streams_hide_is_counted_once():
    times = us(
        step_mark(0),
        kernel("gemm", 100, 100, of=0),
        kernel("gemm", 100, 100, of=0, stream=8),  # at the same time
        kernel("gemm", 150, 100, of=0, stream=8),
        kernel("gemm", 300, 10, of=0),
        kernel("ncclDevKernel_AllReduce", 50, 300, of=0, stream=9),
        step_mark(400),
    )
    assert times == {
        "matrix": 150.0 + 10.0,
        "communication": 50.0 + 50.0 + 40.0,
        "host": 50.0 + 50.0,
    }


def test_what_is_outside_of_the_profiled_steps_is_not_counted():
    def load(start):
        return host("enumerate(DataLoader)#_It.__next__", start, 50, cat="user_annotation")

    records = [load(0), step_mark(100), load(110), kernel("gemm", 180, 20, of=0), step_mark(300)]
    records.append(load(310))
    assert us(*records) == {"data": 50.0, "matrix": 20.0, "host": 130.0}
    events = Profile(records).host  # among which calls of attention are counted
    assert [event.start for event in events if event.kind == "data"] == [110]


def test_kernels_tell_precision_and_units():
    full = {"Input type": ["float"] * 2, "Input Dims": [[8, 8]] * 2}
    profile = Profile(
        [
            step_mark(0),
            host("aten::mm", 0, 9, **{"External id": 1}, **HALF_INPUTS),
            host("aten::mm", 10, 9, **{"External id": 2}, **full),
            kernel("sm80_xmma_gemm_f16f16_tensorop", 0, 1, of=1),
            kernel("maxwell_fp16_sgemm_128x64_nn", 2, 1, of=1),
            kernel("cutlass_80_tensorop_s1688gemm_tf32", 4, 1, of=2),
            kernel("ampere_sgemm_128x64_tn", 6, 1, of=2),
            step_mark(100),
        ]
    )
    events = [(event.precision, event.units, event.kind) for event in profile.device]
    assert events == [
        ("FP16", "tensor cores", "matrix"),
        ("FP16", "no tensor cores", "matrix"),
        ("TF32", "tensor cores", "matrix"),
        ("FP32", "no tensor cores", "matrix"),
    ]


def test_a_kernel_without_an_operation_belongs_to_what_is_around_its_launch():
    """ampfuse's optimizers launch their kernels themselves."""
    unknown, own = (kernel("apply", start, 10, of=None) for start in (20, 70))
    for record in (unknown, own):
        del record["args"]["External id"]
    own["args"]["correlation"] = 7
    profile = Profile(
        [
            step_mark(0),
            host("aten::mm", 0, 9, **HALF_INPUTS),
            unknown,
            host("Optimizer.step#AdamW.step", 50, 40, cat="user_annotation"),
            host("cudaLaunchKernel", 60, 5, cat="cuda_runtime", correlation=7),
            own,
            step_mark(99),
        ]
    )
    kinds = [(event.parent and event.parent.name, event.kind) for event in profile.device]
    assert kinds == [(None, "memory"), ("Optimizer.step#AdamW.step", "optimizer")]


def test_time_of_the_cpu_is_counted_once():
    """An operation's time is without that of those inside, but for what launching them takes."""
    copy = {"Input type": ["float", "float"], "Input Dims": [[4, 4]] * 2}
    assert us(
        step_mark(0),
        host("aten::linear", 10, 200),
        host("aten::addmm", 20, 180, **{"Input type": ["float"] * 3}),
        host("aten::view", 300, 50),
        host("aten::copy_", 400, 100, **{**copy, "Input type": ["float", "c10::BFloat16"]}),
        host("aten::copy_", 500, 100, **copy, **{"Input Strides": [[4, 1], [1, 4]]}),
        host("aten::copy_", 600, 100, **copy, **{"Input Strides": [[4, 1], [4, 1]]}),
        host("aten::native_batch_norm", 700, 100),
        host("aten::mul", 850, 40, tid=2),  # beside it, as communication is
        step_mark(1000),
        host("my own part", 1200, 300, cat="user_annotation"),
        host("aten::addmm", 1300, 100, **{"Input type": ["float"] * 3}),
        host("aten::sum", 1700, 100),
        host("Optimizer.step#SGD.step", 1985, 500, cat="user_annotation"),  # and the profiler's end
        step_mark(2000),
    ) == {
        "host": (20 + 50) / 2,
        "matrix": (180 + 100) / 2,
        "cast": 50.0,
        "layout": 50.0,
        "memory": 50.0,
        "norm": 50.0,
        "optimizer": (10 + 15) / 2,
        "reduction": 50.0,
        "python": (10 + 90 + 50 + 190 + 200 + 200 + 200 + 185) / 2,  # between and around them
    }


def test_kernels_of_a_closure_are_not_the_optimizers():
    profile = Profile(
        [
            step_mark(0),
            host(STEP, 1, 999, cat="user_annotation"),
            host("aten::mul", 10, 5, **{"External id": 1}),
            host(CLOSURE, 100, 500, cat="user_annotation"),
            host("aten::mul", 110, 5, **{"External id": 2}),
            kernel("elementwise", 20, 10, of=1),
            kernel("elementwise", 120, 10, of=2),
        ]
    )
    assert [event.kind for event in profile.device] == ["optimizer", "memory"]
