"""The effect of half precision on what a network learns: each variant trains small tasks, 3 seeds.

    python benchmarks/quality.py [--tasks text ...] [--variants split ...]
    python benchmarks/quality.py --tasks            # only prints the tables and draws the curves
    python benchmarks/quality.py --quantization     # the error of 8-bit states
    python benchmarks/quality.py --tasks lightning fabric accelerate transformers timm

Runs replace their rows. docs/benchmarks.md describes the tasks and what "within the spread" means.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness.data import SmallTransformer, digits, sentences
from harness.models import image_model
from harness.options import parser_of
from harness.quantization import STEPS, measure_quantization, normal
from harness.results import RESULTS, Record, conditions, put, records_of
from harness.tables import markdown
from torch import Tensor, nn

from ampfuse import amp, optim
from ampfuse.experiments.training import lr_factor
from ampfuse.experiments.variants import squared_error

CPU = torch.device("cpu")
# Options of ``amp.initialize`` (default: O5) and the optimizer by variant; a task's first is its
# reference. The memory modes, the levels with and without fused batch norms, and two that short
# tasks compare.
MODES: dict[str, dict[str, Any]] = {
    "FP32 states, masters": {},
    "split": {"master_weights": "split"},
    "split, 8bit": {"master_weights": "split", "state_dtype": "8bit"},
    "masters, 8bit": {"state_dtype": "8bit"},
    "masters, bf16": {"state_dtype": "bf16"},
    "BF16, nearest": {"master_weights": False},
    "BF16, stochastic": {"master_weights": False, "rounding": "stochastic"},
}
# A curve's colour and dash.
_LINES = dict(zip(MODES, ["k-", "C0-", "C2-", "C3-", "C1-", "k--", "k:"], strict=True))
LEVELS: dict[str, dict[str, Any]] = {"O0": {"opt_level": "O0"}}
for _level in ("O1", "O2", "O4", "O5"):
    LEVELS[_level] = {"opt_level": _level}
    LEVELS[f"{_level}, fused"] = {"opt_level": _level, "fuse": True}
SHORT = {"FP32": {"opt_level": "O0"}, "O5, split, 8bit": MODES["split, 8bit"]}
SEEDS = range(3)
RUN = "task", "variant", "seed"
_POINTS = 25  # of a curve: each is the mean loss since the one before


def cross_entropy(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), classes.flatten())


def network(name: str) -> Callable[[], nn.Module]:
    return partial(image_model, name, classes=10, channels=1, dropout=0.3)


_decayed = {"lr": 1e-3, "weight_decay": 0.01}
_muon = {"optimizer": "Muon", "recipe": {"lr": 0.02, "weight_decay": 0.1}}


class Task(NamedTuple):
    """A training: `data()` is inputs and targets to train on, then those to test on. By default
    E2's recipe on a small Wide-ResNet."""

    file: str = "memory_quality.csv"
    variants: dict[str, dict[str, Any]] = MODES
    build: Callable[[], nn.Module] = network("wrn10_1")
    data: Callable[[], tuple[Tensor, ...]] = partial(digits, 8)
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    optimizer: str = "SGD"
    recipe: dict[str, float] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}  # noqa: RUF012
    schedule: str = "linear"
    steps: int = 2000
    batch: int = 128

    def prepare(self, variant: str) -> tuple[nn.Module, Any]:
        """The model and its optimizer."""
        options: dict[str, Any] = {"opt_level": "O5", "verbosity": 0, **self.variants[variant]}
        own = {name: options.pop(name) for name in ("state_dtype", "rounding") if name in options}
        model = self.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer: Any
        if self.optimizer == "Muon":
            optimizer = optim.Muon(optim.muon_groups(model, muon=self.recipe, adamw=_decayed))
        else:
            kind = getattr(optim if own else torch.optim, self.optimizer)
            optimizer = kind(model.parameters(), **self.recipe)
        for name, value in own.items():
            setattr(optimizer, name, value)
        return amp.initialize(model, optimizer, **options)


