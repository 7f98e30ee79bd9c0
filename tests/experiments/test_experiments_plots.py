"""Results read, grouped and drawn: what the figures hold, which files, and what is refused."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from ampfuse.experiments import figures, make_plot, make_table, results
from experiment_results import ResultFolder, divergence
from programs import python

E1_GPUS, E1_METHODS = ("1080 Ti", "TITAN X", "V100"), ("FP32", "FP16", "amp")
E1_BATCHES = (128, 256, 512, 1024, 2048)
E1_FILES = ("CIFAR - Time", "CIFAR - Memory", "CIFAR - Time (std)", "CIFAR - Memory (std)")
GRAPH = {"graph": True}
CPU = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 2 threads"


@pytest.fixture
def folder(tmp_path) -> ResultFolder:
    return ResultFolder(tmp_path / "results")


def rows_of(folder: ResultFolder) -> list[results.Row]:
    return results.measured(folder.path)


def row_of(folder: ResultFolder) -> results.Row:
    (row,) = rows_of(folder)
    return row


def csv_lines(recipe: str) -> list[dict[str, str]]:
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    return list(csv.DictReader(file.read_text().splitlines()))


def drawn_lines(axes: Axes) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """x, y and the half heights of the error bars, by label."""
    found = {}
    for container in axes.containers:
        line, _, bars = container
        segments = bars[0].get_segments() if bars else []
        spread = [(top - bottom) / 2 for (_, bottom), (_, top) in segments]
        found[container.get_label()] = (list(line.get_xdata()), list(line.get_ydata()), spread)
    return found


def texts_in(axes: Axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def heading_of(figure: Figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


# ---- published figures ---------------------------------------------------------------------------


def test_published_figures_show_the_csv():
    rows = results.published("e1")
    for draw, quantity, name in (
        (figures.time_against_batch, "time_s_{}", "training time of 100 iterations, s"),
        (figures.memory_against_batch, "memory_mb_{}", "device memory, MB"),
    ):
        figure = draw(rows, std=True)
        (axes,) = figure.axes
        lines = drawn_lines(axes)
        assert len(lines) == 9
        for gpu, method in itertools.product(E1_GPUS, E1_METHODS):
            own = [
                line for line in csv_lines("e1") if (line["gpu"], line["method"]) == (gpu, method)
            ]
            x, y, spread = lines[f"{gpu} {method}"]
            assert tuple(x) == E1_BATCHES
            assert y == [float(line[quantity.format("mean")]) for line in own]
            assert spread == pytest.approx([float(line[quantity.format("std")]) for line in own])
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch size", name)
        assert axes.get_xscale() == "log"
        assert [label.get_text() for label in axes.get_xticklabels()] == [*map(str, E1_BATCHES)]
        assert axes.get_ylim()[0] == 0
        assert legend_of(figure) == [f"{gpu} {m}" for gpu in E1_GPUS for m in E1_METHODS]
        assert "published" in heading_of(figure)
        colors, dashes = {}, {}  # colour is the GPU and dash the method
        for container in axes.containers:
            gpu, method = container.get_label().rsplit(" ", 1)
            colors.setdefault(gpu, set()).add(to_hex(container[0].get_color()))
            dashes.setdefault(method, set()).add(str(container[0]._dash_pattern))
        for looks, count in ((colors, len(E1_GPUS)), (dashes, len(E1_METHODS))):
            assert all(len(look) == 1 for look in looks.values())
            assert len(set.union(*looks.values())) == count


# ---- result files --------------------------------------------------------------------------------


def test_repeats_become_mean_and_sample_deviation(folder):
    times = [5.0, 5.5, 4.7, 5.1, 6.2]
    names = ("memory_mb", "accuracy_pct", "images_per_s", "loss_last", "loss_mean")
    for n, seconds in enumerate(times):
        speeds = {"images_per_s_min": 900.0 - n, "images_per_s_max": 2000.0 + n}
        folder.add(repeat=n, time_s=seconds, **speeds, **dict.fromkeys(names, 40.0 + n))
    row = row_of(folder)
    assert (row["source"], row["n"]) == ("measured", 5)
    mean = sum(times) / 5
    deviation = math.sqrt(sum((t - mean) ** 2 for t in times) / 4)
    assert row["time_s_mean"] == pytest.approx(mean)
    assert row["time_s_std"] == pytest.approx(deviation)
    for name in names:
        assert row[f"{name}_mean"] == pytest.approx(42)
        assert row[f"{name}_std"] == pytest.approx(statistics.stdev([40, 41, 42, 43, 44]))
    assert (row["images_per_s_min"], row["images_per_s_max"]) == (896, 2004)


def test_a_single_run_has_no_deviation_and_nothing_timed_is_no_time(folder):
    folder.add()
    folder.add(gpu="V100", **dict.fromkeys(("time_s", "images_per_s", "images_per_s_min")))
    one, untimed = rows_of(folder)
    assert (one["time_s_mean"], one["time_s_std"], one["n"]) == (5.0, None, 1)
    assert untimed["time_s_mean"] is untimed["images_per_s_mean"] is None


@pytest.mark.parametrize(
    "difference",
    [
        *(
            {name: "other"}
            for name in ("method", "arm", "gpu", "device", "recipe", "model", "data")
        ),
        *({name: "other"} for name in ("loader", "loop", "loss_scale_of", "torch")),
        *({name: 7} for name in ("batch_size", "iterations", "epochs", "world_size", "lr")),
        GRAPH,
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_in_more_than_the_seed_is_no_repeat(folder, difference):
    folder.add(repeat=0)
    folder.add(repeat=1)
    folder.add(repeat=2, **difference)
    assert sorted(row["n"] for row in rows_of(folder)) == [1, 2]


def test_a_command_given_twice_is_no_second_sample(folder):
    folder.add_repeats([9.0, 9.0])
    folder.add_repeats([5.0, 6.0])
    row = row_of(folder)
    assert (row["n"], row["time_s_mean"]) == (2, 5.5)


def test_diverged_runs_count_for_memory_alone(folder):
    folder.add_repeats([5.0, 6.0], arm="O3", method="O3")
    # A test accuracy of an epoch before.
    folder.add(repeat=2, arm="O3", method="O3", time_s=0.1, memory_mb=3000.0, loss_last=None,
               diverged=divergence(31))  # fmt: skip
    row = row_of(folder)
    assert (row["n"], row["diverged"]) == (3, 1)
    assert (row["time_s_mean"], row["iterations"]) == (5.5, 100)
    assert (row["accuracy_pct_mean"], row["loss_last_mean"]) == (41, 1.5)
    assert row["memory_mb_mean"] == pytest.approx(2000)
    assert row["note"] == "1 of 3 diverged in step 31: the training loss became nan"


def test_a_row_of_diverged_runs_has_the_length_it_was_to_have(folder):
    folder.add(arm="O3", method="O3", diverged=divergence(31))
    row = row_of(folder)
    assert row["diverged"]
    assert (row["time_s_mean"], row["accuracy_pct_mean"], row["iterations"]) == (None, None, 100)
    assert row["note"].startswith("diverged in step 31")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: '{"loss": 1}',
        lambda text: text.replace('"format": 2', '"format": 3'),
        lambda text: "[]",
        lambda text: text.replace('"batch_size": 128', '"batch": 128'),
        lambda text: text.replace('"time_s": 5.0', '"time_s": "5.0"'),
        lambda text: text.replace('"images_per_s": 2560.0, ', ""),
        lambda text: "\x00\x01",
    ],
)
def test_an_unreadable_file_is_named(change, folder, tmp_path, capsys):
    good = folder.add()
    good.with_name("run1.trace.json").write_text("{}")  # the profiler's, no concern of ours
    assert row_of(folder)["n"] == 1
    good.with_name("bad.json").write_text(change(good.read_text()))
    for command in (make_plot, make_table):
        words = ["e1"] if command is make_table else ["--output", str(tmp_path / "figures")]
        assert command.main([*words, "--results", str(folder.path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "bad.json is damaged, or no result file of this version" in line


def test_frame_has_the_rows(folder):
    pandas = pytest.importorskip("pandas")
    folder.add_repeats([5.0, 7.0])
    frame = results.frame([*rows_of(folder), *results.published("e1")])
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 46
    assert list(frame["source"].unique()) == ["measured", "published"]
    ours = frame[frame["source"] == "measured"].iloc[0]
    assert (ours["time_s_mean"], ours["n"], ours["torch"]) == (6.0, 2, "2.14.1")
    assert ours["time_s_std"] == pytest.approx(math.sqrt(2))


# ---- selection -----------------------------------------------------------------------------------


def test_selection_keeps_the_order_given():
    chosen = results.select(
        results.published("e1"),
        gpu=["V100", "1080 Ti"],
        method=["amp", "FP32"],
        batch_size=[512],
    )
    assert [(row["gpu"], row["method"]) for row in chosen] == [
        ("V100", "amp"),
        ("V100", "FP32"),
        ("1080 Ti", "amp"),
        ("1080 Ti", "FP32"),
    ]


# ---- time and memory -----------------------------------------------------------------------------


def add_e1(folder: ResultFolder, *, gpus=("A", "B"), batches=(128, 256, 512)) -> None:
    """Three repeats of E1's methods: time grows with the batch, by GPU and method."""
    arms = {"FP32": ("fp32", 1.0), "FP16": ("O2", 0.5), "amp": ("O1", 0.8)}
    for (i, gpu), batch, (method, (arm, factor)) in itertools.product(
        enumerate(gpus), batches, arms.items()
    ):
        for repeat in range(3):
            folder.add(
                gpu=gpu,
                method=method,
                arm=arm,
                batch_size=batch,
                repeat=repeat,
                train_size=max(2048, 4 * batch),  # as synthetic data have it: one line all the same
                lr=batch / 1000,
                time_s=(i + 1) * factor * batch / 32 + repeat,
                memory_mb=1e3 * factor + batch,
            )


