"""The figures, and the command that draws them."""

import itertools
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread

from ampfuse.experiments import make_plot, results
from ampfuse.experiments.settings import VARIANTS
from experiment_files import ResultFolder, divergence
from programs import python

E1_VARIANTS, E1_BATCHES = ("FP32", "FP16", "amp"), (128, 256, 512, 1024, 2048)
E1_FILES = {"CIFAR - Time", "CIFAR - Memory", "CIFAR - Time (std)", "CIFAR - Memory (std)"}
OUT_OF_MEMORY = {"step": 1, "reason": "out of memory"}
CPU = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 2 threads"


@pytest.fixture
def folder(tmp_path) -> ResultFolder:
    return ResultFolder(tmp_path / "results")


def rows_of(folder: ResultFolder) -> list[results.Row]:
    return results.measured(folder.path)


def drawn_lines(axes: Axes) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """x, y and half the height of the error bars, by label."""
    found = {}
    for container in axes.containers:
        line, _, bars = container
        segments = bars[0].get_segments() if bars else []
        spread = [(top - bottom) / 2 for (_, bottom), (_, top) in segments]
        found[container.get_label()] = (list(line.get_xdata()), list(line.get_ydata()), spread)
    return found


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [" ".join(text.get_text().split()) for text in legend.get_texts()]


def add_e1(folder: ResultFolder, *, gpus=("A", "B"), batches=(128, 256, 512)) -> None:
    """Three repeats of E1's variants: time grows with the batch, by GPU and variant."""
    variants = {"FP32": ("fp32", 1.0), "FP16": ("O2", 0.5), "amp": ("O1", 0.8)}
    for (i, gpu), batch, (variant, (precision, factor)) in itertools.product(
        enumerate(gpus), batches, variants.items()
    ):
        for repeat in range(3):
            folder.add(
                gpu=gpu,
                variant=variant,
                precision=precision,
                batch_size=batch,
                repeat=repeat,
                train_size=max(2048, 4 * batch),  # as synthetic data have it: one line all the same
                lr=batch / 1000,
                time_s=(i + 1) * factor * batch / 32 + repeat,
                memory_mb=1e3 * factor + batch,
            )


@pytest.mark.parametrize("kind", ["time", "memory"])
@pytest.mark.parametrize("source", ["published", "own"])
def test_lines_and_error_bars_are_the_rows(source, kind, folder):
    add_e1(folder)
    rows = results.published("e1") if source == "published" else rows_of(folder)
    gpus = ("1080 Ti", "TITAN X", "V100") if source == "published" else ("A", "B")
    title = {"published": "VGG16, published figures", "own": "VGG16 on synthetic CIFAR-10"}[source]
    column = {"time": "time_s", "memory": "memory_mb"}[kind]
    name = {"time": "training time of 100 iterations, s", "memory": "device memory, MB"}[kind]
    if (source, kind) == ("published", "memory"):
        name = "device memory, MiB"  # as nvidia-smi's
    figure = make_plot.against_batch(rows, kind, std=True)
    (axes,) = figure.axes
    lines = drawn_lines(axes)
    labels = [f"{gpu} {variant}" for gpu in gpus for variant in E1_VARIANTS]
    assert list(lines) == labels == legend_of(figure)
    for label, (x, y, spread) in lines.items():
        of_line = [row for row in rows if f"{row.gpu} {row.variant}" == label]
        sizes = [row.batch_size for row in of_line]
        assert (x, y) == (sizes, [getattr(row, f"{column}_mean") for row in of_line])
        assert spread == pytest.approx([getattr(row, f"{column}_std") for row in of_line])
    (plain,) = make_plot.against_batch(rows, kind).axes
    assert not any(spread for _, _, spread in drawn_lines(plain).values())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch size", name)
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == [*map(str, sizes)]
    assert axes.get_ylim()[0] == 0
    assert figure.get_suptitle().startswith(title)
    colors, dashes = {}, {}  # colour is the GPU and dash the variant
    for container in axes.containers:
        gpu, variant = container.get_label().rsplit(" ", 1)
        colors.setdefault(gpu, set()).add(to_hex(container[0].get_color()))
        dashes.setdefault(variant, set()).add(str(container[0]._dash_pattern))
    for looks, count in ((colors, len(gpus)), (dashes, len(E1_VARIANTS))):
        assert all(len(look) == 1 for look in looks.values())
        assert len(set.union(*looks.values())) == count


