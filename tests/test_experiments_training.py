"""The trainers' loop: results, resumed runs, interruptions, divergence."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")

from ampfuse import _C, amp
from ampfuse.experiments import checkpoint, diagnose, provenance, report
from ampfuse.experiments.arms import build_arm
from ampfuse.experiments.config import ARMS, RunConfig, UsageError
from ampfuse.experiments.distributed import World
from ampfuse.experiments.record import Record, RunResult
from ampfuse.experiments.run_log import RunLog
from ampfuse.experiments.signals import StopWish
from ampfuse.experiments.tasks import TASKS
from ampfuse.experiments.trainers import main
from ampfuse.experiments.training import Diverged, Interrupted, Place, Training
from ampfuse.nn import fuse
from experiment_results import ResultFolder
from programs import ranks

CPU_ARMS = [arm for arm in ARMS if arm != "tf32"]
BASE = RunConfig(
    experiment="cifar",
    model="wrn10_1",
    data="digits",
    arm="O2",
    method="O2",
    recipe=None,
    batch_size=64,
    optimizer="sgd",
    lr=0.05,
    image_size=8,
    epochs=2,
    augment=True,
    dropout=0.2,
    print_freq=5,
    schedule="cosine",
    warmup=0.1,
)


def training_of(config: RunConfig, folder: Path | None = None, **more: object) -> Training:
    place = Place(torch.device("cpu"), World(), folder, more.pop("wish", StopWish()))
    data = TASKS[config.experiment].open_data(config, place.device, place.world)
    data.reseed(config.seed + config.repeat)
    log = more.pop("log", None) or RunLog(folder and folder / "run.jsonl")
    return Training(config, data, place, "run", log=log, **more)


def unrehearsed(config: RunConfig) -> Training:
    """A training that is quicker: its first steps may choose kernels."""
    training = training_of(config)
    training.rehearse = dict
    return training


class StopAt(RunLog):
    """Wishes for an end after so many steps."""

    def __init__(self, step: int, wish: StopWish, folder: Path) -> None:
        super().__init__(folder / "run.jsonl")
        self.left, self.wish = step, wish

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.wish.received = signal.SIGTERM


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def in_two_processes(trainer: str, *line: str) -> str:
    """What `trainer` printed, under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", f"ampfuse.experiments.{trainer}", *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return done.stdout


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


