"""Identical bits from every instruction set, number of threads, floating-point mode and backend.

One scenario with every seam in it is run in all these ways, and all of its outputs are compared:
parameters, masters, moments, model weights, step counts, norms, clip coefficients, results of ops.
The instruction set is chosen once per process: this one has the widest, children the others.
"""

import functools
import hashlib
import itertools
import json

import pytest
import torch

import amp_c_calls as amp_c
from ampfuse import _core, ops, optim
from cases import (
    CODED,
    KINDS,
    OPTIMIZERS,
    assert_same_bits,
    bf16,
    bits,
    can_mix_dtypes,
    f16,
    f32,
    make,
    set_grad,
    snapshot,
)
from conftest import nn_ops
from programs import python
from trainings import MODES as MEMORY_MODES
from trainings import NOT_PACKED

CHUNK = 32768  # kChunk of csrc/core/reduce.h
TILE = 2048  # kTile
WIDEST = 16  # elements of the widest vector
DTYPES = (f32, f16, bf16)
SIZES = [*range(3 * WIDEST + 2), TILE - 1, TILE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17]
# Half of it is large enough for a CPU to store model weights past its caches: whole chunks of them,
# aligned, as every fourth of Values is.
LARGE_TABLE = [CHUNK if i in (3, 7, 11) else 1 for i in range(1040)]
ISAS = ("scalar", "avx2", "avx512")
THIS_ISA = ISAS.index(_core.C.cpu_isa())
# threads, whether this thread flushes subnormals to zero
MODES = {"1 thread": (1, False), "2 threads": (2, False), "2 threads, flushing": (2, True)}
# How a tensor is shared out is decided before the instruction set matters, so of the narrower ones
# the first and the last mode say enough.
MODES_OF_CHILDREN = ("1 thread", "2 threads, flushing")


