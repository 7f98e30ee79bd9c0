"""What each way to save memory does to a training: loss curves of three small trainings.

    python benchmarks/memory_quality.py [--tasks text ...] [--modes split ...]

Runs replace their rows in results/memory_quality.csv; ``--tasks`` without a task only prints the
table and draws the curves of what is there. BF16 weights but for the norms' FP32 ones, as at O5:

    wide-resnet  experiment E2's net and recipe, as Wide-ResNet-10-1 on scikit-learn's digits
    mlp          experiment E5's perceptron and loss, 256 wide, on the digits as 16x16 pixels; with
                 momentum 0.9 and a higher rate, as E5's own recipe keeps no state and learns little
    text         a transformer of two layers that learns sentences of a fixed grammar; AdamW

Each of three seeds gives the same initial weights, batches and dropout in every mode. A mode's loss
(of the last 4 % of the steps; of the trained net on the test set) is within the spread if its mean
is above the reference's by no more than the reference's seeds differ, largest less smallest.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import operator
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import groupby, product
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from harness import RESULTS, hardware
from torch import Tensor, nn

import ampfuse
from ampfuse.experiments import models, schedule
from ampfuse.experiments.data import load_digits
from ampfuse.optim import SGD, AdamW

MODES: dict[str, dict[str, Any]] = {  # what each hands to the optimizer; the first is the reference
    "FP32 states, masters": {"master_weights": True},
    "split": {"master_weights": "split"},
    "split, 8bit": {"master_weights": "split", "state_dtype": "8bit"},
    "masters, 8bit": {"master_weights": True, "state_dtype": "8bit"},
    "masters, bf16": {"master_weights": True, "state_dtype": "bf16"},
    "BF16, nearest": {"master_weights": False},
    "BF16, stochastic": {"master_weights": False, "rounding": "stochastic"},
}
_LINES = dict(zip(MODES, ["k-", "C0-", "C2-", "C3-", "C1-", "k--", "k:"], strict=True))
_CSV = RESULTS / "memory_quality.csv"
_POINTS = 25  # of a curve: each is the mean loss since the one before

Row = dict[str, Any]
_task, _mode, _accuracy = map(operator.itemgetter, ("task", "mode", "accuracy"))


class Task(NamedTuple):
    """A training: `data()` is inputs and targets to train on, then those to test on."""

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    recipe: dict[str, float]
    schedule: str
    steps: int
    batch: int = 128


def digits(side: int) -> tuple[Tensor, ...]:
    """scikit-learn's digits as BF16 [n, 1, side, side], and their classes."""
    data = load_digits(torch.device("cpu"))
    train, test = (F.interpolate(x, side).bfloat16() for x in (data.train_images, data.test_images))
    return train, data.train_labels, test, data.test_labels


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


_net = partial(models.WideResNet, 10, 1, classes=10, channels=1, dropout=0.3)
_e2 = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
_e5, _decayed = {"lr": 1.0, "momentum": 0.9}, {"lr": 1e-3, "weight_decay": 0.01}
_perceptron, _8x8, _16x16 = partial(models.mlp, 256), partial(digits, 8), partial(digits, 16)
TASKS = {
    "wide-resnet": Task(_net, _8x8, cross_entropy, SGD, _e2, "linear", steps=2000),
    "mlp": Task(_perceptron, _16x16, squared_error, SGD, _e5, "constant", steps=4000),
    "text": Task(Transformer, sentences, cross_entropy, AdamW, _decayed, "cosine", 3000, batch=16),
}


