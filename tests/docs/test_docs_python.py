"""Every Python block of every page of the documentation runs."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import amp

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))  # test_docs.py trains by the README
# Pages, or blocks by something that they contain, that other tests run.
ELSEWHERE = {
    "from_apex.md": "test_migration_docs.py",
    "from_torch_amp.md": "test_migration_docs.py",
    'Path("checkpoints")': "test_docs.py, on processes",
    "fabric.setup_module": "test_integrations_sharded.py, on processes",
}
# What a block needs that trains with what an earlier one, or its reader, has set up; those with one
# of these words set it up themselves.
PREPARED = """
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
train_step(x, y)
loss = loss_function(model(x), y)
"""
SETS_UP = ("amp.initialize(", "ampfuse.optim", "GradScaler", "graphed", "import ", "amp.advise")
# And what blocks need that contain this.
BEFORE = {
    "GradScaler": "loss = loss_function(model(x), y)",
    "fully_shard": "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
    "no_sync": "model, batch = nn.parallel.DistributedDataParallel(model), x",
    "results.measured": "import os; os.mkdir('results')",
}
SMALLER = {
    '"cuda"': '"cpu"',
    "batch, optimizer)": "batch, optimizer, levels=['O2'], steps=2)",
}


def blocks():
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            code = block[1]
            if page.name not in ELSEWHERE and not any(part in code for part in ELSEWHERE):
                line = text.count("\n", 0, block.start()) + 2
                marks = pytest.mark.gpu if "make_graphed_step" in code else ()
                yield pytest.param(code, id=f"{page.name}:{line}", marks=marks)


@pytest.fixture
def names(tmp_path, monkeypatch, request):
    """What the blocks call by name: a small training, and all that is around one."""
    monkeypatch.chdir(tmp_path)
    with torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu"):
        yield world()
    amp.restore_torch()


def world():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )
    net_d, net_g = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer = ampfuse.optim.AdamW(model.parameters(), lr=1e-3, ema_decay=0.9)
    x, y = torch.randn(8, 3, 6, 6), torch.arange(8) % 3
    torch.save(model.state_dict(), "fp32.pt")

    def loss_function(output, target):
        return nn.functional.cross_entropy(output.float(), target)

    def train_step(x, y):
        names["optimizer"].zero_grad()
        loss = loss_function(names["model"](x), y)
        with amp.scale_loss(loss, names["optimizer"]) as scaled_loss:
            scaled_loss.backward()
        names["optimizer"].step()

    names = {
        **{"torch": torch, "nn": nn, "contextlib": contextlib, "ampfuse": ampfuse, "amp": amp},
        **{"model": model, "optimizer": optimizer, "loss_function": loss_function},
        **{"x": x, "y": y, "loader": [(x, y)] * 3, "batch": (x, y), "images": x},
        **{"batches": [(x, y)] * 3, "train_step": train_step, "evaluate": lambda model: model(x)},
        **{"net_d": net_d, "net_g": net_g, "path": "saved.pt", "steps": 20, "step": 0},
        "opt_d": torch.optim.Adam(net_d.parameters()),
        "opt_g": torch.optim.Adam(net_g.parameters()),
        "loss_real": net_d(torch.randn(5, 4)).mean(),
        "loss_fake": net_d(net_g(torch.randn(5, 4))).mean(),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }
    return names


@pytest.mark.parametrize("code", list(blocks()))
def test_python_of_the_pages_runs(code, names, request):
    if "ampfuse.experiments" in code:
        pytest.importorskip("pandas")
    if "torchao" in code:
        pytest.importorskip("torchao")
    if "fully_shard" in code or "no_sync" in code:
        request.getfixturevalue("one_process")
    if not any(part in code for part in SETS_UP):
        exec(PREPARED, names)
    for part, before in BEFORE.items():
        if part in code:
            exec(before, names)
    for part, smaller in SMALLER.items():
        code = code.replace(part, smaller)
    exec(code, names)
