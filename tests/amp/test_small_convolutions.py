"""csrc/torch/half_conv.cpp: BF16 convolutions over few rows on the CPU, as products of matrices."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampfuse import cpu_half_ops
from cases import NEEDS_BF16, Convolution, assert_torchs_own

HALF = torch.bfloat16
LAST = torch.channels_last

pytestmark = NEEDS_BF16


@pytest.fixture(autouse=True, scope="module")
def ours():
    with cpu_half_ops():
        yield


def image(*shape):
    return torch.randn(shape).to(HALF).contiguous(memory_format=LAST)


class Case(Convolution):
    def products(self, convolves):
        """The results that are computed without a convolution of oneDNN."""
        calls = {
            "y": self.forward,
            "dx": partial(self.backward, wanted=(True, False, False)),
            "dw": partial(self.backward, wanted=(False, True, True)),
        }
        return " ".join(name for name, call in calls.items() if not convolves(call))


@pytest.fixture
def convolves(capfd):
    """Whether a call comes to a convolution of oneDNN's."""
    onednn = torch.backends.mkldnn

    def convolves(call):
        capfd.readouterr()
        with onednn.verbose(onednn.VERBOSE_ON):
            call()
        return ",convolution," in capfd.readouterr().out

    return convolves


def assert_right(case):
    """Errors of one rounding, as torch's; the same layout."""
    for name, ours, torchs, exact in zip(
        ("y", "dx", "dw", "db"),
        case.results(),
        case.torchs(),
        case.results(torch.float64),
        strict=True,
    ):
        assert (ours is None) == (torchs is None), name
        if ours is None:
            continue
        assert ours.dtype == HALF, name
        assert ours.shape == exact.shape, name
        strides = zip(ours.shape, ours.stride(), torchs.stride(), strict=True)
        assert all(size == 1 or mine == other for size, mine, other in strides), name
        error = (ours.double() - exact).abs()
        assert (error <= 2.0**-8 * 1.01 * exact.abs() + 1e-5 * exact.abs().max()).all(), name
        # On CPUs with AMX oneDNN now and then leaves a NaN where nothing is multiplied.
        torchs_error = (torchs.double() - exact).abs().nan_to_num(nan=torch.inf)
        assert error.mean() <= 1.02 * torchs_error.mean() + 1e-9, name


