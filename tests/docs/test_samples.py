"""What the pages show as output is what these versions print, but for measured numbers."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import hardware
from programs import python

DOCS = Path(__file__).parents[2] / "docs"


def sample(page, begins):
    """The block of output that begins so."""
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    (shown,) = (block for block in blocks if block.startswith(begins))
    return shown.rstrip("\n")


def masked(text):
    """Without numbers, bars and the width of columns; lines may be wrapped elsewhere."""
    text = re.sub(r"\d[\d.,]*(e[+-]\d+)?", "N", text)
    return " ".join(re.sub(r"#+", "", text).split())


def test_the_table_of_memory_modes_is_what_is_printed(capsys):
    page = (DOCS / "memory.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*memory_report\(model[^`]*)```\n\n```text", page)
    exec(code, {})
    assert capsys.readouterr().out.rstrip("\n") == sample("memory.md", "AdamW, 302")


@pytest.mark.slow
def test_the_plan_of_eight_billion_parameters_is_what_is_printed():
    pytest.importorskip("transformers")
    (command,) = re.findall(
        r"^ampfuse (plan --hf [^`]*)^```", (DOCS / "memory.md").read_text(), re.M
    )
    ran = python("-m", "ampfuse", *command.replace("\\\n", " ").split())
    assert ran.stdout.rstrip("\n") == sample("memory.md", "AdamW, 8,030")


def test_the_report_of_the_meter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.GELU(), nn.Linear(200, 10))
    model.bfloat16()
    optimizer = ampfuse.optim.AdamW(model.named_parameters(), lr=1e-4, master_weights=False)
    optimizer.meter(every=10)
    x, y = torch.randn(64, 300).bfloat16(), torch.arange(64) % 10
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    shown = sample("insight.md", "Step 91")
    assert masked(optimizer.meter.report()) == masked(shown)


SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse import amp


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        {weight}
        return weight @ x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), Attention(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
options = {options}
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
x, y = {size} * torch.randn({batch}, 10, 16), torch.arange({batch})
with amp.explain_overflow(model) as watch:
    {loss}
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
print(watch.explanation)
"""
OVERFLOWS = {
    "inf originated in the forward pass": {
        "weight": "weight = (self.q(x) @ self.k(x).transpose(1, 2)).exp()",
        "loss": "loss = F.cross_entropy(model(x).mean(1), y)",
        "options": {},
        "size": 3.0,
        "batch": 8,
    },
    "inf originated in the backward pass": {
        "weight": "weight = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)",
        "loss": "loss = F.cross_entropy(model(x).mean(1), y)",
        "options": {"loss_scale": 2.0**20},
        "size": 1.0,
        "batch": 4,
    },
}


@pytest.mark.parametrize("begins", OVERFLOWS)
def test_the_explanation_of_an_overflow_is_what_is_printed(begins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(**OVERFLOWS[begins]))
    runpy.run_path("train.py")
    assert masked(capsys.readouterr().out) == masked(sample("insight.md", begins))


DOCTORED = """
import torch
from torch import nn

model = nn.Sequential(
    *(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(10)),
)
x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
model(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(x), y)
    if not torch.isfinite(loss):
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.skipif(not hardware.cpu_has_bf16(), reason="the sample's advice is BF16")
def test_the_report_of_the_doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(DOCTORED)
    arguments = ("doctor", "--warmup", "1", "--steps", "3", "train.py")
    printed, shown = python("-m", "ampfuse", *arguments).stdout, sample("insight.md", "train.py")
    # What takes most of three steps, and so what is advised first, depends on the machine.
    begins = ("train.py: bound by", "Operations that take most", "At most", "Lines that would")
    begins += ("  train.py:", "What would help most:", "  1. ")
    for text in (printed, shown):
        lines = text.strip().splitlines()
        assert all(any(line.startswith(begin) for line in lines) for begin in begins), text
        assert any(re.match(r"  \d\. about [\d.]+x: BF16 \(O5\)", line) for line in lines), text


def test_the_table_of_advise_is_what_is_printed():
    model = nn.Linear(8, 4)
    batch = torch.randn(16, 8), torch.arange(16) % 4

    def loss_function(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    optimizer = torch.optim.AdamW(model.parameters())
    advice = ampfuse.amp.advise(
        model, loss_function, batch, optimizer, levels=["O4"], seconds=1, steps=20
    )
    for text in (str(advice), sample("insight.md", "On ")):
        _, header, row, *_, last = text.strip().splitlines()
        assert header.split() == "level steps ms/step speed deviation allowed skipped".split()
        assert re.match(r"O0 +\d+ +[\d.]+ +1.00x +0 ", row)
        assert re.match(r"Train at O\d: ", last)
