"""Runs: results, resuming, interruptions, divergence; on a GPU, the step as a CUDA graph."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from ampfuse._core import EXTENSION as _C
from ampfuse.command_line import UsageError
from ampfuse.experiments import cifar, make_table, mlp, training
from ampfuse.experiments.data import open_data
from ampfuse.experiments.distributed import World
from ampfuse.experiments.results import result_of, rows_of
from ampfuse.experiments.settings import VARIANTS, Settings
from ampfuse.experiments.sweep import report, train_all
from ampfuse.experiments.training import Diverged, Job, Record, Run, load_checkpoint
from ampfuse.experiments.variants import Loss, Variant, build_variant, squared_error
from ampfuse.graphs import EAGER_CALLS
from ampfuse.measuring import ProcessMemory, tensor_memory

CPU = torch.device("cpu")
CPU_VARIANTS = [variant for variant in VARIANTS if variant != "tf32"]


def some(values, *quick):
    """Parameters, of which all but the `quick` ones are slow."""
    marks = {value: () if value in quick else pytest.mark.slow for value in values}
    return [pytest.param(value, marks=mark) for value, mark in marks.items()]


BASE = Settings(
    experiment="cifar",
    model="wrn10_1",
    data="digits",
    image_size=8,
    precision="O2",
    variant="O2",
    batch_size=64,
    epochs=2,
    lr=0.05,
    schedule="cosine",
    warmup=0.1,
    augment=True,
    dropout=0.2,
    print_freq=5,
    fuse=False,  # most of a short run's time goes into it
)
# Four steps in an epoch.
NOISE = dataclasses.replace(BASE, data="synthetic", synthetic_size=128, batch_size=32)


def run_of(settings: Settings, folder: Path | None = None, resume: dict | None = None) -> Run:
    data = open_data(settings, CPU)
    return Run(settings, data, Job(CPU, folder=folder), "run", resume)


def trained(settings: Settings, folder: Path | None = None, resume: dict | None = None) -> Run:
    run = run_of(settings, folder, resume)
    run.train()
    return run


whole_run = functools.cache(trained)  # tests of several stops share it


def stopped(settings: Settings, step: int, folder: Path) -> dict:
    """The checkpoint of a run that was saved in that step and then interrupted."""
    run = run_of(settings, folder)
    name = "_record_step" if step % run.data.batches_per_epoch else "_end_epoch"
    original = getattr(run, name)

    def and_stop(*values: torch.Tensor) -> None:
        original(*values)
        if run.steps_done == step:
            if run._steps:
                run._end_interval()
            run.save()
            raise KeyboardInterrupt

    setattr(run, name, and_stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    return load_checkpoint(folder / "run.pt")


@pytest.mark.parametrize("variant", some(CPU_VARIANTS, "O2", "O5"))
def test_learns_in_every_variant(variant):
    settings = dataclasses.replace(
        BASE, precision=variant, epochs=4, dropout=0.0, augment=False, lr=0.1, fuse=None
    )
    result = result_of(trained(settings))
    assert result["accuracy_pct"] > 60
    assert result["loss_last"] < 1.5
    assert (result["iterations"], result["epochs"]) == (4 * 22, 4)
    assert [line["step"] for line in result["evaluations"]] == [22, 44, 66, 88]
    assert 100 * result["evaluations"][-1]["accuracy"] == result["accuracy_pct"]
    expected = 65536 if variant in ("O1", "O2", "amp-fp16") else 1
    assert result["loss_scale"] == expected / 2 ** result["skipped_steps"]


def test_figures_agree_with_each_other_and_with_the_log():
    run = trained(BASE)
    result, steps = result_of(run), 44
    assert result["images_per_s"] == pytest.approx(64 * steps / result["time_s"])
    assert result["images_per_s_min"] <= result["images_per_s"] <= result["images_per_s_max"]
    assert len(run.record.step_ms) == len(run.record.losses) == steps
    assert result["memory_mb"] > 1
    intervals = result["intervals"]
    # Every fifth step, and the end of each epoch of 22.
    assert [line["step"] for line in intervals] == [5, 10, 15, 20, 22, 25, 30, 35, 40, 44]
    assert intervals[-1]["time_s"] == pytest.approx(result["time_s"])
    weights = [5, 5, 5, 5, 2, 3, 5, 5, 5, 4]
    losses = [line["loss"] for line in intervals]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / steps
    assert mean == pytest.approx(result["loss_mean"], rel=1e-5)
    expected = {"precision": "O2", "lr": 0.05, "data": "digits", "torch": torch.__version__}
    assert expected.items() <= result["conditions"].items()
    json.dumps(result, allow_nan=False)


def test_skipped_steps_are_counted_where_they_happened():
    run = run_of(dataclasses.replace(BASE, precision="amp-fp16", variant="amp-fp16"))
    build = run.build

    def with_huge_scale() -> object:
        variant = build()
        variant.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # halved until it fits
        return variant

    run.build = with_huge_scale
    run.train()
    result = result_of(run)
    steps = [step for line in result["intervals"] for step in line["overflow_steps"]]
    assert len(steps) == result["skipped_steps"] >= 5
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert result["loss_scale"] == 2.0 ** (40 - len(steps))


@pytest.mark.parametrize("variant", some(CPU_VARIANTS, "fp32", "amp-fp16", "O1", "O5"))
def test_clipping_reaches_every_variant(variant):
    """With a tiny norm the weights hardly move; without clipping they do."""
    options = {"momentum": 0.0, "iterations": 3, "evaluate": False, "warmup": 0.0}
    for clip, least, most in ((1e-6, 0, 2e-4), (None, 1e-3, 10)):
        run = run_of(dataclasses.replace(NOISE, precision=variant, clip=clip, **options))
        torch.manual_seed(0)
        before = run.build().bare_model
        run.train()
        pairs = zip(before.parameters(), run.variant.bare_model.parameters(), strict=True)
        moved = sum((b - a).float().square().sum().item() for a, b in pairs) ** 0.5
        assert least <= moved <= most, clip


@pytest.mark.parametrize("optimizer", some(("sgd", "adam", "adamw"), "adamw"))
def test_levels_follow_fp32(optimizer):
    """The same data, weights and rule in all variants: losses stay close for a while."""
    options = {"optimizer": optimizer, "lr": 1e-3, "weight_decay": 0.01, "dropout": 0.0}
    settings = dataclasses.replace(BASE, iterations=10, evaluate=False, **options)
    losses = {
        a: trained(dataclasses.replace(settings, precision=a)).record.losses for a in CPU_VARIANTS
    }
    for variant, values in losses.items():
        assert values == pytest.approx(losses["fp32"], rel=0.03, abs=0.02), variant


# Within an epoch, at the end of one, in the next.
@pytest.mark.covers(1)
@pytest.mark.parametrize("stop_at", some((7, 12, 17), 7, 12))
@pytest.mark.parametrize("variant", some(("fp32", "amp-fp16", "O1", "O2", "O3", "O5"), "O1", "O2"))
def test_a_resumed_run_has_the_same_bits(variant, stop_at, tmp_path):
    options = {"synthetic_size": 384, "optimizer": "adamw", "lr": 1e-3}
    fuse = None if variant == "O2" else False
    settings = dataclasses.replace(NOISE, precision=variant, fuse=fuse, **options)
    whole = whole_run(settings)
    saved = stopped(settings, stop_at, tmp_path)
    torch.manual_seed(1234)  # as another process would have another
    resumed = trained(settings, tmp_path, saved)
    assert resumed.record.losses == whole.record.losses
    results = [result_of(run) for run in (resumed, whole)]
    assert results[0]["test_loss"] == results[1]["test_loss"]
    for name, value in whole.variant.bare_model.state_dict().items():
        assert torch.equal(resumed.variant.bare_model.state_dict()[name], value), name
    assert [line["step"] for line in results[0]["evaluations"]] == [12, 24]


def test_a_resumed_run_is_not_shorter_and_reports_no_older_accuracy(tmp_path):
    saved = stopped(NOISE, 4, tmp_path)
    with pytest.raises(UsageError, match="has done 4 steps, but 3 are asked for"):
        run_of(dataclasses.replace(NOISE, iterations=3), tmp_path, saved)
    longer = result_of(trained(dataclasses.replace(NOISE, evaluate=False), tmp_path, saved))
    assert [line["step"] for line in longer["evaluations"]] == [4]
    assert (longer["accuracy_pct"], longer["test_loss"]) == (None, None)


def test_a_run_that_is_resumed_on_another_device_has_the_figures_of_that_one(tmp_path):
    saved = stopped(NOISE, 4, tmp_path)
    for device, timed in ((saved["device"], 8), ("another", 4)):
        resume = {**saved, "device": device, "record": copy.deepcopy(saved["record"])}
        run = run_of(NOISE, tmp_path, resume)
        assert (run.record.memory_bytes > 0) == (timed == 8)
        run.train()
        assert (len(run.record.losses), len(run.record.step_ms)) == (8, timed)
        assert run.record.intervals[-1]["time_s"] == pytest.approx(sum(run.record.step_ms) / 1e3)


def test_the_reading_of_an_interval_is_no_part_of_a_step():
    run = run_of(dataclasses.replace(BASE, iterations=8, evaluate=False))
    peak = run.memory.peak

    def slow() -> int:
        time.sleep(2)
        return peak()

    run.memory.peak = slow
    run.train()
    assert len(run.record.step_ms) == 8
    assert max(run.record.step_ms) < 2000


SMALL = "--data digits -b 64 --image-size 16 --variant O5 fp32 --repeats 1 --iterations 2"


@pytest.mark.parametrize("trained_first", [True, False], ids=["at its end", "before a checkpoint"])
def test_an_interrupted_command_prints_the_one_that_continues(
    trained_first, tmp_path, capsys, monkeypatch
):
    line = [*SMALL.split(), "--checkpoints", "-o", str(tmp_path)]
    train = Run.train

    def interrupted(run: Run) -> None:
        if trained_first or run.settings.precision != "fp32":
            train(run)
        if run.settings.precision == "fp32":
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "train", interrupted)
    assert mlp.main(line) == 130
    printed = capsys.readouterr()
    assert "Interrupted; finished runs have saved their results" in printed.err

    def variants():
        return {json.loads(path.read_text())["variant"] for path in tmp_path.rglob("*.json")}

    assert variants() == {"O5"}
    monkeypatch.setattr(Run, "train", train)
    words = re.search(r"To continue: python -m ampfuse.experiments.mlp (.+)", printed.out)[1]
    again = shlex.split(words)
    assert again[:-2] == line
    assert mlp.main(again) == 0
    assert variants() == {"O5", "fp32"}


def test_a_divergence_that_evaluation_alone_shows():
    run = run_of(dataclasses.replace(NOISE, epochs=1))
    batches = run.data.test_batches
    run.data.test_batches = lambda: ((x * math.inf, y) for x, y in batches())
    with pytest.raises(Diverged, match="test loss became nan"):
        run.train()


def test_a_divergence_of_o3_says_what_to_do(tmp_path, capsys):
    line = "--data digits --model wrn10_1 --image-size 8 -b 32 --variant fp32 O3 --lr 1000"
    line += f" --iterations 12 --repeats 1 -o {tmp_path}"
    assert cifar.main(line.split()) == 3
    printed = capsys.readouterr().out
    assert "O3 batch 32 diverged in step" in printed
    assert "Loss scale: 1." in printed
    assert "amp.explain_overflow(model)" in printed
    texts = [path.read_text() for path in tmp_path.rglob("*.json")]
    results = [json.loads(text, parse_constant=pytest.fail) for text in texts]  # no NaN
    (o3,) = [result for result in results if result["conditions"]["precision"] == "O3"]
    assert o3["diverged"].keys() == {"step", "reason"}


def test_the_other_variants_follow_one_that_skips_every_step(tmp_path, capsys, monkeypatch):
    """Also if the loss is read less often than every `max_skipped_steps` steps."""
    monkeypatch.setattr(training, "squared_error", lambda out, _: (out - out).sqrt().mean())
    line = "--data digits -b 8 --image-size 8 --variant O2 fp32 --repeats 1"
    assert mlp.main(f"{line} --iterations 120 -p 110 -o {tmp_path}".split()) == 3
    printed = capsys.readouterr().out
    assert "O2 batch 8 diverged in step 110: every step overflows" in printed
    assert "fp32 batch 8 diverged in step 2: the training loss became nan" in printed


def raise_as_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("fail", [raise_as_cuda, lambda: torch.empty(1 << 50)], ids=["cuda", "cpu"])
def test_the_other_runs_follow_one_that_runs_out_of_memory(fail, tmp_path, capsys, monkeypatch):
    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(outputs) == 16:
            fail()
        return squared_error(outputs, targets)

    monkeypatch.setattr(training, "squared_error", loss_of)
    line = "--data digits --batch-size 16 8 --image-size 8 --variant O2 --repeats 1 --iterations 2"
    assert mlp.main(f"{line} -o {tmp_path}".split()) == 3
    printed = capsys.readouterr().out
    assert "O2 batch 16 ran out of memory in step 1.\n  Try a smaller --batch-size.\n" in printed
    assert re.search(r"^\| O2 +\| 16 .* ran out of memory in step 1 \|$", printed, re.MULTILINE)
    assert "O2 batch 8: " in printed
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    small, large = sorted(results, key=lambda result: result["batch_size"])
    assert small["diverged"] is None
    assert large["diverged"] == {"step": 1, "reason": "out of memory"}
    assert (large["memory_mb"], large["time_s"], large["loss_scale"]) == (None, None, 65536)
    assert small["conditions"].keys() == large["conditions"].keys()


def test_memory_that_one_of_several_processes_lacks_ends_the_command(monkeypatch):
    """The others wait for it."""
    monkeypatch.setattr(World, "gather", lambda world, value: [value] * world.size)
    monkeypatch.setattr(Run, "train", lambda run: raise_as_cuda())
    with pytest.raises(torch.OutOfMemoryError):
        next(train_all([BASE], Job(CPU, World(size=2))))


def test_advice_fits_the_variant():
    result = result_of(trained(dataclasses.replace(NOISE, epochs=1)), "the loss became nan")
    for precision, scale, o3 in (("fp32", 0, 0), ("O5", 0, 0), ("O2", 1, 0), ("O3", 1, 1)):
        result["conditions"]["precision"] = precision
        text = report(result)
        assert "Try a lower --lr" in text
        found = [words in text for words in ("Loss scale: ", "--loss-scale dynamic", "O3 has")]
        assert found == [scale, scale, o3], precision


OVERFLOWS = "every step overflows, even at a loss scale of"


@pytest.mark.parametrize(
    ("losses", "scale", "skipped", "said"),
    [
        ([1.0, 1.0, math.inf], 2.0, [0, 0, 1], None),  # a bad batch is skipped
        ([math.inf] * 3, 2.0, [1] * 3, "the training loss became inf"),
        ([1.0] * 20, 2.0, [1] * 20, None),  # still searching
        ([1.0] * 20, 0.5, [1] * 20, f"{OVERFLOWS} 0.5"),
        ([1.0] * 20, 0.5, [0, 1] * 5 + [1] * 10, f"{OVERFLOWS} 0.5"),
        ([1.0] * 20, 0.5, [1] * 10 + [0] + [1] * 9, None),
        ([1.0, 1.0, math.nan, math.inf, math.nan], 1.0, [0] * 5, "the training loss became nan"),
        ([1.0] * 10, "static", [1] * 10, f"{OVERFLOWS} 128"),
    ],
)
def test_when_a_run_has_diverged(losses, scale, skipped, said):
    static = scale == "static"
    run = run_of(dataclasses.replace(NOISE, loss_scale=128.0 if static else None))
    run.steps_done, run.record = len(losses), Record(losses=losses)
    for first in range(0, len(losses), run.settings.print_freq):
        interval = enumerate(skipped[first : first + run.settings.print_freq], first + 1)
        overflows = [step for step, is_skipped in interval if is_skipped]
        scale_then = 128.0 if static else scale
        run.record.intervals.append({"loss_scale": scale_then, "overflow_steps": overflows})
    with pytest.raises(Diverged, match=said) if said else contextlib.nullcontext():
        run._raise_if_diverged()


def test_prof_writes_a_trace_and_no_result(tmp_path, capsys):
    line = f"--data digits --image-size 8 --variant O5 --prof 3 --repeats 1 -o {tmp_path}"
    assert mlp.main(line.split()) == 0
    (path,) = tmp_path.rglob("*.json")
    assert f"Traces: {path.parent}" in capsys.readouterr().out
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"aten::addmm", "aten::mse_loss"} <= names


def variant_of(loss_of: Loss = nn.functional.cross_entropy, **settings: object) -> Variant:
    return build_variant(dataclasses.replace(BASE, **settings), nn.Linear(4, 3), loss_of, CPU)


@pytest.mark.parametrize("precision", CPU_VARIANTS)
def test_what_a_step_returns_and_whose_kernels_it_uses(precision):
    """Tensors, so that no variant waits for the device; torch.amp in BF16 uses torch's kernels."""

    def loss_of(outputs, targets):
        ours.append(_C.half_ops())
        return nn.functional.cross_entropy(outputs.float(), targets)

    ours = []
    variant = variant_of(loss_of, precision=precision)
    for value in variant.step(torch.randn(8, 4), torch.randint(3, (8,))):
        assert (value.dtype, value.shape) == (torch.float32, ())
    assert ours == [precision not in ("fp32", "O0", "amp-bf16")]


