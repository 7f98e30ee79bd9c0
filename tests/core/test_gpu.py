"""The CUDA kernels give the bits of the CPU kernels: every optimizer. (Every op: test_core.cpp.)

Each comparison runs twice: against the CUDA kernels in host emulation, which every machine can do,
and against a GPU, where there is one. What only a GPU can show (graphs, streams, sizes past 2^31)
follows.
"""

import contextlib

import pytest
import torch

from ampfuse import _core, optim
from cases import (
    DTYPES,
    KINDS,
    OPTIMIZERS,
    assert_same_bits,
    bf16,
    bits,
    can_mix_dtypes,
    everything,
    f16,
    f32,
    make,
    set_grad,
    snapshot,
)
from conftest import emulated_module, nn_ops
from trainings import MODES

CHUNK = 32768  # kChunk of csrc/core/reduce.h
SIZES = [*range(26), 255, 256, 257, 2047, 2048, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
HALF = (f16, bf16)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def compare(request, monkeypatch):
    """compare(run): run(device) on the CPU kernels and on CUDA's; equal bits in all it returns."""

    def compare(run):
        torch.manual_seed(0)
        expected = run(torch.device("cpu"))
        with monkeypatch.context() as patch:
            if request.param == "emulated":
                patch.setattr(_core, "C", emulated_module())
            torch.manual_seed(0)
            found = run(torch.device("cpu" if request.param == "emulated" else "cuda"))
        assert_same_bits(found, expected)
        return found

    return compare


def tensors(device, dtypes, offset=0, sizes=SIZES):
    """One tensor per size, its dtype from `dtypes` in turn; `offset` elements off alignment."""
    made = []
    for i, size in enumerate(sizes):
        values = torch.randn(size + offset).to(dtypes[i % len(dtypes)])
        made.append(values.to(device)[offset:])
    return made


def named(**groups):
    return {f"{name} {i}": t for name, group in groups.items() for i, t in enumerate(group)}


def zero(device, dtype=f32):
    return torch.zeros((), dtype=dtype, device=device)


# ---- optimizers ----------------------------------------------------------------------------------


def steps(optimizer, params, dtypes, count, bad=(), draw=torch.randn, offset=0):
    """`count` steps on random gradients; in the steps of `bad` one of them is not finite.

    Gradients are what `draw` makes of a size, each `offset` elements off alignment, as DDP's views
    of a bucket may be.
    """
    for step in range(count):
        for i, param in enumerate(params):
            if (i + step) % 5 == 4:
                param.grad = None  # rows without a gradient keep their own step count
                continue
            grad = draw(param.numel() + offset).to(dtypes[i])
            if step in bad and i == len(params) // 2 and grad.numel():
                grad.view(-1)[-1] = float("nan")
            set_grad(param, grad.to(param.device)[offset:])
        optimizer.step()


def optimize(
    name,
    dtypes,
    device,
    sizes=SIZES,
    count=5,
    bad=(),
    draw=torch.randn,
    offset=0,
    **options,
):
    grad_dtypes, weight_dtypes = zip(*dtypes, strict=True)
    params = [p.requires_grad_() for p in tensors(device, weight_dtypes, offset, sizes)]
    optimizer = make(name, params, **options)
    dtypes_of = [grad_dtypes[i % len(dtypes)] for i in range(len(sizes))]
    steps(optimizer, params, dtypes_of, count, bad, draw, offset)
    saved = optimizer.state_dict()["state"].items()
    decoded = {
        f"saved {key} {i}": value
        for i, state in saved
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return everything(optimizer) | decoded


@pytest.mark.skipif(
    not can_mix_dtypes(), reason="this torch ties a gradient's dtype to its parameter's"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_every_dtype_mixture(compare, name):
    compare(lambda device: optimize(name, DTYPES, device, master_weights=True, max_grad_norm=1.0))


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("name", ["sgd-all", "adam-all", "adamw"])
def test_optimizers(compare, name, dtype, master_weights):
    compare(lambda device: optimize(name, [(dtype, dtype)], device, master_weights=master_weights))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sgd-all", "adamw", "adagrad-all", "lion-decay"])
def test_memory_modes(compare, name, mode):
    halves = [(bf16, bf16), (f16, f16)]
    compare(lambda device: optimize(name, halves, device, max_grad_norm=1.0, **MODES[mode]))


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_odd_offsets(compare, name, offset):
    dtypes = [(dtype, dtype) for dtype in (bf16, f32, f16)]
    compare(lambda device: optimize(name, dtypes, device, offset=offset, master_weights=True))


def seldom(size):
    """A gradient of an embedding, of which most rows, here 64 wide, are never seen."""
    return torch.randn(size) * (torch.arange(size) // 64 % 5 == 0)


@pytest.mark.parametrize("draw", [torch.zeros, seldom], ids=["all", "most"])
@pytest.mark.parametrize("name", KINDS)
def test_zero_gradients(compare, name, draw):
    options = {"draw": draw, "master_weights": True, "max_grad_norm": 1.0}
    compare(lambda device: optimize(name, [(bf16, bf16), (f32, f32)], device, **options))


def test_skipped_steps(compare):
    compare(
        lambda device: optimize(
            "adamw", [(bf16, bf16)], device, bad=(1, 3), master_weights=True, skip_nonfinite=True
        )
    )


def test_many_tensors(compare):
    sizes = [i % 37 for i in range(5000)]
    compare(lambda device: optimize("adamw", [(bf16, bf16)], device, sizes, 2, master_weights=True))


def test_accumulation_under_a_scale(compare):
    def run(device):
        params = [p.requires_grad_() for p in tensors(device, HALF)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        optim.upgrade(optimizer, master_weights=True)
        for step in range(3):
            for loss in range(3):
                optimizer.begin_backward()
                for param in params:
                    param.grad = torch.randn(param.shape).to(param.dtype).to(device)
                optimizer.end_backward(zero(device) + 2.0 ** (loss + step), True)
            optimizer.step()
        return {**everything(optimizer), **named(model=params)}

    compare(run)


# ---- streams -------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(device, stream):
    """Work of the block is queued on a stream of its own."""
    with torch.cuda.stream(stream) if device.type == "cuda" else contextlib.nullcontext():
        yield


def test_steps_beside_a_competing_stream(device):
    """Ten thousand on a GPU: whichever block ends last finds what the others left.

    The competitor keeps the memory busy and has last blocks of its own, in rows of other sizes.
    """
    on_gpu = device.type == "cuda"
    count, size, rows = (10_000, 4_000_003, 8) if on_gpu else (6, CHUNK + 3, 2)
    streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else [None, None]

    def start(sizes):
        torch.manual_seed(2)
        params = [p.requires_grad_() for p in tensors(device, (bf16, f32), 0, sizes)]
        optimizer = make("lamb", params, master_weights=True, max_grad_norm=1.0)
        gradients = [[torch.randn_like(param) for param in params] for _ in range(3)]
        return params, optimizer, gradients, torch.zeros(count, device=device)

    def step(i, params, optimizer, gradients, norms):
        for param, grad in zip(params, gradients[i % 3], strict=True):
            param.grad = grad
        optimizer.step()
        norms[i].copy_(optimizer.last_step.grad_norm)

    def run(*sides):
        sides = [start(sizes) for sizes in sides]
        for stream in filter(None, streams):
            stream.wait_stream(torch.cuda.current_stream())
        for i in range(count):
            for stream, side in zip(streams, sides, strict=False):
                with beside(device, stream):
                    step(i, *side)
        if on_gpu:
            torch.cuda.synchronize()
        for *_, norms in sides:
            assert torch.equal(norms, norms[:3].repeat(count)[:count])
        return [{**everything(side[1]), "norms": side[3]} for side in sides]

    ours, competitor = [size, 7, size // 3], [CHUNK * i + 1 for i in range(1, rows + 1)]
    (expected,) = run(ours)
    found, other = run(ours, competitor)
    assert_same_bits(found, expected)
    (expected,) = run(competitor)
    assert_same_bits(other, expected)


# ---- only a GPU ----------------------------------------------------------------------------------


def gradients(count, shapes, dtype=bf16):
    return [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(count)]


SHAPES = [(1000,), (3,), (300, 70), (CHUNK + 1,)]


def start(device):
    torch.manual_seed(1)
    params = [torch.randn(shape).to(bf16).to(device).requires_grad_() for shape in SHAPES]
    return params, make("adamw", params, master_weights=True, max_grad_norm=1.0)


def on_cpu(history):
    """Where the given gradients, step after step, lead on the CPU."""
    params, optimizer = start("cpu")
    for grads in history:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return snapshot(optimizer)


@pytest.mark.gpu
def test_new_gradient_addresses_behind_a_delayed_stream():
    """The host is a hundred steps ahead; no upload may overwrite one that is still to be read."""
    history = gradients(100, SHAPES)
    params, optimizer = start("cuda")
    on_device = [[grad.cuda() for grad in grads] for grads in history]
    for step, grads in enumerate(on_device):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        if step == 0:  # what the first step makes and loads does wait
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
        if step == 50:  # fewer uploads than the ring of staging buffers takes before it waits
            assert not torch.cuda.current_stream().query(), "the host is not ahead"
    assert_same_bits(snapshot(optimizer), on_cpu(history))


@pytest.mark.gpu
def test_steps_on_several_streams():
    history = gradients(9, SHAPES)
    params, optimizer = start("cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    previous = torch.cuda.current_stream()
    for step, grads in enumerate(history):
        stream = streams[step % 3]
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.cuda()
            optimizer.step()
        previous = stream
    torch.cuda.synchronize()
    assert_same_bits(snapshot(optimizer), on_cpu(history))


@pytest.mark.gpu
def test_capture_then_eager_steps_then_replay():
    """A captured step reads its own gradients' addresses, whatever eager steps did since."""
    history = gradients(8, SHAPES)
    params, optimizer = start("cuda")
    static = [grad.cuda() for grad in history[0]]

    def eager(grads):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.cuda()
        optimizer.step()

    def point_at_static():
        for param, grad in zip(params, static, strict=True):
            param.grad = grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager(history[0])
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    point_at_static()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 8):
        if step % 2:
            eager(history[step])
        else:
            for grad, new in zip(static, history[step], strict=True):
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)
        optimizer.step()
        assert not torch.cuda.current_stream().query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
    found_inf = zero("cuda")
    _core.C.scale([src], [dst], 2.0, found_inf)
    norm, _ = _core.C.l2norm([dst], False)
    assert float(found_inf) == 0
    assert float(dst[-1]) == 6
    assert bool((dst[:-1] == 2).all())
    assert float(norm) == pytest.approx((4 * (count - 1) + 36) ** 0.5, rel=1e-6)
    src[-1] = float("nan")
    _core.C.scale([src], [dst], 2.0, found_inf)
    assert float(found_inf) == 1


@pytest.fixture
def second():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", 1)


@pytest.mark.gpu
def test_another_device_than_the_current(second):
    src = torch.randn(5000, device=second)
    dst = torch.empty_like(src)
    _core.C.scale([src], [dst], 2.0, None)
    assert torch.equal(bits(dst), bits(src * 2))
    found = []
    for device in (torch.device("cpu"), second):
        torch.manual_seed(0)
        found.append(optimize("adamw", [(bf16, bf16)], device, master_weights=True))
    assert_same_bits(*found)


@pytest.mark.gpu
def test_batch_norms_on_another_device_than_the_current(second):
    x = torch.randn(4, 16, 9, 9).to(memory_format=torch.channels_last)
    arguments = (*[None] * 5, True, 0.1, 1e-5, True)
    found = []
    for device in (torch.device("cpu"), second):
        leaf = x.to(device).requires_grad_()
        y = nn_ops().batch_norm_act(leaf, *arguments)
        y.square().sum().backward()
        found.append({"y": y, "dx": leaf.grad})
    assert_same_bits(*found)
