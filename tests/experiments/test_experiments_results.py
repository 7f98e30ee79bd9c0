"""Result files as rows, and their tables: published rows as published, own ones beside them and
labelled; the CSV."""

import argparse
import csv
from importlib import resources

import pytest

from ampfuse.command_line import UsageError
from ampfuse.experiments import make_table, results
from experiment_files import ResultFolder, divergence


@pytest.fixture
def folder(tmp_path, monkeypatch) -> ResultFolder:
    monkeypatch.chdir(tmp_path)
    return ResultFolder(tmp_path / "results")


def test_repeats_become_mean_and_sample_deviation(folder):
    names = ("time_s", "memory_mb", "accuracy_pct", "images_per_s", "loss_last", "loss_mean")
    for n in range(3):
        speeds = {"images_per_s_min": 900.0 - n, "images_per_s_max": 2000.0 + n}
        folder.add(repeat=n, skipped_steps=n, **speeds, **dict.fromkeys(names, 40.0 + n))
    folder.add(gpu="V100", **dict.fromkeys(("time_s", "images_per_s", "images_per_s_min")))
    row, untimed = results.measured()
    assert (row.source, row.n, row.skipped_steps) == ("measured", 3, 1)
    for name in names:
        assert (getattr(row, f"{name}_mean"), getattr(row, f"{name}_std")) == (41, 1)
    assert (row.images_per_s_min, row.images_per_s_max) == (898, 2002)
    assert untimed.time_s_mean is untimed.images_per_s_mean is None
    assert (untimed.memory_mb_mean, untimed.memory_mb_std, untimed.n) == (1500, None, 1)


WORDS = "variant precision gpu device recipe model data loader loss_scale_of torch".split()
NUMBERS = "batch_size iterations epochs world_size lr".split()
DIFFERENCES = {**dict.fromkeys(WORDS, "other"), **dict.fromkeys(NUMBERS, 7), "graph": True}


def test_runs_that_differ_in_more_than_the_seed_are_not_repeats(folder):
    folder.add(repeat=0)
    folder.add(repeat=1)
    for name, value in DIFFERENCES.items():
        folder.add(repeat=2, **{name: value})
    assert sorted(row.n for row in results.measured()) == [1] * len(DIFFERENCES) + [2]


def test_a_repeated_command_replaces_its_samples(folder):
    folder.add_repeats([9.0, 9.0])
    folder.add_repeats([5.0, 6.0])
    (row,) = results.measured()
    assert (row.n, row.time_s_mean) == (2, 5.5)
    folder.add(repeat=0, time_s=4.0, loss_scale=2.0)
    (row,) = results.measured()
    assert (row.n, row.time_s_mean, row.scale, row.date[-8:-6]) == (2, 5.0, 2.0, "05")
    folder.add(repeat=0, seed=1, time_s=8.0)  # the second repeat's seed as a command of its own
    (row,) = results.measured()
    assert (row.n, row.time_s_mean) == (2, 6.0)


def test_diverged_runs_count_for_memory_alone(folder):
    """They have their intended length."""
    o3 = {"precision": "O3", "variant": "O3"}
    folder.add_repeats([5.0, 6.0], **o3)
    diverged = {
        **o3,
        "time_s": 0.1,
        "memory_mb": 3000.0,
        "loss_last": None,
        "accuracy_pct": 7.0,  # of an epoch before
        "diverged": divergence(31),
    }
    folder.add(repeat=2, **diverged)
    folder.add(gpu="V100", **diverged)
    some, all_ = results.measured()
    names = ("time_s", "accuracy_pct", "loss_last", "memory_mb")
    for row, n, values in ((some, 3, [5.5, 41, 1.5, 2000]), (all_, 1, [None, None, None, 3000])):
        assert (row.n, row.diverged, row.iterations) == (n, 1, 100)
        assert [getattr(row, f"{name}_mean") for name in names] == values
    assert some.note == "1 of 3 diverged in step 31: the training loss became nan"
    assert all_.note.startswith("diverged in step 31")