def test_momentum_of_zeros_is_for_steps_that_can_be_skipped():
    for precision, buffers in (("fp32", 0), ("amp-bf16", 0), ("amp-fp16", 2)):
        assert len(variant_of(precision=precision).optimizer.state) == buffers


@pytest.mark.parametrize("precision", ["amp-fp16", "O2"])
def test_loss_scales_of_the_settings(precision):
    """A dynamic one grows after each interval; a static one stays, even after an overflow."""

    def steps(factors: list[float], **settings: object) -> list[tuple[float, float]]:
        def loss_of(outputs: torch.Tensor, factor: float) -> torch.Tensor:
            return outputs.float().mean() * factor

        variant = variant_of(loss_of, precision=precision, **settings)
        values = (variant.step(torch.randn(8, 4), factor) for factor in factors)
        return [(float(scale), float(skipped)) for _, scale, skipped in values]

    scales, skipped = zip(*steps([0.01] * 5, growth_interval=2), strict=True)
    assert not any(skipped)
    assert [scale / scales[0] for scale in scales] == [1, 1, 2, 2, 4]
    assert [scale for scale, _ in steps([math.inf, 1.0, 1.0], loss_scale=512.0)] == [512] * 3


def test_the_line_of_a_run_has_its_zeros_and_not_what_was_not_measured():
    run = trained(NOISE)
    result = result_of(run)
    run.record.step_ms = []  # a graph's first steps are not timed: no division by zero
    untimed = result_of(run)
    assert untimed["time_s"] is None
    assert report(untimed).startswith("wrn10_1 O2 batch 32: loss ")
    assert "| O2" in make_table.table(rows_of([untimed]), make_table.TRAINED)
    result |= {"loss_last": 0.0, "test_loss": 0.0, "accuracy_pct": 0.0, "skipped_steps": 0}
    assert report(result).endswith(" images/s, loss 0.0000, test loss 0.0000, test accuracy 0.0%")
    assert report({**result, "skipped_steps": 1}).endswith(" 0.0%, 1 steps skipped")