def test_lines_of_own_results(folder):
    add_e1(folder)
    figure = figures.time_against_batch(rows_of(folder), std=True)
    lines = drawn_lines(figure.axes[0])
    assert list(lines) == [f"{gpu} {m}" for gpu in "AB" for m in E1_METHODS] == legend_of(figure)
    x, y, spread = lines["B FP16"]
    assert x == [128, 256, 512]
    assert y == pytest.approx([2 * 0.5 * batch / 32 + 1 for batch in x])
    assert spread == pytest.approx([1, 1, 1])  # of 0, 1 and 2 seconds more
    memory = drawn_lines(figures.memory_against_batch(rows_of(folder)).axes[0])
    assert memory["A amp"][1] == pytest.approx([928, 1056, 1312])
    assert memory["A amp"][2] == []
    assert heading_of(figure).startswith("vgg16 on synthetic cifar10")


def test_one_gpu_is_named_once(folder):
    add_e1(folder, gpus=(CPU,))
    figure = figures.time_against_batch(rows_of(folder))
    assert legend_of(figure) == list(E1_METHODS)
    assert figure.legends[0].get_title().get_text() == CPU


def test_one_batch_size_makes_points(folder):
    add_e1(folder, batches=(128,))
    folder.add(gpu="A", method="O3", arm="O3", diverged=divergence(3))
    figure = figures.time_against_batch(rows_of(folder), std=True)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [*E1_METHODS, "O3"]
    lines = drawn_lines(axes)
    for gpu, seconds in (("A", 3), ("B", 5)):
        x, y, spread = lines[f"{gpu} FP16"]
        assert (x, y) == ([names.index("FP16")], [seconds])
        assert spread == pytest.approx([1])
    assert len({str(container[0].get_color()) for container in axes.containers}) == 2
    assert texts_in(axes) == ["O3 diverged"]
    assert "batch size 128" in heading_of(figure)


