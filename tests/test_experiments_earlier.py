"""Results and a checkpoint of the trainers as they were before their rebuilding: read as they were.

``tests/data/experiments`` holds what these commands left, and what make_table said of them then::

    ampfuse train mlp FLAGS -o results --arm fp32 amp-fp16 O2 --iterations 4 --print-freq 2
    ampfuse train mlp FLAGS --arm O2 --iterations 2 --checkpoints
    ampfuse make_table e5 --no-published --results results --csv e5.csv > table.md
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("rich")
pytest.importorskip("tqdm")

from ampfuse.experiments import checkpoint, make_table, results
from ampfuse.experiments.record import RunResult
from ampfuse.experiments.trainers import main

EARLIER = Path(__file__).parent / "data" / "experiments"
FLAGS = "--data synthetic --image-size 2 -b 8 --evaluate --optimizer adamw --lr 0.01 --quiet"
FLAGS += " --GPU here --device cpu"
FILES = sorted((EARLIER / "results").rglob("*.json"))


def test_table_and_csv_are_the_same(tmp_path, capsys):
    path = tmp_path / "e5.csv"
    line = ["e5", "--no-published", "--results", str(EARLIER / "results"), "--csv", str(path)]
    assert make_table.main(line) == 0
    assert capsys.readouterr().out == (EARLIER / "table.md").read_text()
    assert path.read_text() == (EARLIER / "e5.csv").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split("-")[2])
def test_results_are_read_and_written_as_they_stand(path, tmp_path):
    RunResult.read(path).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_logs_are_read():
    (row,) = (row for row in results.measured(EARLIER / "results") if row.method == "O2")
    assert [line["step"] for line in row.runs[0].log("interval")] == [2, 4]
    assert [line["step"] for line in row.runs[0].log("evaluation")] == [4]


def test_a_checkpoint_goes_on_as_it_would_have(tmp_path):
    """To the losses of the run that was not interrupted, up to another machine's last bits."""
    line = [*FLAGS.split(), "--arm", "O2", "--iterations", "4", "-o", str(tmp_path)]
    assert main("mlp", [*line, "--resume", str(EARLIER / "checkpoint.pt")]) == 0
    resumed = RunResult.read(next(tmp_path.rglob("*.json")))
    (whole,) = (RunResult.read(path) for path in FILES if "-O2-" in path.name)
    assert resumed.iterations == 4
    assert resumed.train_loss == pytest.approx(whole.train_loss, rel=1e-4)
    assert resumed.test["loss"] == pytest.approx(whole.test["loss"], rel=1e-4)
    assert resumed.data == whole.data
    assert resumed.policy == whole.policy


def test_a_checkpoint_is_written_as_it_was(tmp_path):
    line = [*FLAGS.split(), "--arm", "O2", "--iterations", "2", "-o", str(tmp_path)]
    assert main("mlp", [*line, "--checkpoints"]) == 0
    (path,) = tmp_path.rglob("*.pt")
    then, now = (torch.load(p, weights_only=True) for p in (EARLIER / "checkpoint.pt", path))
    assert [*then, "world_size"] == list(now)
    for name in ("model", "optimizer", "scaler", "rng", "record"):
        assert list(then[name]) == list(now[name]), name
    # Since then, levels fuse batch norms, and a model may be in shards.
    assert now["config"] == then["config"] | {"fuse_batchnorm": True, "fsdp": False}
    assert dataclasses.asdict(checkpoint.load(path).config) == now["config"]
    for name, weight in then["model"].items():
        torch.testing.assert_close(now["model"][name], weight, rtol=1e-4, atol=1e-6)


def test_new_results_have_the_fields_of_earlier_ones(tmp_path):
    line = [*FLAGS.split(), "--arm", "fp32", "--iterations", "2", "-o", str(tmp_path)]
    assert main("mlp", line) == 0
    (path,) = tmp_path.rglob("*.json")
    (earlier,) = (path for path in FILES if "-fp32-" in path.name)
    new, old = (json.loads(file.read_text()) for file in (path, earlier))
    assert list(new) == list(old)
    for name in ("data", "device", "environment", "switches", "optimizer", "kernels"):
        assert list(new[name]) == list(old[name]), name
