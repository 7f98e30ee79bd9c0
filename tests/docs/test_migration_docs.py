"""docs/from_apex.md and from_torch_amp.md: before and after run, and train to the same loss."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ampfuse.compat import apex
from cases import clean_apex_names

DOCS = Path(__file__).parents[2] / "docs"
APEX, TORCH_AMP = ((DOCS / name).read_text() for name in ("from_apex.md", "from_torch_amp.md"))
# Those that have a "Before:", by title.
SECTIONS = {
    section.split("\n")[0]: section
    for section in re.split(r"^## ", APEX + TORCH_AMP, flags=re.MULTILINE)
    if "\nBefore:" in section
}


def run(code):
    """The loss after `code`, which finds a model, an optimizer and data, and trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(96, 6)
    targets = inputs[:, :3].argmax(1)
    batches = list(zip(inputs.split(16), targets.split(16), strict=True))
    names = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": batches * 5,
        "loss_function": nn.CrossEntropyLoss(),
    }
    exec(code.replace('"cuda"', '"cpu"'), names)
    with torch.no_grad():
        return nn.functional.cross_entropy(names["model"](inputs).float(), targets).item()


def test_three_sections_have_a_before():
    assert list(SECTIONS) == ["From apex.amp", "From FP16_Optimizer", "The loop"]


@pytest.mark.parametrize("title", SECTIONS)
def test_before_and_after_train_alike(title):
    before, after = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)
    untrained = run("")
    with clean_apex_names():
        apex.install()
        old = run(before)
    with clean_apex_names():
        assert "apex" not in after.replace("ampfuse", "")
        new = run(after)
    assert old < 0.6 * untrained
    assert new == pytest.approx(old, abs=0.01)


def test_the_names_of_the_table_are_there():
    """Each row's first ones; of a name without dots, beside the one before it."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", APEX, re.MULTILINE)
    assert len(rows) > 20
    for cells in rows:
        for cell in cells:
            parent = None
            for name in re.findall(r"`([\w.]+)`", cell):
                if "." in name:
                    path, _, name = name.rpartition(".")
                    path = re.sub(r"^(?=apex|amp_C)", "ampfuse.compat.apex.", path)
                    parent = importlib.import_module(path.replace("apex.apex", "apex"))
                if parent is not None and not cell.startswith("the same"):
                    assert hasattr(parent, name), cell


def test_the_import_at_the_start_of_a_program_replaces_apex():
    (code,) = re.findall(r"```python\n(import ampfuse\.compat\.apex.*?)```", APEX, re.DOTALL)
    with clean_apex_names():
        exec(code, {})
        import apex as found

        assert found is apex
