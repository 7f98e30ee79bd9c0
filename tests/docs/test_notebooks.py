"""The notebooks: how they are stored, how they install, and what they show when they run."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampfuse import _core

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(notebook: dict, kind: str) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in cells(notebook, "code") for output in cell["outputs"]]


def shown(notebook: dict, kind: str) -> list[str]:
    """What was displayed of that MIME type."""
    data = [output.get("data", {}) for output in outputs(notebook)]
    return ["".join(of[kind]) for of in data if kind in of]


def text(notebook: dict) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs(notebook))


STORED = {path: json.loads(path.read_text()) for path in NOTEBOOKS}
FIRST_CELL, *OTHERS = ("".join(cells(stored, "code")[0]["source"]) for stored in STORED.values())


# ---- as stored -----------------------------------------------------------------------------------


def test_all_notebooks_are_there():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["e1_vgg16_cifar10", "e2_levels", "e5_native_amp", "insight", "quickstart"]


@each_notebook
def test_stored_with_the_outputs_of_one_run_from_top_to_bottom(path):
    code = cells(STORED[path], "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(cell["metadata"] for cell in code)
    introduction = "".join(cells(STORED[path], "markdown")[0]["source"])
    assert "The outputs stored here come from a CPU (" in introduction
    assert re.search(r"CUDA available +no", text(STORED[path]))
    assert shown(STORED[path], "image/png")


@each_notebook
def test_stored_outputs_are_small_and_free_of_errors_warnings_and_paths_of_a_machine(path):
    assert path.stat().st_size < 300_000
    stored = STORED[path]
    kinds = {(output["output_type"], output.get("name")) for output in outputs(stored)}
    assert kinds <= {("stream", "stdout"), ("display_data", None)}
    types = {kind for output in outputs(stored) for kind in output.get("data", {})}
    texts = [each for kind in types if kind.startswith("text/") for each in shown(stored, kind)]
    everything = "\n".join([text(stored), *texts])
    assert "warning" not in everything.lower()
    assert not re.search(r"(?<![\w./:])/(?!proc|sys)\w+/", everything)


def test_first_cell_is_the_same():
    assert set(OTHERS) == {FIRST_CELL}


@each_notebook
def test_badges_open_this_file(path):
    repository = re.search(r'REPOSITORY = "https://github.com/(.+)"', FIRST_CELL)[1]
    introduction = "".join(cells(STORED[path], "markdown")[0]["source"])
    links = re.findall(r"\((https://[^)]+)\)", introduction)
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
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
        return monkeypatch

    def run_cell(self):
        exec(FIRST_CELL, {"__name__": "__main__"})

    def installed(self):
        self.run_cell()
        *installing, environment = self.commands
        assert environment == [sys.executable, "-m", "ampfuse", "env"]
        for command in installing:
            assert command[:4] == [sys.executable, "-m", "pip", "install"]
            assert command[-1] == "torch==2.11.0+cu128"
        return [command[4:-1] for command in installing]

    @pytest.mark.parametrize(
        ("source", "arguments"),
        [
            (None, ["--only-binary=ampfuse", "ampfuse[experiments]"]),
            ("git+https://a.org/b@v1", ["ampfuse[experiments] @ git+https://a.org/b@v1"]),
            ("checkout", ["ampfuse[experiments] @ HERE/checkout"]),
            ("checkout/..", ["ampfuse[experiments] @ HERE"]),
            ("ampfuse-0.2.0-cp313.whl", ["ampfuse[experiments] @ HERE/ampfuse-0.2.0-cp313.whl"]),
        ],
    )
    def test_installs(self, machine, source, arguments, tmp_path, capsys):
        """A wheel; what is at another address; a folder or a file."""
        machine.chdir(tmp_path)
        Path("checkout").mkdir()
        Path("ampfuse-0.2.0-cp313.whl").touch()
        if source:
            self.environ["AMPFUSE_SOURCE"] = source
        here = tmp_path.resolve().as_uri()
        assert self.installed() == [[argument.replace("HERE", here) for argument in arguments]]
        assert capsys.readouterr().out == "torch 2.11.0+cu128, Tesla T4\nthe report\n"

    def test_compiles_where_there_is_none_and_says_how_long(self, machine, capsys):
        self.refused = "--only-binary"
        compiled = "ampfuse[experiments] @ git+https://github.com/ampfuse/ampfuse"
        assert self.installed()[1:] == [[compiled]]
        assert "compiling it, three to nine minutes" in capsys.readouterr().out

    def test_what_is_there_is_left_alone(self, machine, capsys):
        machine.setattr(importlib.util, "find_spec", lambda name: object())
        self.run_cell()
        assert self.commands == [[sys.executable, "-m", "ampfuse", "env"]]
        assert capsys.readouterr().out == "torch 2.11.0+cu128, Tesla T4\nthe report\n"

    def test_says_that_there_is_no_gpu(self, machine, capsys):
        machine.setattr(torch.cuda, "is_available", lambda: False)
        machine.setattr(torch, "ones", lambda *_, device: {"cpu": 1}[device])
        assert self.installed()
        assert capsys.readouterr().out.startswith("torch 2.11.0+cu128, no NVIDIA GPU")

    def test_an_old_torch_stops_it_before_anything_is_installed(self, machine, capsys):
        oldest = _core.build_info.TORCH_TESTED[0].partition(".")[2]
        machine.setattr(importlib.metadata, "version", lambda name: f"2.{int(oldest) - 1}.0+cu128")
        said = f"^ampfuse needs torch 2.{oldest} or later: choose the newest environment"
        with pytest.raises(RuntimeError, match=said):
            self.run_cell()
        assert not self.commands
        assert capsys.readouterr().out == f"torch 2.{int(oldest) - 1}.0+cu128, Tesla T4\n"

    def test_a_gpu_without_kernels_stops_it_before_anything_is_installed(self, machine, capsys):
        def ones(*_, **where):
            assert where == {"device": "cuda"}
            raise RuntimeError("CUDA error: no kernel image is available for execution")

        machine.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100-PCIE-16GB")
        machine.setattr(torch, "ones", ones)
        with pytest.raises(RuntimeError, match=r"^choose T4 x2: this torch has no kernels for"):
            self.run_cell()
        assert not self.commands
        assert capsys.readouterr().out == "torch 2.11.0+cu128, Tesla P100-PCIE-16GB\n"

    def test_a_failure_shows_what_pip_said(self, machine):
        self.refused = "install"
        with pytest.raises(RuntimeError, match=r"^what pip said$"):
            self.run_cell()


# ---- as run --------------------------------------------------------------------------------------


# What a notebook finds in a new kernel, but for modules that are imported: no names, its folder.
FRESH = "%reset -f\n__import__('os').chdir({folder!r})\n__import__('gc').freeze()"


def executed(name: str, folder: Path, kernel: object) -> dict:
    """A notebook that ran from top to bottom at AMPFUSE_SMALL=1, in `folder`."""
    import nbformat
    from nbclient import NotebookClient

    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    notebook = nbformat.read(path, as_version=4)
    fresh = nbformat.v4.new_code_cell(FRESH.format(folder=str(folder)))
    notebook.cells.insert(0, fresh)
    return NotebookClient(notebook, km=kernel, timeout=200).execute()


def assert_figures(images: list[bytes], files: list[Path]) -> None:
    """These files, in this order, none of them blank."""
    from matplotlib.image import imread

    assert images == [file.read_bytes() for file in files]
    for file in files:
        pixels = imread(file)
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


# By notebook: what its text holds.
TEXTS = {
    "quickstart": [
        r"built for torch +\d",
        r"test accuracy [5-9]\d",
        r"last step skipped: False",
        r"\| O0 +\| [\d.]+ +\| \d+",
        r"O5: ampfuse, BF16 \+ masters",
    ],
    "e1_vgg16_cifar10": [],
    "e2_levels": [
        r"small updates vanish.+= 1\.0",
        r"small gradients vanish.+= 0\.0",
        r"variances overflow.+= inf",
    ],
    "e5_native_amp": [
        r" workers +loader +[\d,]+ images/s",
        r" resident +loader +[\d,]+ images/s",
    ],
    "insight": [
        r"published loader, FP32: .*\d+% of the time",
        r"ResNet-18, JPEG files: .*\d+% of the time",
        r"MLP, FP32: .*\d+% of the time",
        r"- stale: updates .* are lost\..*\n +\d+% of the updates lost .*: .*1\.weight",
        r"No problem found\.\s*$",
    ],
}
PLAIN, STD = ("Time", "Memory"), ("Time (std)", "Memory (std)")
# By notebook that has any: the folder of its results, and its figures there.
FIGURES = {
    "e1_vgg16_cifar10": (
        "e1-small",
        [f"figures/{folder}CIFAR - {what}.png" for folder in ("", "published/") for what in STD],
    ),
    "e2_levels": ("e2-small", [f"figures/CIFAR wrn10_1 - {what}.png" for what in PLAIN]),
    "e5_native_amp": (
        "e5-small",
        [
            *(f"figures/MLP - {what}.png" for what in STD),
            *(f"figures/MNIST - {what}.png" for what in PLAIN),
            "loaders/figures/MNIST - Time.png",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.parametrize("name", TEXTS)
def test_a_notebook_shows_what_it_should(name, tmp_path, kernel):
    for package in ("torchvision", "timm", "pandas"):
        pytest.importorskip(package)
    run = executed(name, tmp_path, kernel)
    for expected in TEXTS[name]:
        assert re.search(expected, text(run)), expected
    if name not in FIGURES:
        return
    folder, figures = FIGURES[name]
    results = tmp_path / "results" / folder
    # Right below the device's folder.
    variants = {json.loads(file.read_text())["variant"] for file in results.glob("*/*.json")}
    assert len(variants) >= 3
    tables = "\n".join(shown(run, "text/markdown"))
    measured = re.findall(r"^\| measured here +\|.*?\| (\S+) +\| \w+ +\| \d+ ", tables, re.M)
    assert set(measured) == variants or name == "e2_levels"  # whose own table is HTML
    images = [base64.b64decode(data) for data in shown(run, "image/png")]
    assert_figures(images, [results / path for path in figures])