@pytest.mark.parametrize(
    ("runs", "of", "said", "label"),
    [
        ([(128, 50, 2), (256, 100, 2)], "iterations", "50, 100 iterations", "100 iterations"),
        ([(512, 40, 2), (256, 20, 2), (128, 20, 3)], "epochs", "2, 3 epochs", "2 epochs"),
    ],
)
def test_runs_of_different_length_do_not_mix(runs, of, said, label, folder, tmp_path, capsys):
    for batch, iterations, epochs in runs:
        folder.add(batch_size=batch, iterations=iterations, epochs=float(epochs))
    rows, number = rows_of(folder), label.split()[0]
    for draw in (figures.time_against_batch, figures.memory_against_batch):
        with pytest.raises(
            results.ResultsError, match=rf"T4 FP32 \({said}\).*--iteration.*--epochs"
        ):
            draw(rows, of=of)
    (axes,) = figures.time_against_batch(results.select(rows, **{of: [int(number)]}), of=of).axes
    assert axes.get_ylabel() == f"training time of {label}, s"
    output = tmp_path / "figures"
    assert make_plot.main(arguments(folder, output)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "iterations" in error
    assert not output.exists()
    flag = "--epochs" if of == "epochs" else "--iteration"
    assert make_plot.main(arguments(folder, output, flag, number)) == 0
    assert "CIFAR - Time.png" in names_in(output)


def test_lines_of_different_length_say_so(folder):
    for batch in (128, 256):
        folder.add(batch_size=batch)
        folder.add(batch_size=batch, gpu="V100", iterations=50)
    figure = figures.time_against_batch(rows_of(folder))
    assert legend_of(figure) == ["T4 FP32 (100 iterations)", "V100 FP32 (50 iterations)"]
    assert figure.axes[0].get_ylabel() == "training time, s"


def test_different_conditions_make_different_lines(folder):
    for batch in (128, 256):
        folder.add(batch_size=batch)
        folder.add(batch_size=batch, loop="original", channels_last=False)
        folder.add(batch_size=batch, method="FP16", arm="O2")
        folder.add(batch_size=batch, method="FP16", arm="O2", **GRAPH)
        folder.add(batch_size=batch, method="amp", arm="O1", lr=0.1)
        folder.add(batch_size=batch, method="amp", arm="O1", lr=0.2)
    figure = figures.time_against_batch(rows_of(folder))
    assert legend_of(figure) == [
        "FP32",
        "FP32 (original loop)",
        "FP16",
        "FP16 (graph)",
        "amp (lr 0.1)",
        "amp (lr 0.2)",
    ]
    looks = {(str(c[0]._dash_pattern), c[0].get_color()) for c in figure.axes[0].containers}
    assert len(looks) == 6
    folder.add(model="wrn28_10")
    with pytest.raises(results.ResultsError, match="--model"):
        figures.time_against_batch(rows_of(folder))


def test_own_and_published_figures_never_share_a_line(folder):
    for batch in E1_BATCHES:
        folder.add(gpu="V100", batch_size=batch)
    both = [*results.select(results.published("e1"), gpu=["V100"]), *rows_of(folder)]
    lines = drawn_lines(figures.time_against_batch(both).axes[0])
    assert len(lines) == 4
    assert lines["V100 FP32 (published)"][1] == [3.93, 6.9, 12.97, 25.11, 49.43]
    (ours,) = (label for label in lines if "measured" in label)
    assert lines[ours][1] == [5.0] * 5


def test_nothing_to_draw(folder):
    folder.add(time_s=None)
    with pytest.raises(figures.NothingToDraw):
        figures.time_against_batch(rows_of(folder))


# ---- readable ------------------------------------------------------------------------------------


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that touch, and texts that leave the page."""
    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    texts += [legend.get_title() for legend in figure.legends]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            texts += [label for place, label in ticks if low <= place <= high]
    boxes = [
        (text.get_text().strip(), text.get_window_extent(canvas.get_renderer()).padded(-0.5))
        for text in texts
        if text.get_visible() and text.get_text().strip()
    ]
    found = [
        (a, b) for (a, box), (b, other) in itertools.combinations(boxes, 2) if box.overlaps(other)
    ]
    page = figure.bbox.padded(1)
    outside = [
        (name, "the edge")
        for name, box in boxes
        if not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1))
    ]
    return found + outside


def add_all_arms(folder: ResultFolder, **changes) -> None:
    """Ten arms, two of them in the original loop too, one diverged."""
    arms = ("fp32", "tf32", "amp-fp16", "amp-bf16", "O0", "O1", "O2", "O3", "O4", "O5")
    for place, arm in enumerate(arms):
        seconds = 1234.5 / (1 + place)
        common = {"recipe": "e2", "model": "wrn28_10", "arm": arm, "method": arm}
        common |= {"time_s": seconds, "memory_mb": 1000.0 * (20 - place)} | changes
        folder.add(**common, diverged=divergence() if arm == "O3" else None)
        if arm in ("fp32", "O2"):
            folder.add(**common, loop="original")


def published(folder: ResultFolder) -> list[results.Row]:
    return results.published("e1")


def e1_on_three(folder: ResultFolder) -> list[results.Row]:
    add_e1(folder, gpus=("NVIDIA H200", "Tesla T4", CPU), batches=E1_BATCHES)
    return rows_of(folder)


def all_arms_at_three_batches(folder: ResultFolder) -> list[results.Row]:
    for batch in (128, 256, 512):
        add_all_arms(folder, gpu="Tesla T4", batch_size=batch)
    return rows_of(folder)


@pytest.mark.parametrize(
    "draw",
    [
        figures.time_against_batch,
        figures.memory_against_batch,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize(
    "rows",
    [published, e1_on_three, all_arms_at_three_batches],
    ids=lambda function: function.__name__,
)
def test_no_text_lies_on_another(
    draw: Callable[..., Figure], rows: Callable[..., list[results.Row]], folder
):
    data = rows(folder)
    figure = draw(data)
    assert overlaps(figure) == []
    for axes in figure.axes:
        assert axes.get_ylabel()
        inches = axes.get_position().height * figure.get_figheight()  # what the legend left
        assert inches > (2.2 if len(figure.axes) == 1 else 1.4)
        assert len(axes.get_xticks()) > 0
    assert figure.get_figwidth() == 7


# ---- the command ---------------------------------------------------------------------------------


def arguments(folder: ResultFolder, output: Path, *more: str) -> list[str]:
    return ["--results", str(folder.path), "--output", str(output), *more]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def with_endings(*names: str) -> set[str]:
    return {f"{name}.png" for name in names}


def test_e1s_command_line(folder, tmp_path, capsys):
    add_e1(folder, gpus=("A", "B", "C"), batches=(128, 256))
    output = tmp_path / "figures"
    line = "--GPU A B C --method FP32 FP16 amp --batch 128 256 --plot_std"
    assert make_plot.main(arguments(folder, output, *line.split())) == 0
    assert names_in(output) == with_endings(*E1_FILES)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(str(path) for path in output.iterdir())
    for name in names_in(output):
        picture = imread(output / name)
        assert picture.shape[1] == 1050  # 7 inches at 150 dots each
        assert picture[..., :3].std() > 0.03  # an empty page has none


def test_published_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_plot.main(["--published"]) == 0
    assert names_in(tmp_path) == with_endings(*E1_FILES)
    assert {path.parent for path in tmp_path.rglob("*.png")} == {
        tmp_path / "results" / "figures" / "published"
    }


def test_all_models_are_drawn_into_files_of_their_names(folder, tmp_path):
    nets = {("cifar", "vgg16"): "CIFAR", ("cifar", "wrn28_10"): "CIFAR wrn28_10"}
    nets |= {("imagenet", "resnet50"): "ImageNet resnet50", ("mlp", "mlp"): "MLP"}
    nets |= {("mnist", "mnist_cnn"): "MNIST", ("demo", "digits64"): "Digits"}
    for experiment, model in nets:
        folder.add(experiment=experiment, model=model)
    output = tmp_path / "figures"
    assert make_plot.main(arguments(folder, output)) == 0
    names = [f"{title} - {what}" for title in nets.values() for what in ("Time", "Memory")]
    assert names_in(output) == with_endings(*names)


def test_help_is_light_and_says_the_flags():
    code = (
        "import sys; from ampfuse.experiments import make_plot, make_table\n"
        "for main in (make_plot.main, make_table.main):\n"
        "    try: main(['--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'matplotlib', 'pandas', 'torchvision'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    for flag in ("--GPU", "--method", "--batch", "--plot_std", "--published", "--csv"):
        assert flag in done.stdout


def test_results_of_a_script(tmp_path, monkeypatch, capsys):
    """What the scripts write is what is read here."""
    for package in ("torchvision", "timm", "sklearn", "tqdm"):
        pytest.importorskip(package)
    from ampfuse.experiments import mnist

    monkeypatch.chdir(tmp_path)
    line = "--data digits --iterations 2 --batch-size 32 --arm fp32 O2 --repeats 2 --device cpu"
    assert mnist.main([*line.split(), "--GPU", "My GPU/1", "--image-size", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| fp32 ") == printed.count("| O2 ") == 1
    assert not list(Path("results").rglob("*.pt"))
    rows = results.measured("results")
    assert [(row["method"], row["n"], row["iterations"], row["gpu"]) for row in rows] == [
        ("fp32", 2, 2, "My GPU-1"),
        ("O2", 2, 2, "My GPU-1"),
    ]
    for row in rows:
        ran = sorted((run["repeat"], run["seed"], run["recipe"]) for run in row["runs"])
        assert ran == [(0, 0, "e5"), (1, 1, "e5")]
        assert {(run["format"], run["memory_kind"]) for run in row["runs"]} == {(2, "process RSS")}
        assert row["time_s_mean"] == pytest.approx(
            statistics.fmean(r["time_s"] for r in row["runs"])
        )
        accuracies = [run["accuracy_pct"] for run in row["runs"]]
        assert row["accuracy_pct_std"] == pytest.approx(statistics.stdev(accuracies))
    assert make_plot.main(["--plot_std"]) == 0
    kinds = ("Time", "Memory", "Time (std)", "Memory (std)")
    made = {path.name for path in Path("results/figures").iterdir()}
    assert made == with_endings(*(f"MNIST - {kind}" for kind in kinds))
