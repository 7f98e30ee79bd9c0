"""What half precision does to what a network learns: small trainings of three seeds in every arm.

    python benchmarks/quality.py [--tasks text ...] [--arms split ...]
    python benchmarks/quality.py --tasks            # only prints the tables and draws the curves
    python benchmarks/quality.py --codes            # the error of 8-bit states: harness/codes.py

Runs replace their rows. Into results/memory_quality.csv go the ways to save memory, with BF16
weights but for the norms' FP32 ones, as at O5:

    wide-resnet  experiment E2's net and recipe, as Wide-ResNet-10-1 on scikit-learn's digits
    mlp          experiment E5's perceptron and loss, 256 wide, on the digits as 16x16 pixels; with
                 momentum 0.9 and a higher rate, as E5's own recipe keeps no state and learns little
    text         a transformer of two layers that learns sentences of a fixed grammar; AdamW

Into results/fused_accuracy.csv go the levels, with batch norms fused and left as they are:

    wrn16_4      E2's recipe on a Wide-ResNet-16-4 and the digits as 16x16 pixels, 15 epochs

Into results/muon_quality.csv go AdamW and Muon, in FP32 and at O5 with split masters and states in
8 bits: ``text`` for half as many steps, and ``wrn16_4`` for 5 epochs of the digits as they are.

A seed gives the same initial weights, batches and dropout in every arm. An arm's loss (of the last
4 % of the steps; of the trained net on the test set) is within the spread if its mean is above the
first arm's by no more than the first arm's seeds differ, largest less smallest.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness.codes import STEPS, measure_codes, normal
from harness.models import build
from harness.results import RESULTS, conditions, parser_of, put, read
from report import markdown
from torch import Tensor, nn

CPU = torch.device("cpu")
MODES: dict[str, dict[str, Any]] = {  # what each hands to the optimizer; the first is the reference
    "FP32 states, masters": {"master_weights": True},
    "split": {"master_weights": "split"},
    "split, 8bit": {"master_weights": "split", "state_dtype": "8bit"},
    "split, fp8": {"master_weights": "split", "state_dtype": "fp8"},
    "masters, 8bit": {"master_weights": True, "state_dtype": "8bit"},
    "masters, bf16": {"master_weights": True, "state_dtype": "bf16"},
    "BF16, nearest": {"master_weights": False},
    "BF16, stochastic": {"master_weights": False, "rounding": "stochastic"},
}
_LINES = dict(zip(MODES, ["k-", "C0-", "C2-", "C4-", "C3-", "C1-", "k--", "k:"], strict=True))
LEVELS: dict[str, dict[str, Any]] = {"O0": {"opt_level": "O0"}}  # to ``amp.initialize``
for _level in ("O1", "O2", "O4", "O5"):
    LEVELS[_level] = {"opt_level": _level}
    LEVELS[f"{_level}, fused"] = {"opt_level": _level, "fuse": True}
SMALL: dict[str, dict[str, Any]] = {  # to ``amp.initialize`` and the optimizer
    "FP32": {"opt_level": "O0"},
    "O5, split, 8bit": {"opt_level": "O5", "master_weights": "split", "state_dtype": "8bit"},
}
SEEDS = range(3)
_POINTS = 25  # of a curve: each is the mean loss since the one before


@dataclass(frozen=True, kw_only=True)
class Row:
    """A point of a training's curve; the last has also what only the trained net has."""

    task: str
    arm: str
    seed: int
    step: int = 0
    loss: float = math.nan
    test_loss: float = math.nan
    accuracy: float = math.nan  # 0 to 1, on the test set
    hardware: str
    torch: str
    ampfuse: str
    date: str


