"""ampfuse.nn.cross_entropy against float64; see test_operators.py, too."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampfuse import pytree
from ampfuse.nn import LinearCrossEntropy, cross_entropy, linear_cross_entropy
from cases import assert_rounded, losses_at

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPAN = 4096  # columns, of which a row's sums are made


def logits_of(rows, classes, dtype, spread=3.0, seed=0, device="cpu"):
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, classes, generator=random)
    return logits.to(device, dtype).requires_grad_()


def targets_of(rows, classes, ignored=()):
    target = torch.arange(rows) * 7919 % classes
    target[list(ignored)] = -100
    return target


def exact(logits, target, weight=None, **options):
    """Loss and gradient in float64."""
    z = logits.detach().double().requires_grad_()
    weight = None if weight is None else weight.double()
    loss = F.cross_entropy(z, target, weight, **options)
    loss.sum().backward()
    return loss.detach(), z.grad


def check(logits, target, weight=None, **options):
    expected, gradient = exact(logits, target, weight, **options)
    loss = cross_entropy(logits, target, weight, **options)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach().double(), expected, rtol=3e-7, atol=1e-6)
    assert_rounded("dlogits", logits.grad, gradient, 2e-6, gradient.abs().amax().item() / 10)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        *((1, 1), (3, 7), (5, 15), (4, 16), (2, 17), (9, 127), (9, 128), (9, 129), (70, 5000)),
        *((3, SPAN - 1), (3, SPAN), (3, SPAN + 1), (2, 3 * SPAN + 5), (2, 17 * SPAN + 3)),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_agrees_with_float64(dtype, rows, classes, smoothing, hardware):
    target = targets_of(rows, classes).to(hardware)
    check(logits_of(rows, classes, dtype, device=hardware), target, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_weights_ignored_targets_and_reductions_agree_with_float64(
    dtype, reduction, weighted, smoothing
):
    rows, classes = 33, 130
    weight = torch.linspace(0, 2, classes) if weighted else None
    target = targets_of(rows, classes, ignored=(0, 7, 32))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check(logits_of(rows, classes, dtype), target, weight, **options)


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 7, 3), (2, 7, 3, 5)])
def test_every_shape_of_torch_is_taken(shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    target = torch.randint(7, shape[:0] if len(shape) == 1 else shape[:1] + shape[2:])
    layouts = [x, x.to(memory_format=torch.channels_last)] if len(shape) == 4 else [x]
    for half in layouts:
        check(half.requires_grad_(), target)
    probabilities = torch.rand(shape).softmax(0 if len(shape) == 1 else 1).bfloat16()
    loss = cross_entropy(x, probabilities)
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), probabilities.float()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_logits_give_the_loss_of_float64(dtype):
    largest = torch.finfo(dtype).max
    inf = torch.inf
    rows = [
        [0.0] * 20,
        [1e4] + [-1e4] * 19,
        [-1e4] + [1e4] * 19,
        [largest, -largest] + [0.0] * 18,
        [0.0, -inf] + [-inf] * 18,
        [1.0, -inf] + [3.0] * 18,
        [inf] + [0.0] * 19,
        [0.0, inf] + [0.0] * 18,
        [-inf] * 20,
        [torch.nan] + [0.0] * 19,
        [inf, inf] + [0.0] * 18,
    ]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    target = torch.zeros(len(rows), dtype=torch.int64)
    expected, gradient = exact(logits, target, reduction="none")
    loss = cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    known = ~expected.isnan()
    torch.testing.assert_close(loss[known].double(), expected[known], rtol=1e-6, atol=1e-6)
    assert not loss[~known].isfinite().any()
    finite = gradient.isfinite().all(1) & gradient.sum(1).isfinite()
    computed, rtol = logits.grad[finite].double(), max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(computed, gradient[finite], rtol=rtol, atol=1e-6)
    assert logits.grad[1:2].isfinite().all()
    assert logits.grad[9].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("first", "last"), [(-900, 900), (900, -900), (5000, 5100), (-20100, -20000), (-60000, 60000)]
)
def test_logits_may_rise_or_fall_along_a_row(first, last, dtype, hardware):
    """The exponent of the sums is raised on the way."""
    steps = torch.linspace(first, last, SPAN + 70, device=hardware)
    logits = torch.stack([steps, steps.view(2, -1).flip(0).flatten(), steps.sort().values])
    masked = logits.where(torch.arange(SPAN + 70, device=hardware) % 300 > 140, -torch.inf)
    target = torch.tensor([SPAN, 7 + 140, 299], device=hardware)
    for each in (logits, masked):
        check(each.to(dtype).requires_grad_(), target)


def test_a_loss_in_which_nothing_counts_is_torchs():
    logits, target = logits_of(3, 5, torch.bfloat16), torch.full((3,), -100)
    loss = cross_entropy(logits, target)
    loss.backward()
    assert loss.isnan()  # as torch's
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert cross_entropy(logits, target, reduction="sum") == 0
    empty = torch.empty(0, 5, requires_grad=True)
    assert cross_entropy(empty, target[:0], reduction="sum") == 0
    assert cross_entropy(logits.detach()[:, :5], torch.tensor([0, 4, 9]), ignore_index=9) > 0


def test_wrong_arguments_are_told():
    logits, target = logits_of(3, 5, torch.bfloat16), targets_of(3, 5)
    with pytest.raises(
        IndexError, match=r"target 5 is out of range for 5 classes .* ignore_index, -100"
    ):
        cross_entropy(logits, torch.tensor([0, 5, 1]))
    with pytest.raises(IndexError, match="target -1 is out of range"):
        cross_entropy(logits, torch.tensor([0, 4, -1]))
    with pytest.raises(ValueError, match="reduction must be"):
        cross_entropy(logits, target, reduction="max")
    with pytest.raises(ValueError, match="label_smoothing must be"):
        cross_entropy(logits, target, label_smoothing=1.5)


def passed_on(view=False):
    """(x, logits): logits that no operation before saved."""
    x = logits_of(8, 300, torch.bfloat16)
    logits = x + 1
    return x, logits.view(2, 4, 300).flatten(0, 1) if view else logits


@pytest.mark.parametrize("view", [False, True])
def test_the_gradient_is_written_over_logits_that_nobody_holds(view):
    gradients = []
    target = targets_of(8, 300)
    for held in (False, True):
        x, logits = passed_on(view=view)
        memory, before = logits.data_ptr(), logits.detach().clone()
        logits.register_hook(gradients.append)
        loss = cross_entropy(logits, target)
        kept = logits if held else None
        del logits
        loss.backward()
        expected = exact(before, target)[1].bfloat16()
        torch.testing.assert_close(x.grad, expected)
        assert (gradients.pop().data_ptr() == memory) is not held
        if held:
            assert torch.equal(kept, before)


def test_a_graph_that_is_kept_gives_the_gradient_again():
    x, logits = passed_on()
    loss = cross_entropy(logits, targets_of(8, 300))
    del logits
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, first)


def test_what_another_operation_saved_stays():
    x = logits_of(8, 300, torch.float32)
    logits = x.tanh()  # keeps its output
    loss = cross_entropy(logits, targets_of(8, 300)) + logits.sum()
    del logits
    loss.backward()
    z = x.detach().double().requires_grad_()
    y = z.tanh()
    (F.cross_entropy(y, targets_of(8, 300)) + y.sum()).backward()
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-5, atol=1e-6)


# ---- with the last linear layer ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block_rows", [None, 1, 7, 40, 41])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1}])
def test_a_head_in_blocks_agrees_with_float64(dtype, block_rows, options):
    head = LinearCrossEntropy(24, 130, bias=True, **options, block_rows=block_rows).to(dtype)
    x = torch.randn(5, 8, 24, dtype=dtype, requires_grad=True)
    target = targets_of(40, 130, ignored=(3, 39)).view(5, 8)
    loss = head(x, target)
    loss.backward()
    exact_head = nn.Linear(24, 130).double()
    exact_head.load_state_dict(head.state_dict())
    y = x.detach().double().requires_grad_()
    expected = F.cross_entropy(exact_head(y).flatten(0, 1), target.flatten(), **options)
    expected.backward()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=2 * eps, atol=0)
    for a, b in zip((x, *head.parameters()), (y, *exact_head.parameters()), strict=True):
        assert (a.grad.double() - b.grad).norm() < 2 * eps * b.grad.norm()


class Shapes(TorchDispatchMode):
    """Notes the shape of every result."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen += [tensor.shape for tensor in pytree.tensors(result)]
        return result