class TestRun:
    @pytest.mark.parametrize("arm", CPU_ARMS)
    def test_learns_in_every_arm(self, arm, tmp_path):
        config = dataclasses.replace(BASE, arm=arm, epochs=4, dropout=0.0, augment=False, lr=0.1)
        measured = training_of(config, tmp_path).run()
        assert measured.test["accuracy"] > 0.6
        assert measured.train_loss["last"] < 1.5
        assert measured.iterations == measured.timed_iterations == 4 * 22
        assert measured.epochs == 4
        assert [entry["epoch"] for entry in measured.epoch_log] == [1, 2, 3, 4]
        assert measured.epoch_log[-1]["test_accuracy"] == measured.test["accuracy"]
        expected = 65536 if arm in ("O1", "O2", "amp-fp16") else 1
        assert measured.loss_scale == expected / 2**measured.skipped_steps
        assert measured.kernels["convolution"] == "onednn"
        assert (measured.policy or {}).get("opt_level") == (arm if arm[0] == "O" else None)

    @pytest.mark.parametrize(("fused", "server"), [(True, "ampfuse"), (False, "native")])
    def test_says_who_served_the_batch_norms(self, fused, server):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        model.to(memory_format=torch.channels_last)
        if fused:
            fuse(model)
        x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        used = provenance.kernels_used(lambda: model(x), torch.device("cpu"))
        assert used["batch_norm"] == server

    def test_figures_agree_with_each_other_and_with_the_log(self, tmp_path):
        measured = training_of(BASE, tmp_path).run()
        steps = measured.timed_iterations
        speed, time_s = measured.images_per_s, measured.train_time_s
        assert speed["mean"] == pytest.approx(64 * steps / time_s)
        assert speed["min"] <= speed["mean"] <= speed["max"]
        assert measured.step_time_ms["mean"] == pytest.approx(1e3 * time_s / steps)
        assert sum(e["train_time_s"] for e in measured.epoch_log) == pytest.approx(time_s)
        log = log_of(tmp_path)
        intervals = [line for line in log if line["kind"] == "interval"]
        # Every fifth step, and the end of each epoch of 22.
        assert [line["step"] for line in intervals] == [5, 10, 15, 20, 22, 25, 30, 35, 40, 44]
        assert [line["epoch"] for line in intervals] == [1] * 5 + [2] * 5
        assert intervals[-1]["time_s"] == pytest.approx(time_s)
        evaluations = [line for line in log if line["kind"] == "evaluation"]
        assert [line["step"] for line in evaluations] == [22, 44]
        assert evaluations[-1]["test_accuracy"] == measured.test["accuracy"]
        weights = [5, 5, 5, 5, 2, 3, 5, 5, 5, 4]
        losses = [line["train_loss"] for line in intervals]
        mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / 44
        assert mean == pytest.approx(measured.train_loss["mean"], rel=1e-5)

    def test_skipped_steps_are_counted_where_they_happened(self, tmp_path):
        # Five halvings of this scale until the scaled gradients fit.
        config = dataclasses.replace(BASE, arm="amp-fp16", method="amp-fp16")
        training = training_of(config, tmp_path)
        build = training.build

        def with_huge_scale(*args: object) -> object:
            arm = build(*args)
            arm._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
            return arm

        training.build = with_huge_scale
        measured = training.run()
        steps = [step for line in log_of(tmp_path) for step in line.get("overflow_steps", [])]
        assert len(steps) == measured.skipped_steps >= 5
        assert steps[:5] == [1, 2, 3, 4, 5]
        assert measured.loss_scale == 2.0 ** (40 - len(steps))

    def test_the_same_seed_gives_the_same_run_and_another_one_another(self):
        first, again = (unrehearsed(BASE).run().train_loss for _ in range(2))
        other = unrehearsed(dataclasses.replace(BASE, seed=1)).run().train_loss
        assert first == again != other

    def test_clipping_reaches_every_arm(self):
        """With a tiny norm the weights hardly move, whatever the arm; without they do."""
        cases = [(arm, 1e-6, 0, 2e-4) for arm in CPU_ARMS] + [("fp32", None, 1e-3, 10)]
        for arm, clip, least, most in cases:
            config = dataclasses.replace(
                BASE, arm=arm, clip=clip, momentum=0.0, iterations=3, evaluate=False, warmup=0.0
            )
            training = unrehearsed(config)
            before = torch.cat([p.flatten() for p in training.build().bare_model.parameters()])
            training.run()
            after = torch.cat([p.detach().flatten() for p in training.arm.bare_model.parameters()])
            moved = (after.float() - before.float()).norm().item()
            assert least <= moved <= most, (arm, clip)

    @pytest.mark.parametrize(
        "optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow), "adamw"]
    )
    def test_levels_follow_fp32(self, optimizer):
        """The same data, weights and rule in all arms: losses stay close for a while."""
        config = dataclasses.replace(
            BASE, optimizer=optimizer, lr=1e-3, iterations=10, weight_decay=0.01, dropout=0.0
        )
        losses = {}
        for arm in CPU_ARMS:
            training = unrehearsed(dataclasses.replace(config, arm=arm))
            training.run()
            losses[arm] = training.record.losses
        for arm, values in losses.items():
            assert values == pytest.approx(losses["fp32"], rel=0.03, abs=0.02), arm


@functools.cache
def whole_run(config: RunConfig) -> tuple[Training, RunResult]:
    whole = training_of(config)
    return whole, whole.run()


