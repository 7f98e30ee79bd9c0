"""``amp_C`` and ``apex.multi_tensor_apply``: argument orders, flags and errors."""

import functools
import itertools

import pytest
import torch

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex_cases import OPERATIONS, arguments, call
from cases import bf16, f16, f32, f64

CHUNKS = (65536, 333, 33333)


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int32)


def some(*dtypes):
    return [torch.randn(size).to(dtype) for dtype in dtypes for size in (5, 333, 0, 1)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_scale(bad, chunk, flag):
    """A bad input sets the flag and nothing clears it. A result that overflows does not set it."""
    x, y = some(f16, bf16, f32), some(f32, f16, bf16)
    apply = MultiTensorApply(chunk)
    assert apply(amp_C.multi_tensor_scale, flag, [x, y], 0.25) is None
    for a, b in zip(x, y, strict=True):
        assert torch.equal(b, (a.float() * 0.25).to(b.dtype))
    rounded = torch.empty(1, dtype=f16)
    apply(amp_C.multi_tensor_scale, flag, [[torch.tensor([1e5])], [rounded]], 1.0)
    assert torch.isinf(rounded).all()
    assert flag.item() == 0
    x[1][7] = bad
    for inputs in (x, some(f16, bf16, f32)):
        apply(amp_C.multi_tensor_scale, flag, [inputs, y], 1.0)
        assert flag.item() == 1


@pytest.mark.parametrize(("check", "seen"), [(-1, (1, 1)), (0, (1, 0)), (1, (0, 1))])
def test_axpby_checks_what_it_is_told(check, seen):
    for bad, expected in enumerate(seen):
        flag = torch.zeros(1, dtype=torch.int32)
        x, y, out = lists = [some(f16, bf16, f32), some(f32, f32, f32), some(f32, f32, f32)]
        call("axpby", flag, lists, (2.0, -3.0, check))
        for a, b, c in zip(x, y, out, strict=True):
            torch.testing.assert_close(c, 2 * a.float() - 3 * b)
        assert flag.item() == 0
        lists[bad][0][0] = float("inf")
        call("axpby", flag, lists, (1.0, 1.0, check))
        assert flag.item() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_as_torch_has_them(dtype, flag):
    """Counters among the averages of a state dict; floats are computed as without them."""
    x, y = torch.tensor([7, 0, 100]).to(dtype), torch.tensor([9, 1, 101]).to(dtype)
    floats = torch.randn(5), torch.randn(5)
    expected = x.clone().copy_(0.75 * x + 0.25 * y), 0.75 * floats[0] + 0.25 * floats[1]
    old, new = [x.clone(), floats[0].clone()], [y, floats[1]]
    call("axpby", flag, [old, new, old], (0.75, 0.25, -1))
    assert torch.equal(old[0], expected[0])
    torch.testing.assert_close(old[1], expected[1])
    scaled = [torch.empty(3), torch.empty(5)]
    call("scale", flag, [[x, floats[0]], scaled], (0.5,))
    assert torch.equal(scaled[0], x * 0.5)
    assert torch.equal(scaled[1], floats[0] * 0.5)
    _, norms = call("l2norm", flag, [[x, floats[0]]], (True,))
    torch.testing.assert_close(norms, torch.stack([x.float().norm(), floats[0].norm()]))
    call("scale", flag, [[x], [x]], (1.0,))  # no floats at all
    assert flag.item() == 0


@pytest.mark.parametrize("name", ["l2norm", "l2norm_mp"])
def test_l2norm(name, flag):
    x = some(f16, bf16, f32)
    norm, norms = call(name, flag, [x], (True,))
    exact = torch.stack([torch.linalg.vector_norm(t.double()) for t in x])
    torch.testing.assert_close(norms.double(), exact, rtol=1e-6, atol=0)
    expected = torch.linalg.vector_norm(exact).reshape(1)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    assert norm.dtype == norms.dtype == f32
    for per_tensor in (False, None):
        norm, norms = call(name, flag, [x], (per_tensor,))
        assert (norm.shape, norms.shape) == ((1,), (0,))
    assert flag.item() == 0
    x[0][0] = float("nan")
    call(name, flag, [x], (False,))
    assert flag.item() == 1


@pytest.mark.parametrize(("value", "norm"), [(1e30, 2e30), (3e38, 3.4028235e38)])
def test_squares_that_overflow_do_not_set_the_flag(value, norm, flag):
    """The second norm is the largest FP32 value: the elements are finite."""
    measured, _ = call("l2norm", flag, [[torch.full((4,), value)]], ())
    torch.testing.assert_close(measured, torch.tensor([norm]))
    assert flag.item() == 0


def test_norms_beside_a_scale(flag):
    """Unscaled ones leave the tensors; scaling gives the norms of what there was."""
    x, y = some(f16), some(f32)
    before, inverse = [t.clone() for t in x], torch.tensor([0.125])
    plain = call("l2norm", flag, [x], (True,))
    unscaled = call("unscale_l2norm", flag, [x], (inverse, True))
    of_input = call("l2norm_scale", flag, [x, y], (2.0, True))
    for norm, eighth, same in zip(plain, unscaled, of_input, strict=True):
        assert torch.equal(eighth, norm / 8)
        assert torch.equal(same, norm)
    for a, b, c in zip(x, before, y, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, a.float() * 2)


def test_unscale_l2norm_is_of_unscaled_values(flag):
    """A norm beyond FP32's range that unscaling brings back into it does not overflow."""
    x = [torch.full((9,), 3e38), torch.full((16,), 1.5e38)]
    inv = torch.tensor([2.0**-16])
    norm, norms = call("unscale_l2norm", flag, [x], (inv, True))
    assert flag.item() == 0
    torch.testing.assert_close(norms, torch.tensor([9e38 / 2**16, 6e38 / 2**16]))
    torch.testing.assert_close(norm, norms.double().norm().float().reshape(1))
    assert [t.shape for t in (norm, norms)] == [(1,), (2,)]
    x[1][3] = float("inf")
    call("unscale_l2norm", flag, [x], (inv,))
    assert flag.item() == 1


def test_memory_order(flag):
    x = torch.randn(2, 3, 4, 4)
    last = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(last)
    call("scale", flag, [[last], [out]], (2.0,))
    assert torch.equal(out, x * 2)
    flat = torch.empty(96)
    call("scale", flag, [[x], [flat]], (2.0,))
    assert torch.equal(flat, x.view(-1) * 2)
    one = x[:, :1].contiguous()  # the stride of one channel says nothing
    other = torch.empty(2, 1, 4, 4).as_strided(one.shape, (16, 1, 4, 1))
    call("scale", flag, [[one], [other]], (2.0,))
    assert torch.equal(other, one * 2)
    with pytest.raises(RuntimeError, match="strides"):  # apex paired the wrong elements
        call("scale", flag, [[last], [torch.empty_like(x)]], (1.0,))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[torch.ones(2)], [torch.ones(3)]], "dst\\[0\\] has shape"),
        ([[torch.ones(2, dtype=f64)], [torch.ones(2)]], "Double"),
        ([[torch.ones(2, device="meta")], [torch.ones(2)]], "not for meta"),
    ],
)
def test_errors(lists, message, flag):
    with pytest.raises(RuntimeError, match=message):
        call("scale", flag, lists, (1.0,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_lists_that_do_not_fit(name, flag):
    refuses = functools.partial(pytest.raises, RuntimeError)
    lists, options = arguments(name, "cpu")
    before = [[t.clone() for t in tensors] for tensors in lists]
    known = "l2norm" if name == "l2norm_mp" else name
    for wrong in ([], lists * 2):
        message = rf"^multi_tensor_{known} takes \d list\(s\).*got {len(wrong)}"
        with refuses(match=message):
            call(name, flag, wrong, options)
    with refuses(match="first list is empty"):
        call(name, flag, [[] for _ in lists], options)
    for shorter in lists[1:2]:
        with refuses(match="list 0 has 4 tensors, list 1 has 3"):
            call(name, flag, [lists[0], shorter[:3], *lists[2:]], options)
    channels = torch.rand(1, 2, 3, 3, 3)
    for gaps in (channels[:, :1, ::2], channels.transpose(2, 4)):
        with refuses(match="tensor 0 of list 0 is neither contiguous"):
            call(name, flag, [[gaps, *tensors[1:]] for tensors in lists], options)
    assert all(map(torch.equal, itertools.chain(*lists), itertools.chain(*before)))
    last = channels.contiguous(memory_format=torch.channels_last_3d)
    for dense in (channels, last, channels[0, :1]):
        call(name, flag, [[dense.clone(), *tensors[1:]] for tensors in lists], options)
    assert flag.item() == 0


def test_what_is_not_here_is_named():
    with pytest.raises(AttributeError, match="it has multi_tensor_adagrad"):
        amp_C.nonsense  # noqa: B018
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 65536


def test_update_scale_hysteresis():
    """Against the rule, written as branches."""
    expected = [1024.0, 0, 2]
    tensors = torch.tensor([1024.0]), *torch.tensor([[0], [2]], dtype=torch.int32)
    for overflows in (0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0):
        found_inf = torch.tensor([float(overflows)])
        result = amp_C.update_scale_hysteresis(*tensors, found_inf, 2.0, 0.5, 3, 2)
        scale, growth, hysteresis = expected
        if overflows:
            growth, hysteresis = 0, hysteresis - 1
            scale *= 0.5 if hysteresis <= 0 else 1.0
        else:
            growth, hysteresis = growth + 1, 2
            if growth == 3:
                scale, growth = scale * 2.0, 0
        expected = [scale, growth, hysteresis]
        assert result is tensors[0]
        assert [t.item() for t in tensors] == expected
    largest = torch.tensor([2.0**127])
    amp_C.update_scale_hysteresis(largest, *tensors[1:], torch.zeros(1), 2.0, 0.5, 1, 2)
    assert largest.item() == 2.0**127


def test_the_unscaled_norm_takes_integers():
    tensors, flag = [torch.tensor([3, 4]), torch.tensor([12.0])], torch.zeros(1, dtype=torch.int32)
    norm, norms = amp_C.multi_tensor_unscale_l2norm(0, flag, [tensors], torch.tensor([0.5]), True)
    assert (norm.tolist(), norms.tolist(), flag.item()) == ([6.5], [2.5, 6.0], 0)
