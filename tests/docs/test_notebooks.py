"""The notebooks: how they are stored, how they install, and what they show when they run."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampfuse import hardware

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
GPU = torch.cuda.is_available()
BF16 = torch.cuda.get_device_capability() >= (8, 0) if GPU else hardware.cpu_has_bf16()

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def first_cell(path: Path) -> str:
    return "".join(cells(path, "code")[0]["source"])


def all_outputs(path: Path) -> list[dict]:
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def outputs(path: Path) -> str:
    """All that is text in the stored outputs."""
    parts = [
        part
        for output in all_outputs(path)
        for kind, part in [("text/plain", output.get("text", "")), *output.get("data", {}).items()]
        if kind.startswith("text/")
    ]
    return "\n".join("".join(part) for part in parts)


# ---- as stored -----------------------------------------------------------------------------------


def test_all_are_there():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["e1_vgg16_cifar10", "e2_levels", "e5_native_amp", "insight", "quickstart"]


@each_notebook
def test_stored_with_the_outputs_of_one_run_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(cell["metadata"] for cell in code)
    assert "The outputs stored here come from a CPU (" in "".join(
        cells(path, "markdown")[0]["source"]
    )
    assert re.search(r"CUDA available +no", outputs(path))
    assert any("image/png" in output.get("data", {}) for output in all_outputs(path))


@each_notebook
def test_stored_outputs_are_free_of_errors_warnings_and_paths_of_a_machine(path):
    kinds = [(output["output_type"], output.get("name")) for output in all_outputs(path)]
    assert set(kinds) <= {("stream", "stdout"), ("display_data", None)}
    assert "warning" not in outputs(path).lower()
    assert not re.search(r"(?<![\w./:])/(?!proc|sys)\w+/", outputs(path))


@each_notebook
def test_stored_file_is_small(path):
    assert path.stat().st_size < 300_000


def test_first_cell_is_the_same():
    assert len({first_cell(path) for path in NOTEBOOKS}) == 1


@each_notebook
def test_badges_open_this_file(path):
    repository = re.search(r'REPOSITORY = "https://github.com/(.+)"', first_cell(path))[1]
    links = re.findall(r"\((https://[^)]+)\)", "".join(cells(path, "markdown")[0]["source"]))
    file = f"{repository}/blob/main/notebooks/{path.name}"
    assert f"https://colab.research.google.com/github/{file}" in links
    assert f"https://kaggle.com/kernels/welcome?src=https://github.com/{file}" in links


# ---- the installation ----------------------------------------------------------------------------


class TestFirstCell:
    """Run here, on a pretended machine that has torch and no ampfuse; nothing is installed."""

    @pytest.fixture
    def machine(self, monkeypatch):
        self.commands, self.refused, self.environ = [], "none", {}

        def run(command, **_):
            self.commands.append(command)
            output = "the report" if "env" in command else "what pip said"
            return subprocess.CompletedProcess(command, self.refused in str(command), stdout=output)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(os, "environ", self.environ)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu128")
        return monkeypatch

    def run_cell(self):
        exec(compile(first_cell(NOTEBOOKS[0]), "first cell", "exec"), {"__name__": "__main__"})

    def installed(self):
        self.run_cell()
        *installing, environment = self.commands
        assert environment == [sys.executable, "-m", "ampfuse", "env"]
        for command in installing:
            assert command[:4] == [sys.executable, "-m", "pip", "install"]
            assert command[-1] == "torch==2.11.0+cu128"
        return [command[4:-1] for command in installing]

    def test_installs_a_wheel(self, machine, capsys):
        assert self.installed() == [["--only-binary=ampfuse", "ampfuse[experiments]"]]
        assert capsys.readouterr().out == "the report\n"

    def test_compiles_where_there_is_none_and_says_how_long(self, machine, capsys):
        self.refused = "--only-binary"
        compiled = "ampfuse[experiments] @ git+https://github.com/ampfuse/ampfuse"
        assert self.installed()[1:] == [[compiled]]
        assert "compiling it, three to nine minutes" in capsys.readouterr().out

    def test_another_address(self, machine):
        self.environ["AMPFUSE_SOURCE"] = "git+https://a.org/b@v1"
        assert self.installed() == [["ampfuse[experiments] @ git+https://a.org/b@v1"]]

    @pytest.mark.parametrize("source", ["ampfuse-0.2.0-cp313.whl", "checkout", "checkout/.."])
    def test_a_wheel_or_a_folder(self, machine, source, tmp_path):
        machine.chdir(tmp_path)
        Path("checkout").mkdir()
        Path("ampfuse-0.2.0-cp313.whl").touch()
        self.environ["AMPFUSE_SOURCE"] = source
        # The whole path: pip takes a bare "checkout[experiments]" for a name on PyPI.
        assert self.installed() == [[f"{(tmp_path / source).resolve()}[experiments]"]]

    def test_what_is_there_is_left_alone(self, machine, capsys):
        machine.setattr(importlib.util, "find_spec", lambda name: object())
        self.run_cell()
        assert self.commands == [[sys.executable, "-m", "ampfuse", "env"]]
        assert capsys.readouterr().out == "the report\n"

    def test_a_failure_shows_what_pip_said(self, machine, capsys):
        self.refused = "install"
        with pytest.raises(subprocess.CalledProcessError):
            self.run_cell()
        assert "what pip said" in capsys.readouterr().out


# ---- as run --------------------------------------------------------------------------------------


# What a notebook finds in a new kernel, but for modules that are imported: no names, its folder.
FRESH = "%reset -f\n__import__('os').chdir({folder!r})\n__import__('gc').freeze()"


class Executed:
    """A notebook that ran from top to bottom at AMPFUSE_SMALL=1, in `folder`."""

    def __init__(self, name: str, folder: Path, kernel: object) -> None:
        import nbformat
        from nbclient import NotebookClient

        path = next(path for path in NOTEBOOKS if path.stem == name)
        self.folder, self.notebook = folder, nbformat.read(path, as_version=4)
        fresh = nbformat.v4.new_code_cell(FRESH.format(folder=str(folder)))
        self.notebook.cells.insert(0, fresh)
        NotebookClient(self.notebook, km=kernel, timeout=200).execute()

    @property
    def outputs(self) -> list[dict]:
        return [
            output
            for cell in self.notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
        ]

    @property
    def text(self) -> str:
        return "".join(output.get("text", "") for output in self.outputs)

    def shown(self, kind: str) -> list[str]:
        """What was displayed of that MIME type."""
        return [o["data"][kind] for o in self.outputs if kind in o.get("data", {})]

    @property
    def figures(self) -> list[bytes]:
        return [base64.b64decode(data) for data in self.shown("image/png")]

    @property
    def table(self) -> list[dict[str, str]]:
        """The rows of the Markdown tables, each by its columns' names."""
        found = []
        for shown in self.shown("text/markdown"):
            rows = [line for line in shown.splitlines() if line.startswith("|")]
            cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
            if cells:
                found += [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
        return found

    def rows(self, **where: str) -> list[dict[str, str]]:
        """Those with these cells; ``batch_size`` is the column "batch size"."""
        wanted = {name.replace("_", " "): cell for name, cell in where.items()}
        return [row for row in self.table if wanted.items() <= row.items()]

    def results(self, folder: str) -> list[dict]:
        """The result files right below ``results/FOLDER/<device>``."""
        files = (self.folder / "results" / folder).glob("*/*.json")
        return [json.loads(file.read_text()) for file in sorted(files)]

    def assert_shows(self, *paths: str) -> None:
        """These figures, in this order, none of them blank."""
        from matplotlib.image import imread

        files = [(self.folder / "results" / path).read_bytes() for path in paths]
        assert self.figures == files
        for file in files:
            pixels = imread(io.BytesIO(file))
            assert pixels.shape[1] >= 1000
            assert pixels.std() > 0.05


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One for all notebooks: what each of them imports takes seconds."""
    for package in ("nbclient", "ipykernel", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    from jupyter_client.manager import start_new_kernel

    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AMPFUSE_SMALL", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
        monkeypatch.delenv("MPLBACKEND", raising=False)  # else figures are not shown inline
        manager, client = start_new_kernel(kernel_name="python3")
        client.stop_channels()
        yield manager
        manager.shutdown_kernel(now=True)


@pytest.fixture
def execute(tmp_path, kernel):
    return lambda name: Executed(name, tmp_path, kernel)


@pytest.fixture
def execute_experiment(execute):
    for package in ("torchvision", "timm", "pandas"):
        pytest.importorskip(package)
    return execute


def seconds(results: list[dict]) -> str:
    """Mean and deviation of the training times, as the tables have them: to four figures."""
    times = [result["time_s"] for result in results]
    values = [statistics.fmean(times), *([statistics.stdev(times)] if times[1:] else [])]
    digits = max(0, 3 - math.floor(math.log10(values[0])))
    return " ± ".join(f"{value:.{digits}f}".rstrip("0").rstrip(".") for value in values)


@pytest.mark.slow
@pytest.mark.notebook
def test_quickstart(execute):
    run = execute("quickstart")
    assert re.search(r"built for torch +\d", run.text)  # of the environment's report
    assert float(re.search(r"test accuracy ([\d.]+)%", run.text)[1]) > 50
    assert "last step skipped: False" in run.text
    assert len(run.figures) == 1
    for level, what in (("O0", "FP32"), ("O5", r"BF16 \+ masters")):
        assert re.search(rf"\| {level} +\| [\d.]+ +\| \d+", run.text)
        assert re.search(rf"{level}: ampfuse, {what}", run.text)


@pytest.mark.slow
@pytest.mark.notebook
def test_e1(execute_experiment):
    run = execute_experiment("e1_vgg16_cifar10")
    results = run.results("e1-small")
    for method in ("FP32", "FP16", "amp") if GPU else ("fp32", "amp-bf16", "O5"):
        for batch in (2, 4):
            repeats = [r for r in results if (r["method"], r["batch_size"]) == (method, batch)]
            assert [r["iterations"] for r in repeats] == [2, 2]
            (row,) = run.rows(source="measured here", method=method, batch_size=str(batch))
            assert row["time, s"] == seconds(repeats)
    v100 = {"source": "published", "GPU": "V100"}
    assert len(run.rows(**v100)) == 15
    (row,) = run.rows(**v100, method="FP16", batch_size="2048")
    assert row["time, s"] == "37.32 ± 3.73"
    own, published = "e1-small/figures/CIFAR - ", "e1-small/figures/published/CIFAR - "
    run.assert_shows(
        *(f"{own}{name}.png" for name in ("Time (std)", "Memory (std)")),
        *(f"{published}{name}.png" for name in ("Time (std)", "Memory (std)")),
    )


@pytest.mark.slow
@pytest.mark.notebook
def test_e2(execute_experiment):
    run = execute_experiment("e2_levels")
    results = run.results("e2-small")
    levels = ["O0", "O1", "O2", "O3"] + ["O5"] * BF16
    assert sorted(r["conditions"]["arm"] for r in results) == levels
    own = next(table for table in run.shown("text/html") if "runs diverged" in table)
    for result in results:
        row = re.search(rf"<th>{result['conditions']['arm']}</th>(.*?)</tr>", own, re.DOTALL)[1]
        assert re.findall(r"<td>(.*?)</td>", row)[4] == f"{result['accuracy_pct']:.2f}"
    assert run.rows(source="published", environment="colab", GPU="T4", method="O3")
    run.assert_shows(
        *(f"e2-small/figures/CIFAR wrn10_1 - {name}.png" for name in ("Time", "Memory"))
    )
    # The level that fails, and why.
    (failed,) = run.results("e2-small/provoked")
    why = failed["diverged"]
    assert why["reason"] == "the training loss became nan"
    last = run.text[run.text.index("O3 at lr 60: diverged") :]
    assert f"suggestion        {why['suggestion']}" in last
    assert "--keep-batchnorm-fp32 True" in why["suggestion"]
    assert "O2 at lr 0.1: did not diverge" in run.text


@pytest.mark.slow
@pytest.mark.notebook
def test_e5(execute_experiment):
    run = execute_experiment("e5_native_amp")
    arms = ["fp32", "amp-bf16", "O5"]
    if GPU:
        arms = ["fp32", "amp-fp16", *(["amp-bf16", "O2", "O5"] if BF16 else ["O1", "O2"])]
    results = run.results("e5-small")
    for model, repeats in (("mlp", 2), ("mnist_cnn", 1)):
        for arm in arms:
            runs = [r for r in results if (r["model"], r["method"]) == (model, arm)]
            assert len(runs) == repeats
            (row,) = run.rows(source="measured here", model=model, method=arm)
            assert row["time, s"] == seconds(runs)
    assert run.rows(source="published", model="mlp", GPU="T4", method="amp")
    loops = run.results("e5-small/loops")
    of = {tuple(r["conditions"][key] for key in ("arm", "loop", "loader")): r for r in loops}
    for arm in (arms[0], arms[-1]):
        for loop, loader in (("original", "workers"), ("tuned", "workers"), ("tuned", "resident")):
            speed = f"{of[arm, loop, loader]['images_per_s']:,.0f}"
            assert re.search(rf"{arm} +{loop} +loop, {loader} +loader +{speed} images/s", run.text)
    figures = "e5-small/figures/"
    run.assert_shows(
        *(f"{figures}MLP - {name}.png" for name in ("Time (std)", "Memory (std)")),
        *(f"{figures}MNIST - {name}.png" for name in ("Time", "Memory")),
        "e5-small/loops/figures/MNIST - Time.png",
    )


@pytest.mark.slow
@pytest.mark.notebook
def test_insight(execute_experiment):
    run = execute_experiment("insight")
    for title in ("published loop, FP32", "ResNet-18, JPEG files", "perceptron, FP32"):
        assert re.search(rf"{title}: .*\d+% of the time\)", run.text)
    assert re.search(
        r"- stale: updates .* are lost\..*\n +\d+% of the updates lost .*: .*1\.weight", run.text
    )
    assert run.text.rstrip().endswith("Nothing to be said against it.")
