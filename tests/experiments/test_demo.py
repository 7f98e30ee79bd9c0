"""``ampfuse demo`` as a user meets it: table, files, errors, Ctrl-C."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from ampfuse.__main__ import main
from ampfuse.experiments import training
from ampfuse.experiments.settings import LEVELS, VARIANTS
from ampfuse.experiments.training import Run
from ampfuse.measuring import tensor_memory

EPOCHS, BATCH_SIZE = 2, 256
STEPS = EPOCHS * (1437 // BATCH_SIZE)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_table_and_files(tmp_path, capsys):
    """test_experiments_plots.py looks into the pictures that make_plot.save() makes."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "levels.csv").write_text("old")
    options = f"--width 8 --epochs {EPOCHS} --batch-size {BATCH_SIZE} --output {folder}"
    assert main(f"demo --device cpu {options}".split()) == 0
    printed = capsys.readouterr().out
    rows = read(folder / "levels.csv")
    assert [row["variant"] for row in rows] == list(LEVELS)
    for level, row in zip(LEVELS, rows, strict=True):
        cells = re.search(rf"^\| {level} +\| (.+) \|$", printed, re.MULTILINE)
        values = map(float, cells[1].replace(",", "").split("|"))
        size, milliseconds, speed, memory, loss, accuracy, skipped, scale = values
        assert (size, loss > 0) == (BATCH_SIZE, True)
        assert milliseconds * STEPS == pytest.approx(1e3 * float(row["time_s_mean"]), rel=0.001)
        assert speed > 0
        assert 0.1 < memory < 100
        assert 0 <= accuracy <= 100
        assert 0 <= skipped <= STEPS
        assert scale >= 1
        assert f"{level}: {VARIANTS[level]}" in printed
        images = float(row["images_per_s_mean"]) * float(row["time_s_mean"])
        assert images == pytest.approx(STEPS * BATCH_SIZE)
        assert float(row["accuracy_pct_mean"]) == pytest.approx(accuracy, abs=0.05)
        assert (row["batch_size"], row["epochs"]) == (str(BATCH_SIZE), str(float(EPOCHS)))
        assert (row["torch"], row["memory_kind"]) == (torch.__version__, "tensors")
    assert "O3 has no FP32 master weights" in printed
    assert str(folder) in printed
    names = {"levels.csv", "Digits - Time.png", "Digits - Memory.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_level_that_diverged_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "lr_factor", lambda *_: 1e30)
    options = f"--width 2 --epochs 1 --levels O0 --output {tmp_path}"
    assert main(f"demo --device cpu {options}".split()) == 3
    printed = capsys.readouterr().out
    assert re.search(
        r"^\| O0 .* diverged in step \d+: the training loss became nan \|$", printed, re.M
    )


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch, capsys):
    note = Run._record_step

    def interrupted(run: Run, *values: object) -> None:
        note(run, *values)
        if run.steps_done == 3:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "_record_step", interrupted)
    assert main("demo --device cpu --width 8 --epochs 2 --levels O0".split()) == 130
    assert capsys.readouterr().err.strip() == "Interrupted; nothing was written."
    assert not list(tmp_path.iterdir())


def test_peak_memory_of_tensors(capfd):
    """Two and one MiB, which are released, and then two: the peak is three."""
    with tensor_memory(torch.device("cpu")) as memory:
        first = torch.zeros(2**19)
        second = torch.zeros(2**18)
        del first, second
        third = torch.zeros(2**19)
    del third
    assert memory.mib == pytest.approx(3, abs=0.01)
    assert capfd.readouterr().err == ""
    print("heard again", file=sys.stderr)
    assert capfd.readouterr().err == "heard again\n"


def demo(folder: Path, *options: object) -> list[dict[str, str]]:
    """The rows of the demo as it stands, in a process of its own."""
    command = [sys.executable, "-m", "ampfuse", "demo", *map(str, options), "-o", str(folder)]
    subprocess.run(command, check=True)
    return read(folder / "levels.csv")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_level_learns(seed, tmp_path):
    """At least 97 %, and within one point of FP32 but for pure FP16."""
    rows = demo(tmp_path, "--seed", seed)
    accuracy = {row["variant"]: float(row["accuracy_pct_mean"]) / 100 for row in rows}
    for level in ("O0", "O1", "O2", "O4", "O5"):
        assert accuracy[level] >= 0.97
        assert abs(accuracy[level] - accuracy["O0"]) <= 0.01


@pytest.mark.benchmark
def test_no_level_is_much_slower_than_fp32(tmp_path):
    rows = demo(tmp_path, "--device", "cpu")
    seconds = {row["variant"]: float(row["time_s_mean"]) for row in rows}
    assert max(seconds.values()) <= 2.5 * seconds["O0"]
    assert sum(seconds.values()) < 180
