"""Outputs of batch norms that the backward pass computes again: the same bits from less memory."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampfuse
from ampfuse import amp
from ampfuse.measuring import tensor_memory
from ampfuse.nn import BatchNormAct2d, recompute_norms
from cases import nn_ops
from trainings import NormsAndConvolutions


def image(*shape, dtype=torch.float32, device="cpu"):
    x = torch.randn(shape).to(device, dtype, memory_format=torch.channels_last)
    return x.requires_grad_()


def recompute(wanted):
    return recompute_norms() if wanted else contextlib.nullcontext()


def gradients(model, x, recomputed, mode=True):
    """The loss and all gradients, of a copy."""
    model, x = copy.deepcopy(model).train(mode), x.detach().clone().requires_grad_()
    with recompute(recomputed):
        loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad, *(param.grad for param in model.parameters())]


@contextlib.contextmanager
def on_a_side_stream(device):
    """On a GPU the block's work is queued on a stream of its own, behind work that takes a while;
    it begins with what was queued before and ends before what comes after. On a CPU: nothing."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_same_bits(dtype, training, hardware):
    """On a side stream, too."""
    block = NormsAndConvolutions().to(hardware, memory_format=torch.channels_last)
    x = image(4, 16, 9, 7, dtype=dtype, device=hardware)
    for conv in (block.conv1, block.conv2):
        conv.to(dtype)
    kept, made = (gradients(block, x, recomputed, training) for recomputed in (False, True))
    assert all(map(torch.equal, kept, made))
    for recomputed in (False, True):
        with on_a_side_stream(hardware):
            aside = gradients(block, x, recomputed, training)
        assert all(map(torch.equal, kept, aside))


def test_an_output_that_was_changed_without_a_gradient_is_kept():
    """Its producer would make what it was before."""
    block = NormsAndConvolutions()
    x = image(2, 16, 5, 5)

    def gradient(recomputed):
        block.zero_grad()
        with recompute(recomputed):
            y = block.norm1(x)
            with torch.no_grad():
                y.mul_(0.5)
            block.conv1(y).sum().backward()
        return block.conv1.weight.grad.clone()

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_the_kernel_repeats_itself(relu, bias, device):
    """On every backend; and only for what was asked for."""
    op = nn_ops().batch_norm_act
    x, weight = image(3, 5, 4, 4).to(device), torch.rand(5, device=device)
    shift = torch.rand(5, device=device) if bias else None
    y = op(x, None, weight, shift, None, None, True, 0.1, 1e-5, relu)
    saved = ampfuse._core.C.SavedTensor
    made = saved(y).unpack()
    assert made is not y
    assert torch.equal(made, y)
    added = op(x, y.detach(), weight, shift, None, None, True, 0.1, 1e-5, relu)
    for other in (added, y + 1, y.detach(), x, weight):
        assert saved(other).unpack() is other


def test_memory_of_a_network_and_equal_steps(hardware):
    """One of the four saved images of each block is not kept."""
    x = image(8, 16, 32, 32, device=hardware).detach()
    peaks, ends = [], []
    for recomputed in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(*(NormsAndConvolutions() for _ in range(6)))
        model.to(hardware, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        for _ in range(2):
            with tensor_memory(hardware) as peak:
                with recompute(recomputed):
                    loss = model(x).float().square().mean()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(peak.mib)
        ends.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *ends))
    one_image = x.numel() * 2 / 2**20
    assert peaks[0] - peaks[1] > 5 * one_image  # the sixth is made while the rest is there


def test_second_passes_have_the_same_bits():
    block, x = NormsAndConvolutions(4).to(memory_format=torch.channels_last), image(2, 4, 5, 5)

    results = []
    for recomputed in (False, True):
        with recompute(recomputed):
            loss = block(x).square().sum()
            (first,) = torch.autograd.grad(loss, x, retain_graph=True)
            results.append([first, *torch.autograd.grad(loss, block.conv1.weight)])
    torch.testing.assert_close(*results)


def test_an_edited_input_is_an_error_as_ever():
    norm = BatchNormAct2d(4).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 4, 1, 1).requires_grad_()
    x = image(2, 4, 5, 5)
    for edited in ("the norm's input", "another's"):
        hidden = x * 1
        with recompute_norms():
            loss = F.conv2d(norm(hidden), weight).exp().sum()
            other = hidden.sin().sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss if edited == "the norm's input" else other).backward()


def test_a_compiled_model_goes_through():
    block, x = NormsAndConvolutions(4).to(memory_format=torch.channels_last), image(2, 4, 5, 5)

    def loss(x):
        with recompute_norms():
            return block(x).square().mean()

    expected = torch.autograd.grad(loss(x), x)
    gradients = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    torch.testing.assert_close(gradients, expected)
