"""Networks for images, FP32 on the CPU, from random weights of torch's global generator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch import nn


def _from_file(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # torch.compile looks there
    spec.loader.exec_module(module)
    return module


# The experiments' own, by their file: a peer's process never imports ampfuse.
_ROOT = Path(__file__).parents[2]
_models = _from_file("experiments_models", _ROOT / "python/ampfuse/experiments/models.py")


def build(name: str, classes: int, channels: int = 3, dropout: float = 0.0) -> nn.Module:
    """``vgg16`` and ``wrn<depth>_<width>`` for small images; else torchvision's or timm's."""
    if name == "vgg16" or name.startswith("wrn"):
        return _models.build(
            name, classes=classes, channels=channels, image_size=32, dropout=dropout
        )
    import torchvision

    if hasattr(torchvision.models, name):
        return getattr(torchvision.models, name)(num_classes=classes)
    import timm

    return timm.create_model(name, num_classes=classes)
