"""Runs the notebooks and stores what they show, for readers on GitHub: ``make notebooks``.

    python notebooks/execute.py [--full] [NAME ...]

They run on the CPU, with the sizes of AMPFUSE_SMALL=1 or, with --full, those that they choose for a
CPU (several minutes each), in a folder that is thrown away. Data come without a network. What is
stored is reduced to what a reader needs: figures become small, progress bars and warnings go, and
so do the paths of this machine. The first cell says where the outputs come from.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from ampfuse.hardware import core_count, cpu_model

FOLDER = Path(__file__).parent
# What AMPFUSE_DATA says to those that would download something.
DATA = {"e1_vgg16_cifar10": "synthetic", "e5_native_amp": "digits"}
FIGURE_WIDTH, FIGURE_COLORS = 700, 24  # pixels; few colours keep a file below 300 KB
# What the first cell says, up to the next empty line.
ORIGIN = re.compile(r"The outputs stored here come from .*?(?=\n\n|$)", re.DOTALL)


def execute(path: Path, full: bool) -> None:
    """Run the notebook from top to bottom and write it back with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file is as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)  # nbclient adds the version of Python
    with tempfile.TemporaryDirectory() as folder:
        # Else figures would not be inline, and the report of the environment would show more.
        environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "IPYTHONDIR": f"{folder}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{folder}/jupyter",
        }
        if not full:
            environment["AMPFUSE_SMALL"] = "1"
        elif path.stem in DATA:
            environment["AMPFUSE_DATA"] = DATA[path.stem]
        NotebookClient(
            notebook,
            timeout=3600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute(env=environment)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = reduced(cell.outputs, folder)
    first = notebook.cells[0]
    first.source, replaced = ORIGIN.subn(origin(full), first.source)
    assert replaced == 1, "the first cell says where the outputs come from"
    notebook.metadata = metadata
    nbformat.write(notebook, path)


def origin(full: bool) -> str:
    """Where the outputs come from."""
    sizes = "" if full else ", with the sizes of `AMPFUSE_SMALL=1`: the times mean nothing"
    return (
        f"The outputs stored here come from a CPU ({cpu_model()}, {core_count()} cores)"
        f"{sizes}.\nRun the notebook to have those of your machine, best on a GPU."
    )


def reduced(outputs: list[NotebookNode], folder: str) -> list[NotebookNode]:
    """Without stderr, which has progress bars and warnings (a failure would have been raised)."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if "text" in output:
            output.text = general(output.text, folder)
            if kept and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
                continue
        for kind, data in output.get("data", {}).items():
            is_figure = kind == "image/png"
            output.data[kind] = shrunk(data) if is_figure else general(data, folder)
        kept.append(output)
    return kept


def general(text: str, folder: str) -> str:
    """`text` without colours and paths of this machine; of a path the last part is left."""
    text = re.sub(r"\x1b\[[\d;?]*\w", "", text.replace(f"{folder}/", ""))
    return re.sub(r"(?<![\w.:/<])/(?:[\w.+-]+/)+(?=[\w.+-])", "", text)


def shrunk(png: str) -> str:
    """A PNG in base64 with fewer pixels and colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if image.width > FIGURE_WIDTH:
        height = round(image.height * FIGURE_WIDTH / image.width)
        image = image.resize((FIGURE_WIDTH, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image = image.quantize(FIGURE_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--full", action="store_true", help="with the sizes chosen for a CPU")
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"{name} ...", flush=True)
        execute(FOLDER / f"{name}.ipynb", arguments.full)


if __name__ == "__main__":
    main()