class Task(NamedTuple):
    """A training: `data()` is inputs and targets to train on, then those to test on."""

    file: str
    arms: dict[str, dict[str, Any]]
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: str
    recipe: dict[str, float]
    schedule: str
    steps: int
    batch: int = 128

    def prepare(self, arm: str) -> tuple[nn.Module, Any, Callable[..., Any]]:
        """The model, its optimizer, and the context that scales a loss."""
        import ampfuse

        options = dict(self.arms[arm])
        model = self.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if "opt_level" in options:
            state_dtype = options.pop("state_dtype", None)
            if self.optimizer == "Muon":
                groups = ampfuse.optim.muon_groups(model, muon=self.recipe, adamw=_decayed)
                optimizer = ampfuse.optim.Muon(groups)
            else:
                kind = getattr(ampfuse.optim if state_dtype else torch.optim, self.optimizer)
                optimizer = kind(model.parameters(), **self.recipe)
            if state_dtype:
                optimizer.state_dtype = state_dtype
            model, optimizer = ampfuse.amp.initialize(model, optimizer, verbosity=0, **options)
            return model, optimizer, ampfuse.amp.scale_loss
        model = model.bfloat16()
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.float()
        kind = getattr(ampfuse.optim, self.optimizer)
        optimizer = kind(model.parameters(), **self.recipe, **options)
        return model, optimizer, lambda loss, optimizer: nullcontext(loss)


@cache
def digits(side: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """scikit-learn's digits as standardised [n, 1, side, side], and their classes; 360 to test."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, classes = datasets.load_digits(return_X_y=True)
    train, test = train_test_split(
        range(len(classes)), test_size=360, stratify=classes, random_state=0
    )
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    images, classes = F.interpolate(images, side).to(dtype), torch.as_tensor(classes)
    return images[train], classes[train], images[test], classes[test]


_ADJECTIVES, _NOUNS, _VERBS = 40, 120, 80
_WORDS = 4 + _ADJECTIVES + _NOUNS + 2 * _VERBS  # "." and three determiners first
_CONTEXT = 32


@cache
def sentences() -> tuple[Tensor, ...]:
    """Word numbers int64 [n, 32] of "det adj+ noun verb det adj+ noun ." on and on; the next words.

    To learn by heart: each of the 4,800 pairs of adjective and noun (in Zipf's frequencies) admits
    two verbs, the first determiner one form of them, and each verb eight objects.
    """
    draw = random.Random(0)
    zipf = {n: [1 / (1 + i) for i in range(n)] for n in (_ADJECTIVES, _NOUNS)}
    pairs = [[draw.sample(range(_VERBS), 2) for _ in range(_NOUNS)] for _ in range(_ADJECTIVES)]
    objects = [draw.sample(range(_NOUNS), 8) for _ in range(_VERBS)]
    text: list[int] = []
    while len(text) < 1_000_000:
        determiners = draw.choices(range(1, 4), k=2)
        counts = (1 + (draw.random() < 0.3), 1 + (draw.random() < 0.3))
        first, second = (draw.choices(range(_ADJECTIVES), zipf[_ADJECTIVES], k=k) for k in counts)
        noun = draw.choices(range(_NOUNS), zipf[_NOUNS])[0]
        verb = draw.choice(pairs[first[0]][noun])
        text += [determiners[0], *(4 + a for a in first), 4 + _ADJECTIVES + noun]
        text += [4 + _ADJECTIVES + _NOUNS + 2 * verb + (determiners[0] == 1), determiners[1]]
        text += [*(4 + a for a in second), 4 + _ADJECTIVES + draw.choice(objects[verb]), 0]
    rows = torch.tensor(text).unfold(0, _CONTEXT + 1, _CONTEXT)
    return rows[:-1000, :-1], rows[:-1000, 1:], rows[-1000:, :-1], rows[-1000:, 1:]


class Transformer(nn.Module):
    """Word numbers [n, 32] to scores [n, 32, words]; pre-norm, learned positions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, _WORDS, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT, dtype=hidden.dtype)
        return self.head(self.blocks(hidden, mask, is_causal=True))


def squared_error(scores: Tensor, classes: Tensor) -> Tensor:
    """E5's loss where the targets are classes."""
    return F.mse_loss(scores, F.one_hot(classes, scores.shape[1]).to(scores.dtype))


def cross_entropy(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), classes.flatten())


