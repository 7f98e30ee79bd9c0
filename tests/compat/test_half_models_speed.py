"""A half model made with ``network_to_half`` is no slower on the CPU than its loop can bear."""

import time

import pytest
import torch
from torch import nn

from ampfuse.compat.apex.fp16_utils import FP16_Optimizer, network_to_half

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def vgg16():
    torch.manual_seed(0)
    layers, channels = [], 3
    for width in VGG16:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def seconds_per_iteration(half):
    model = network_to_half(vgg16()) if half else vgg16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if half:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=128)
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    times = []
    for _ in range(5):
        start = time.process_time()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        optimizer.backward(loss) if half else loss.backward()
        optimizer.step()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.benchmark
def test_vgg16_takes_at_most_three_times_as_long_as_in_fp32():
    assert seconds_per_iteration(half=True) <= 3 * seconds_per_iteration(half=False)
