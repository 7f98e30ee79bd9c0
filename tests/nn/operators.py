"""Results of fused layers compared with float64."""

import torch


def assert_rounded(name, found, right, error, size):
    """`found` is `right`, which is float64, rounded once; beside it `error`, of FP32's arithmetic.

    Arguments:
        size: that of the terms, which may cancel.
    """
    type_of = torch.finfo(found.dtype)
    half = type_of.eps / 2 if found.dtype != torch.float32 else 0.0
    torch.testing.assert_close(
        found.detach().double(),
        right.detach(),
        rtol=half + error,
        atol=error * size + type_of.smallest_normal * type_of.eps,
        msg=lambda text: f"{name}: {text}",
    )