def perceptron(width: int = 256) -> nn.Sequential:
    """E5's: three linear layers with ReLU between; images are flattened first."""
    first, second, third = (nn.Linear(width, width) for _ in range(3))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), third)


_memory = partial(Task, "memory_quality.csv", MODES)
_net = partial(build, classes=10, channels=1)
_e2 = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
_e5, _decayed = {"lr": 1.0, "momentum": 0.9}, {"lr": 1e-3, "weight_decay": 0.01}
_small, _8x8, _16x16 = (
    partial(_net, "wrn10_1", dropout=0.3),
    partial(digits, 8, torch.bfloat16),
    partial(digits, 16, torch.bfloat16),
)
TASKS = {
    "wide-resnet": _memory(_small, _8x8, cross_entropy, "SGD", _e2, "linear", steps=2000),
    "mlp": _memory(perceptron, _16x16, squared_error, "SGD", _e5, "constant", steps=4000),
    "text": _memory(
        Transformer, sentences, cross_entropy, "AdamW", _decayed, "cosine", steps=3000, batch=16
    ),
    "wrn16_4": Task(
        "fused_accuracy.csv",
        LEVELS,
        partial(_net, "wrn16_4", dropout=0.3),
        partial(digits, 16),
        cross_entropy,
        "SGD",
        _e2,
        "linear",
        steps=330,
        batch=64,
    ),
}
_text = partial(
    Task, "muon_quality.csv", SMALL, Transformer, sentences, cross_entropy, steps=1500, batch=16
)
_wrn = partial(
    Task,
    "muon_quality.csv",
    SMALL,
    partial(_net, "wrn16_4", dropout=0.3),
    partial(digits, 8),
    cross_entropy,
    steps=110,
    batch=64,
)
_muon = {"lr": 0.02, "weight_decay": 0.1}
TASKS |= {
    "text, AdamW": _text(optimizer="AdamW", recipe=_decayed, schedule="cosine"),
    "text, Muon": _text(optimizer="Muon", recipe=_muon, schedule="cosine"),
    "wrn16_4, AdamW": _wrn(optimizer="AdamW", recipe=_decayed, schedule="linear"),
    "wrn16_4, Muon": _wrn(optimizer="Muon", recipe=_muon, schedule="linear"),
}


def factor(schedule: str, step: int, steps: int, warmup: float = 0.1) -> float:
    """What the peak rate is multiplied by: it climbs linearly, then falls in a line, or along a
    cosine, or stays."""
    climb = math.ceil(warmup * steps)
    if step < climb:
        return (step + 1) / climb
    share = (step - climb) / max(1, steps - climb)
    shapes = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
    return shapes[schedule]


