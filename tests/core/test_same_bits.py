"""Identical bits from every instruction set, number of threads, floating-point mode and backend.

One scenario with every seam in it is run in all these ways, and all of its outputs are compared:
parameters, masters, moments, model weights, step counts, norms, clip coefficients, sums. So each
way in from Python is seen; every option, storage type and operation, test_cpp.py compares. The
instruction set is chosen once per process: this one has the widest, children the others.
"""

import itertools
import json

import pytest
import torch

from ampfuse import _core
from cases import (
    CHUNK,
    ISAS,
    KINDS,
    assert_same_bits,
    bf16,
    can_mix_dtypes,
    digest,
    emulated_module,
    f16,
    f32,
    make,
    nn_ops,
    set_grad,
    snapshot,
)
from programs import python

TILE = 2048  # kTile
WIDEST = 16  # elements of the widest vector
DTYPES = (f32, f16, bf16)
SIZES = [*range(3 * WIDEST + 2), TILE - 1, TILE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17]
# Half of it is large enough for a CPU to store model weights past its caches: whole chunks of them,
# aligned, as every fourth of Values is.
LARGE_TABLE = [CHUNK if i in (3, 7, 11) else 1 for i in range(1040)]


class Values:
    """Random tensors of any size, dtype and alignment, subnormals among them."""

    def __init__(self, device, seed=0):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0

    def __call__(self, size, dtype, spread=False):
        self.count += 1
        offset = self.count % 4  # elements off alignment, in a different way for each tensor
        values = torch.randn(size + offset, generator=self.generator)
        if spread and self.count % 3 == 0:  # from subnormal to large
            values *= 10.0 ** (torch.randint(-44, 2, values.shape, generator=self.generator))
        return values.to(self.device, dtype)[offset:]

    def gradients(self, params, step):
        """The gradients of a step: an overflow in the second, zeros in the fourth.

        Some rows have none and keep their own step count; others have mostly zeros, like an
        embedding whose rows, here 64 wide, are mostly unused.
        """
        row = []
        for i, param in enumerate(params):
            dtype = DTYPES[i // 3 % 3] if can_mix_dtypes() else param.dtype
            grad = self(len(param), dtype, spread=True)
            if step == 1 and i == len(params) // 2 and len(grad):
                grad[-1] = torch.inf
            if step == 3:
                grad.zero_()
            elif (i + step) % 8 == 5:
                grad *= torch.arange(len(grad), device=self.device) // 64 % 5 == 0
            row.append(None if (i + step) % 8 == 4 else grad)
        return row


def steps(name, sizes, device, count=4):
    """Inputs now, steps later, over tensors of all dtypes; the first half has masters."""
    values = Values(device)
    params = [values(n, DTYPES[i % 3]).requires_grad_() for i, n in enumerate(sizes)]
    grads = [values.gradients(params, step) for step in range(count)]
    half = len(params) // 2
    optimizers = [
        make(name, params[:half], max_grad_norm=1.0, master_weights=True),
        make(name, params[half:], max_grad_norm=1.0),
    ]

    def run():
        tensors = {}
        for step, row in enumerate(grads):
            for param, grad in zip(params, row, strict=True):
                set_grad(param, grad)
            for i, optimizer in enumerate(optimizers):
                optimizer.step()
                tensors[f"{name} {i} norm {step}"] = optimizer.last_step.grad_norm
                clip = optimizer._rows.table.inspector.state_field("clip_coef").clone()
                tensors[f"{name} {i} clip {step}"] = clip
        for i, optimizer in enumerate(optimizers):
            tensors |= {f"{name} {i} {key}": value for key, value in snapshot(optimizer).items()}
        return tensors

    return run


def first_half_of_larc(device):
    """Which also measures parameters; of a step on lists, whose rest `steps` has."""
    values = Values(device, 4)
    grads, params = (
        [values(n, DTYPES[(i + shift) % 3], spread=True) for i, n in enumerate(SIZES)]
        for shift in (0, 1)
    )

    def run():
        results = {}
        for clip in (False, True):
            hyper = {"lr": 0.1, "weight_decay": 0.01, "layerwise": 1, "clipped_ratio": clip}
            hyper |= {"trust_coefficient": 0.02, "trust_eps": 1e-8}
            lists = grads, params, [], [], grads, torch.zeros(len(grads), device=device)
            _core.C.step("layerwise", *lists, None, None, hyper, None, None)
            results |= {f"layerwise {clip} {i}": t.clone() for i, t in enumerate(grads)}
        return results

    return run


def batch_norms(device):
    """Passes over many rows and over many channels, with sums of gradients that are subnormal."""
    layers = []
    for dtype, shape in itertools.product(DTYPES, ((4, 41, 24, 24), (2, 520, 3, 3))):
        torch.manual_seed(6)
        x, residual, dy = (torch.randn(shape).to(dtype) for _ in range(3))
        images = [x, residual, (1e-40 * dy.float()).to(dtype)]
        images = [t.contiguous(memory_format=torch.channels_last).to(device) for t in images]
        layers.append((*images, torch.rand(3, shape[1]).to(device).unbind()))

    def run():
        norm = nn_ops()
        tensors = {}
        for i, (x, residual, dy, (weight, *running)) in enumerate(layers):
            running = [t.clone() for t in running]
            batches = torch.tensor(6, device=device)
            mean, invstd = norm.batch_norm_statistics(x, *running, batches, 0.1, 1e-5)
            y, mask = norm.batch_norm_apply(x, residual, mean, invstd, weight, None, True)
            sums, centered, dweight, g = norm.batch_norm_reduce(dy, x, mean, invstd, mask, True)
            count = x.numel() // x.shape[1]
            none = mask.new_empty(0)
            dx = norm.batch_norm_dx(g, none, x, mean, invstd, weight, sums, centered, count)
            results = (*running, batches, mean, invstd, y, mask, sums, centered, dweight, g, dx)
            tensors |= {f"{i} {k}": t for k, t in enumerate(results)}
        return tensors

    return run


def scenario(threads=1, flush=False, device="cpu"):
    """All outputs, where this thread may flush subnormals to zero. Inputs are made before."""
    parts = [steps(name, SIZES, device) for name in KINDS]
    parts += [steps("adamw", [i % 5 for i in range(5000)], device, count=3)]
    parts += [steps(name, LARGE_TABLE, device, count=3) for name in ("adamw", "lamb")]
    parts += [first_half_of_larc(device), batch_norms(device)]
    tensors = {}
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)
    try:
        for i, part in enumerate(parts):
            tensors |= {f"{i}: {key}": value for key, value in part().items()}
    finally:
        torch.set_flush_denormal(False)
    return tensors


