"""Image files decoded once, for the loader that keeps everything on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ampfuse.experiments.data.processes import Feed
from ampfuse.experiments.data.request import DataError, DataRequest
from ampfuse.experiments.data.sets import ImageFiles
from ampfuse.experiments.data.transforms import stored_size

_AT_ONCE = 32


def decode(files: ImageFiles, which: range, request: DataRequest, title: str) -> Tensor:
    """The middle of each of the images `which`, a little larger than wanted so that crops differ.

    Returns:
        uint8 [len(which), edge, edge, 3] on the device; the edge is 256 for images of 224.

    Raises:
        DataError: a file cannot be read; it names the file.
    """
    from tqdm import tqdm

    edge = stored_size(request.image_size)
    result = torch.empty(len(which), edge, edge, 3, dtype=torch.uint8, device=request.device)
    feed: Feed[int] = Feed(_Middles(files, edge), workers=request.workers)
    parts = [which[at : at + _AT_ONCE] for at in range(0, len(which), _AT_ONCE)]
    # None: a bar on a terminal, nothing in a log.
    hidden = True if request.rank else None
    try:
        with tqdm(
            total=len(which), desc=f"decoding {title}", unit=" images", disable=hidden
        ) as bar:
            for into, pixels in zip(result.split(_AT_ONCE), feed.batches(parts), strict=True):
                into.copy_(pixels)
                bar.update(len(pixels))
    finally:
        feed.close()
    return result


class _Middles(Dataset[Tensor | DataError]):
    """By number of the image: uint8 [edge, edge, 3]."""

    def __init__(self, files: ImageFiles, edge: int) -> None:
        from torchvision.transforms import v2

        self._files = files
        self._middle = v2.Compose([v2.Resize(edge), v2.CenterCrop(edge), v2.PILToTensor()])

    def __getitem__(self, index: int) -> Tensor | DataError:
        try:
            image = self._files.open(index)
        except DataError as error:
            return error
        return self._middle(image).permute(1, 2, 0)