class TestResume:
    @pytest.mark.parametrize("arm", ["fp32", "amp-fp16", "O1", "O2", "O3", "O5"])
    @pytest.mark.parametrize("stop_at", [13, 22, 30])  # in an epoch, at the end of one, in the next
    def test_same_bits(self, arm, stop_at, tmp_path):
        config = dataclasses.replace(BASE, arm=arm, optimizer="adamw", lr=1e-3)
        whole, expected = whole_run(config)
        wish = StopWish()
        broken = training_of(config, tmp_path, wish=wish, log=StopAt(stop_at, wish, tmp_path))
        with pytest.raises(Interrupted) as stopped:
            broken.run()
        assert stopped.value.step == stop_at
        resume = checkpoint.load(stopped.value.checkpoint)
        torch.manual_seed(1234)  # whatever another process would start with
        resumed = training_of(config, tmp_path, resume=resume)
        measured = resumed.run()
        assert resumed.record.losses == whole.record.losses
        assert measured.test["loss"] == expected.test["loss"]
        for name, value in whole.arm.bare_model.state_dict().items():
            assert torch.equal(resumed.arm.bare_model.state_dict()[name], value), name
        assert len(measured.epoch_log) == 2
        steps = [line["step"] for line in log_of(tmp_path) if line["kind"] == "evaluation"]
        assert steps == [22, 44]

    def test_a_finished_run_can_be_made_longer(self, tmp_path):
        line = ["--data", "digits", "--image-size", "8", "-b", "64", "--arm", "O5", "--checkpoints"]
        line += ["--quiet", "-o", str(tmp_path), "--GPU", "here", "--repeats", "1"]
        assert main("mlp", [*line, "--iterations", "5"]) == 0
        (saved,) = (tmp_path / "here").glob("*.pt")
        assert main("mlp", [*line, "--iterations", "8", "--resume", str(saved)]) == 0
        (result,) = (tmp_path / "here").glob("*.json")
        assert json.loads(result.read_text())["iterations"] == 8

    def test_after_a_kill_and_from_a_file_of_earlier_versions(self, tmp_path):
        """Half a line in the log; the random numbers of one process, which does not say of many."""
        config = dataclasses.replace(BASE, arm="O5", epochs=1)
        whole, _ = whole_run(config)
        wish = StopWish()
        with pytest.raises(Interrupted) as stopped:
            training_of(config, tmp_path, wish=wish, log=StopAt(13, wish, tmp_path)).run()
        path = stopped.value.checkpoint
        values = torch.load(path, weights_only=True)
        del values["world_size"]
        values["rng"] = {name: rows[0].clone() for name, rows in values["rng"].items()}
        torch.save(values, path)
        with open(tmp_path / "run.jsonl", "a") as log:
            log.write('{"kind": "interval", "st')
        resumed = training_of(config, tmp_path, resume=checkpoint.load(path))
        resumed.run()
        assert resumed.record.losses == whole.record.losses
        steps = [line["step"] for line in log_of(tmp_path) if line["kind"] == "interval"]
        assert steps == [5, 10, 13, 15, 20, 22]

    def test_checkpoint_is_plain_data(self, tmp_path):
        wish = StopWish()
        with pytest.raises(Interrupted) as stopped:
            training_of(BASE, tmp_path, wish=wish, log=StopAt(2, wish, tmp_path)).run()
        values = torch.load(stopped.value.checkpoint, weights_only=True)
        assert values["step"] == 2
        assert all(v.dtype != torch.float16 for v in values["model"].values())
        assert any("master_param" in s for s in values["optimizer"]["state"].values())

    @pytest.mark.parametrize("damage", ["cut", "text", "other", "missing", "lacking"])
    def test_damaged_checkpoints_are_refused_in_a_line(self, damage, tmp_path, capsys):
        path = tmp_path / "run.pt"
        if damage == "cut":
            torch.save({"format": 1, "model": torch.zeros(1000)}, path)
            path.write_bytes(path.read_bytes()[:500])
        elif damage == "text":
            path.write_text("no checkpoint at all")
        elif damage == "other":
            torch.save({"model": {}}, path)
        elif damage == "lacking":
            torch.save({"format": 1, "model": {}}, path)
        before = path.read_bytes() if path.exists() else None
        output = tmp_path / "results"
        line = ["--data", "digits", "--resume", str(path), "-o", str(output)]
        assert main("mnist", line) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(path) in error
        assert (path.read_bytes() if path.exists() else None) == before
        assert not output.exists()

    def test_a_checkpoint_of_another_run_is_refused(self, tmp_path, capsys):
        wish = StopWish()
        with pytest.raises(Interrupted) as stopped:
            training_of(BASE, tmp_path, wish=wish, log=StopAt(2, wish, tmp_path)).run()
        line = ["--data", "digits", "--resume", str(stopped.value.checkpoint), "-o", str(tmp_path)]
        assert main("cifar", [*line, "--arm", "O5", "--iterations", "3"]) == 2
        error = capsys.readouterr().err
        assert "is of another run" in error
        assert "model 'wrn10_1' then and 'vgg16' now" in error


