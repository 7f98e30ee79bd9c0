"""ImageNet as image folders: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``."""

from __future__ import annotations

from pathlib import Path

import torch

from ampfuse.experiments.data.request import KINDS, DataError
from ampfuse.experiments.data.sets import ImageFiles, ImageSet

_TEST = ("val", "validation")
EXPECTED = "train/ and val/ (or validation/), with a folder of JPEG or PNG files for each class"


def load(folder: Path) -> ImageSet | None:
    """The images below `folder`, as paths; None if it has neither ``train`` nor ``val``.

    Classes are the folders of ``train`` in alphabetical order, as torchvision's ImageFolder counts
    them.

    Raises:
        DataError: a folder is missing or empty, or ``val`` has a class that ``train`` lacks.
    """
    train = folder / "train"
    tests = [folder / name for name in _TEST if (folder / name).is_dir()]
    if not train.is_dir() and not tests:
        return None
    if not train.is_dir() or not tests:
        missing = "val/ (or validation/)" if train.is_dir() else "train/"
        raise DataError(f"--data {folder}: lacks {missing}; expected: {EXPECTED}")
    classes = {name: number for number, name in enumerate(_classes(train))}
    if unknown := [name for name in _classes(tests[0]) if name not in classes]:
        raise DataError(f"{tests[0]}: has class {unknown[0]}, which {train} lacks")
    kind = KINDS["imagenet"]
    return ImageSet(
        train=_images(train, classes),
        test=_images(tests[0], classes),
        classes=len(classes),
        channels=kind.channels,
        mean=kind.mean,
        std=kind.std,
    )


def _classes(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        raise DataError(f"{folder}: holds no class folders; expected: {EXPECTED}")
    return names


def _images(folder: Path, classes: dict[str, int]) -> ImageFiles:
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    found = make_dataset(str(folder), classes, extensions=IMG_EXTENSIONS, allow_empty=True)
    if not found:
        raise DataError(f"{folder}: its class folders hold no JPEG or PNG files")
    paths, labels = zip(*found, strict=True)
    return ImageFiles(paths, torch.tensor(labels))