class Values:
    """Random tensors of any size, dtype and alignment, subnormals among them."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0

    def __call__(self, size, dtype, spread=False):
        self.count += 1
        offset = self.count % 4  # elements off alignment, in a different way for each tensor
        values = torch.randn(size + offset, generator=self.generator)
        if spread and self.count % 3 == 0:  # from subnormal to large
            values *= 10.0 ** (torch.randint(-44, 2, values.shape, generator=self.generator))
        return values.to(dtype)[offset:]


def steps(
    name,
    sizes,
    count=3,
    values=None,
    group=None,
    around=lambda optimizer: optimizer,
    modes=({"master_weights": True}, {}),
):
    """Inputs now, steps later: `count` steps of an optimizer over tensors of all dtypes.

    `group` are options that only a parameter group has, `modes` those of the first and of the
    second half of the parameters.
    """
    values = values or Values()
    params = [values(n, DTYPES[i % 3]).requires_grad_() for i, n in enumerate(sizes)]
    grads = []
    for _ in range(count):
        row = []
        for i, param in enumerate(params):
            dtype = DTYPES[i // 3 % 3] if can_mix_dtypes() else param.dtype
            row.append(None if i % 11 == 10 else values(len(param), dtype, spread=True))
        grads.append(row)
    half = len(params) // 2
    optimizers = [
        around(make(name, [{"params": those, **(group or {})}], max_grad_norm=1.0, **mode))
        for those, mode in zip((params[:half], params[half:]), modes, strict=True)
    ]

    def run():
        found = {}
        for step, row in enumerate(grads):
            for param, grad in zip(params, row, strict=True):
                set_grad(param, grad)
            for i, optimizer in enumerate(optimizers):
                optimizer.step()
                found[f"{name} {i} norm {step}"] = optimizer.last_step.grad_norm
                clip = optimizer._table.inspector.state_field("clip_coef").clone()
                found[f"{name} {i} clip {step}"] = clip
        for i, optimizer in enumerate(optimizers):
            found |= {f"{name} {i} {key}": value for key, value in snapshot(optimizer).items()}
        return found

    return run


def accumulation():
    """Passes of scale_loss: folded into FP32, unscaled, inspected, clipped in the step."""
    values = Values(1)
    params = [values(n, bf16 if n % 2 else f16).requires_grad_() for n in SIZES]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optim.upgrade(optimizer, master_weights=True)
    passes = [[values(len(p), p.dtype, spread=True) for p in params] for _ in range(3)]

    def run():
        for scale, grads in zip((4.0, 3.0, 0.5), passes, strict=True):
            optimizer.begin_backward()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.end_backward(torch.tensor(scale), True)
        norm = optimizer.clip_next_step(0.1)
        optimizer.step()
        models = {f"model {i}": param.detach().clone() for i, param in enumerate(params)}
        return {"accumulated norm": norm, **models, **snapshot(optimizer)}

    return run


def operations():
    values = Values(2)
    lists = [[values(n, t, spread=True) for n in SIZES for t in DTYPES] for _ in range(3)]
    x, y, _ = lists
    out = [values(n, t) for n in SIZES for t in (bf16, f32, f16)]

    def run():
        found, flag = {}, torch.zeros(())
        norm, norms = ops.l2norm(x, per_tensor=True)
        found |= {"norm": norm, "norms": norms, "flag": flag}
        for name, op in {
            "scale": lambda: ops.scale(x, out, 1 / 3, flag),
            "axpby": lambda: ops.axpby(x, y, out, 1 / 3, -7.0, flag),
            "unscale": lambda: ops.unscale(x, out, torch.tensor(1 / 3), flag),
            "copy": lambda: ops.copy(x, out),
        }.items():
            op()
            found |= {f"{name} {i}": tensor.clone() for i, tensor in enumerate(out)}
        return found

    return run


def options():
    """Every option of every optimizer, LARC among them, on a few sizes."""
    sizes = [0, 1, 15, 16, 17, 255, TILE + 5, CHUNK + 3]
    parts = [steps(name, sizes, values=Values(3)) for name in OPTIMIZERS]
    for name, group in {
        "sgd-all": {"wd_after_momentum": True},
        "adam-all": {"bias_correction": False},
        "adagrad-all": {"decoupled_weight_decay": True},
    }.items():
        parts.append(steps(name, sizes, values=Values(3), group=group))
    for name, clip in itertools.product(("sgd-all", "adamw-all", "adagrad-all"), (False, True)):
        larc = functools.partial(optim.LARC, clip=clip)
        parts.append(steps(name, sizes, values=Values(3), around=larc))
    return parts


def memory_modes():
    """Blocks of coded states end within and beside vectors, tiles and chunks."""
    sizes = [1, 17, 4095, 4096, 4097, 4111, 40 * 128 - 1, CHUNK - 1, CHUNK + 1, CHUNK + 130]
    coded = [f"split {name} ema" for name in CODED]
    parts = []
    for name in KINDS:
        for mode in ["split"] if name in NOT_PACKED else coded:
            modes = [MEMORY_MODES[mode], MEMORY_MODES["stochastic bf16 ema"]]
            parts.append(steps(name, [*sizes, *sizes], values=Values(5), modes=modes))
    return parts


def functions_of_lists():
    """amp_C's optimizers, and LARC in front of another's step."""
    torch.manual_seed(4)
    calls = {}
    for name in amp_c.NAMES:
        lists, numbers = amp_c.arguments(name, "cpu")
        calls[name] = amp_c.of_all_types(name, lists), numbers
    values = Values(4)
    grads, params = ([values(n, t, spread=True) for n in SIZES for t in DTYPES] for _ in range(2))

    def run():
        found = {}
        for name, (lists, numbers) in calls.items():
            amp_c.call(name, amp_c.flag(0, "cpu"), lists, numbers)
            for k, tensors in enumerate([*lists, [t for t in numbers if torch.is_tensor(t)]]):
                found |= {f"{name} {k} {i}": t for i, t in enumerate(tensors)}
        for clip in (False, True):
            _core.C.layerwise(grads, params, 0.1, None, 0.01, 0.02, 1e-8, clip)
            found |= {f"layerwise {clip} {i}": t.clone() for i, t in enumerate(grads)}
        return found

    return run


def batch_norms():
    """Passes over many rows and over many channels, with sums of gradients that are subnormal."""
    layers = []
    for dtype, shape in itertools.product(DTYPES, ((4, 41, 24, 24), (2, 520, 3, 3))):
        torch.manual_seed(6)
        x, residual, dy = (torch.randn(shape).to(dtype) for _ in range(3))
        images = [x, residual, (1e-40 * dy.float()).to(dtype)]
        images = [t.contiguous(memory_format=torch.channels_last) for t in images]
        layers.append((*images, torch.rand(3, shape[1]).unbind()))

    def run():
        norm = nn_ops()
        found = {}
        for i, (x, residual, dy, (weight, *running)) in enumerate(layers):
            running = [t.clone() for t in running]
            mean, invstd = norm.batch_norm_statistics(x, *running, 0.1, 1e-5)
            y, mask = norm.batch_norm_apply(x, residual, mean, invstd, weight, None, True)
            sums, centered, g = norm.batch_norm_reduce(dy, x, mean, mask, True)
            count = x.numel() // x.shape[1]
            none = mask.new_empty(0)
            dx = norm.batch_norm_dx(g, none, x, mean, invstd, weight, sums, centered, count)
            results = (*running, mean, invstd, y, mask, sums, centered, g, dx)
            found |= {f"{i} {k}": t for k, t in enumerate(results)}
        return found

    return run


def scenario(threads, flush):
    """All outputs. Inputs are made in the standard mode, whatever is asked for."""
    parts = [steps(name, SIZES) for name in KINDS]
    parts += [*options(), *memory_modes(), functions_of_lists()]
    parts += [steps("adamw", [i % 5 for i in range(5000)], count=2)]
    parts += [steps(name, LARGE_TABLE, count=2) for name in ("adamw", "lamb")]
    parts += [accumulation(), operations(), batch_norms()]
    found = {}
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)
    try:
        for i, part in enumerate(parts):
            found |= {f"{i}: {key}": value for key, value in part().items()}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
    return found


def digests(found):
    return {k: hashlib.sha1(bits(v).numpy().tobytes()).hexdigest() for k, v in found.items()}


@pytest.fixture(scope="module")
def expected():
    return scenario(1, False)


BOTH = "2 threads, flushing"


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=() if m == BOTH else pytest.mark.slow) for m in MODES]
)
def test_threads_and_floating_point_mode(expected, mode):
    assert_same_bits(scenario(*MODES[mode]), expected)


def test_the_instruction_set_of_this_process_can_be_asked_for():
    code = "from ampfuse import _core; print(_core.C.cpu_isa())"
    isa = _core.C.cpu_isa()
    assert python("-c", code, AMPFUSE_CPU_ISA=isa).stdout == f"{isa}\n"


SLOW = {"scalar": pytest.mark.slow}  # test_bits.py has its kernels one by one


@pytest.mark.parametrize("isa", [pytest.param(i, marks=SLOW.get(i, ())) for i in ISAS[:THIS_ISA]])
def test_instruction_sets(expected, isa):
    run = python(__file__, AMPFUSE_CPU_ISA=isa)
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert printed.pop("isa") == isa
    assert set(printed) == set(MODES_OF_CHILDREN)
    for mode, found in printed.items():
        different = [key for key, digest in digests(expected).items() if found[key] != digest]
        assert not different, f"{mode}: bits differ in {different}"


def test_emulated_cuda(expected, emulated):
    assert_same_bits(scenario(1, False), expected)


def test_an_unknown_instruction_set_is_refused():
    code = "import torch, ampfuse; ampfuse.ops.l2norm([torch.ones(3)])"
    run = python("-c", code, AMPFUSE_CPU_ISA="sse9")
    assert run.returncode != 0
    assert "AMPFUSE_CPU_ISA is 'sse9'; set it to scalar, avx2 or avx512" in run.stderr


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
        found = first.state[alone]
        assert_same_bits({"p": alone, **found}, {"p": among, **second.state[among]})


if __name__ == "__main__":
    found = {mode: digests(scenario(*MODES[mode])) for mode in MODES_OF_CHILDREN}
    print(json.dumps({"isa": _core.C.cpu_isa(), **found}))
