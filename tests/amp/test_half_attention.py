"""csrc/torch/half_attention.cpp: BF16 attention on the CPU in tiles of oneDNN's small kernels."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ampfuse import _core, cpu_half_ops
from cases import ISAS, NEEDS_BF16, assert_torchs_own, compilers, digest
from programs import python

HALF = torch.bfloat16
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

pytestmark = NEEDS_BF16


@pytest.fixture(autouse=True, scope="module")
def ours():
    with cpu_half_ops():
        yield


def as_a_model_has_it(batch, heads, tokens, width):
    """A tensor as a projection returns it: rows of tokens, heads next to each other."""
    return torch.randn(batch, tokens, heads, width).to(HALF).transpose(1, 2)


def of_packed(batch, heads, tokens, width):
    return torch.randn(batch, tokens, 3, heads, width).to(HALF)[:, :, 1].transpose(1, 2)


def contiguous(*shape):
    return torch.randn(shape).to(HALF)


def columns_apart(*shape):
    return torch.randn(*shape, 2).to(HALF)[..., 0]


def width_first(batch, heads, tokens, width):
    return torch.randn(batch, heads, width, tokens).to(HALF).mT


NAMES = "y", "lse", "dq", "dk", "dv"
LAYOUTS = (as_a_model_has_it, of_packed, contiguous, columns_apart, width_first)


class Case:
    def __init__(
        self, queries, keys=None, width=64, batch=2, heads=2, layout=as_a_model_has_it,
        is_causal=False, scale=None, spread=1.0,
    ):  # fmt: skip
        torch.manual_seed(0)
        of_keys = batch, heads, keys or queries, width
        self.q = layout(batch, heads, queries, width) * spread
        self.k, self.v = layout(*of_keys), layout(*of_keys)
        self.dy = layout(batch, heads, queries, width)
        self.is_causal, self.scale = is_causal, scale

    def results(self):
        y, lse = FORWARD(self.q, self.k, self.v, 0.0, self.is_causal, scale=self.scale)
        inputs = self.dy, self.q, self.k, self.v, y, lse
        return y, lse, *BACKWARD(*inputs, 0.0, self.is_causal, scale=self.scale)

    def torchs(self):
        """torch's results for contiguous copies: its kernel assumes that widths are contiguous."""
        copied = copy.copy(self)
        for name in ("q", "k", "v", "dy"):
            setattr(copied, name, getattr(self, name).contiguous())
        with cpu_half_ops(False):
            return copied.results()

    def exact(self):
        """By the definition, in FP64."""
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        scores = q @ k.mT * (self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        y = scores.softmax(-1) @ v
        y.backward(self.dy.double())
        return y.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad


def by_tokens(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def assert_right(case):
    """The errors are at most torch's, which keeps FP32 for few tokens; the layouts are torch's."""
    strides = [torch.empty_like(case.q), case.q[..., 0], case.q, case.k, case.v]
    strides = [x if i == 0 else by_tokens(x) for i, x in enumerate(strides)]
    for name, layout, ours, torchs, exact in zip(
        NAMES, strides, case.results(), case.torchs(), case.exact(), strict=True
    ):
        assert ours.dtype == torchs.dtype, name
        assert ours.shape == exact.shape, name
        assert ours.stride() == layout.stride() or 1 in ours.shape, name
        error, torchs_error = ((x.double() - exact).abs() for x in (ours, torchs))
        unit = (2.0**-8 if ours.dtype == HALF else 1e-6) * exact.abs()
        largest = 4 * torchs_error.max() + unit.max() / 2
        assert (error <= unit + largest + 2e-6).all(), name
        if exact.count_nonzero() > 4000:  # fewer say little; causal attention leaves many at 0
            assert error.mean() <= 1.25 * torchs_error.mean() + 0.02 * unit.mean() + 2e-6, name


TOKENS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 197, 256, 257, 331, 513]
TOKENS += [(1, 200), (200, 1), (70, 330), (330, 70), (64, 65)]  # queries and keys
CASES = {
    **{
        f"{n} tokens{', causal' if is_causal else ''}": (n, {"is_causal": is_causal})
        for n in TOKENS
        for is_causal in (False, True)
    },
    **{
        f"{n} wide": (70, {"width": n, "is_causal": True})
        for n in (2, 4, 30, 32, 64, 66, 80, 96, 128, 160, 256)
    },
    **{layout.__name__: (100, {"layout": layout}) for layout in LAYOUTS},
    **{f"times {scale}": (100, {"scale": scale}) for scale in (0.0, 1.0, -0.5)},
    # Where all but one probability of a row is next to nothing.
    "large scores": (150, {"spread": 60.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_attention_is_right(name):
    tokens, options = CASES[name]
    assert_right(Case(*(tokens if isinstance(tokens, tuple) else [tokens]), **options))


@settings(max_examples=30, deadline=None)
@given(
    queries=st.integers(1, 300), keys=st.integers(1, 300), half_width=st.integers(1, 70),
    heads=st.integers(2, 3), layout=st.sampled_from(LAYOUTS), is_causal=st.booleans(),
)  # fmt: skip
def test_attention_of_any_shape_is_right(queries, keys, half_width, heads, layout, is_causal):
    options = {"batch": 8, "heads": heads, "layout": layout, "is_causal": is_causal}
    assert_right(Case(queries, keys, width=2 * half_width, **options))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "dy"])
def test_what_is_not_finite_stays_visible(where, value):
    case = Case(70)
    getattr(case, where)[1, 0, 66, 3] = value
    for name, ours, exact in zip(NAMES, case.results(), case.exact(), strict=True):
        assert (ours.isfinite() | ~exact.isfinite()).all(), name  # no more than the definition
        if name != "lse":
            rows = exact.isfinite().all(-1)
            assert torch.equal(ours.isfinite().all(-1), rows), name


def masked(dtype):
    case, mask = Case(70), torch.zeros(70, 70, dtype=dtype)
    return lambda: FORWARD(case.q, case.k, case.v, 0.0, False, attn_mask=mask)


def of_type(dtype):
    case = Case(70)
    case.q, case.k, case.v, case.dy = (x.to(dtype) for x in (case.q, case.k, case.v, case.dy))
    return case.results


LEFT = {
    **{f"{dtype} mask": (masked, dtype) for dtype in (HALF, torch.float32)},
    **{str(dtype): (of_type, dtype) for dtype in (torch.float32, torch.float16, torch.float64)},
    # Odd and large ones.
    **{f"{n} wide": (lambda n: Case(70, width=n).results, n) for n in (63, 258)},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name):
    make, argument = LEFT[name]
    assert_torchs_own(make(argument))


def test_fewer_heads_than_threads_are_torchs():
    torch.set_num_threads(2)
    assert_torchs_own(Case(70, batch=1, heads=1).results)


def test_without_onednn_it_is_torchs():
    case = Case(70)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_torchs_own(case.results)


def gradients(attend, case, **options):
    inputs = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
    attend(*inputs, **options).backward(case.dy)
    return [x.grad for x in inputs]


@pytest.mark.parametrize("dynamic", [False, True])
@compilers
def test_autograd_and_compiled_code_come_to_it(backend, dynamic):
    case = Case(70)
    _, _, *expected = case.results()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)
    for call in (attend, compiled):
        for ours, exact in zip(gradients(call, case), expected, strict=True):
            assert torch.equal(ours, exact)


def test_it_computes_under_autocast_too():
    case = Case(70)
    with torch.autocast("cpu", dtype=HALF):
        y = F.scaled_dot_product_attention(case.q.float(), case.k.float(), case.v.float())
    assert torch.equal(y, case.results()[0])


def print_digest():
    with cpu_half_ops():
        cases = [Case(n, is_causal=causal) for n in (5, 197) for causal in (False, True)]
        print(digest([case.results() for case in cases]))


PRINT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import test_half_attention
test_half_attention.print_digest()
"""
OTHERS = ISAS[_core.C.cpu_isa()][1:-1]  # but plain C++, and the one of this process


@pytest.mark.parametrize("isa", OTHERS)
def test_same_bits_by_every_instruction_set(isa, capsys):
    print_digest()
    assert python("-c", PRINT, AMPFUSE_CPU_ISA=isa).stdout == capsys.readouterr().out