class TestInterruption:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_saves_says_how_to_go_on_and_goes_on(self, number, tmp_path, capsys):
        line = ["--data", "digits", "-b", "64", "--image-size", "16", "--arm", "O5", "-p", "2"]
        line += ["--repeats", "1", "-o", str(tmp_path), "--GPU", "here", "--quiet"]

        def send_in_the_middle() -> None:
            while not any(path.stat().st_size for path in tmp_path.rglob("*.jsonl")):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        sender = threading.Thread(target=send_in_the_middle, daemon=True)
        sender.start()
        assert main("mlp", [*line, "--iterations", "1000000"]) == 128 + number
        sender.join()
        (saved,) = tmp_path.rglob("*.pt")
        assert f"--resume {saved}" in capsys.readouterr().out
        assert not list(tmp_path.rglob("*.json"))
        step = torch.load(saved, weights_only=True)["step"]
        assert main("mlp", [*line, "--resume", str(saved), "--iterations", str(step + 3)]) == 0
        (result,) = tmp_path.rglob("*.json")
        assert json.loads(result.read_text())["iterations"] == step + 3
        assert not list(tmp_path.rglob("*.pt"))  # it has served


class TestDivergence:
    def test_finds_the_first_module_and_tensor(self, tmp_path):
        """A weight that is set to inf in the fourth step is what the report names."""
        training = training_of(dataclasses.replace(BASE, arm="fp32", method="fp32"), tmp_path)
        build = training.build

        def with_a_mine(*args: object) -> object:
            arm = build(*args)
            steps = iter(range(1, 1000))
            step = arm.step

            def explode_in_step_4(*batch: object) -> object:
                if next(steps) == 4:
                    layer = [m for m in arm.bare_model.modules() if isinstance(m, nn.Conv2d)][3]
                    layer.weight.data[0, 0, 0, 0] = math.inf
                return step(*batch)

            arm.step = explode_in_step_4
            return arm

        training.build = with_a_mine
        training.rehearse = dict
        with pytest.raises(Diverged) as caught:
            training.run()
        assert caught.value.step == 4
        told = diagnose.explain(training, caught.value)
        names = [n for n, m in training.arm.bare_model.named_modules() if isinstance(m, nn.Conv2d)]
        assert told["module"] == f"{names[3]} (Conv2d)"
        assert told["tensor"] == "weight"
        assert told["first"].endswith("(Conv2d), float32, holds inf in step 4")
        assert told["step"] == 4
        assert told["batch_norm_dtype"] == "float32"

    def test_one_that_evaluation_alone_shows(self, tmp_path):
        training = training_of(dataclasses.replace(BASE, epochs=1), tmp_path)
        batches = training.data.test_batches
        training.data.test_batches = lambda: ((x * math.inf, y) for x, y in batches())
        with pytest.raises(Diverged, match="test loss became nan") as caught:
            training.run()
        told = diagnose.explain(training, caught.value)
        assert told["module"].startswith("the model (")
        assert told["tensor"].startswith("argument 'images', first in batch element")

    def test_o3_says_why_and_what_to_do(self, tmp_path, capsys):
        line = ["--data", "digits", "--model", "wrn10_1", "--image-size", "8", "-b", "32"]
        line += ["--arm", "fp32", "O3", "--lr", "1000", "--iterations", "12", "--repeats", "1"]
        line += ["-o", str(tmp_path), "--GPU", "here", "--quiet"]
        assert main("cifar", line) == 3
        printed = capsys.readouterr().out
        assert "O3 diverged in step" in printed
        assert "Batch norm statistics: float16." in printed
        assert "Loss scale: 1." in printed
        assert "--keep-batchnorm-fp32 True --loss-scale 128" in printed
        assert "nan " not in printed.split("method")[1]  # the table
        results = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
        (o3,) = [result for result in results if result["arm"] == "O3"]
        assert o3["diverged"]["module"]
        assert o3["diverged"]["tensor"]
        for path in tmp_path.rglob("*.json*"):  # NaN and Infinity are no JSON
            for text in (
                path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            ):
                json.loads(text, parse_constant=pytest.fail)

    def test_one_bad_batch_under_a_dynamic_scale_is_no_divergence(self):
        training = training_of(dataclasses.replace(BASE, iterations=10, evaluate=False))
        training.record = Record(losses=[1.0, 1.0, math.inf])
        training._check_interval(3, [2.0] * 3, [False, False, True])
        training.record = Record(losses=[math.inf] * 3)
        with pytest.raises(Diverged, match="loss became inf") as caught:
            training._check_interval(3, [2.0] * 3, [True] * 3)
        assert caught.value.step == 1

    def test_a_scale_that_sinks_to_nothing_is_one(self):
        training = training_of(dataclasses.replace(BASE, iterations=10, evaluate=False))
        training.record = Record(losses=[1.0] * 20)
        training._check_interval(20, [2.0] * 20, [True] * 20)  # still searching
        with pytest.raises(Diverged, match="every step overflows"):
            training._check_interval(20, [0.5] * 20, [True] * 20)

    @pytest.mark.parametrize(
        ("arm", "scale", "said"),
        [
            ("O3", 128.0, "O3 runs without FP32 masters and FP32 batch norm"),
            ("O2", 128.0, "try --loss-scale dynamic"),
            ("O2", None, "beyond FP16's 65504"),
            ("fp32", None, "try a lower --lr"),
        ],
    )
    def test_suggestions(self, arm, scale, said):
        config = dataclasses.replace(BASE, arm=arm, loss_scale=scale)
        model = torch.nn.Linear(1, 1, bias=False).half()
        with amp.explain_overflow(model) as watch:
            model(torch.full((1, 1), 6e4).half() / model.weight.detach().abs() * 2)
        assert said in diagnose._suggestion(config, watch.explanation, "float16")


