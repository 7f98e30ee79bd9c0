"""The table of optimizers and dtypes that the tests share, and small helpers.

`bits.py`, which imports it, also runs on older versions of ampfuse.
"""

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import io
import itertools
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
from ampfuse import _core, amp, cpu_half_ops, hardware, optim
from ampfuse._schema import STORAGES
from ampfuse.amp import function_casts
from ampfuse.measuring import tensor_memory
from ampfuse.optim.masters import joined_master

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF_TYPES = {"O1": f16, "O2": f16, "O3": f16, "O4": bf16, "O5": bf16}
CHUNK = 32768  # kChunk of csrc/core/reduce.h

NEEDS_BF16 = pytest.mark.skipif(
    not hardware.cpu_has_bf16(), reason="BF16 is computed in FP32 on this CPU"
)

QUANTIZED = [name for name, storage in STORAGES.items() if storage.block]  # of state_dtype

# For the best instruction set of a CPU, all those that it has.
ISAS = {"scalar": ["scalar"], "avx2": ["scalar", "avx2"], "avx512": ["scalar", "avx2", "avx512"]}
ISAS |= {"neon": ["scalar", "neon"], "neon_bf16": ["scalar", "neon", "neon_bf16"]}

_OF_ADAM = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}
# Each option alone and all of them together.
_SETTINGS = {
    "sgd": {},
    "sgd-decay": {"weight_decay": 0.1},
    "sgd-momentum": {"momentum": 0.9},
    "sgd-dampening": {"momentum": 0.9, "dampening": 0.3},
    "sgd-nesterov": {"momentum": 0.9, "nesterov": True},
    "sgd-maximize": {"momentum": 0.9, "maximize": True},
    "sgd-all": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True},
    "adam": {},
    "adam-decay": {"weight_decay": 0.1},
    "adam-amsgrad": {"amsgrad": True},
    "adam-maximize": {"maximize": True},
    "adam-all": {**_OF_ADAM, "maximize": True},
    "adamw": {},
    "adamw-no-decay": {"weight_decay": 0.0},
    "adamw-amsgrad": {"weight_decay": 0.1, "amsgrad": True},
    "adamw-maximize": {"weight_decay": 0.1, "maximize": True},
    "adamw-all": {**_OF_ADAM, "maximize": True},
    "adagrad": {},
    "adagrad-decay": {"weight_decay": 0.1},
    "adagrad-lr-decay": {"lr_decay": 0.1},
    "adagrad-started": {"initial_accumulator_value": 0.5},
    "adagrad-maximize": {"maximize": True},
    "adagrad-all": {
        "weight_decay": 0.1,
        "lr_decay": 0.1,
        "initial_accumulator_value": 0.5,
        "eps": 1e-6,
        "maximize": True,
    },
    "lamb": {},
    "lamb-no-decay": {"weight_decay": 0.0},
    "lamb-nv": {"weight_decay": 0.0, "use_nvlamb": True},
    "lamb-l2": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "lamb-uncorrected": {"bias_correction": False},
    "lamb-unaveraged": {"grad_averaging": False},
    "lamb-all": {
        "betas": (0.8, 0.99),
        "eps": 1e-4,
        "weight_decay": 0.1,
        "bias_correction": False,
        "grad_averaging": False,
        "decoupled_weight_decay": False,
        "use_nvlamb": True,
    },
    "novograd": {},
    "novograd-decay": {"weight_decay": 0.1},
    "novograd-inside": {"weight_decay": 0.1, "reg_inside_moment": True},
    "novograd-inf": {"norm_type": float("inf")},
    "novograd-zero": {"init_zero": True},
    "novograd-uncorrected": {"bias_correction": False, "init_zero": True},
    "novograd-unaveraged": {"grad_averaging": False},
    "novograd-all": {
        "betas": (0.8, 0.9),
        "eps": 1e-4,
        "weight_decay": 0.1,
        "grad_averaging": False,
        "norm_type": float("inf"),
        "init_zero": True,
        "reg_inside_moment": True,
    },
    "lion": {},
    "lion-decay": {"weight_decay": 0.1},
    "lion-maximize": {"maximize": True},
    # Betas for which 16-bit gradients do not cancel: where a sum is zero but for rounding errors,
    # its sign is arbitrary.
    "lion-all": {"betas": (0.83, 0.97), "weight_decay": 0.1, "maximize": True},
}


