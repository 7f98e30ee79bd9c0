"""The notebooks: how they are stored, how they install, and what they show when they run."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
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
    def measured(self) -> set[str]:
        """The methods of the rows of Markdown tables that were measured here."""
        tables = "\n".join(self.shown("text/markdown"))
        return set(re.findall(r"^\| measured here +\|.*?\| (\S+) +\| \w+ +\| \d+ ", tables, re.M))

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


E1, E2, E5 = "e1-small/figures/", "e2-small/figures/", "e5-small/figures/"
PLAIN, STD = ("Time", "Memory"), ("Time (std)", "Memory (std)")
# By notebook: what its text holds, the folder of its results if it has any, and its figures.
SHOWN: dict[str, tuple[list[str], str, list[str]]] = {
    "quickstart": (
        [
            r"built for torch +\d",
            r"test accuracy [5-9]\d",
            r"last step skipped: False",
            r"\| O0 +\| [\d.]+ +\| \d+",
            r"O5: ampfuse, BF16 \+ masters",
        ],
        "",
        [],
    ),
    "e1_vgg16_cifar10": (
        [],
        "e1-small",
        [f"{E1}{folder}CIFAR - {what}.png" for folder in ("", "published/") for what in STD],
    ),
    "e2_levels": (
        [
            r"O3 at lr 60: diverged",
            r"suggestion .*--keep-batchnorm-fp32 True",
            r"O2 at lr 0.1: did not diverge",
        ],
        "e2-small",
        [f"{E2}CIFAR wrn10_1 - {what}.png" for what in PLAIN],
    ),
    "e5_native_amp": (
        [
            r" original +loop, workers +loader +[\d,]+ images/s",
            r" tuned +loop, workers +loader +[\d,]+ images/s",
            r" tuned +loop, resident +loader +[\d,]+ images/s",
        ],
        "e5-small",
        [
            *(f"{E5}MLP - {what}.png" for what in STD),
            *(f"{E5}MNIST - {what}.png" for what in PLAIN),
            "e5-small/loops/figures/MNIST - Time.png",
        ],
    ),
    "insight": (
        [
            r"published loop, FP32: .*\d+% of the time\)",
            r"ResNet-18, JPEG files: .*\d+% of the time\)",
            r"perceptron, FP32: .*\d+% of the time\)",
            r"- stale: updates .* are lost\..*\n +\d+% of the updates lost .*: .*1\.weight",
            r"Nothing to be said against it\.\s*$",
        ],
        "",
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.parametrize("name", SHOWN)
def test_what_a_notebook_shows(name, tmp_path, kernel):
    for package in ("torchvision", "timm", "pandas"):
        pytest.importorskip(package)
    run = Executed(name, tmp_path, kernel)
    texts, folder, figures = SHOWN[name]
    for text in texts:
        assert re.search(text, run.text), text
    if folder:
        methods = {result["method"] for result in run.results(folder)}
        assert len(methods) >= 3
        assert run.measured == methods or name == "e2_levels"  # whose own table is HTML
        run.assert_shows(*figures)
