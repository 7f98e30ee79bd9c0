"""Trainers and published experiments as data: what each set, and how much of it suits a CPU.

Where a write-up does not say a value, the field's usual one stands here and `ours` names it.
Settings are fields of :class:`~ampfuse.experiments.config.RunConfig`; a flag of the command line
wins over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One experiment of one trainer.

    `settings` hold for every model and arm; `by_arm` (keyed by model and arm) go over them, and
    `by_epochs` if the user gives the length in epochs. `cpu` makes a run of seconds to minutes on a
    machine without a GPU. `original` is how the published script loaded its data, for
    ``--loop original``.
    """

    name: str
    experiment: str
    title: str
    models: tuple[str, ...]
    settings: Settings
    by_arm: Mapping[tuple[str, str], Settings] = dataclasses.field(default_factory=dict)
    by_epochs: Settings = dataclasses.field(default_factory=dict)
    cpu: Settings = dataclasses.field(default_factory=dict)
    original: Settings = dataclasses.field(default_factory=dict)
    ours: str = ""

    def settings_for(self, model: str, arm: str) -> dict[str, Any]:
        return {**self.settings, **self.by_arm.get((model, arm), {})}


_HALF = (0.5, 0.5, 0.5)
_SGD = {"optimizer": "sgd", "momentum": 0.9}
_E3_O3 = {**_SGD, "lr": 0.1}
_WORKERS = {"loader": "workers", "workers": 2}
_SIX_STEPS = {"batch_size": 16, "iterations": 6}

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="e1",
        experiment="cifar",
        title="VGG16 on CIFAR-10: time and memory against batch size (znxlwm, 2018)",
        models=("vgg16",),
        settings={
            **{"batch_size": 128, "iterations": 100, "repeats": 5},
            **{**_SGD, "lr": 0.01, "weight_decay": 0.0, "schedule": "constant"},
            **{"shuffle": False, "augment": False, "mean": _HALF, "std": _HALF},
        },
        cpu={"batch_size": 64, "iterations": 20, "repeats": 3},
        original={"loader": "workers", "workers": 0},
    ),
    Recipe(
        name="e2",
        experiment="cifar",
        title="Wide-ResNet-28-10 on CIFAR-10 at O0 to O3 (ceshine, 2019)",
        models=("wrn28_10",),
        settings={
            **{"batch_size": 128, "epochs": 10, "dropout": 0.3, "augment": True},
            **{**_SGD, "lr": 0.1, "weight_decay": 5e-4, "schedule": "linear", "warmup": 0.1},
        },
        cpu=_SIX_STEPS,
        original=_WORKERS,
        ours="the peak rate 0.1, the weight decay 5e-4 (both the Wide-ResNet paper's) and the "
        "length of the warm-up",
    ),
    Recipe(
        name="e3",
        experiment="cifar",
        title="SE-ResNeXt50 and DenseNet161 on CIFAR-10 (ceshine, 2019)",
        models=("seresnext50_32x4d", "densenet161"),
        settings={
            **{"batch_size": 512, "epochs": 25, "clip": 1.0, "augment": True},
            **{"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0},
            **{"schedule": "linear", "warmup": 0.1},
        },
        by_arm={
            # The published comparison doubled batch and epochs together with the level.
            ("densenet161", "O2"): {"batch_size": 1024, "epochs": 50},
            ("seresnext50_32x4d", "O3"): _E3_O3,
            ("densenet161", "O3"): _E3_O3,
        },
        cpu=_SIX_STEPS,
        original=_WORKERS,
        ours="the rates, the clipping norm 1, the schedule, and batch and epochs of SE-ResNeXt50",
    ),
    Recipe(
        name="e4",
        experiment="imagenet",
        title="ResNet-18 and ResNet-50 on ImageNet: images per second (2018)",
        models=("resnet18", "resnet34", "resnet50"),
        settings={
            **{"batch_size": 128, "iterations": 360, "augment": True, "evaluate": False},
            **{**_SGD, "lr": 0.1, "weight_decay": 1e-4, "schedule": "constant"},
            **{"loader": "workers", "workers": 4},
        },
        by_epochs={"schedule": "steps", "evaluate": True},
        cpu={"batch_size": 16, "iterations": 12},
        original={"loader": "workers", "workers": 4},
    ),
    Recipe(
        name="e5",
        experiment="mlp",
        title="A 4096-wide perceptron of three layers: torch's AMP recipe (T4, 2022)",
        models=("mlp",),
        settings={
            **{"batch_size": 512, "epochs": 3, "synthetic_size": 50 * 512, "evaluate": False},
            **{"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
            "schedule": "constant",
        },
        cpu={"synthetic_size": 10 * 512},
    ),
    Recipe(
        name="e5",
        experiment="mnist",
        title="A small CNN on MNIST (T4, 2022)",
        models=("mnist_cnn",),
        settings={
            **{"batch_size": 512, "epochs": 20, "augment": False},
            **{"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "schedule": "constant"},
        },
        cpu={"epochs": 1},
        original=_WORKERS,
        ours="the optimizer",
    ),
)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One command: its name, what it trains, and what differs from its siblings. `closing_lines`:
    it ends with the two lines that E5's scripts printed."""

    name: str
    title: str
    model_names: str
    default_model: str
    image_size: int
    default_data: str | None
    closing_lines: bool = False

    @property
    def recipes(self) -> list[Recipe]:
        return [recipe for recipe in RECIPES if recipe.experiment == self.name]


_CIFAR_MODELS = "vgg16, wrn28_10, wrn<depth>_<width>, seresnext50_32x4d, densenet161"
_IMAGENET_MODELS = "resnet18, resnet34, resnet50"
_MLP = "A perceptron of three layers, 4096 wide."
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer("cifar", "Image classification on CIFAR-10.", _CIFAR_MODELS, "vgg16", 32, "data"),
        Trainer("imagenet", "ResNets on ImageNet.", _IMAGENET_MODELS, "resnet18", 224, None),
        Trainer("mnist", "A small CNN on MNIST.", "mnist_cnn", "mnist_cnn", 28, "data", True),
        Trainer("mlp", _MLP, "mlp", "mlp", 64, "synthetic", True),
    )
}
