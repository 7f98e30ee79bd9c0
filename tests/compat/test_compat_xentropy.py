"""``apex.contrib.xentropy`` against its formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from ampfuse.compat.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from cases import bf16, f16, f32


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize(("smoothing", "padding"), [(0.0, 0), (0.1, 3), (0.1, -100)])
def test_losses_of_rows(dtype, half_to_float, smoothing, padding):
    logits = (3 * torch.randn(6, 40)).to(dtype).requires_grad_()
    labels = torch.tensor([0, 3, 39, 7, 0, 3])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding, half_to_float)
    assert losses.dtype == (f32 if half_to_float else dtype)
    z = logits.detach().double().requires_grad_()
    options = {"ignore_index": padding, "label_smoothing": smoothing, "reduction": "none"}
    exact = F.cross_entropy(z, labels, **options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(losses.double(), exact, rtol=max(eps, 1e-5), atol=1e-5)
    factor = torch.arange(1.0, 7.0)
    (losses * factor).sum().backward()
    (exact * factor.double()).sum().backward()
    torch.testing.assert_close(logits.grad.double(), z.grad, rtol=max(eps, 1e-5), atol=4 * eps)


def test_scripts_leave_out_what_has_a_default():
    logits, labels = torch.randn(3, 5), torch.tensor([0, 1, 4])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
    expected = F.cross_entropy(logits, labels, ignore_index=0, reduction="none")
    torch.testing.assert_close(losses, expected)