class TestCommand:
    def test_results_and_table(self, tmp_path, capsys):
        line = ["--data", "digits", "-b", "64", "--iterations", "6", "--repeats", "2"]
        line += ["--arm", "fp32", "O5", "-o", str(tmp_path), "--GPU", "My GPU/1", "--quiet"]
        assert main("mnist", [*line, "--image-size", "8", "--tensorboard"]) == 0
        printed = capsys.readouterr().out
        folder = tmp_path / "My GPU-1"
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert sorted((r["arm"], r["repeat"], r["seed"]) for r in results) == [
            ("O5", 0, 0),
            ("O5", 1, 1),
            ("fp32", 0, 0),
            ("fp32", 1, 1),
        ]
        for result in results:
            assert result["format"] == 1
            assert result["gpu"] == "My GPU-1"
            assert result["recipe"] == "e5"
            assert result["command"][1:] == ["-m", "ampfuse.experiments.mnist", *line,
                                             "--image-size", "8", "--tensorboard"]  # fmt: skip
            assert result["environment"]["torch"] == torch.__version__
            assert result["memory_bytes"] > 2**20
            assert result["memory_kind"] == "process RSS"
            assert f"Total execution time = {result['train_time_s']:.3f} sec" in printed
            assert f"Max memory used by tensors = {result['memory_bytes']} bytes" in printed
        assert "1.00x" in printed
        assert printed.strip().splitlines()[-1].startswith("Max memory used by tensors = ")
        assert not list(folder.glob("*.pt"))
        assert len(list(folder.rglob("events.out.tfevents.*"))) == 4

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("trainer", "model", "size"), [("cifar", "wrn10_1", "8"), ("imagenet", "resnet18", "32")]
    )
    def test_rank_0_alone_prints_and_writes(self, trainer, model, size, tmp_path):
        line = ["--data", "digits", "--model", model, "--image-size", size, "-b", "32"]
        line += ["--iterations", "4", "--repeats", "1", "--arm", "O2", "--lr", "0.1"]
        printed = in_two_processes(trainer, *line, "-o", str(tmp_path), "--GPU", "here")
        assert printed.count("images/s (") == 1
        (path,) = tmp_path.rglob("*.json")
        result = json.loads(path.read_text())
        assert result["world_size"] == 2
        speed = result["images_per_s"]["mean"]
        assert speed == pytest.approx(2 * 32 * 4 / result["train_time_s"])
        assert result["data"]["train_size"] == 1437

    def test_two_processes_learn_what_one_does(self, tmp_path):
        """Two halves of a batch, averaged, are the batch: without batch norm, the same loss."""
        common = ["--data", "digits", "--image-size", "8", "--iterations", "8", "--GPU", "x"]
        common += ["--arm", "O0", "O2", "O5", "--repeats", "1", "--lr", "10", "--quiet"]
        common += ["--evaluate"]
        main("mlp", [*common, "-b", "64", "-o", str(tmp_path / "1")])
        ranks(2, "-m", "ampfuse.experiments.mlp", *common, "-b", "32", "-o", tmp_path / "2")
        alone, together = (
            {result["arm"]: result for result in map(json.loads, texts)}
            for texts in (
                [path.read_text() for path in (tmp_path / n).rglob("*.json")] for n in ("1", "2")
            )
        )
        assert alone.keys() == together.keys() == {"O0", "O2", "O5"}
        for level, one in alone.items():
            two, rel = together[level], 1e-5 if level == "O0" else 1e-3
            assert two["train_loss"]["mean"] == pytest.approx(one["train_loss"]["mean"], rel=rel)
            assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], rel=rel)

    def test_prof_writes_a_trace(self, tmp_path):
        line = ["--data", "digits", "--image-size", "8", "--arm", "O5", "--prof", "3"]
        assert main("mlp", [*line, "-o", str(tmp_path), "--repeats", "1", "--quiet"]) == 0
        (path,) = tmp_path.rglob("*.trace.json")
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {"aten::addmm", "aten::mse_loss"} <= names
        (result,) = (p for p in tmp_path.rglob("*.json") if p != path)
        assert json.loads(result.read_text())["iterations"] == 3

    def test_unwritable_output(self, tmp_path, capsys):
        taken = tmp_path / "file"
        taken.write_text("precious")
        assert main("mnist", ["--data", "digits", "-o", str(taken)]) == 2
        assert f"--output: {taken} is not a folder" in capsys.readouterr().err
        assert taken.read_text() == "precious"

    @pytest.mark.parametrize(
        ("trainer", "line", "said"),
        [
            (
                "cifar",
                ["--data", "digits", "--device", "gpu"],
                "--device gpu: give auto, cpu, cuda or cuda:N",
            ),
            ("cifar", ["--data", "digits", "--model", "vgg99"], "vgg99"),
            ("cifar", ["--data", "digits", "-b", "5000"], "5000"),
            ("imagenet", ["/nowhere/at/all"], "/nowhere/at/all"),
            ("mlp", ["--image-size", "8", "--arm", "O1", "--keep-batchnorm-fp32"], None),
        ],
    )
    def test_wrong_wishes_are_one_line_and_status_2(self, trainer, line, said, tmp_path, capsys):
        status = main(trainer, [*line, "-o", str(tmp_path / "out"), "--iterations", "1"])
        captured = capsys.readouterr()
        if said is None:  # O1 has no use for it, and the others of a comparison may
            assert status == 0
            return
        assert status == 2
        assert said in captured.err
        assert captured.err.count("\n") == 1
        assert not list((tmp_path / "out").rglob("*.json"))