def digests(found):
    return {key: digest(value) for key, value in found.items()}


@pytest.fixture(scope="module")
def expected():
    return scenario()


@pytest.mark.parametrize("flush", [pytest.param(False, marks=pytest.mark.slow), True])
def test_threads_and_floating_point_mode_change_no_bits(expected, flush):
    assert_same_bits(scenario(threads=2, flush=flush), expected)


SLOW = {"scalar": pytest.mark.slow}  # test_bits.py has its kernels one by one
NARROWER = ISAS[_core.C.cpu_isa()][:-1]


@pytest.mark.parametrize("isa", [pytest.param(isa, marks=SLOW.get(isa, ())) for isa in NARROWER])
def test_instruction_sets_give_the_same_bits(expected, isa):
    run = python(__file__, AMPFUSE_CPU_ISA=isa)
    assert run.returncode == 0, run.stderr
    used, hashes = json.loads(run.stdout)
    assert used == isa
    different = [key for key, value in digests(expected).items() if hashes[key] != value]
    assert not different, f"bits differ in {different}"


def test_an_unknown_instruction_set_is_refused():
    code = "import torch, ampfuse; ampfuse.ops.l2norm([torch.ones(3)])"
    run = python("-c", code, AMPFUSE_CPU_ISA="sse9")
    assert run.returncode != 0
    assert "AMPFUSE_CPU_ISA is 'sse9'; set it to scalar, avx2, avx512, neon or" in run.stderr


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("emulated", marks=pytest.mark.slow),  # test_cpp.py has its kernels one by one
        *(pytest.param(cuda, marks=pytest.mark.gpu) for cuda in ("cuda:0", "cuda:1")),
    ],
)
def test_the_cuda_kernels_give_the_same_bits(expected, device, monkeypatch):
    """The second GPU is not the current one."""
    if device == "emulated":
        monkeypatch.setattr(_core, "C", emulated_module())
        device = "cpu"
    elif torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    assert_same_bits(scenario(device=device), expected)


def test_a_step_depends_on_nothing_but_its_inputs():
    """A tensor's result is the same alone and among 1,000 others, without clipping."""
    alone = torch.randn(100)
    among = alone.clone()
    others = [torch.randn(i % 5).requires_grad_() for i in range(500)]
    alone.requires_grad_()
    among.requires_grad_()
    for name in KINDS:
        first = make(name, [alone])
        second = make(name, [*others, among, *[torch.randn(3).requires_grad_() for _ in others]])
        for _ in range(2):
            for group in second.param_groups:
                for param in group["params"]:
                    param.grad = torch.randn_like(param)
            alone.grad = among.grad.clone()
            first.step()
            second.step()
        state = first.state[alone]
        assert_same_bits({"p": alone, **state}, {"p": among, **second.state[among]})


if __name__ == "__main__":
    print(json.dumps([_core.C.cpu_isa(), digests(scenario(threads=2, flush=True))]))
