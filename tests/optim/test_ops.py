"""ampfuse.ops against the same operation in float64, over lists of any sizes and dtypes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ampfuse import ops
from cases import bf16, f16, f32, f64, same_bits

inf, nan = math.inf, math.nan
HALF_ULP = {f32: 2**-24, f16: 2**-11, bf16: 2**-8}
SMALLEST = {f32: 2**-149, f16: 2**-24, bf16: 2**-133}

dtypes = st.sampled_from([f32, f16, bf16])
# Sizes around vectors and tiles, and around a chunk (2^15).
sizes = st.one_of(st.integers(0, 60), st.sampled_from([2047, 2049, 32767, 32768, 32769]))
factors = st.floats(-1e3, 1e3, width=32)


@st.composite
def lists(draw, names):
    """{name: list}, the same shapes in all of them, dtypes and alignments at will."""
    shapes = draw(st.lists(sizes, max_size=6))
    torch.manual_seed(draw(st.integers(0, 99)))
    made = {}
    for name in names:
        made[name] = []
        for size in shapes:
            offset = draw(st.integers(0, 3))
            made[name].append(torch.randn(size + offset).to(draw(dtypes))[offset:])
    return made


def assert_within_ulps(found, exact, more=0.0):
    """`found` is `exact` (float64) after one rounding to its dtype, `more` ulps of FP32 before."""
    error = (found.to(f64) - exact).abs()
    allowed = exact.abs() * (HALF_ULP[found.dtype] + more * 2**-24) + SMALLEST[found.dtype]
    overflow = exact.abs() > torch.finfo(found.dtype).max
    assert bool(((error <= allowed) | (overflow & found.isinf())).all())


@given(lists(["src", "dst"]), factors)
def test_scale_multiplies_and_rounds_once(made, factor):
    ops.scale(made["src"], made["dst"], factor)
    for src, dst in zip(made["src"], made["dst"], strict=True):
        assert_within_ulps(dst, src.to(f64) * factor, more=1)


@given(lists(["x", "y", "out"]), factors, factors)
def test_axpby_adds_two_multiples_within_rounding(made, a, b):
    ops.axpby(made["x"], made["y"], made["out"], a, b)
    for x, y, out in zip(*made.values(), strict=True):
        # b * y is rounded before the fused multiply-add, so the error is relative to the terms.
        terms = (x.to(f64) * a).abs() + (y.to(f64) * b).abs()
        exact = x.to(f64) * a + y.to(f64) * b
        allowed = exact.abs() * HALF_ULP[out.dtype] + terms * 2**-23 + SMALLEST[out.dtype]
        assert bool(((out.to(f64) - exact).abs() <= allowed).all())


@given(lists(["src", "dst"]))
def test_copy_gives_the_bits_of_a_cast(made):
    ops.copy(made["src"], made["dst"])
    for src, dst in zip(made["src"], made["dst"], strict=True):
        assert same_bits(dst, src.to(dst.dtype))


@given(lists(["grads", "out"]), st.sampled_from([1.0, 2.0**16, 3.0, 1e-3]))
def test_unscale_multiplies_by_the_inverse_scale_and_rounds_once(made, scale):
    inv_scale, found_inf = torch.tensor(1 / scale), torch.zeros(())
    ops.unscale(made["grads"], made["out"], inv_scale, found_inf)
    for grad, out in zip(made["grads"], made["out"], strict=True):
        assert_within_ulps(out, grad.to(f64) * float(inv_scale), more=1)
    assert found_inf == 0


def assert_norms(tensors):
    """The norm of all tensors and the norm of each are right."""
    norm, norms = ops.l2norm(tensors, per_tensor=True)
    assert norm.dtype == norms.dtype == f32
    assert (norm.shape, norms.shape) == ((), (len(tensors),))
    for found, of in [(norm, tensors), *zip(norms, ([tensor] for tensor in tensors), strict=True)]:
        # Near the smallest subnormal FP32 itself has few digits.
        expected = pytest.approx(reference.norm([t.cpu() for t in of]), rel=1e-6, abs=2e-45)
        assert float(found) == expected
    alone, empty = ops.l2norm(tensors)
    assert same_bits(alone, norm)
    assert empty.shape == (0,)


@given(lists(["tensors"]))
def test_l2norm_gives_the_norm_of_all_and_of_each(made):
    assert_norms(made["tensors"])


MAGNITUDES = [1e-45, 1e-40, 1e-30, 1e-7, 1.0, 6e4, 1e20, 1e30, 1e36]


@pytest.mark.covers(1)
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_norm_neither_overflows_nor_underflows(device, dtype, magnitude):
    tensors = [(torch.rand(n) * magnitude).to(dtype) for n in (1, 100, 40000)]
    assert_norms([torch.where(t.isinf(), 0, t).to(device) for t in tensors])


def test_norm_of_very_different_magnitudes_is_accurate(device):
    assert_norms([torch.full((5,), value, device=device) for value in (1e-42, 1e-20, 1.0, 1e25)])


# --- inf and NaN ---------------------------------------------------------------------------------

PLACES = {"first": 0, "middle": 1500, "last": -1}


@pytest.mark.covers(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_found_inf_is_set_by_a_bad_value_in_any_place(device, dtype, bad, place):
    """And never cleared."""
    tensors = [torch.randn(3001).to(dtype).to(device) for _ in range(5)]
    spoilt = [tensor.clone() for tensor in tensors]
    spoilt[3][PLACES[place]] = bad
    out = [torch.empty_like(tensor) for tensor in tensors]
    one = torch.ones((), device=device)

    def flags(x):
        found_infs = torch.zeros(7, device=device).unbind()
        for _ in range(2):
            ops.scale(x, out, 2.0, found_infs[0])
            ops.unscale(x, out, one, found_infs[1])
            ops.axpby(x, tensors, out, 2.0, 1.0, found_infs[2])
            ops.axpby(tensors, x, out, 2.0, 1.0, found_infs[3])
            ops.axpby(x, tensors, out, 2.0, 1.0, found_infs[4], check=0)
            ops.axpby(tensors, x, out, 2.0, 1.0, found_infs[5], check=1)
            ops.axpby(x, tensors, out, 2.0, 1.0, found_infs[6], check=1)
            x = tensors
        return [float(flag) for flag in found_infs]

    assert flags(tensors) == [0] * 7
    assert flags(spoilt) == [1, 1, 1, 1, 1, 1, 0]
    norm, norms = ops.l2norm(spoilt, per_tensor=True)
    assert not norm.isfinite()
    assert norms.isfinite().tolist() == [True, True, True, False, True]


# --- layouts, aliases, versions ------------------------------------------------------------------


def test_copy_takes_tensors_in_any_order_of_dimensions(device):
    src = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    dst = torch.empty_like(src, dtype=bf16)
    ops.copy([src, src.transpose(0, 1)], [dst, torch.empty_like(dst).transpose(0, 1)])
    assert torch.equal(dst, src.to(bf16))


def test_output_may_be_the_input(device):
    tensor = torch.randn(100, device=device)
    expected = tensor * 3
    ops.scale([tensor], [tensor], 3.0)
    assert torch.equal(tensor, expected)
    ops.axpby([tensor], [tensor], [tensor], 1.0, -1.0)
    assert torch.equal(tensor, torch.zeros_like(tensor))


def test_written_tensors_get_a_new_version_and_read_ones_do_not():
    src, dst = torch.ones(3), torch.ones(3)
    ops.copy([src], [dst])
    assert (src._version, dst._version) == (0, 1)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * dst).sum()
    ops.scale([dst], [dst], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_lists_are_accepted_and_have_norm_zero():
    ops.scale([], [], 2.0)
    ops.axpby([], [], [], 1.0, 1.0)
    ops.copy([], [])
    ops.unscale([], [], torch.ones(()))
    norm, norms = ops.l2norm([], per_tensor=True)
    assert norm == 0
    assert norms.shape == (0,)


# --- refusals ------------------------------------------------------------------------------------

ones, ON_META = torch.ones(4), torch.ones(4, device="meta")
WRONG = {
    "lengths": ([ones, ones], [ones], ValueError, "must have the same length"),
    "shapes": ([ones], [torch.ones(5)], ValueError, r"dst\[0\] has shape \[5\]"),
    "strides": ([torch.ones(2, 3)], [torch.ones(3, 2).t()], ValueError, "have to match"),
    "float64": ([ones, ones.double()], [ones, ones], TypeError, r"src\[1\] is Double"),
    "integers": ([ones], [ones.int()], TypeError, r"dst\[0\] is Int"),
    "complex": ([torch.ones(4, dtype=torch.complex64)], [ones], TypeError, r"src\[0\] is Complex"),
    "sparse": ([ones.to_sparse()], [ones], TypeError, r"src\[0\] is sparse; pass dense"),
    "devices": ([ones], [ON_META], ValueError, r"dst\[0\] is on meta"),
    "no kernels": ([ON_META], [ON_META], RuntimeError, "for cpu and cuda tensors, not for meta"),
    "gaps": ([torch.ones(8)[::2]], [ones], ValueError, r"src\[0\].*has gaps.*contiguous copy"),
    "overlap": ([ones], [torch.ones(1).expand(4)], ValueError, r"dst\[0\].*overlaps"),
}


@pytest.mark.parametrize(
    "op", [lambda *lists: ops.scale(*lists, 2.0), ops.copy], ids=["scale", "copy"]
)
@pytest.mark.parametrize("case", WRONG)
def test_lists_that_do_not_fit_are_refused_and_nothing_is_written(case, op):
    src, dst, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        op(src, dst)
    for tensor in dst:
        assert tensor.is_meta or (tensor == 1).all()


NUMBER_ON_META = torch.zeros((), device="meta")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: ops.scale(t, t, 2.0, torch.zeros(1, dtype=f64)), TypeError, "found_inf"),
        (lambda t: ops.scale(t, t, 2.0, torch.zeros(0)), ValueError, "found_inf"),
        (lambda t: ops.scale(t, t, 2.0, NUMBER_ON_META), ValueError, "found_inf is on meta"),
        (lambda t: ops.unscale(t, t, NUMBER_ON_META), ValueError, "inv_scale is on meta"),
        (lambda t: ops.axpby(t, t, t, 1.0, 1.0, check=2), ValueError, "check is 2"),
    ],
    ids=["flag's type", "flag's size", "flag's device", "scale's device", "check"],
)
def test_wrong_flags_and_scales_are_refused_and_nothing_is_written(call, error, message):
    tensor = torch.ones(3)
    with pytest.raises(error, match=message):
        call([tensor])
    assert torch.equal(tensor, torch.ones(3))


def test_a_leaf_is_written_under_no_grad_only():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"dst\[0\] requires grad"):
        ops.scale([torch.ones(3)], [weight], 2.0)
    with torch.no_grad():
        ops.scale([torch.ones(3)], [weight], 2.0)
    assert torch.equal(weight.detach(), torch.full((3,), 2.0))