@pytest.mark.parametrize("trained", ["weight", "bias", "neither"])
def test_nothing_is_computed_for_the_frozen_part_of_a_head(trained):
    head = LinearCrossEntropy(24, 130, bias=True, block_rows=7)
    for name, param in head.named_parameters():
        param.requires_grad_(name == trained)
    loss = head(torch.randn(40, 24, requires_grad=True), targets_of(40, 130))
    with Shapes() as shapes:
        loss.backward()
    assert ((130, 24) in shapes.seen) == (trained == "weight")
    assert ((130,) in shapes.seen) == (trained == "bias")
    assert [p.grad is not None for p in head.parameters()] == [
        p.requires_grad for p in head.parameters()
    ]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_head_trains_at_every_level(level):
    model, x = LinearCrossEntropy(16, 10, block_rows=5), torch.randn(16, 16)
    batch = x, x[:, :10].argmax(1)
    sgd = partial(torch.optim.SGD, lr=0.5)
    losses = losses_at(level, model, sgd, [batch] * 30, lambda model, batch: model(*batch))
    assert losses[-1] < losses[0] / 4
    assert model(*batch).dtype == torch.float32
    assert model(x).shape == (16, 10)


def test_a_head_tells_what_is_wrong():
    x, weight, target = torch.randn(4, 3), torch.randn(5, 3), torch.full((4,), 5)
    with pytest.raises(ValueError, match=r"target must be int64 of shape \(4,\)"):
        linear_cross_entropy(x, weight, target[:3])
    with pytest.raises(IndexError, match="target 5 is out of range"):
        linear_cross_entropy(x, weight, target)
    for block_rows in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1, or None; got {block_rows}"):
            linear_cross_entropy(x, weight, target - 1, block_rows=block_rows)
    with pytest.raises(ValueError, match="reduction must be"):
        linear_cross_entropy(x, weight, target - 1, reduction="max")
    with pytest.raises(ValueError, match="label_smoothing must be"):
        linear_cross_entropy(x, weight, target - 1, label_smoothing=1.5)
    assert linear_cross_entropy(x[:0], weight, target[:0], reduction="sum") == 0
    none = linear_cross_entropy(
        x[:0].view(0, 5, 3), weight, target[:0].view(0, 5), reduction="none"
    )
    assert none.shape == (0, 5)