_text = Task(build=SmallTransformer, data=sentences, schedule="cosine", steps=3000, batch=16)
_text = _text._replace(optimizer="AdamW", recipe=_decayed)
_mlp = Task(build=partial(network("mlp"), 16), data=partial(digits, 16), loss=squared_error)
_short = {"file": "muon_quality.csv", "variants": SHORT}
_short_text = _text._replace(**_short, steps=1500)
_short_wide = Task(**_short, build=network("wrn16_4"), steps=110, batch=64)
_fused = {"file": "fused_accuracy.csv", "variants": LEVELS, "data": partial(digits, 16)}
TASKS = {
    "wide-resnet": Task(),
    "mlp": _mlp._replace(recipe={"lr": 1.0, "momentum": 0.9}, schedule="constant", steps=4000),
    "text": _text,
    "wrn16_4": _short_wide._replace(**_fused, steps=330),
    "text, AdamW": _short_text,
    "text, Muon": _short_text._replace(**_muon),
    "wrn16_4, AdamW": _short_wide._replace(optimizer="AdamW", recipe=_decayed),
    "wrn16_4, Muon": _short_wide._replace(**_muon),
}


# File and variants by task; the examples of frameworks have neither curve nor accuracy.
_FRAMEWORKS = "frameworks_epyc.csv"
_LEVELS = "native BF16", "O5", "O2"
_TIMM = "native BF16", "ampfuse-adamw, BF16", "ampfuse-adamw, FP16"
VARIANTS: dict[str, tuple[str, Sequence[str]]] = {
    **{name: (task.file, list(task.variants)) for name, task in TASKS.items()},
    **dict.fromkeys("lightning fabric accelerate transformers".split(), (_FRAMEWORKS, _LEVELS)),
    "timm": (_FRAMEWORKS, _TIMM),
}


def train(name: str, variant: str, seed: int) -> list[dict[str, Any]]:
    """A run as rows of the CSV: points of its curve. The last has also what only the trained
    network has: the loss and the accuracy (0 to 1) on the test set."""
    torch.manual_seed(seed)
    run: dict[str, Any] = {"task": name, "variant": variant, "seed": seed, "step": 0}
    run |= dict.fromkeys(("loss", "test_loss", "accuracy"), math.nan) | conditions(CPU)
    if name not in TASKS:
        from harness.frameworks import EXAMPLES

        return [run | {"test_loss": _rounded(EXAMPLES[name](variant))}]
    task = TASKS[name]
    model, optimizer = task.prepare(variant)
    draw = torch.Generator().manual_seed(seed)
    inputs, targets, test_inputs, test_targets = task.data()
    losses, peaks = [], [group["lr"] for group in optimizer.param_groups]
    for step in range(task.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * lr_factor(task.schedule, step, task.steps, warmup=0.1)
        chosen = torch.randint(len(inputs), (task.batch,), generator=draw)
        loss = task.loss(model(inputs[chosen]).float(), targets[chosen])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        scores = model(test_inputs).float()
    right = (scores.argmax(-1) == test_targets).float().mean().item()
    each = max(1, task.steps // _POINTS)
    means = [fmean(losses[i : i + each]) for i in range(0, task.steps, each)]
    ends = [min(i * each, task.steps) for i in range(1, len(means) + 1)]
    points = zip(ends, means, strict=True)
    rows = [run | {"step": end, "loss": _rounded(mean)} for end, mean in points]
    test_loss = _rounded(task.loss(scores, test_targets).item())
    rows[-1] |= {"test_loss": test_loss, "accuracy": round(right, 5)}
    return rows


def gradients(name: str) -> Tensor:
    """Float32 [200, n] of a training: step, element of the large tensors, which hold whole blocks
    of 256 each."""
    torch.manual_seed(0)
    task, steps = TASKS[name], []
    inputs, targets, *_ = task.data()
    model = task.build().bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, master_weights=True)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (task.batch,))
        x = inputs[chosen].bfloat16() if inputs.is_floating_point() else inputs[chosen]
        optimizer.zero_grad()
        task.loss(model(x), targets[chosen]).backward()
        large = [p.grad for p in model.parameters() if p.numel() >= 4096]
        steps.append(nn.utils.parameters_to_vector(large).float())
        optimizer.step()
    return torch.stack(steps)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def save(path: Path, rows: Sequence[Record]) -> None:
    """Runs in the place of the same runs', in the order of `VARIANTS`."""
    runs = (product([name], VARIANTS[name][1], map(str, SEEDS)) for name in VARIANTS)
    put(path, rows, RUN, list(chain.from_iterable(runs)))


