"""The experiments' models: shapes, published sizes, gradients."""

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from ampfuse.experiments import models

SIZE = {"mnist_cnn": 28, "mlp": 8}
SMALL = ["wrn10_2" if name == "wrn28_10" else name for name in models.NAMES]


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        *((name, 1, SIZE.get(name, 32)) for name in SMALL),
        *[("vgg16", 3, 48), ("resnet18", 3, 64), ("mnist_cnn", 3, 32), ("wrn10_1", 3, 28)],
        ("digits4", 3, 8),
    ],
)
def test_scores_for_every_class_and_gradients_for_every_parameter(name, channels, size):
    model = models.build(name, classes=7, channels=channels, image_size=size)
    scores = model(torch.randn(4, channels, size, size))
    assert scores.shape == (4, size**2 * channels if name == "mlp" else 7)
    assert scores.dtype == torch.float32
    assert scores[0].ne(scores[1]).any()
    nn.functional.cross_entropy(scores, torch.arange(4)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


# Published: 36.5 M (Wide-ResNet paper); torchvision's and timm's tables, less the layers for 1000
# classes (27.56 M, 11.69 M); PyTorch's MNIST example; the convolutions of VGG16 (with batch norms).
@pytest.mark.parametrize(
    ("name", "channels", "count"),
    [
        ("wrn28_10", 3, 36_479_194),
        ("seresnext50_32x4d", 3, 27_559_896 - 2049 * 1000 + 2049 * 10),
        ("resnet18", 1, 11_689_512 - 513 * 1000 + 513 * 10 - 2 * 64 * 49),
        ("mnist_cnn", 1, 1_199_882),
        ("vgg16", 3, 14_714_688 + 2 * 4224 + 513 * 10),
    ],
)
def test_published_sizes(name, channels, count):
    size = SIZE.get(name, 32)
    model = models.build(name, classes=10, channels=channels, image_size=size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_wide_resnet():
    """The second and the third stage halve the image."""
    model = models.build("wrn16_2", classes=10, channels=3, image_size=32)
    shapes = []
    for block in model[1]:
        block.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(32, 32, 32)] * 2 + [(64, 16, 16)] * 2 + [(128, 8, 8)] * 2


def test_mlp():
    model = models.build("mlp", classes=10, channels=3, image_size=4)
    first, second, third = (module for module in model if isinstance(module, nn.Linear))
    images = torch.randn(2, 3, 4, 4)
    expected = third(torch.relu(second(torch.relu(first(images.flatten(1))))))
    assert expected.shape == (2, 48)
    assert torch.equal(model(images), expected)
    assert torch.equal(model(images.flatten(1)), expected)


@pytest.mark.parametrize(
    ("name", "dropout", "layers"),
    [("wrn16_1", 0.3, [0.3] * 6), ("wrn16_1", 0.0, []), ("mnist_cnn", 0.0, [0.25, 0.5])],
)
def test_dropout(name, dropout, layers):
    sizes = {"classes": 10, "channels": 1, "image_size": SIZE.get(name, 32)}
    model = models.build(name, dropout=dropout, **sizes)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == layers


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "wrn10_1"])
def test_weights_follow_torchs_seed(name):
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = models.build(name, classes=10, channels=1, image_size=32)
        return nn.utils.parameters_to_vector(model.parameters())

    first = weights(1)
    assert torch.equal(first, weights(1))
    assert first.ne(weights(2)).any()


@pytest.mark.parametrize(("name", "size"), [("vgg16", 32), ("densenet161", 29), ("mnist_cnn", 6)])
def test_images_too_small_are_refused(name, size):
    """Smaller ones than these end a network in a layer."""
    with torch.device("meta"):
        model = models.build(name, classes=10, channels=3, image_size=size).eval()
        assert model(torch.empty(2, 3, size, size)).shape == (2, 10)
        with pytest.raises(ValueError, match=f"needs images of {size} pixels or more"):
            models.build(name, classes=10, channels=3, image_size=size - 1)
