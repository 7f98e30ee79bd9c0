"""Convolutions for the tests of the CPU's kernels for half types."""

import contextlib

import torch

from ampfuse import cpu_half_ops

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def eighths(shape):
    """Exact in any dtype."""
    return torch.randint(-8, 9, shape).div(8)


def assert_torchs_own(call):
    """`call` gives tensors of torch's bits and layout, or its error."""
    answers = []
    for on in (True, False):
        with cpu_half_ops(on):
            try:
                answers.append(call())
            except RuntimeError as error:
                answers.append(str(error))
    ours, torchs = answers
    if isinstance(torchs, str):
        assert ours == torchs
        return
    for a, b in zip(ours, torchs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            options = {"rtol": 0, "atol": 0, "equal_nan": True, "check_stride": True}
            torch.testing.assert_close(a, b, **options)


class Case:
    """A convolution's arguments, drawn for the shapes of x and weight."""

    def __init__(
        self, x, w, stride=1, padding=0, dilation=1, bias=False, transposed=False, groups=1,
        output_padding=0, *, dtype=torch.bfloat16, channels_last=True, draw=torch.randn,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.dtype = dtype

        def image(shape):
            tensor = draw(shape).to(dtype)
            return tensor.contiguous(memory_format=FORMATS[len(shape)]) if channels_last else tensor

        self.x, self.w = image(x), image(w)
        filters = w[1] * groups if transposed else w[0]
        self.bias = draw((filters,)).to(dtype) if bias else None
        each = (stride, padding, dilation, output_padding)
        each = [[v] * (len(x) - 2) if isinstance(v, int) else list(v) for v in each]
        self.options = (*each[:3], transposed, each[3], groups)
        with contextlib.suppress(RuntimeError):  # of shapes that torch refuses
            self.dy = image(self.forward(torch.float64).shape)

    def forward(self, dtype=None):
        tensors = (self.x, self.w, self.bias)
        x, w, bias = (None if t is None else t.to(dtype or self.dtype) for t in tensors)
        return torch.convolution(x, w, bias, *self.options)

    def backward(self, dtype=None, wanted=(True, True, True)):
        """The gradients of x, weight and bias in `dtype`; None: in their own types."""
        dy, x, w = (t if dtype is None else t.to(dtype) for t in (self.dy, self.x, self.w))
        sizes = None if self.bias is None else list(self.bias.shape)
        mask = [*wanted[:2], wanted[2] and sizes is not None]
        return torch.ops.aten.convolution_backward(dy, x, w, sizes, *self.options, mask)

    def results(self, dtype=None):
        return [self.forward(dtype), *self.backward(dtype)]

    def torchs(self, dtype=None):
        with cpu_half_ops(False):
            return self.results(dtype)