def train(name: str, mode: str, seed: int) -> list[Row]:
    """A run as rows of the CSV. The last one has what only the trained net has."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model = task.build().bfloat16()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            module.float()
    optimizer = task.optimizer(model.parameters(), **task.recipe, **MODES[mode])
    draw = torch.Generator().manual_seed(seed)
    inputs, targets, test_inputs, test_targets = task.data()
    losses = []
    for step in range(task.steps):
        share = schedule.factor(task.schedule, step, task.steps, warmup=0.1)
        schedule.set_lr(optimizer, task.recipe["lr"] * share)
        chosen = torch.randint(len(inputs), (task.batch,), generator=draw)
        loss = task.loss(model(inputs[chosen]).float(), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        scores = model(test_inputs).float()
    right = (scores.argmax(-1) == test_targets).float().mean()
    each = task.steps // _POINTS
    means = [fmean(losses[i : i + each]) for i in range(0, task.steps, each)]
    run: Row = {"task": name, "mode": mode, "seed": str(seed)}
    rows = [run | {"step": i * each, "loss": f"{mean:.5g}"} for i, mean in enumerate(means, 1)]
    test_loss = f"{task.loss(scores, test_targets):.5g}"
    rows[-1] |= {"test_loss": test_loss, "accuracy": f"{right:.5f}"}
    rows[-1] |= {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__}
    rows[-1] |= {"ampfuse": ampfuse.__version__, "date": datetime.date.today().isoformat()}
    return rows


def read() -> list[Row]:
    with _CSV.open(newline="") as file:
        return list(csv.DictReader(file))


def write(run: list[Row]) -> None:
    """`run` in the place of the same run's rows; the others stay."""
    rank = {name: i for i, name in enumerate([*TASKS, *MODES])}

    def key(row: Mapping[str, Any]) -> tuple[int, int, str]:
        return rank[row["task"]], rank[row["mode"]], row["seed"]

    kept = [row for row in read() if key(row) != key(run[0])] if _CSV.exists() else []
    with _CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, run[-1].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *run], key=key))


def print_table(rows: list[Row]) -> None:
    """A line for each task and mode: mean and range over the seeds, and the verdict."""
    print("| task | mode | training loss | test loss | accuracy | losses within the spread |")
    print("|---|---|---|---|---|---|")
    for task, group in groupby(filter(_accuracy, rows), key=_task):
        limits: list[float] = []
        for mode, runs in groupby(group, key=_mode):
            cells = [(row["loss"], row["test_loss"], row["accuracy"]) for row in runs]
            columns = [[float(value) for value in column] for column in zip(*cells, strict=True)]
            means = [fmean(column) for column in columns]
            limits = limits or [fmean(v) + max(v) - min(v) for v in columns[:2]]
            shown = [f"{fmean(v):.4g} ({min(v):.4g} to {max(v):.4g})" for v in columns]
            within = ["no" if above else "yes" for above in map(operator.gt, means, limits)]
            print("|", " | ".join([task, mode, *shown, ", ".join(within)]), "|")


def draw(rows: list[Row]) -> None:
    """A panel for each task: the mean curve of each mode, and the seeds' range about it."""
    tasks = [list(group) for _, group in groupby(rows, key=_task)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        for mode, group in groupby(task, key=_mode):
            at: dict[int, list[float]] = defaultdict(list)
            for row in group:
                at[int(row["step"])].append(float(row["loss"]))
            lows, means, highs = ([f(v) for v in at.values()] for f in (min, fmean, max))
            axes.fill_between(
                list(at), lows, highs, color=_LINES[mode].rstrip("-:"), alpha=0.15, linewidth=0
            )
            axes.plot(list(at), means, _LINES[mode], linewidth=1.2, label=mode)
        axes.set_yscale("log")
        axes.set_title(f"{task[0]['task']}: training loss by step", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(fontsize=8, frameon=False)
    figure.savefig(_CSV.with_suffix(".png"), dpi=130)


def main() -> None:
    """Trains, and after each run writes its rows; then the table and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task, mode, seed in product(options.tasks, options.modes, range(3)):
        write(train(task, mode, seed))
        print(task, mode, seed, flush=True)
    print_table(read())
    draw(read())


if __name__ == "__main__":
    main()
