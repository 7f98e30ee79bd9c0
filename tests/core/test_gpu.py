"""What a GPU alone can show of steps: streams, graphs, sizes past 2^31.

That its kernels give the bits of the CPU's, test_same_bits.py and tests/cpp compare, in emulation,
too.
"""

import contextlib

import pytest
import torch

from ampfuse import _core
from cases import (
    CHUNK,
    assert_same_bits,
    bf16,
    everything,
    f32,
    make,
    never_waiting,
    same_bits,
    snapshot,
)


def step(params, optimizer, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device)
    optimizer.step()


def queued_on(stream):
    """Work of the block is queued on a stream of its own, of a GPU."""
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()


def test_steps_beside_a_competing_stream_have_the_same_bits(device):
    """Ten thousand on a GPU: whichever block ends last finds what the others left.

    The competitor keeps the memory busy and has last blocks of its own, in rows of other sizes.
    """
    on_gpu = device.type == "cuda"
    count, size, rows = (10_000, 4_000_003, 8) if on_gpu else (6, CHUNK + 3, 2)
    streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else [None, None]

    def start(sizes):
        torch.manual_seed(2)
        dtypes = [(bf16, f32)[i % 2] for i in range(len(sizes))]
        params = [torch.randn(n).to(device, t) for n, t in zip(sizes, dtypes, strict=True)]
        params = [param.requires_grad_() for param in params]
        optimizer = make("lamb", params, master_weights=True, max_grad_norm=1.0)
        gradients = [[torch.randn_like(param) for param in params] for _ in range(3)]
        return params, optimizer, gradients, torch.zeros(count, device=device)

    def run(*sides):
        sides = [start(sizes) for sizes in sides]
        for stream in filter(None, streams):
            stream.wait_stream(torch.cuda.current_stream())
        for i in range(count):
            for stream, side in zip(streams, sides, strict=False):
                params, optimizer, gradients, norms = side
                with queued_on(stream):
                    step(params, optimizer, gradients[i % 3])
                    norms[i].copy_(optimizer.last_step.grad_norm)
        if on_gpu:
            torch.cuda.synchronize()
        for *_, norms in sides:
            assert torch.equal(norms, norms[:3].repeat(count)[:count])
        return [{**everything(side[1]), "norms": side[3]} for side in sides]

    ours, competitor = [size, 7, size // 3], [CHUNK * i + 1 for i in range(1, rows + 1)]
    together = run(ours, competitor)
    for sizes, beside_another in zip((ours, competitor), together, strict=True):
        (expected,) = run(sizes)
        assert_same_bits(beside_another, expected)


SHAPES = [(1000,), (3,), (300, 70), (CHUNK + 1,)]


def gradients(count):
    return [[torch.randn(shape).to(bf16) for shape in SHAPES] for _ in range(count)]


def start(device):
    torch.manual_seed(1)
    params = [torch.randn(shape).to(bf16).to(device).requires_grad_() for shape in SHAPES]
    return params, make("adamw", params, master_weights=True, max_grad_norm=1.0)


def on_cpu(history):
    """Where the given gradients, step after step, lead on the CPU."""
    params, optimizer = start("cpu")
    for grads in history:
        step(params, optimizer, [grad.clone() for grad in grads])
    return snapshot(optimizer)


@pytest.mark.gpu
def test_new_gradient_addresses_behind_a_delayed_stream():
    """The host is a hundred steps ahead; no upload may overwrite one that is still to be read."""
    history = gradients(100)
    params, optimizer = start("cuda")
    on_device = [[grad.cuda() for grad in grads] for grads in history]
    for i, grads in enumerate(on_device):
        step(params, optimizer, grads)
        if i == 0:  # what the first step makes and loads does wait
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
        if i == 50:  # fewer uploads than the ring of staging buffers takes before it waits
            assert not torch.cuda.current_stream().query(), "the host is not ahead"
    assert_same_bits(snapshot(optimizer), on_cpu(history))


@pytest.mark.gpu
def test_steps_on_several_streams_have_the_same_bits():
    history = gradients(9)
    params, optimizer = start("cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    previous = torch.cuda.current_stream()
    for i, grads in enumerate(history):
        stream = streams[i % 3]
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            step(params, optimizer, grads)
        previous = stream
    torch.cuda.synchronize()
    assert_same_bits(snapshot(optimizer), on_cpu(history))


@pytest.mark.gpu
def test_capture_then_eager_steps_then_replay():
    """A captured step reads its own gradients' addresses, whatever eager steps did since."""
    history = gradients(8)
    params, optimizer = start("cuda")
    static = [grad.cuda() for grad in history[0]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(params, optimizer, history[0])
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    for param, grad in zip(params, static, strict=True):
        param.grad = grad
    with torch.cuda.graph(graph):
        optimizer.step()
    for i in range(1, 8):
        if i % 2:
            step(params, optimizer, history[i])
        else:
            for grad, new in zip(static, history[i], strict=True):
                grad.copy_(new)
            graph.replay()
    assert_same_bits(snapshot(optimizer), on_cpu(history))


@pytest.mark.gpu
def test_no_wait_and_no_allocation_in_a_step():
    params, optimizer = start("cuda")
    for param in params:
        param.grad = torch.randn_like(param)
    for _ in range(3):
        optimizer.step()
    torch.cuda._sleep(1)  # loading a kernel may wait
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with never_waiting():
        torch.cuda._sleep(400_000_000)
        optimizer.step()
        assert not torch.cuda.current_stream().query(), "the host waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    count = 2**31 + 4099
    src = torch.ones(count, dtype=bf16, device="cuda")
    src[-1] = 3
    dst = torch.zeros_like(src)
    found_inf = torch.zeros((), device="cuda")
    _core.C.scale([src], [dst], 2.0, found_inf)
    norm, _ = _core.C.l2norm([dst], False)
    assert float(found_inf) == 0
    assert float(dst[-1]) == 6
    assert bool((dst[:-1] == 2).all())
    assert float(norm) == pytest.approx((4 * (count - 1) + 36) ** 0.5, rel=1e-6)
    src[-1] = float("nan")
    _core.C.scale([src], [dst], 2.0, found_inf)
    assert float(found_inf) == 1


@pytest.mark.gpu
def test_every_mantissa_has_the_bits_of_the_cpu():
    """Roots, reciprocals and quotients rest on the hardware's approximations, whose error is known
    for the architectures so far."""
    every = (torch.arange(1 << 24, dtype=torch.int32) + 0x3F800000).view(f32)  # in [1, 4)

    def run(device):
        x = every.to(device)
        param = torch.zeros_like(x, requires_grad=True)
        optimizer = make("adam", [param], lr=1.0, eps=2.0**-100)
        for _ in range(2):
            param.grad = torch.ones_like(x)
            optimizer.step()
            optimizer.state[param]["exp_avg_sq"].copy_(x)
        with torch.no_grad():
            silu = torch.ops.ampfuse.activation(x, None, None, "silu")
        return param.detach().cpu(), silu.cpu()

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert same_bits(found, expected)