@pytest.mark.parametrize("gpus", [("A", "B"), (CPU,)])
def test_one_batch_size_makes_bars(gpus, folder):
    """The axis names the variants, the legend several GPUs."""
    add_e1(folder, gpus=gpus, batches=(128,))
    folder.add(gpu=gpus[0], variant="O3", precision="O3", diverged=divergence(3))
    figure = make_plot.against_batch(rows_of(folder), "time", std=True)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [*E1_VARIANTS, "O3"]
    found = {}
    for container in axes.containers:
        for bar in container if isinstance(container, BarContainer) else ():
            middle = round(bar.get_x() + bar.get_width() / 2, 3)
            found[container.get_label(), middle] = (bar, container.errorbar)
    sides, colors = {1: (0,), 2: (-0.2, 0.2)}[len(gpus)], []
    for gpu, side, seconds in zip(gpus, sides, (3, 5), strict=False):
        bar, error = found[gpu, names.index("FP16") + side]
        assert (bar.get_y(), bar.get_height()) == (0, seconds)
        colors.append(bar.get_facecolor())
        (low, high) = error.lines[2][0].get_segments()[0][:, 1]
        assert (low, high) == pytest.approx((seconds - 1, seconds + 1))
    everywhere = {bar.get_facecolor() for bar, _ in found.values()}
    assert len(everywhere) == {1: len(E1_VARIANTS), 2: 2}[len(gpus)]
    (text,) = axes.texts
    assert text.get_text().strip() == "O3 diverged"
    assert axes.get_xlim()[0] < text.get_position()[0] < axes.get_xlim()[1]
    assert "batch size 128" in figure.get_suptitle()
    if gpus[1:]:
        assert legend_of(figure) == [*gpus]
        assert [patch.get_facecolor() for patch in figure.legends[0].get_patches()] == colors
    else:
        assert not figure.legends
        assert figure.get_supxlabel() == CPU
    assert overlaps(figure) == []


@pytest.mark.parametrize(
    ("runs", "label"),
    [
        ([(128, 50, 2), (256, 100, 3)], "100 iterations"),
        ([(512, 40, 2), (256, 20, 2), (128, 20, 3)], "2 epochs"),
    ],
)
def test_runs_of_different_length_do_not_mix(runs, label, folder, tmp_path, capsys):
    for batch, iterations, epochs in runs:
        folder.add(batch_size=batch, iterations=iterations, epochs=float(epochs))
    number, of = label.split()
    output = tmp_path / "figures"
    assert make_plot.main(arguments(folder, output)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"T4 FP32 of vgg16: results have different lengths.*--iteration.*--epochs", error
    )
    assert not output.exists()
    flag = "--epochs" if of == "epochs" else "--iteration"
    assert make_plot.main(arguments(folder, output, flag, number)) == 0
    assert "CIFAR - Time" in names_in(output)
    rows = [row for row in rows_of(folder) if getattr(row, of) == int(number)]
    (axes,) = make_plot.against_batch(rows, "time").axes
    assert axes.get_ylabel() == f"training time of {label}, s"