def _optimizers():
    """Return the optimizer and its options by name."""
    kinds = {kind.lower(): kind for kind in reference.RULES}
    return {
        name: (kinds[name.partition("-")[0]], {"lr": 1e-2, **settings})
        for name, settings in _SETTINGS.items()
    }


OPTIMIZERS = _optimizers()

# One of each kind, for tests whose subject is not the formula. The first are torch's too.
TORCH_KINDS = ("sgd-all", "adam-all", "adamw", "adagrad-all")
NEVER_QUANTIZED = ("lamb", "novograd-decay")
KINDS = (*TORCH_KINDS, *NEVER_QUANTIZED, "lion-decay")

# How masters and states may be kept; see ampfuse.optim.Options.
MODES = {
    "split": {"master_weights": "split"},
    **{name: {"master_weights": True, "state_dtype": name} for name in QUANTIZED},
    "bf16": {"master_weights": True, "state_dtype": "bf16", "seed": 3},
    "stochastic": {"rounding": "stochastic", "seed": 2**32 - 1},
    "ema": {"master_weights": True, "ema_decay": 0.9},
    **{
        f"split {name} ema": {"master_weights": "split", "state_dtype": name, "ema_decay": 0.9}
        for name in QUANTIZED
    },
    "stochastic bf16 ema": {"rounding": "stochastic", "state_dtype": "bf16", "ema_decay": 0.9},
}


def has_mode(name, mode):
    """Whether an optimizer of `KINDS` has a mode of `MODES`."""
    quantizes = MODES.get(mode, {}).get("state_dtype") in QUANTIZED
    return not (quantizes and name in NEVER_QUANTIZED)


# (dtype of gradients, dtype of model weights). Autograd gives gradients of the weight's dtype; for
# others see set_grad.
DTYPES = tuple(itertools.product((f32, f16, bf16), (f32, f16, bf16)))


def short(dtype):
    return {f16: "f16", bf16: "bf16", f32: "f32", f64: "f64"}[dtype]


def make(name, params, **more):
    """Make ampfuse's optimizer of the table's row `name`."""
    kind, options = OPTIMIZERS[name]
    return getattr(optim, kind)(params, **{**options, **more})


def make_torch(name, params, **more):
    """Make torch's optimizer of the same name, or the rule in FP32 where torch has none."""
    kind, options = OPTIMIZERS[name]
    cls = getattr(torch.optim, kind, None)
    options = {**options, **more}
    return cls(params, **options) if cls else Plain(params, reference.RULES[kind], options)


class Plain(torch.optim.Optimizer):
    """A rule of reference.py as an optimizer, tensor by tensor and in the parameters' type."""

    def __init__(self, params, rule, options):
        self.rule = rule
        self.names = inspect.signature(rule).parameters
        defaults = {name: parameter.default for name, parameter in self.names.items()}
        super().__init__(params, {k: options.get(k, default) for k, default in defaults.items()})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            options = {name: group[name] for name in self.names}
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("step", torch.tensor(0.0))
                    param.copy_(self.rule(**options).step(param, param.grad, state))
        return loss


# --- where tests run ------------------------------------------------------------------------------

GPU = pytest.param("cuda", marks=pytest.mark.gpu)

# In emulation in CI alone: of kernels that tests/cpp compares in the quick tests, and that are many
# times slower there.
slow_in_emulation = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow), GPU], indirect=True
)

# Inductor compiles C++.
compilers = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)

_EMULATED = Path(__file__).parent / f"_C_emulated{sysconfig.get_config_var('EXT_SUFFIX')}"
_modules = {}


def emulated_module():
    """Load the extension in which CPU tensors go to the CUDA kernels, on the host (host_cuda/)."""
    if not _EMULATED.exists():
        pytest.skip("the emulated CUDA module is built with AMPFUSE_HOST_EMULATION=ON only")
    if "emulated" not in _modules:
        spec = importlib.util.spec_from_file_location("_C_emulated", _EMULATED)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _modules["emulated"] = module
    return _modules["emulated"]


def nn_ops():
    """Return the fused layers' operators, of the module in force."""
    in_emulation = _core.C is _modules.get("emulated")
    return torch.ops.ampfuse_emulated if in_emulation else torch.ops.ampfuse


def _apex_modules():
    from ampfuse.compat.apex.install import EXTENSIONS

    return {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("apex", *EXTENSIONS)}