def train(name: str, arm: str, seed: int) -> list[Row]:
    """A run as rows of the CSV."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model, optimizer, scale_loss = task.prepare(arm)
    draw = torch.Generator().manual_seed(seed)
    inputs, targets, test_inputs, test_targets = task.data()
    losses, peaks = [], [group["lr"] for group in optimizer.param_groups]
    for step in range(task.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor(task.schedule, step, task.steps)
        chosen = torch.randint(len(inputs), (task.batch,), generator=draw)
        loss = task.loss(model(inputs[chosen]).float(), targets[chosen])
        optimizer.zero_grad()
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        scores = model(test_inputs).float()
    right = (scores.argmax(-1) == test_targets).float().mean().item()
    each = max(1, task.steps // _POINTS)
    means = [fmean(losses[i : i + each]) for i in range(0, task.steps, each)]
    run = partial(Row, task=name, arm=arm, seed=seed, **conditions(CPU))
    rows = [run(step=i * each, loss=_rounded(mean)) for i, mean in enumerate(means, 1)]
    test_loss = _rounded(task.loss(scores, test_targets).item())
    rows[-1] = replace(rows[-1], test_loss=test_loss, accuracy=round(right, 5))
    return rows


def gradients(name: str) -> Tensor:
    """Float32 [200, n] of a training: step, element of the large tensors, which hold whole blocks
    of 256 each."""
    from ampfuse.optim import AdamW

    torch.manual_seed(0)
    task, steps = TASKS[name], []
    inputs, targets, *_ = task.data()
    model = task.build().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3, master_weights=True)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (task.batch,))
        optimizer.zero_grad()
        task.loss(model(inputs[chosen]), targets[chosen]).backward()
        large = [p.grad for p in model.parameters() if p.numel() >= 4096]
        steps.append(nn.utils.parameters_to_vector(large).float())
        optimizer.step()
    return torch.stack(steps)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def save(path: Path, rows: Sequence[Row], arms: Sequence[tuple[str, str]]) -> None:
    """Runs in the place of the same runs'; `arms` (with their tasks) in the order of the file."""
    order = [(*arm, seed) for arm in arms for seed in SEEDS]
    put(path, rows, lambda row: (row.task, row.arm, row.seed), order)


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each task and arm: mean and range over the seeds, and the verdict."""
    columns = ["task", "arm", "training loss", "test loss", "accuracy", "losses within the spread"]
    last = [list(run)[-1] for _, run in groupby(rows, lambda row: (row.task, row.arm, row.seed))]
    lines = []
    for task, of_task in groupby(last, lambda row: row.task):
        limits: list[float] = []
        for arm, runs in groupby(of_task, lambda row: row.arm):
            found = list(runs)
            losses = [[r.loss for r in found], [r.test_loss for r in found]]
            means = [fmean(values) for values in losses]
            limits = limits or [fmean(v) + max(v) - min(v) for v in losses]
            within = [
                "yes" if mean <= limit else "no"
                for mean, limit in zip(means, limits, strict=True)
                if not math.isnan(mean)
            ]
            shown = [_range(values) for values in (*losses, [r.accuracy for r in found])]
            lines.append([task, arm, *shown, ", ".join(within)])
    said = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    return markdown([columns[i] for i in said], [[line[i] for i in said] for line in lines])


def _range(values: list[float]) -> str:
    if any(map(math.isnan, values)):
        return ""
    return f"{fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def draw_curves(path: Path) -> None:
    """A panel for each task: the mean curve of each mode, and the seeds' range about it."""
    import matplotlib.pyplot as plt

    tasks = [list(group) for _, group in groupby(read(path, Row), lambda row: row.task)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        for mode, group in groupby(task, lambda row: row.arm):
            at: dict[int, list[float]] = defaultdict(list)
            for row in group:
                at[row.step].append(row.loss)
            lows, means, highs = ([f(v) for v in at.values()] for f in (min, fmean, max))
            color = _LINES[mode].rstrip("-:")
            axes.fill_between(list(at), lows, highs, color=color, alpha=0.15, linewidth=0)
            axes.plot(list(at), means, _LINES[mode], linewidth=1.2, label=mode)
        axes.set_yscale("log")
        axes.set_title(f"{task[0].task}: training loss by step", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(fontsize=8, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=130)


def main() -> None:
    """Trains, and after each run writes its rows; then the tables and the picture."""
    arms = list(dict.fromkeys([*MODES, *LEVELS, *SMALL]))
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=arms, choices=arms)
    parser.add_argument(
        "--codes", action="store_true", help="needs bitsandbytes; nothing else runs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.codes:
        cases = {f"normal, sigma {sigma}": normal(sigma) for sigma in (0, 1, 2)}
        return measure_codes(cases | {name: gradients(name) for name in ("text", "wide-resnet")})
    for name in options.tasks:
        task = TASKS[name]
        order = [(other, arm) for other, some in TASKS.items() for arm in some.arms]
        for arm, seed in product([arm for arm in task.arms if arm in options.arms], SEEDS):
            save(RESULTS / task.file, train(name, arm, seed), order)
            print(name, arm, seed, flush=True)
    for file in dict.fromkeys(task.file for task in TASKS.values()):
        print("\n".join(table(read(RESULTS / file, Row))))
    draw_curves(RESULTS / "memory_quality.csv")


if __name__ == "__main__":
    main()
