"""A whole CIFAR-style training with ampfuse, to be read from top to bottom.

    python examples/cifar_airbench_style.py                 noise in CIFAR-10's shape
    python examples/cifar_airbench_style.py --data digits   scikit-learn's handwritten digits
    python examples/cifar_airbench_style.py --data data     CIFAR-10, as torchvision keeps it there

Three things make such a training fast, and all of them are here: half precision with FP32 master
weights (ampfuse.amp), the whole data set on the device as bytes, where it is cropped, flipped and
normalised a batch at a time, and a step that is one CUDA graph (ampfuse.graphs). On a CPU the step
runs as it stands.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ampfuse import amp, graphs


def read(data: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, uint8 [n, 3, 32, 32], and labels, int64 [n], to train and to test."""
    if data == "synthetic":
        random = torch.Generator().manual_seed(0)
        images = torch.randint(160, (3072, 3, 32, 32), dtype=torch.uint8, generator=random)
        labels = torch.randint(10, (3072,), generator=random)
        # A bright square for each class, so that there is something to learn.
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 4)
            image[:, 4 + 8 * row : 12 + 8 * row, 8 * column : 8 + 8 * column] = 255
        return images[:2560], labels[:2560], images[2560:], labels[2560:]
    if data == "digits":
        from sklearn.datasets import load_digits

        pixels, numbers = load_digits(return_X_y=True)
        images = torch.tensor(pixels * 255 / 16, dtype=torch.uint8).view(-1, 1, 8, 8)
        images = images.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        labels = torch.tensor(numbers, dtype=torch.int64)
        return images[:1437], labels[:1437], images[1437:], labels[1437:]
    from torchvision.datasets import CIFAR10

    parts = [CIFAR10(data, train=train) for train in (True, False)]
    train, test = (torch.from_numpy(part.data).permute(0, 3, 1, 2) for part in parts)
    return train, torch.tensor(parts[0].targets), test, torch.tensor(parts[1].targets)


class Normalise:
    """uint8 to float32 with the mean and the deviation of `images`, by channel."""

    def __init__(self, images: Tensor) -> None:
        pixels = images[:5000].float()
        self.mean, self.std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))

    def __call__(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 2, 3, 1).float()
        return ((pixels - self.mean) / self.std).permute(0, 3, 1, 2)  # channels_last


def epoch(images: Tensor, labels: Tensor, size: int, flip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of bytes in a new order, each image moved by up to 2 pixels, perhaps mirrored."""
    count, device = len(images), images.device
    places = torch.randint(-2, 3, (2, count, 1), device=device) + torch.arange(32, device=device)
    rows, columns = 31 - (31 - places.abs()).abs()  # what is beyond an edge is mirrored in it
    if flip:
        columns = torch.where(torch.rand(count, 1, device=device) < 0.5, 31 - columns, columns)
    for chosen in torch.randperm(count, device=device)[: count // size * size].split(size):
        row, column = rows[chosen][:, :, None], columns[chosen][:, None, :]
        yield images[chosen[:, None, None], :, row, column].permute(0, 3, 1, 2), labels[chosen]


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm; the first halves the image."""
    first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
    half = (first, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.GELU())
    return nn.Sequential(*half, second, nn.BatchNorm2d(outputs), nn.GELU())


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 2),
        nn.GELU(),
        block(width, 2 * width),
        block(2 * width, 4 * width),
        block(4 * width, 4 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def main(argv: list[str] | None = None) -> float:
    """Train, print a line per epoch, and return the accuracy on the test images (0 to 1)."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="synthetic, digits, or a folder")
    parser.add_argument("--opt-level", default="O2" if gpu else "O5", help="O0 to O5")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=512 if gpu else 128)
    parser.add_argument("--width", type=int, default=64 if gpu else 8, help="channels at the start")
    parser.add_argument("--lr", type=float, default=0.1, help="at its highest")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = torch.device("cuda" if gpu else "cpu")
    images, labels, test_images, test_labels = (part.to(device) for part in read(args.data))
    steps = args.epochs * (len(images) // args.batch_size)

    model = network(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, nesterov=True, weight_decay=5e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    normalise = Normalise(images)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.detach()

    flip = args.data not in ("synthetic", "digits")  # a mirrored 2 is none
    if gpu:  # the same step, captured
        inputs, targets = next(epoch(images, labels, args.batch_size, flip))
        step = graphs.make_graphed_step(model, criterion, optimizer, (normalise(inputs), targets))

    started = time.perf_counter()
    for number in range(1, args.epochs + 1):
        model.train()
        for inputs, targets in epoch(images, labels, args.batch_size, flip):
            loss = step(normalise(inputs), targets)
            schedule.step()
        model.eval()
        with torch.no_grad():
            batches = zip(test_images.split(500), test_labels.split(500), strict=True)
            right = sum((model(normalise(x)).argmax(1) == y).sum() for x, y in batches)
        accuracy = int(right) / len(test_labels)
        seconds = time.perf_counter() - started
        print(f"epoch {number}: loss {loss:.3f}, accuracy {accuracy:.1%}, {seconds:.1f} s")
    return accuracy


if __name__ == "__main__":
    main()