@contextlib.contextmanager
def clean_apex_names():
    """What a block installs under apex's names, and the state of amp, end with it."""
    from ampfuse.compat import apex

    before = _apex_modules()
    state = apex.amp._amp_state
    try:
        yield
    finally:
        if hasattr(state, "handle"):
            state.handle._deactivate()
        function_casts.restore_registered()
        state.hard_override = state.allow_incoming_model_not_fp32 = False
        for name in _apex_modules():
            del sys.modules[name]
        sys.modules.update(before)


# --- parameters and steps -------------------------------------------------------------------------


def parameters(shapes, *dtypes, device="cpu"):
    """Return a parameter of each shape; the dtypes take turns."""
    pairs = zip(shapes, itertools.cycle(dtypes or (f32,)), strict=False)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape, dtype in pairs]


def integers(shape, seed, limit):
    """Integers from -limit to limit, FP32, from a linear congruence."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 40503 + seed * 30011 + 7) % 8191 % (2 * limit + 1) - limit
    return values.reshape(shape).to(f32)


def fractions(shape, seed):
    """FP32 values in (-1/2, 1/2) with more digits than half precision holds."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 2654435761 + seed * 97) % 1048573 - 524286
    return values.reshape(shape).to(f32) / 2**20


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def weights(params):
    return [param.detach().clone() for param in params]


@torch.no_grad()
def copy_weights(params, into):
    for param, other in zip(params, into, strict=True):
        other.copy_(param)


def give_gradients(params, step=None, scale=1.0):
    """Set random gradients times `scale`, and return them without it. With `step` they depend on it
    alone."""
    generator = None if step is None else torch.Generator().manual_seed(step)
    gradients = []
    for param in params:
        gradients.append(torch.randn(param.shape, generator=generator).to(param))
        param.grad = gradients[-1] * scale
    return gradients


def train(optimizer, steps=(0,)):
    """Make `steps` of `optimizer`, with gradients that depend on the number of the step alone."""
    for step in steps:
        give_gradients(params_of(optimizer), step)
        optimizer.step()


def set_grad(param, grad):
    """Set ``param.grad``, whatever the gradient's dtype."""
    if grad is not None and grad.dtype != param.dtype:
        param.grad = None
        param.grad_dtype = None
    param.grad = grad


def can_mix_dtypes():
    """Whether this torch lets a gradient have another dtype than its parameter."""
    return hasattr(torch.Tensor, "grad_dtype")


@contextlib.contextmanager
def refused(optimizer, message, error=ValueError):
    """Assert that the block raises, and that it changes nothing."""

    def state():
        return copy.deepcopy((optimizer.state_dict(), snapshot(optimizer)))

    saved, before = state()
    with pytest.raises(error, match=message):
        yield
    found, after = state()
    assert_same(found["state"], saved["state"])
    assert_same_bits(after, before)
    assert repr(found["param_groups"]) == repr(saved["param_groups"])  # NaN is NaN here


def losses_at(level, model, make_optimizer, batches, loss_of, **options):
    """Train `model` by amp at `level` on `batches`; return the losses."""
    optimizer = make_optimizer(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch).float()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_whole_masters(optimizer):
    """Return the state dict, with ``master_param`` for the remainders of split masters."""
    state = optimizer.state_dict()
    params = params_of(optimizer)
    for i, values in state["state"].items():
        if isinstance(values, dict) and "master_remainder" in values:
            remainder = values.pop("master_remainder")
            values["master_param"] = joined_master(params[i], remainder)
    return state


def history_of_norms(log_mean, log_variance=0.0):
    """Return the step history after a hundred applied steps whose norms have this mean and variance
    of their logarithms."""
    return torch.tensor([0.0] * 7 + [100, log_mean, log_variance], dtype=f64)


def through_a_file(state, weights_only=True):
    """Return `state` after it was saved and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def most_allocated(call):
    """Return the peak of the bytes of tensors that `call` makes, and its result."""
    with tensor_memory(torch.device("cpu")) as peak:
        result = call()
    return int(peak.mib * 2**20), result


# --- bits and comparisons -------------------------------------------------------------------------


def bit_pattern(tensor):
    """Return the tensor's bits as integers, so that -0 differs from 0 and NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
    return tensor.detach().cpu().contiguous().clone().view(integer[tensor.element_size()])