def test_scales_and_skips_are_device_values():
    """What a step returns are tensors, so that no arm makes the host wait for them."""
    for arm_name in CPU_ARMS:
        config = dataclasses.replace(BASE, arm=arm_name)
        arm = build_arm(config, nn.Linear(4, 3), torch.device("cpu"))
        batch = torch.randn(8, 4), torch.randint(3, (8,))
        for value in arm.step(*batch, nn.functional.cross_entropy):
            assert (value.dtype, value.shape) == (torch.float32, ())


@pytest.mark.parametrize("arm_name", CPU_ARMS)
def test_bf16_under_torch_amp_is_as_without_ampfuse(arm_name):
    def loss_of(outputs, targets):
        ours.append(_C.half_ops())
        return nn.functional.cross_entropy(outputs.float(), targets)

    ours = []
    config = dataclasses.replace(BASE, arm=arm_name)
    arm = build_arm(config, nn.Linear(4, 3), torch.device("cpu"))
    arm.step(torch.randn(8, 4), torch.randint(3, (8,)), loss_of)
    assert ours == [arm_name not in ("fp32", "O0", "amp-bf16")]


def test_tf32_is_refused_on_a_cpu():
    config = dataclasses.replace(BASE, arm="tf32")
    with pytest.raises(UsageError, match="sm_80"):
        build_arm(config, nn.Linear(4, 3), torch.device("cpu"))


def test_report_without_timed_steps(tmp_path):
    """A graph of four steps in a run of four leaves nothing timed, and no division by zero."""
    steps = Record(losses=[1.0] * 4).summary(32)
    changes = {"model": "m", "method": "O2", "arm": "O2", "test": None, "loss_scale": 1.0}
    result = RunResult.read(ResultFolder(tmp_path).add(**steps | changes))
    assert "O2" in report.table([result])
    assert report.line(result) == "m O2: loss 1.0000"