def table(rows: Sequence[Record]) -> list[str]:
    """A line for each task and variant: mean and range over the seeds, what is in the spread."""
    columns = ["task", "variant", "training loss", "test loss", "accuracy"]
    columns.append("losses within the spread")
    runs = {itemgetter(*RUN)(row): row for row in rows}  # the last row of each
    lines, limits = [], {}
    for (task, variant), seeds in groupby(runs.values(), itemgetter("task", "variant")):
        found = list(seeds)
        of = [[float(row[k]) for row in found] for k in ("loss", "test_loss", "accuracy")]
        means = [*map(fmean, of[:2])]
        limits.setdefault(task, [fmean(v) + max(v) - min(v) for v in of[:2]])
        within = [
            "yes" if mean <= limit else "no"
            for mean, limit in zip(means, limits[task], strict=True)
            if not math.isnan(mean)
        ]
        lines.append([task, variant, *map(_range, of), ", ".join(within)])
    filled = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    return markdown([columns[i] for i in filled], [[line[i] for i in filled] for line in lines])


def _range(values: list[float]) -> str:
    if any(map(math.isnan, values)):
        return ""
    return f"{fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def draw_curves(path: Path) -> None:
    """A panel for each task: the mean curve of each mode, and the seeds' range about it."""
    import matplotlib.pyplot as plt

    tasks = [list(group) for _, group in groupby(records_of(path), itemgetter("task"))]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        for mode, group in groupby(task, itemgetter("variant")):
            at: dict[int, list[float]] = defaultdict(list)
            for row in group:
                at[int(row["step"])].append(float(row["loss"]))
            lows, means, highs = ([f(v) for v in at.values()] for f in (min, fmean, max))
            color = _LINES[mode].rstrip("-:")
            axes.fill_between(list(at), lows, highs, color=color, alpha=0.15, linewidth=0)
            axes.plot(list(at), means, _LINES[mode], linewidth=1.2, label=mode)
        axes.set_yscale("log")
        axes.set_title(f"{task[0]['task']}: training loss by step", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(fontsize=8, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=130)


def main() -> None:
    """Trains, and after each run writes its rows; then the tables and the picture."""
    known = dict.fromkeys(variant for _, variants in VARIANTS.values() for variant in variants)
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", default=list(known), choices=list(known))
    parser.add_argument(
        "--quantization", action="store_true", help="needs bitsandbytes, runs alone"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quantization:
        cases = {f"normal, sigma {sigma}": normal(sigma) for sigma in (0, 1, 2)}
        return measure_quantization(
            cases | {name: gradients(name) for name in ("text", "wide-resnet")}
        )
    for name in options.tasks:
        file, variants = VARIANTS[name]
        for variant, seed in product(
            [variant for variant in variants if variant in options.variants], SEEDS
        ):
            save(RESULTS / file, train(name, variant, seed))
            print(name, variant, seed, flush=True)
    for file in dict.fromkeys(file for file, _ in VARIANTS.values()):
        print("\n".join(table(records_of(RESULTS / file))))
    draw_curves(RESULTS / "memory_quality.csv")


if __name__ == "__main__":
    main()