FP16, AMP = {"variant": "FP16", "precision": "O2"}, {"variant": "amp", "precision": "O1"}
WORKERS, GRAPH = {"loader": "workers", "workers": 2}, {"graph": True}
# Names of lines; batch sizes and what else differs in their runs.
LINES = {
    "lengths": {
        "T4 FP32, 100 iterations": ([128, 256], {}),
        "V100 FP32, 50 iterations": ([128, 256], {"gpu": "V100", "iterations": 50}),
    },
    "conditions": {
        "FP32 (loader resident, workers None)": ([128, 256], {}),
        "FP32 (loader workers, workers 2)": ([128, 256], WORKERS),
        "FP16 (graph False)": ([128, 256], FP16),
        "FP16 (graph True)": ([128, 256], FP16 | GRAPH),
        "amp (lr 0.1)": ([128, 256], AMP | {"lr": 0.1}),
        "amp (lr 0.2)": ([128, 256], AMP | {"lr": 0.2}),
    },
    "a condition that one batch size has twice": {
        "FP32 (graph False)": ([128, 256, 512], {}),
        "FP32 (graph True)": ([128], GRAPH),
        "FP16 (optimizer adam)": ([128], FP16 | {"optimizer": "adam"}),
        "FP16 (optimizer sgd)": ([128], FP16),
    },
}


@pytest.mark.parametrize("differing", LINES)
def test_lines_are_named_by_what_differs(differing, folder):
    for batches, changes in LINES[differing].values():
        for batch in batches:
            folder.add(batch_size=batch, **changes)
    figure = make_plot.against_batch(rows_of(folder), "time")
    (axes,) = figure.axes
    sizes = {name: batches for name, (batches, _) in LINES[differing].items()}
    assert {name: x for name, (x, _, _) in drawn_lines(axes).items()} == sizes
    assert legend_of(figure) == [*sizes]
    looks = {(str(line[0]._dash_pattern), line[0].get_color()) for line in axes.containers}
    assert len(looks) == len(sizes)
    length = "" if differing == "lengths" else " of 100 iterations"
    assert axes.get_ylabel() == f"training time{length}, s"


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_figure_says_which_runs_ended_early(kind, folder):
    """The line goes on where some of the repeats did not."""
    for batch, ended in ((128, divergence()), (256, OUT_OF_MEMORY)):
        folder.add_repeats([5.0, 6.0], batch_size=batch)
        folder.add(batch_size=batch, repeat=2, diverged=ended)
        folder.add(batch_size=batch, variant="O3")
    folder.add(batch_size=512, variant="O3", memory_mb=None, diverged=divergence())
    (axes,) = make_plot.against_batch(rows_of(folder), kind).axes
    assert [x for x, _, _ in drawn_lines(axes).values()] == [[128, 256], [128, 256]]
    assert [(text.get_text().strip(), text.get_position()) for text in axes.texts] == [
        ("FP32 1 of 3 diverged", (128, 0)),
        ("FP32 1 of 3 ran out of memory", (256, 0)),
        ("O3 diverged", (512, 0)),
    ]


def test_own_and_published_figures_never_share_a_line(folder):
    for batch in E1_BATCHES:
        folder.add(gpu="V100", batch_size=batch)
    published = [row for row in results.published("e1") if row.gpu == "V100"]
    lines = drawn_lines(make_plot.against_batch([*published, *rows_of(folder)], "time").axes[0])
    assert len(lines) == 4
    assert lines["FP32 (source published)"][1] == [3.93, 6.9, 12.97, 25.11, 49.43]
    (ours,) = (label for label in lines if "measured" in label)
    assert lines[ours][1] == [5.0] * 5