def test_memory_of_a_run_is_its_own():
    """The peak of an earlier run is forgotten."""
    memory = ProcessMemory(CPU)
    memory.release()
    memory.start()
    before = memory.peak()
    block = torch.ones(64 << 20)  # 256 MiB
    with_block = memory.peak()
    del block
    memory.release()
    memory.start()
    assert with_block - before > 250 << 20
    assert memory.peak() - before < 50 << 20


def test_blocks_from_before_do_not_lower_the_peak():
    """Not even at an address where an earlier measurement saw a block."""
    seen, old = set(), []
    while not old:
        with tensor_memory(CPU):
            blocks = [torch.empty(1 << 16) for _ in range(8)]
        seen |= {block.data_ptr() for block in blocks}
        del blocks
        old = [
            block for block in [torch.empty(1 << 16) for _ in range(8)] if block.data_ptr() in seen
        ]
    with tensor_memory(CPU) as peak:
        old.clear()
        torch.empty(1 << 15)
    assert peak.mib == 4 * (1 << 15) / 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_captured_steps_train_like_eager_ones(variant, optimizer, monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", lambda input, *_: input)
    if variant == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    of_mnist = Settings(
        experiment="mnist",
        model="mnist_cnn",
        precision=variant,
        image_size=28,
        synthetic_size=256,
        batch_size=32,
        iterations=20,
        optimizer=optimizer,
        lr=1e-3,
        schedule="linear",
        evaluate=False,
        print_freq=6,
        deterministic=True,
    )
    device, runs = torch.device("cuda", 0), []
    for graph in (False, True):
        settings = dataclasses.replace(of_mnist, graph=graph)
        runs.append(Run(settings, open_data(settings, device), Job(device)))
        runs[-1].train()
    eager, graphed = runs
    assert graphed.record.losses == pytest.approx(eager.record.losses, rel=1e-3)
    assert graphed.record.skipped_steps == eager.record.skipped_steps
    assert len(graphed.record.step_ms) == of_mnist.iterations - EAGER_CALLS - 1
    result = result_of(graphed)
    assert result["memory_kind"] == "max_memory_allocated"
    assert 0 < result["memory_mb"] < 8192