def test_an_unreadable_file_is_named(folder):
    good = folder.add()
    good.with_name("run1.trace.json").write_text("{}")  # the profiler's
    assert len(results.measured()) == 1
    text = good.read_text()
    for bad in (
        text[: len(text) // 2],
        '{"loss": 1}',
        text.replace('"format": 3', '"format": 2'),
        "[]",
        text.replace('"batch_size": 128', '"batch": 128'),
        text.replace('"time_s": 5.0', '"time_s": "5.0"'),
        text.replace('"images_per_s": 2560.0, ', ""),
        "\x00\x01",
    ):
        good.with_name("bad.json").write_text(bad)
        with pytest.raises(UsageError, match=r"bad\.json is damaged or not a result file") as error:
            results.measured()
        assert "\n" not in str(error.value)


# ---- tables -------------------------------------------------------------------------------------


def parsed(markdown: str) -> list[dict[str, str]]:
    """The table's cells, by column."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    header, rule, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    assert {cell.strip("-") for cell in rule} == {""}
    return [dict(zip(header, row, strict=True)) for row in rows]


def printed(capsys, *arguments: str) -> list[dict[str, str]]:
    assert make_table.main(list(arguments)) == 0
    return parsed(capsys.readouterr().out)


@pytest.mark.parametrize("recipe", results.RECIPES)
def test_what_e1_published_has_another_deviation_and_memory(recipe):
    text = make_table.table(results.published(recipe))
    assert ("memory is what nvidia-smi reported, in MiB" in text) == (recipe == "e1")


def own(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if row["source"] == "measured here"]


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# Column of the published CSVs, by the header of the table.
COLUMNS = {
    "environment": "platform",
    "GPU": "gpu",
    "batch size": "batch_size",
    "time, s": "time_s",
    "images/s": "images_per_s",
    "min": "images_per_s_min",
    "max": "images_per_s_max",
    "memory, MB": "memory_mb",
    "accuracy, %": "accuracy_pct",
    "loss last": "loss_last",
    "loss mean": "loss_mean",
    **{
        name: name
        for name in ("model", "variant", "optimizer", "iterations", "epochs", "n", "note")
    },
}


@pytest.mark.parametrize("recipe", results.RECIPES)
def test_published_cells_are_the_csv(recipe, folder, capsys):
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    lines = list(csv.DictReader(file.read_text().splitlines()))
    rows = printed(capsys, recipe)
    assert len(rows) == len(lines)
    for line, row in zip(lines, rows, strict=True):
        assert row["source"] == "published"
        names = [*COLUMNS.values(), "source", "recipe", "experiment"]
        assert {*line} <= {n + end for n in names for end in ("", "_mean", "_std")}
        for header, name in COLUMNS.items():
            mean, _, deviation = row.get(header, "").partition(" ± ")
            expected = line.get(name, line.get(f"{name}_mean", ""))
            assert number(mean) == number(expected), (header, row)
            assert number(deviation) == number(line.get(f"{name}_std", "")), (header, row)


def test_e1_has_means_and_deviations_of_own_runs(folder, capsys):
    for n, (seconds, accuracy) in enumerate([(5.0, 40.0), (6.0, 42.0), (7.0, 41.0)]):
        own_ = {"repeat": n, "time_s": seconds, "memory_mb": 1400.0 + n, "accuracy_pct": accuracy}
        folder.add(variant="FP16", precision="O2", memory_kind="process RSS", **own_)
    assert make_table.main(["e1"]) == 0
    text = capsys.readouterr().out
    rows = parsed(text)
    assert len(rows) == 46
    (row,) = own(rows)
    expected = {
        "source": "measured here",
        "GPU": "T4 (Tesla T4)",
        "variant": "FP16",
        "n": "3",
        "batch size": "128",
        "iterations": "100",
        "accuracy, %": "41 ± 1",
        "time, s": "6 ± 1",
        "memory, MB": "1401 ± 1",
        "note": "re-enactment; synthetic data",
    }
    assert expected.items() <= row.items()
    below = text.rsplit("|", 1)[1]
    for words in ("process RSS", "torch 2.14.1", "ampfuse 0.1.0", "2026-11-21", "10^6 bytes"):
        assert words in below
    assert own(printed(capsys, "e1", "--no-published")) == printed(capsys, "e1", "--no-published")


def test_e2_tells_why_a_level_diverged_and_labels_what_differs(folder, capsys):
    of_e2 = {
        "recipe": "e2",
        "model": "wrn28_10",
        "iterations": 3900,
        "epochs": 10.0,
        "time_s": 1234.5,
        "data": "cifar10",
    }
    for changes in (
        {"precision": "O2", "variant": "O2"},
        {"precision": "O3", "variant": "O3", "memory_mb": 4347.0, "diverged": divergence(31)},
        {"graph": True},
        {"iterations": 6, "epochs": 6 / 390, "batch_size": 16},
    ):
        folder.add(**of_e2 | changes)
    columns = ("variant", "iterations", "epochs", "time, s", "accuracy, %", "memory, MB", "note")
    found = [[row[name] for name in columns] for row in own(printed(capsys, "e2"))]
    note = "re-enactment; diverged in step 31: the training loss became nan"
    assert found == [
        ["FP32", "6", "0.01538", "1234", "41", "1500", "re-enactment"],
        ["FP32", "3900", "10", "1234", "41", "1500", "re-enactment; graph"],
        ["O2", "3900", "10", "1234", "41", "1500", "re-enactment"],
        ["O3", "3900", "10", "", "", "4347", note],
    ]


def test_small_loss_scales_are_shown(folder):
    for number, scale in enumerate((0.25, 1.0, 65536.0)):
        folder.add(variant=f"O{number}", loss_scale=scale)
    rows = parsed(make_table.table(results.measured(), make_table.TRAINED))
    assert [row["scale"] for row in rows] == ["0.25", "1", "65,536"]


def test_the_note_tells_rows_of_one_size_apart(folder, capsys):
    """Rows of other sizes name the same conditions; what they all differ in goes unnamed."""
    folder.add(torch="2.15.0")
    folder.add(lr=0.1)
    folder.add(lr=0.1, graph=True)
    folder.add(batch_size=256, train_size=4096)
    found = [(row["batch size"], row["note"]) for row in own(printed(capsys, "e1"))]
    start = "re-enactment; synthetic data"
    assert found == [
        ("128", f"{start}; lr 0.01, torch 2.15.0"),
        ("128", f"{start}; lr 0.1, torch 2.14.1"),
        ("128", f"{start}; graph; lr 0.1, torch 2.14.1"),
        ("256", f"{start}; lr 0.01, torch 2.14.1"),
    ]


def test_e4_has_mean_min_and_max(folder, capsys):
    network = {
        "recipe": "e4",
        "experiment": "imagenet",
        "model": "resnet50",
        "iterations": 360,
        "gpu": "Tesla T4",
        "world_size": 2,
    }
    for n, mean in enumerate((330.0, 334.0)):
        speeds = {"images_per_s_min": 300.0 - n, "images_per_s_max": 350.0 + n}
        folder.add(repeat=n, images_per_s=mean, loss_last=5.0, loss_mean=5.5, **network, **speeds)
    (row,) = own(printed(capsys, "e4"))
    expected = {
        "images/s": "332 ± 2.8",
        "min": "299",
        "max": "351",
        "loss last": "5 ± 0",
        "loss mean": "5.5 ± 0",
        "GPU": "Tesla T4",
    }
    assert expected.items() <= row.items()
    assert row["note"] == "re-enactment; synthetic data; 2 processes"


@pytest.mark.parametrize("others", [[], ["e2", None]], ids=["none", "of other recipes"])
def test_without_results_of_the_recipe_published_rows_are_printed(others, folder, capsys):
    for recipe in others:
        folder.add(recipe=recipe)
    assert make_table.main(["e1"]) == 0
    said = capsys.readouterr()
    assert [row["source"] for row in parsed(said.out)] == ["published"] * 45
    assert "results: no results of e1" in said.err
    assert "ampfuse train cifar --recipe e1" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("", [1, 2, 4, 3, 5, 6]),
        ("--GPU V100 T4", [6, 1, 2, 4, 3, 5]),
        ("--method FP16 FP32", [4, 3, 1, 2, 6]),
        ("--batch 128 --GPU T4", [1, 4, 3, 5]),
        ("--iteration 50", [4]),
        ("--epochs 2 --model vgg16", [2]),
    ],
)
def test_the_runs_that_tables_and_figures_choose(flags, chosen, folder):
    folder.add()
    folder.add(batch_size=256, epochs=2.0)
    folder.add(precision="O2", variant="FP16")
    folder.add(precision="O2", variant="FP16", iterations=50, graph=True)
    folder.add(precision="O3", variant="O3", diverged=divergence())
    folder.add(gpu="V100")
    folder.add(recipe=None, batch_size=512)  # of no recipe
    folder.add(recipe="e2", model="wrn28_10")

    parser = argparse.ArgumentParser()
    results.add_selection(parser, recipe=True)
    own = results.chosen(results.measured(), parser.parse_args(["--recipe", "e1", *flags.split()]))
    assert [int(row.runs[0]["finished"][17:19]) for row in own] == chosen


def test_a_length_is_chosen_as_it_is_listed(folder, capsys):
    folder.add(epochs=10 / 39)
    folder.add(epochs=2.0)
    assert [row["epochs"] for row in own(printed(capsys, "e1", "--epochs", "0.25641"))] == [
        "0.2564"
    ]
    assert make_table.main(["e1", "--epochs", "3"]) == 2
    assert "--epochs 3: no such results; there are 0.25641, 2" in capsys.readouterr().err


def test_csv_has_one_line_per_measured_row(folder, capsys, tmp_path):
    """With all that is known of it."""
    folder.add_repeats([5.0, 6.0, 7.0])
    folder.add(variant="O3", precision="O3", diverged=divergence(), torch="2.15.0")
    path = tmp_path / "new" / "e1.csv"
    assert make_table.main(["e1", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.count("measured here") == 2
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert lines == [
        {name: "" if value is None else str(value) for name, value in record.items()}
        for record in results.records(results.measured())
    ]
    names = (
        "source recipe gpu device variant precision batch_size data n time_s_mean time_s_std date"
    )
    expected = "measured e1 T4 Tesla-T4 FP32 fp32 128 synthetic 3 6.0 1.0 2026-11-21T04:00:03+00:00"
    sound, diverged = lines
    assert [sound[name].replace(" ", "-") for name in names.split()] == expected.split()
    assert (diverged["time_s_mean"], diverged["diverged"], diverged["torch"]) == ("", "1", "2.15.0")
    assert diverged["note"] == "diverged in step 31: the training loss became nan"