def digest(found):
    """Return the SHA-256 of a nested structure of tensors and values."""
    hashed = hashlib.sha256()
    for key, value in _flat(found, ""):
        if isinstance(value, torch.Tensor):
            hashed.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            hashed.update(bit_pattern(value).numpy().tobytes())
        else:
            hashed.update(f"{key} {value!r}".encode())
    return hashed.hexdigest()


def _flat(value, key):
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from _flat(value[name], f"{key}/{name}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _flat(item, f"{key}/{i}")
    else:
        yield key, value


def same_bits(a, b):
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(bit_pattern(a), bit_pattern(b))


def everything(optimizer):
    """Return every tensor that a step of `optimizer` may write, by name."""
    tensors = {}
    i = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors[f"param {i}"] = param
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key} {i}"] = value
            i += 1
    return tensors


def snapshot(optimizer):
    return {key: value.detach().clone() for key, value in everything(optimizer).items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    different = [key for key in found if not same_bits(found[key], expected[key])]
    assert not different, f"bits differ in {different}"


def assert_same(a, b):
    """Assert equal values in two nested structures of tensors, on whatever device."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b.to(a.device))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def assert_rounded(name, found, right, error, size):
    """Assert that `found` is `right` (float64) rounded once, up to `error`, that of FP32
    arithmetic.

    Arguments:
        size: that of the terms, which may cancel.
    """
    type_of = torch.finfo(found.dtype)
    half = type_of.eps / 2 if found.dtype != torch.float32 else 0.0
    torch.testing.assert_close(
        found.detach().double(),
        right.detach(),
        rtol=half + error,
        atol=error * size + type_of.smallest_normal * type_of.eps,
        msg=lambda text: f"{name}: {text}",
    )


# --- half types on the CPU ------------------------------------------------------------------------


def assert_torchs_own(call):
    """Assert that `call` gives tensors of the same bits and layout with torch's own kernels, or the
    same error."""
    answers = []
    for on in (True, False):
        with cpu_half_ops(on):
            try:
                answers.append(call())
            except RuntimeError as error:
                answers.append(str(error))
    ours, torchs = answers
    if isinstance(torchs, str):
        assert ours == torchs
        return
    for a, b in zip(ours, torchs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            options = {"rtol": 0, "atol": 0, "equal_nan": True, "check_stride": True}
            torch.testing.assert_close(a, b, **options)


class Convolution:
    """The arguments of a convolution, drawn for shapes of x and weight, and its two passes."""

    def __init__(
        self, x, w, stride=1, padding=0, dilation=1, bias=False, transposed=False, groups=1,
        output_padding=0, *, dtype=torch.bfloat16, channels_last=True, draw=torch.randn,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.dtype = dtype

        def image(shape):
            tensor = draw(shape).to(dtype)
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            return tensor.contiguous(memory_format=formats[len(shape)]) if channels_last else tensor

        self.x, self.w = image(x), image(w)
        filters = w[1] * groups if transposed else w[0]
        self.bias = draw((filters,)).to(dtype) if bias else None
        each = (stride, padding, dilation, output_padding)
        each = [[v] * (len(x) - 2) if isinstance(v, int) else list(v) for v in each]
        self.options = (*each[:3], transposed, each[3], groups)
        with contextlib.suppress(RuntimeError):  # of shapes that torch refuses
            self.dy = image(self.forward(torch.float64).shape)

    def forward(self, dtype=None):
        tensors = (self.x, self.w, self.bias)
        x, w, bias = (None if t is None else t.to(dtype or self.dtype) for t in tensors)
        return torch.convolution(x, w, bias, *self.options)

    def backward(self, dtype=None, wanted=(True, True, True)):
        """The gradients of x, weight and bias in `dtype`; None: in their own types."""
        dy, x, w = (t if dtype is None else t.to(dtype) for t in (self.dy, self.x, self.w))
        sizes = None if self.bias is None else list(self.bias.shape)
        mask = [*wanted[:2], wanted[2] and sizes is not None]
        return torch.ops.aten.convolution_backward(dy, x, w, sizes, *self.options, mask)

    def results(self, dtype=None):
        return [self.forward(dtype), *self.backward(dtype)]

    def torchs(self, dtype=None):
        with cpu_half_ops(False):
            return self.results(dtype)


# --- a GPU ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def never_waiting():
    """A block in which it is an error that the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
