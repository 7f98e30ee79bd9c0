"""``ampfuse demo`` as a user meets it: table, files, errors, Ctrl-C."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from ampfuse.__main__ import main
from ampfuse.experiments.run import Run
from ampfuse.experiments.settings import ARMS, LEVELS
from ampfuse.measuring import TensorMemory

COMMAND = [sys.executable, "-m", "ampfuse", "demo", "--device", "cpu"]
EPOCHS, BATCH_SIZE = 2, 256
STEPS = EPOCHS * (1437 // BATCH_SIZE)
PICTURES = ("Time", "Memory")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> tuple[str, Path]:
    """What a small, short run at every level printed, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "results"
    options = ["--width", "8", "--epochs", EPOCHS, "--batch-size", BATCH_SIZE, "--output", folder]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", "--device", "cpu", *map(str, options)]) == 0
    return printed.getvalue(), folder


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_table(short_run):
    printed, folder = short_run
    for level in LEVELS:
        row = re.search(rf"^\| {level} +\| (.+) \|$", printed, re.MULTILINE)
        assert row, printed
        seconds, speed, memory, accuracy, skipped, scale = row[1].replace(",", "").split("|")
        assert float(seconds) > 0
        assert float(speed) > 0
        assert 0.1 < float(memory) < 100
        assert 0 <= float(accuracy) <= 100
        assert 0 <= int(skipped) <= STEPS
        assert float(scale) >= 1
        assert f"{level}: {ARMS[level]}" in printed
    assert "O3 has no FP32 master weights" in printed
    assert str(folder) in printed


def test_levels_csv(short_run):
    rows = read(short_run[1] / "levels.csv")
    assert [row["method"] for row in rows] == list(LEVELS)
    for row in rows:
        images = float(row["images_per_s_mean"]) * float(row["time_s_mean"])
        assert images == pytest.approx(STEPS * BATCH_SIZE)
        assert 0 <= float(row["accuracy_pct_mean"]) <= 100
        assert (row["batch_size"], row["epochs"]) == (str(BATCH_SIZE), str(float(EPOCHS)))
        assert (row["torch"], row["memory_kind"]) == (torch.__version__, "tensors")


def test_plots_are_pictures_and_nothing_else_is_written(short_run):
    from matplotlib.image import imread

    _, folder = short_run
    pictures = {f"Digits - {name}.png" for name in PICTURES}
    assert {path.name for path in folder.iterdir()} == {"levels.csv", *pictures}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    for path in folder.glob("*.png"):
        picture = imread(path)
        height, width = picture.shape[:2]
        assert height > 300
        assert width > 800
        assert picture[..., :3].std() > 0.03  # an empty page has none
        assert (picture[..., :3] > 0.99).mean() > 0.3  # and a plot has paper


def test_a_second_run_replaces_the_files(tmp_path, capsys):
    options = "--device cpu --width 4 --epochs 1".split()
    for level in ("O0", "O5"):
        assert main(["demo", "--levels", level, *options, "-o", str(tmp_path)]) == 0
    assert [row["method"] for row in read(tmp_path / "levels.csv")] == ["O5"]
    capsys.readouterr()


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch, capsys):
    batches = Run.batches

    def interrupted(run: Run) -> object:
        for number, batch in enumerate(batches(run)):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "batches", interrupted)
    # What a shell starts in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main("demo --device cpu --width 8 --epochs 2 --levels O0".split()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.strip() == "Interrupted; nothing was written."
    assert not list(tmp_path.iterdir())


def test_peak_memory_of_tensors(capfd):
    """Two and one MiB, which are released, and then two: the peak is three."""
    with TensorMemory(torch.device("cpu")) as memory:
        first = torch.zeros(2**19)
        second = torch.zeros(2**18)
        del first, second
        third = torch.zeros(2**19)
    del third
    assert memory.mib == pytest.approx(3, abs=0.01)
    assert capfd.readouterr().err == ""
    print("heard again", file=sys.stderr)
    assert capfd.readouterr().err == "heard again\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_level_learns(seed, tmp_path):
    """The demo as it stands: at least 97 %, and within one point of FP32 but for pure FP16."""
    command = [sys.executable, "-m", "ampfuse", "demo", "--seed", str(seed), "-o", str(tmp_path)]
    subprocess.run(command, check=True)
    rows = read(tmp_path / "levels.csv")
    accuracy = {row["method"]: float(row["accuracy_pct_mean"]) / 100 for row in rows}
    for level in ("O0", "O1", "O2", "O4", "O5"):
        assert accuracy[level] >= 0.97
        assert abs(accuracy[level] - accuracy["O0"]) <= 0.01


@pytest.mark.benchmark
def test_no_level_is_much_slower_than_fp32(tmp_path):
    subprocess.run([*COMMAND, "-o", str(tmp_path)], check=True)
    rows = read(tmp_path / "levels.csv")
    seconds = {row["method"]: float(row["time_s_mean"]) for row in rows}
    assert max(seconds.values()) <= 2.5 * seconds["O0"]
    assert sum(seconds.values()) < 180
