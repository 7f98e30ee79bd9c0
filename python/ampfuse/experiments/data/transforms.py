"""What becomes of a single image on its way into a batch, in torchvision's terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ampfuse.experiments.data.request import DataRequest

if TYPE_CHECKING:
    from PIL.Image import Image

    Transform = Callable[[Image | Tensor], Image | Tensor]


def stored_size(image_size: int) -> int:
    """The shorter edge that a file is brought to before the middle is cut out: 256 for 224."""
    return round(image_size * 256 / 224)


def plain(image_size: int) -> Transform:
    """An image file for evaluation: the middle of it, as it is usual for ImageNet."""
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(stored_size(image_size)), v2.CenterCrop(image_size)])


def augmentation(request: DataRequest) -> Transform | None:
    """Of one training image, from torch's global random numbers; None where there is none."""
    if not request.augment or request.kind == "mnist":
        return None
    from torchvision.transforms import v2

    size = request.image_size
    crop = (
        v2.RandomCrop(size, padding=4)
        if request.kind == "cifar10"
        else v2.RandomResizedCrop(size, antialias=True)
    )
    return v2.Compose([crop, v2.RandomHorizontalFlip()])
