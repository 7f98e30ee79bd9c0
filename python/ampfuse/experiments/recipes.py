"""The commands of ``ampfuse train`` and their recipes: the published settings of E1 to E5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampfuse import hardware
from ampfuse.experiments.settings import Recipe, Script


def _e3(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        **{"batch_size": 512, "epochs": 25, "clip": 1.0, "augment": True, "schedule": "linear"},
        **{"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "warmup": 0.1},
    }
    if precision == "O3":
        return {**settings, "optimizer": "sgd", "lr": 0.1}
    # The published comparison doubled batch and epochs together with the level.
    larger = precision == "O2" and flags["model"] == "densenet161"
    return {**settings, "batch_size": 1024, "epochs": 50} if larger else settings


def _e4(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    in_epochs = "epochs" in flags
    return {
        **{"batch_size": 128, "iterations": 360, "image_size": 224, "augment": True},
        **{"lr": 0.1, "weight_decay": 1e-4, "schedule": "steps" if in_epochs else "constant"},
        **{"evaluate": in_epochs, "workers": min(4, hardware.core_count())},
    }


_HALF = (0.5, 0.5, 0.5)
_E1 = {"batch_size": 128, "iterations": 100, "repeats": 5, "lr": 0.01}
_E1 |= {"shuffle": False, "mean": _HALF, "std": _HALF}
_E2 = {"batch_size": 128, "epochs": 10, "dropout": 0.3, "augment": True, "lr": 0.1}
_E2 |= {"weight_decay": 5e-4, "schedule": "linear", "warmup": 0.1}
_MNIST = {"batch_size": 512, "epochs": 20, "image_size": 28, "optimizer": "adam", "lr": 1e-3}
_MLP = {"batch_size": 512, "epochs": 3, "image_size": 64, "synthetic_size": 50 * 512, "lr": 1e-3}
_MLP |= {"momentum": 0.0, "evaluate": False}

E1 = Recipe(
    *("e1", "VGG16: time and memory against batch size (znxlwm, 2018)", ("vgg16",), _E1),
    cpu={"batch_size": 64, "iterations": 20, "repeats": 3},
)
E2 = Recipe(
    *("e2", "Wide-ResNet-28-10 at O0 to O3 (ceshine, 2019)", ("wrn28_10",), _E2),
    cpu={"batch_size": 16, "iterations": 6},
)
E3 = Recipe(
    *("e3", "SE-ResNeXt50 and DenseNet161 (ceshine, 2019)", ("seresnext50_32x4d", "densenet161")),
    settings=_e3,
    cpu={"batch_size": 16, "iterations": 6},
)
E4 = Recipe(
    *("e4", "ResNet-18 and ResNet-50: images per second (2018)", ("resnet18", "resnet50"), _e4),
    cpu={"batch_size": 16, "iterations": 12},
)
E5_CNN = Recipe("e5", "A small CNN (T4, 2022)", ("mnist_cnn",), _MNIST, cpu={"epochs": 1})
E5_MLP = Recipe(
    *("e5", "A three-layer MLP, 4096 wide: torch's AMP recipe (T4, 2022)", ("mlp",), _MLP),
    cpu={"synthetic_size": 10 * 512},
)

CIFAR = Script("cifar", "Image classification on CIFAR-10.", (E1, E2, E3))
IMAGENET = Script("imagenet", "ResNets on ImageNet.", (E4,), data=None, distributed=True)
MNIST = Script("mnist", "A small CNN on MNIST.", (E5_CNN,))
MLP = Script("mlp", "A three-layer MLP, 4096 wide.", (E5_MLP,), data="synthetic")