def test_nothing_to_draw(folder):
    folder.add(time_s=None)
    assert make_plot.against_batch(rows_of(folder), "time") is None


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that touch, and texts that leave the page."""
    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    texts = [figure._suptitle, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    for legend in figure.legends:
        texts += [legend.get_title(), *legend.get_texts()]
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        texts += [label for place, label in ticks if low <= place <= high]
    boxes = [
        (text.get_text().strip(), text.get_window_extent(canvas.get_renderer()).padded(-0.5))
        for text in texts
        if text.get_text().strip()
    ]
    pairs = itertools.combinations(boxes, 2)
    found = [(a, b) for (a, box), (b, other) in pairs if box.overlaps(other)]
    page = figure.bbox.padded(1)
    for name, box in boxes:
        if not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1)):
            found.append((name, "the edge"))
    return found


def published(folder: ResultFolder) -> list[results.Row]:
    return results.published("e1")


def e1_on_three(folder: ResultFolder) -> list[results.Row]:
    add_e1(folder, gpus=("NVIDIA H200", "Tesla T4", CPU), batches=E1_BATCHES)
    return rows_of(folder)


def all_variants_at_three_batches(folder: ResultFolder) -> list[results.Row]:
    """Ten variants, two of them with the workers loader too, one diverged."""
    for batch, (place, variant) in itertools.product((128, 256, 512), enumerate(VARIANTS)):
        common = {
            "recipe": "e2",
            "model": "wrn28_10",
            "precision": variant,
            "variant": variant,
            "gpu": "Tesla T4",
            "batch_size": batch,
            "time_s": 1234.5 / (1 + place),
            "memory_mb": 1000.0 * (20 - place),
        }
        folder.add(**common, diverged=divergence() if variant == "O3" else None)
        if variant in ("fp32", "O2"):
            folder.add(**common, loader="workers")
    return rows_of(folder)


@pytest.mark.parametrize("kind", ["time", "memory"])
@pytest.mark.parametrize(
    "rows",
    [published, e1_on_three, all_variants_at_three_batches],
    ids=lambda function: function.__name__,
)
def test_no_text_lies_on_another(kind, rows, folder):
    figure = make_plot.against_batch(rows(folder), kind, std=True)
    assert overlaps(figure) == []
    (axes,) = figure.axes
    assert axes.get_ylabel()
    inches = axes.get_position().height * figure.get_figheight()  # what the legend left
    assert inches > 2.2
    assert len(axes.get_xticks()) > 0
    assert figure.get_figwidth() == 7
    assert axes.get_ylim()[1] >= 1.05 * axes.dataLim.y1  # so that markers and caps are inside


def arguments(folder: ResultFolder, output: Path, *more: str) -> list[str]:
    return ["--results", str(folder.path), "--output", str(output), *more]


def names_in(folder: Path) -> set[str]:
    """The stems of all files below `folder`, which are PNGs."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in paths} == {".png"}
    return {path.stem for path in paths}


def test_e1s_command_line(folder, tmp_path, capsys):
    add_e1(folder, gpus=("A", "B", "C"), batches=(128, 256))
    output = tmp_path / "figures"
    line = "--GPU A B C --method FP32 FP16 amp --batch 128 256 --plot_std"
    assert make_plot.main(arguments(folder, output, *line.split())) == 0
    assert names_in(output) == E1_FILES
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(str(path) for path in output.iterdir())
    for path in output.iterdir():
        picture = imread(path)
        assert picture.shape[1] == 1050  # 7 inches at 150 dots each
        assert picture[..., :3].std() > 0.03  # an empty page has none


def test_published_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_plot.main(["--published"]) == 0
    assert names_in(tmp_path) == E1_FILES
    folders = {path.parent for path in tmp_path.rglob("*.png")}
    assert folders == {tmp_path / "results" / "figures" / "published"}


def test_figures_of_all_models_have_their_names(folder):
    networks = {
        ("cifar", "vgg16"): "CIFAR",
        ("cifar", "wrn28_10"): "CIFAR wrn28_10",
        ("imagenet", "resnet50"): "ImageNet resnet50",
        ("mlp", "mlp"): "MLP",
        ("cifar", "mlp"): "CIFAR mlp",
        ("mnist", "mnist_cnn"): "MNIST",
        ("demo", "digits64"): "Digits",
    }
    for experiment, model in networks:
        folder.add(experiment=experiment, model=model)
    names = {f"{title} - {what}" for title in networks.values() for what in ("Time", "Memory")}
    assert make_plot.drawn(rows_of(folder)).keys() == names


def test_help_is_light():
    code = (
        "import sys; from ampfuse.experiments import make_plot, make_table\n"
        "for main in (make_plot.main, make_table.main):\n"
        "    try: main(['--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'matplotlib', 'pandas', 'torchvision'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert {"--plot_std", "--csv"} <= set(done.stdout.replace(",", " ").split())
