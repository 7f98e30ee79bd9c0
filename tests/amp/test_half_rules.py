"""csrc/torch/half_rules.cpp: under autocast the CPU chooses the types that a GPU does."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampfuse
from ampfuse import amp, half_ops
from ampfuse._core import EXTENSION as _C
from cases import HALF_TYPES, LEVELS, bf16, compilers, f16, f32, f64

aten, has_kernel = torch.ops.aten, torch._C._dispatch_has_kernel_for_dispatch_key


@pytest.fixture(autouse=True)
def torchs_afterwards():
    yield
    half_ops.reset()


def some(*shape):
    """Values in (0, 1), for functions of any domain."""
    return torch.rand(*shape) * 0.5 + 0.25


def cell(name):
    def call(x):
        h = (some(4, 3),) * 2 if name == "lstm_cell" else some(4, 3)
        gates = {"lstm_cell": 12, "gru_cell": 9}.get(name, 3)
        out = getattr(torch, name)(x, h, some(gates, 4), some(gates, 3))
        return out[0] if name == "lstm_cell" else out

    return call


def recurrent(kind, packed):
    def call(x):
        x = x[None].expand(2, 4, 4)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 2, 1, 1]))
        out, _ = kind(4, 3)(x)
        return out.data

    return call


def with_itself(function, x):
    return function(x, x)


def images(x, dims):
    return x.reshape(1, 1, *{1: (16,), 2: (4, 4), 3: (4, 2, 2)}[dims])


def resized(mode, dims, **options):
    return lambda x: F.interpolate(images(x, dims), 8, mode=mode, **options)


UNSET = [1], [0], [1]
# Calls by the names of torch's operators, of a half tensor of 4 x 4 in (0, 1), with FP32 weights
# where there are any. These are the lists of autocast on a GPU.
HALF = {
    **{
        f"conv{dims}d": lambda x, d=dims: getattr(F, f"conv{d}d")(
            images(x, d), some(1, 1, *[2] * d)
        )
        for dims in (1, 2, 3)
    },
    **{
        f"conv_transpose{dims}d.input": lambda x, d=dims: getattr(F, f"conv_transpose{d}d")(
            images(x, d), some(1, 1, *[2] * d)
        )
        for dims in (1, 2, 3)
    },
    "conv_tbc": lambda x: torch.conv_tbc(x[None], some(1, 4, 2), some(2)),
    "convolution": lambda x: aten.convolution(
        images(x, 1), some(1, 1, 2), None, *UNSET, False, [0], 1
    ),
    "_convolution": lambda x: aten._convolution(
        images(x, 1), some(1, 1, 2), None, *UNSET, False, [0], 1, False, False, False, False
    ),
    "_convolution.deprecated": lambda x: aten._convolution.deprecated(
        images(x, 1), some(1, 1, 2), None, *UNSET, False, [0], 1, False, False, False
    ),
    "prelu": lambda x: F.prelu(x, some(1)),
    "addmm": lambda x: torch.addmm(some(4), x, some(4, 4)),
    "addmv": lambda x: torch.addmv(some(4), x, some(4)),
    "addr": lambda x: torch.addr(some(4, 4), x[0], some(4)),
    "matmul": lambda x: x @ some(4, 4),
    "einsum": lambda x: torch.einsum("ij,jk->ki", x, some(4, 4)),
    "mm": lambda x: x.mm(some(4, 4)),
    "mv": lambda x: x.mv(some(4)),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, some(4, 4)),
    "linear": lambda x: F.linear(x, some(2, 4)),
    "addbmm": lambda x: torch.addbmm(some(4, 4), x[None], some(1, 4, 4)),
    "baddbmm": lambda x: torch.baddbmm(some(1, 4, 4), x[None], some(1, 4, 4)),
    "bmm": lambda x: torch.bmm(x[None], some(1, 4, 4)),
    "chain_matmul": lambda x: aten.chain_matmul([x, some(4, 4), some(4, 4)]),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, some(4, 4), some(4, 4)]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x[None], some(1, 4, 4), some(1, 4, 4)
    ),
    **{name: cell(name) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")},
    # By cuDNN's rule.
    **{
        f"{kind.__name__}{', packed' if packed else ''}": recurrent(kind, packed)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for packed in (False, True)
    },
    "RNN with relu": recurrent(lambda *size: nn.RNN(*size, nonlinearity="relu"), False),
}
UNARY = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"
PAIRS = "cosine_similarity kl_div l1_loss smooth_l1_loss huber_loss mse_loss poisson_nll_loss"
DIMENSION = "prod.dim_int softmax.int log_softmax.int cumprod cumsum sum.dim_IntList logsumexp"
FLOAT = {
    **{name: getattr(torch, name) for name in UNARY.split()},
    **{name: partial(with_itself, getattr(F, name)) for name in PAIRS.split()},
    **{
        name: lambda x, name=name: getattr(torch, name.partition(".")[0])(x, 0)
        for name in DIMENSION.split()
    },
    "pow.Tensor_Scalar": lambda x: x**2,
    "pow.Tensor_Tensor": lambda x: x**x,
    "pow.Scalar": lambda x: 2**x,
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (4,), some(4), some(4)),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (4,), some(4), some(4), 1e-5)[0],
    "rms_norm": lambda x: F.rms_norm(x, (4,), some(4)),
    "group_norm": lambda x: F.group_norm(x, 2, some(4), some(4)),
    "frobenius_norm.dim": lambda x: aten.frobenius_norm.dim(x, [0, 1]),
    "nuclear_norm": lambda x: torch.nuclear_norm(x),
    "nuclear_norm.dim": lambda x: torch.nuclear_norm(x, [0, 1]),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.long)),
    "nll_loss2d": lambda x: F.nll_loss(x[None, :, :, None], torch.zeros(1, 4, 1, dtype=torch.long)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones(4, 4)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x[0], x[1], torch.ones(4)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
        x, torch.zeros(4, 4, dtype=torch.long)
    ),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(4, 4)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x + 1, x - 1),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.long)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "dist": lambda x: torch.dist(x, some(4, 4)),
    "pdist": F.pdist,
    "cdist": lambda x: torch.cdist(x, some(4, 4)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    **{f"upsample_nearest{dims}d": resized("nearest", dims) for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": resized("nearest-exact", dims) for dims in (1, 2, 3)},
    **{
        f"upsample_{mode}{dims}d": resized(mode, dims)
        for mode, dims in {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}.items()
    },
    **{f"_upsample_{m}2d_aa": resized(m, 2, antialias=True) for m in ("bilinear", "bicubic")},
    "prod": torch.prod,
    "linalg_vector_norm": torch.linalg.vector_norm,
    "linalg_matrix_norm": lambda x: torch.linalg.matrix_norm(x.float(), 2),  # refuses half
    "linalg_matrix_norm.str_ord": torch.linalg.matrix_norm,
    "sum": torch.sum,
    "norm.Scalar": lambda x: aten.norm.Scalar(x),
    "norm.ScalarOpt_dim": lambda x: aten.norm.ScalarOpt_dim(x, 2, [0]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "ctc_loss": lambda x: F.ctc_loss(x[:, None], torch.ones(1, 2).long(), [4], [2]),
}
# Functions of two tensors whose result has the wider type.
WIDEST = {
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "atan2": torch.atan2,
    "bilinear": lambda x, y: F.bilinear(x, y, x.reshape(1, 4, 4)),
    "cross": lambda x, y: torch.cross(x[:3], y[:3], dim=0),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "grid_sampler": lambda x, y: F.grid_sample(
        images(x, 2), y.reshape(1, 4, 2, 2), align_corners=False
    ),
    "index_put": lambda x, y: torch.index_put(x, (torch.arange(4),), y),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
}
AS_GIVEN = {
    "relu": F.relu,
    "gelu": F.gelu,
    "batch_norm": lambda x: F.batch_norm(x, some(4), some(4), training=True),
    "max_pool2d": lambda x: F.max_pool2d(images(x, 2), 2),
    "mean": torch.mean,
    "add": lambda x: x + x,
}


class Runs(nn.Module):
    """A model whose forward notes the types of what functions give, and takes their gradients."""

    def __init__(self, functions, *tensors):
        super().__init__()
        self.functions, self.tensors = functions, tensors
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self):
        self.found = {}
        for name, function in self.functions.items():
            tensors = [t.detach().requires_grad_() for t in self.tensors]
            out = function(*tensors)
            self.found[name] = out.dtype
            if out.requires_grad:
                gradients = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
                for gradient, tensor in zip(gradients, tensors, strict=True):
                    assert gradient is None or gradient.dtype == tensor.dtype, name


def types_of(functions, level, *tensors):
    model = amp.initialize(Runs(functions, *tensors), opt_level=level, verbosity=0)
    model()
    return model.found


AUTOCAST = ("O1", "O4")
levels = pytest.mark.parametrize("level", AUTOCAST)


@pytest.mark.filterwarnings("ignore:.*(deprecated|batchmean)")
@levels
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["half", "float", "as given"])
def test_functions_of_one_tensor_return_their_type(kind, wide, level):
    given = f32 if wide else HALF_TYPES[level]
    functions, to = {
        "half": (HALF, HALF_TYPES[level]),
        "float": (FLOAT, f32),
        "as given": (AS_GIVEN, given),
    }[kind]
    types = types_of(functions, level, some(4, 4).to(given))
    assert types == dict.fromkeys(functions, to)


@levels
@pytest.mark.parametrize(("x", "y"), [*itertools.product([False, True], repeat=2)])
def test_mixed_tensors_meet_in_the_widest_type(x, y, level):
    types = [f32 if wide else HALF_TYPES[level] for wide in (x, y)]
    result_types = types_of(WIDEST, level, *(some(4, 4).to(dtype) for dtype in types))
    assert result_types == dict.fromkeys(WIDEST, f32 if x or y else HALF_TYPES[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_compute_what_they_do_in_float32(kind, packed, level):
    model, x, results = kind(3, 4, num_layers=2), torch.randn(5, 2, 3), []
    if packed:
        x = nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    for _ in range(2):
        out, hidden = model(x)
        out = out.data if packed else out
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
        amp.initialize(model, opt_level=level, verbosity=0)
    weights = HALF_TYPES.get(level, f32) if level not in AUTOCAST else f32
    assert [t.dtype for t in results[1]] == [f32] + [weights] * (len(results[1]) - 1)
    assert level in AUTOCAST or {t.dtype for t in hidden} == {f32}
    results = [[t.float() for t in each] for each in results]
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.05)


CUDNN = {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::_cudnn_rnn"}
# Of GPUs alone; banned, see below; and one that both have in torch.
ELSEWHERE = """
    _thnn_fused_gru_cell _thnn_fused_lstm_cell _scaled_dot_product_flash_attention
    binary_cross_entropy linalg_matrix_sqrth