TALL = {"w": (300, 4, 3, 1), "padding": (1, 0)}
WIDE = {"w": (600, 4, 1, 3), "padding": (0, 1)}
# name: (what is a product, the convolution)
CASES = {
    "1x1": ("y dx dw", {"x": (2, 5, 7, 6), "w": (4, 5, 1, 1)}),
    "1x1, bias": ("y dx dw", {"x": (2, 5, 7, 6), "w": (4, 5, 1, 1), "bias": True}),
    "1x1, one pixel": ("y dx dw", {"x": (3, 65, 1, 1), "w": (7, 65, 1, 1)}),
    "1x1, one row": ("y dx dw", {"x": (1, 33, 1, 1), "w": (2, 33, 1, 1), "bias": True}),
    "1x1, one channel": ("y dx dw", {"x": (3, 2, 4, 4), "w": (1, 2, 1, 1)}),
    "1x1, wide": ("y dx dw", {"x": (2, 2000, 2, 2), "w": (300, 2000, 1, 1)}),
    "1x1, stride": ("y dx dw", {"x": (2, 8, 7, 6), "w": (9, 8, 1, 1), "stride": 2}),
    "1x1, strides": ("y dx dw", {"x": (2, 8, 7, 8), "w": (9, 8, 1, 1), "stride": (1, 3)}),
    "1x1, padding": ("y dw", {"x": (2, 8, 3, 4), "w": (9, 8, 1, 1), "padding": (0, 1)}),
    "1x1, 2048 rows": ("y dx dw", {"x": (2, 4, 32, 32), "w": (5, 4, 1, 1)}),
    "1x1, 2049 rows": ("", {"x": (1, 4, 3, 683), "w": (5, 4, 1, 1)}),
    "3x3": ("y dw", {"x": (3, 7, 5, 6), "w": (9, 7, 3, 3), "padding": 1}),
    "3x3, bias": ("y dw", {"x": (3, 7, 5, 6), "w": (9, 7, 3, 3), "padding": 1, "bias": True}),
    "3x3, no padding": ("y dw", {"x": (3, 64, 5, 6), "w": (65, 64, 3, 3)}),
    "3x3, one pixel": ("y dw", {"x": (4, 64, 1, 1), "w": (9, 64, 3, 3), "padding": 1}),
    "3x3, stride": ("y dw", {"x": (3, 8, 7, 6), "w": (9, 8, 3, 3), "padding": 1, "stride": 2}),
    "3x3, dilation": ("y dw", {"x": (3, 8, 9, 8), "w": (9, 8, 3, 3), "padding": 2, "dilation": 2}),
    "3x3, one channel": ("y dw", {"x": (3, 1, 5, 6), "w": (1, 1, 3, 3), "padding": 1}),
    "1x3": ("y dw", {"x": (2, 8, 5, 6), "w": (9, 8, 1, 3), "padding": (0, 1)}),
    "2x1": ("y dw", {"x": (2, 8, 5, 6), "w": (9, 8, 2, 1), "stride": (2, 1)}),
    "2x5": ("", {"x": (2, 8, 5, 6), "w": (9, 8, 2, 5)}),
    "3x3, 256 rows": ("y dw", {"x": (1, 4, 16, 16), "w": (5, 4, 3, 3), "padding": 1}),
    "3x3, 257 rows": ("dw", {"x": (1, 4, 1, 257), "w": (5, 4, 3, 3), "padding": 1}),
    "3x3, 512 rows": ("dw", {"x": (1, 4, 32, 16), "w": (5, 4, 3, 3), "padding": 1}),
    "3x3, 513 rows": ("", {"x": (1, 4, 27, 19), "w": (5, 4, 3, 3), "padding": 1}),
    "300 filters, 300 rows": ("y dw", {"x": (1, 4, 3, 100), **TALL}),
    "300 filters, 600 rows": ("dw", {"x": (1, 4, 6, 100), **TALL}),
    "300 filters, 602 rows": ("", {"x": (1, 4, 7, 86), **TALL}),
    "600 filters, 512 rows": ("y dw", {"x": (1, 4, 4, 128), **WIDE}),
    "600 filters, 1024 rows": ("dw", {"x": (1, 4, 8, 128), **WIDE}),
    "600 filters, 1025 rows": ("", {"x": (1, 4, 25, 41), **WIDE}),
    "groups": ("", {"x": (2, 8, 5, 6), "w": (8, 4, 1, 1), "groups": 2}),
    "transposed": ("", {"x": (2, 8, 5, 6), "w": (8, 4, 1, 1), "transposed": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_right_with_its_products(name, convolves):
    products, arguments = CASES[name]
    case = Case(**arguments)
    assert case.products(convolves) == products
    assert_right(case)
    if not products:
        assert_torchs_own(case.results)


@given(st.data())
def test_any_convolution_is_right(data):
    def side(name):
        kernel = data.draw(st.integers(1, 3), f"kernel, {name}")
        dilation = data.draw(st.integers(1, 2), f"dilation, {name}")
        padding = data.draw(st.integers(0, 2), f"padding, {name}")
        least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
        size = data.draw(st.integers(least, least + 6), f"size, {name}")
        return size, kernel, data.draw(st.integers(1, 3), f"stride, {name}"), padding, dilation

    (h, kh, *high), (w, kw, *wide) = side("height"), side("width")
    batch, channels, filters = (data.draw(st.integers(1, 9), name) for name in "NCO")
    pairs = dict(zip(("stride", "padding", "dilation"), zip(high, wide, strict=True), strict=True))
    case = Case((batch, channels, h, w), (filters, channels, kh, kw), bias=True, **pairs)
    assert_right(case)


# name: (what of a case is changed, how)
OTHERS = {
    "another layout": ("x", lambda x: x.contiguous()),
    "gaps between pixels": ("x", lambda x: x[:, :, :, ::2]),
    "gradient in another layout": ("dy", lambda dy: dy.contiguous()),
    "expanded gradient": ("dy", lambda dy: dy[:1, :, :1, :1].expand_as(dy)),
    "weight in another layout": ("w", lambda w: w.contiguous()),
    "transposed weight": ("w", lambda w: w.mT.contiguous().mT),
    "nothing to compute": ("x", lambda x: x[:0]),
}


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_other_memory_formats_are_right(name, kernel):
    case = Case((2, 6, 8, 8), (5, 6, kernel, kernel), padding=kernel // 2, bias=True)
    part, change = OTHERS[name]
    setattr(case, part, change(getattr(case, part)))
    shape = case.forward().shape
    case.dy = case.dy[: shape[0], :, : shape[2], : shape[3]]
    if case.x.numel():
        assert_right(case)
    else:
        assert_torchs_own(case.results)


WRONG = {
    "stride": {"stride": 0},
    "padding": {"padding": -1},
    "dilation": {"dilation": 0},
    "channels": {"w": (4, 6, 1, 1)},
    "kernel": {"w": (4, 5, 3, 3), "x": (2, 5, 2, 2)},
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_refuses_what_is_wrong(name):
    case = Case(**{"x": (2, 5, 7, 6), "w": (4, 5, 1, 1), **WRONG[name]})
    with pytest.raises(RuntimeError):
        case.forward()
    assert_torchs_own(lambda: [case.forward()])


@pytest.mark.parametrize("length", [1, 3])
def test_a_bias_of_another_length_is_refused(length):
    case = Case((2, 5, 7, 6), (4, 5, 1, 1))
    case.bias = torch.ones(length, dtype=HALF)
    with pytest.raises(RuntimeError, match="bias"):
        case.forward()


@pytest.mark.parametrize("kernel", [1, 3])
def test_inf_and_nan_go_where_float64_puts_them(kernel):
    """But oneDNN's products make NaN of some infinities where the CPU has AMX."""
    case = Case((2, 6, 8, 8), (5, 6, kernel, kernel), bias=True)
    case.x[0, 1, 2, 3], case.x[1, 2, 3, 4] = float("inf"), float("nan")
    case.dy[0, 1, 2, 3], case.dy[1, 2, 3, 4] = float("-inf"), float("nan")
    for ours, exact in zip(case.results(), case.results(torch.float64), strict=True):
        assert torch.equal(ours.isfinite(), exact.isfinite())
        assert ours[exact.isnan()].isnan().all()


def test_small_convolutions_are_not_replaced_under_autocast(convolves):
    pixels, second = torch.nn.Conv2d(6, 16, 1), torch.nn.Conv2d(16, 8, 3, 2, 1, bias=False)
    model = torch.nn.Sequential(pixels, second).to(memory_format=LAST)
    with torch.autocast("cpu", dtype=HALF):
        assert not convolves(lambda: model(image(4, 6, 8, 8)))


def test_a_backward_pass_may_run_inside_autocast():
    case = Case((2, 6, 8, 8), (5, 6, 1, 1), bias=True)
    expected = case.backward()
    with torch.autocast("cpu", dtype=torch.float16):
        for a, b in zip(case.backward(), expected, strict=True):
            assert a.dtype == HALF
            assert torch.equal(a, b)


def test_replaced_convolutions_are_taken_back(convolves):
    case = Case((2, 6, 8, 8), (5, 6, 1, 1))
    with cpu_half_ops(False):
        assert case.products(convolves) == ""
    assert case.products(convolves) == "y dx dw"