"""


def test_no_rule_of_a_gpu_is_missing():
    """Neither here nor in the tables above."""
    ampfuse.cpu_half_ops()
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    of_gpus = {name for name in names if has_kernel(name, "AutocastCUDA")} - CUDNN
    assert all(has_kernel(name, "AutocastCPU") for name in of_gpus)
    listed = {name.partition(".")[0] for name in (*HALF, *FLOAT, *WIDEST)}
    assert {name[6:].partition(".")[0] for name in of_gpus} <= {*listed, *ELSEWHERE.split()}


@levels
@pytest.mark.parametrize("wide", [False, True])
def test_binary_cross_entropy_is_refused_as_on_a_gpu(wide, level):
    x = some(4).to(f32 if wide else HALF_TYPES[level])
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits") as on_cpu:
        types_of({"": lambda x: F.binary_cross_entropy(x, x)}, level, x)
    on_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    with pytest.raises(RuntimeError) as expected:
        aten.binary_cross_entropy.default.redispatch(on_gpu, x, x)
    assert str(on_cpu.value) == str(expected.value)
    assert F.binary_cross_entropy(some(4), some(4)).dtype == f32  # outside of forward


def test_float64_and_types_that_are_given_stay():
    calls = {
        "half sum": (lambda x: x.sum(dtype=f16), f16),
        "softmax": (lambda x: F.softmax(x, 0, dtype=f16), f16),
        "sum of integers": (lambda x: x.long().sum(), torch.int64),
        "float64": (lambda x: x.double().sum() + x.double().exp().sum(), f64),
        "LSTM": (lambda x: nn.LSTM(4, 3).double()(x.double())[0], f64),
    }
    types = types_of({name: call for name, (call, _) in calls.items()}, "O1", some(4, 4).half())
    assert types == {name: dtype for name, (_, dtype) in calls.items()}


def dispatch_tables():
    return {name: torch._C._dispatch_dump(name) for name in torch._C._dispatch_get_all_op_names()}


@pytest.fixture(scope="module")
def tables_before():
    half_ops.reset()
    return dispatch_tables()


@pytest.mark.parametrize("by_name", [None, True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_initialize_installs_rules_and_kernels_unless_refused_by_name(
    level, by_name, tables_before
):
    """The rules at O1 and O4, the kernels at all levels with half types."""
    if by_name is not None:
        ampfuse.cpu_half_ops(by_name)
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert _C.half_ops() == (level != "O0" if by_name is None else by_name)
    assert _C.autocast_rules() == (level in AUTOCAST if by_name is None else by_name)
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)  # the rules stay in use
    assert _C.autocast_rules() == (level in AUTOCAST if by_name is None else by_name)
    amp.restore_torch()
    if level in ("O0", "O1", "O2"):  # O3 and O5 install what O2 does, O4 what O1 does
        assert dispatch_tables() == tables_before


def test_models_elsewhere_leave_the_cpu_alone():
    amp.initialize(nn.Linear(2, 2, device="meta"), opt_level="O2", verbosity=0)
    assert not _C.half_ops()


def test_a_block_puts_back_what_was_before():
    def softmax():
        with torch.autocast("cpu", dtype=bf16):
            return F.softmax(some(4).bfloat16(), 0).dtype

    with ampfuse.cpu_half_ops():
        assert (softmax(), _C.half_ops()) == (f32, True)
        with ampfuse.cpu_half_ops(False):
            assert (softmax(), _C.half_ops()) == (bf16, False)
        assert (softmax(), _C.half_ops()) == (f32, True)
    assert (softmax(), _C.half_ops()) == (bf16, False)
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert _C.half_ops()  # after the blocks nothing was said by name
    with ampfuse.cpu_half_ops():
        assert softmax() == f32
    assert (softmax(), _C.half_ops()) == (bf16, True)
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    with ampfuse.cpu_half_ops(False):
        assert softmax() == bf16
    assert softmax() == f32
    amp.restore_torch()
    assert not _C.half_ops()


@compilers
@levels
def test_compiled_code_follows_them(level, backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    amp.initialize(model, opt_level=level, verbosity=0)
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), some(3, 4)
    out = compiled(x)
    assert not torch.equal(out, out.to(HALF_TYPES[level]).float())
    torch.testing.assert_close(out, model(x), rtol=1e-5, atol=0)
    out.square().sum().backward()
    assert model[0].weight.grad.dtype == f32


def test_code_that_is_kept_on_disk_is_told_apart():
    """The key has what is compiled, but not by which rules."""
    tag = torch.compiler.config.cache_key_tag
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        ampfuse.cpu_half_ops()
        ampfuse.cpu_half_ops()
        assert torch.compiler.config.cache_key_tag == f"the user's{half_ops._TAG}"
        half_ops.reset()
        assert torch.compiler.config.cache_key_tag == "the user's"
    assert torch.compiler.config.cache_key_tag == tag
