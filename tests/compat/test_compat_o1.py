"""O1 under apex's names: which type each function gives, on tensors of the CPU as well."""

import contextlib
import copy
import functools
import inspect
import operator
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import apex_names
from ampfuse import amp as own_amp
from ampfuse.amp import cast_state, weight_cache
from ampfuse.compat.apex import amp
from cases import bf16, f16, f32, f64

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture(autouse=True)
def clean():
    with apex_names.clean():
        yield


class Runs(nn.Module):
    """A model whose forward is a function given by a test."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(4, 4) + 0.5)

    def forward(self, *args):
        return self.function(*args)


def inside(function, *args, level="O1"):
    """What `function` gives inside the forward of a model at `level`."""
    model = amp.initialize(Runs(function), opt_level=level, verbosity=0)
    return model(*args)


def legacy(function, *args):
    handle = amp.init()
    try:
        return function(*args)
    finally:
        handle._deactivate()


REGIONS = {"initialize": inside, "init": legacy}


def tensor(dtype, *shape):
    return (torch.rand(*shape) * 0.5 + 0.25).to(dtype)


# Of section "run in fp16": name, call.
LOW = {
    "F.linear": lambda x: F.linear(x, torch.rand(3, 4)),
    "F.conv1d": lambda x: F.conv1d(x.view(1, 4, 4), torch.rand(2, 4, 3)),
    "F.conv2d": lambda x: F.conv2d(x.view(1, 1, 4, 4), torch.rand(2, 1, 3, 3)),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(x.view(1, 1, 4, 4), torch.rand(1, 2, 3, 3)),
    "torch.matmul": lambda x: torch.matmul(x, torch.rand(4, 4)),
    "@": lambda x: x @ torch.rand(4, 4),
    "float @ x": lambda x: torch.rand(4, 4) @ x,
    "torch.mm": lambda x: torch.mm(x, torch.rand(4, 4)),
    "x.mv": lambda x: x.mv(torch.rand(4)),
    "torch.addmm": lambda x: torch.addmm(torch.rand(4), x, torch.rand(4, 4)),
    "torch.addmv": lambda x: torch.addmv(torch.rand(4), x, torch.rand(4)),
    "torch.addr": lambda x: torch.addr(torch.rand(4, 4), x[0], torch.rand(4)),
    "torch.bmm": lambda x: torch.bmm(x[None], torch.rand(1, 4, 4)),
    "torch.baddbmm": lambda x: torch.baddbmm(torch.rand(4), x[None], torch.rand(1, 4, 4)),
    "torch.prelu": lambda x: torch.prelu(x, torch.rand(1)),
}
FLOAT = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "F.gelu": lambda x: F.gelu(x),
    "F.layer_norm": lambda x: F.layer_norm(x, (4,)),
    "F.group_norm": lambda x: F.group_norm(x[None], 2),
    "F.interpolate": lambda x: F.interpolate(x[None], scale_factor=2),
    "F.mse_loss": lambda x: F.mse_loss(x, torch.rand(4, 4)),
    "F.cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.rand(4, 4)),
    "F.bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.rand(4, 4)),
    "F.huber_loss": lambda x: F.huber_loss(x, torch.rand(4, 4)),
    "torch.exp": lambda x: torch.exp(x),
    "x.exp": lambda x: x.exp(),
    "torch.log": lambda x: torch.log(x),
    "torch.pow": lambda x: torch.pow(x, 2),
    "**": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "x.sum": lambda x: x.sum(),
    "torch.norm": lambda x: torch.norm(x),
    "x.std": lambda x: x.std(),
    "x.var": lambda x: x.var(),
    "torch.cumsum": lambda x: torch.cumsum(x, 0),
    "torch.rsqrt": lambda x: torch.rsqrt(x),
    "x.cpu": lambda x: x.cpu(),
}
PROMOTE = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "torch.add": lambda x, y: torch.add(x, y),
    "x.mul": lambda x, y: x.mul(y),
    "torch.atan2": lambda x, y: torch.atan2(x, y),
    "torch.addcmul": lambda x, y: torch.addcmul(x, x, y),
    "torch.dot": lambda x, y: torch.dot(x[0], y[0]),
    "torch.cross": lambda x, y: torch.cross(x[:3], y[:3], dim=0),
    "torch.cat": lambda x, y: torch.cat([x, y]),
    "torch.cat(tensors=)": lambda x, y: torch.cat(tensors=[x, y]),
    "torch.stack": lambda x, y: torch.stack((x, y)),
    "0-dim": lambda x, y: x * y[0, 0],
}
AS_GIVEN = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "dropout": lambda x: F.dropout(x, 0.5),
    "max_pool": lambda x: F.max_pool2d(x[None], 2),
    "view": lambda x: x.view(16),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
}


def types_of(functions, region, *tensors):
    """The types of what `functions` give, all of them in one region, by name."""
    at_o4 = functools.partial(inside, level="O4")
    run = REGIONS.get(region, at_o4)
    return run(lambda: {name: call(*tensors).dtype for name, call in functions.items()})


@pytest.mark.parametrize("region", [*REGIONS, "O4"])
@pytest.mark.parametrize("dtype", [f16, f32])
def test_products_run_in_half(dtype, region):
    found = types_of(LOW, region, tensor(dtype, 4, 4))
    assert found == dict.fromkeys(LOW, bf16 if region == "O4" else f16)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_what_leaves_the_range_of_half_runs_in_float(dtype, region):
    assert types_of(FLOAT, region, tensor(dtype, 4, 4)) == dict.fromkeys(FLOAT, f32)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("x", [f16, f32, f64])
@pytest.mark.parametrize("y", [f16, f32, f64])
def test_mixed_arguments_meet_in_the_widest_type(x, y, region):
    """float64 too, which apex refused."""
    found = types_of(PROMOTE, region, tensor(x, 4, 4), tensor(y, 4, 4))
    assert found == dict.fromkeys(PROMOTE, torch.promote_types(x, y))


@pytest.mark.parametrize("dtype", [f16, f32])
def test_other_functions_keep_the_type(dtype):
    found = types_of(AS_GIVEN, "initialize", tensor(dtype, 4, 4))
    assert found == dict.fromkeys(AS_GIVEN, dtype)


# Operations that the lists of 2019 do not know, on a half and on a float argument.
NEWER = {
    "einsum": (lambda x, y: torch.einsum("ij,jk", x, y), f16),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]), f16),
    "torch.linalg.multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y]), f16),
    "torch.linalg.vecdot": (lambda x, y: torch.linalg.vecdot(x, y), f16),
    "MultiheadAttention": (lambda x, y: nn.MultiheadAttention(4, 2)(x, y, y)[0], f16),
    "torch.linalg.norm": (lambda x, y: torch.linalg.norm(x), f32),
    "torch.linalg.vector_norm": (lambda x, y: torch.linalg.vector_norm(x), f32),
    "torch.linalg.matrix_norm": (lambda x, y: torch.linalg.matrix_norm(x), f32),
    "F.rms_norm": (lambda x, y: F.rms_norm(x, (4,)), f32),
    "torch.cdist": (lambda x, y: torch.cdist(x, y), f32),
    "F.huber_loss": (lambda x, y: F.huber_loss(x, y), f32),
    "F.gaussian_nll_loss": (lambda x, y: F.gaussian_nll_loss(x, x, y), f32),
    "torch.sub": (torch.sub, f32),
    "torch.where": (lambda x, y: torch.where(x > 0, x, y), f32),
    "torch.lerp": (lambda x, y: torch.lerp(x, y, 0.5), f32),
    "torch.maximum": (torch.maximum, f32),
    "index_add": (lambda x, y: x.index_add(0, torch.arange(4), y), f32),
    "index_add_": (lambda x, y: x.clone().index_add_(0, torch.arange(4), y), f16),
    "index_put": (lambda x, y: x.index_put((torch.arange(4),), y), f32),
    "scatter_add": (lambda x, y: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), y), f32),
}


@pytest.mark.parametrize("region", REGIONS)
def test_operations_newer_than_the_lists_have_the_type_of_their_kind(region):
    calls = {name: call for name, (call, _) in NEWER.items()}
    found = types_of(calls, region, tensor(f16, 4, 4), tensor(f32, 4, 4))
    assert found == {name: expected for name, (_, expected) in NEWER.items()}


def test_comparisons_see_both_arguments_in_the_widest_type():
    x, y = torch.tensor([1.0, 2.0], dtype=f16), torch.tensor([1.0, 2.001])
    assert inside(lambda: (x == y).tolist()) == [True, False]
    assert inside(lambda: torch.equal(x, y)) is False
    assert inside(lambda: (x < y).tolist()) == [False, True]


@pytest.mark.parametrize("dtype", [f16, f32, f64])
@pytest.mark.parametrize("other", [f16, f32, f64])
def test_in_place_operations_keep_the_type_of_what_they_write(dtype, other):
    """``x += y`` too, which is ``x.add_(y)`` to torch; apex made a new tensor of it."""

    def written(x, y):
        view = x
        x.add_(y)
        x += y
        x *= y
        x -= y
        x /= y
        assert view is x
        return x

    assert inside(written, tensor(dtype, 2), tensor(other, 2)).dtype == dtype
    assert inside(operator.ipow, torch.full((2,), 3.0, dtype=dtype), 2).tolist() == [9.0, 9.0]


@pytest.mark.parametrize(
    "write", [lambda x: torch.exp_(x), lambda x: x.rsqrt_(), lambda x: x.cumsum_(0)]
)
def test_in_place_in_float_refuses_half(write):
    with pytest.raises(NotImplementedError, match=r"x\.float\(\)"):
        inside(write, tensor(f16, 2))
    assert inside(write, tensor(f32, 2)).dtype == f32

    def disabled(x):  # apex raised here too
        with amp.disable_casts():
            return write(x)

    assert inside(disabled, tensor(f16, 2)).dtype == f16


def test_binary_cross_entropy_is_banned_on_half():
    target = torch.rand(4)
    with pytest.raises(NotImplementedError, match="with_logits"):
        inside(lambda x: F.binary_cross_entropy(x, target), tensor(f16, 4))
    assert inside(lambda x: F.binary_cross_entropy(x, target), tensor(f32, 4)).dtype == f32
    model = amp.initialize(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), verbosity=0)
    out, target = model(torch.rand(3, 4)), torch.rand(3, 1)
    with pytest.raises(NotImplementedError, match="sigmoid"):  # outside the model as well
        F.binary_cross_entropy(out, target)
    with amp.disable_casts():  # apex raised here too
        assert F.binary_cross_entropy(out.float(), target).dtype == f32
        assert F.binary_cross_entropy(out, target.half()).dtype == f16
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(out, target).dtype == f32
    amp._amp_state.handle._deactivate()
    amp.register_float_function(torch, "sigmoid")
    out = amp.initialize(model, verbosity=0)(torch.rand(3, 4))
    assert out.dtype == f32
    F.binary_cross_entropy(out, target)


@pytest.mark.parametrize("dtype", [f16, f32])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_run_in_half(kind, dtype):
    model = amp.initialize(kind(3, 4, num_layers=2), verbosity=0)
    x = torch.randn(5, 2, 3).to(dtype)
    reference = copy.deepcopy(model)
    with amp.disable_casts():
        expected, _ = reference(x.float())
    out, hidden = model(x)
    hidden = hidden[0] if kind is nn.LSTM else hidden
    assert out.dtype == hidden.dtype == f16
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
    out.float().sum().backward()
    assert all(p.grad.dtype == f32 and p.grad.any() for p in model.parameters())
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    assert model(packed)[0].data.dtype == f16
    cell = amp.initialize(getattr(nn, f"{kind.__name__}Cell")(3, 4), verbosity=0)
    out = cell(torch.randn(2, 3))
    assert (out[0] if kind is nn.LSTM else out).dtype == f16


def test_losses_outside_the_model_follow_the_same_lists():
    model = amp.initialize(nn.Linear(4, 4), verbosity=0)
    out = model(torch.rand(3, 4))
    assert out.dtype == f16
    assert F.mse_loss(out, torch.rand(3, 4)).dtype == f32
    assert (out * 2).dtype == f16
    assert (out + torch.rand(3, 4)).dtype == f32
    assert F.linear(out, nn.Parameter(torch.rand(4, 4))).dtype == f16
    assert nn.Softmax(-1)(out).dtype == f32


# --- outside the model --------------------------------------------------------------------------


class Lightning(nn.Module):
    """A module whose own forward is never called in training."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.head = nn.LSTM(4, 4)
        self.backbone.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.features = output

    def loss(self, out, y):
        auxiliary = F.linear(self.features, self.backbone.weight)
        self.seen = types(self.features, out, auxiliary)
        return F.mse_loss(out, y) + (auxiliary - y).pow(2).mean()

    def training_step(self, x, y):
        self.backbone(x)
        return self.loss(self.head(self.features)[0], y)


def test_a_training_step_that_calls_no_forward_is_cast_and_learns():
    module = Lightning()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    amp.initialize(module, optimizer, verbosity=0)
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module.training_step(x, y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
        assert module.seen == [f16, f16, f16]
        assert loss.dtype == f32
    assert losses[2] < losses[1] < losses[0]


def product():
    return F.linear(torch.rand(2, 2), torch.rand(2, 2)).dtype


def in_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(product()))
    thread.start()
    thread.join()
    return seen[0]


def in_backward():
    seen = []
    x = torch.rand(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(product()))
    (x * 2).sum().backward()
    return seen[0]


def in_evaluation():
    with torch.no_grad():
        return nn.Linear(2, 2).eval()(torch.rand(1, 2)).dtype


def in_recomputation():
    seen = []

    def part(x):
        seen.append(product())
        return x * x

    checkpoint(part, torch.rand(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen[0] == seen[1]
    return seen[1]


PLACES = [product, in_thread, in_backward, in_evaluation, in_recomputation]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("level", "expected"), [("O1", f16), ("O4", bf16)])
def test_casts_reach_the_whole_process(place, level, expected):
    assert place() == f32
    amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    assert place() == expected


ENDS = {
    "O0": lambda: amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0),
    "O2": lambda: amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0),
    "disabled": lambda: amp.initialize(nn.Linear(2, 2), enabled=False),
    "no patches": lambda: amp.initialize(nn.Linear(2, 2), patch_torch_functions=False),
    "ampfuse's own": lambda: own_amp.initialize(nn.Linear(2, 2), verbosity=0),
    "deactivated": lambda: amp._amp_state.handle._deactivate(),
    "inactive": lambda: setattr(amp._amp_state.handle, "_is_active", False),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ENDS)
def test_casts_outside_end_with_their_level(end, place):
    model = amp.initialize(nn.Linear(4, 4), verbosity=0)
    ENDS[end]()
    assert place() == f32
    stays = end not in ("deactivated", "inactive")
    assert model(torch.rand(1, 4)).dtype == (f16 if stays else f32)


def test_nothing_is_cast_at_other_levels_in_disabled_blocks_or_on_float64():
    seen = []
    amp.initialize(Runs(lambda: seen.append(product())), opt_level="O1", verbosity=0)
    at_o2 = amp.initialize(Runs(lambda: seen.append(product())), opt_level="O2", verbosity=0)
    amp.initialize(nn.Linear(4, 4), verbosity=0)
    at_o2()
    assert seen == [f32]  # the forward of a model at another level
    with amp.disable_casts():
        assert product() == f32
    double = torch.rand(2, 2, dtype=f64)
    assert types(F.linear(double, double), double.sum(), F.mse_loss(double, double)) == [f64] * 3
    cast_state.outside.casts_cpu = False  # as while the model is on a GPU
    assert product() == f32


def test_a_forked_process_casts_nothing():
    """It loads data."""
    amp.initialize(nn.Linear(4, 4), verbosity=0)
    loader = torch.utils.data.DataLoader(
        range(1), num_workers=1, multiprocessing_context="fork", collate_fn=lambda _: str(product())
    )
    assert list(loader) == ["torch.float32"]
    assert product() == f16


class Muon(torch.optim.Optimizer):
    """Computes a product in its step."""

    def __init__(self, params):
        super().__init__(params, {})
        self.seen = []

    def step(self, closure=None):
        if closure is not None:
            self.seen.append(closure())
        self.seen.append(product())
        if len(self.seen) > 3:
            raise KeyError


def test_an_optimizers_step_is_not_cast():
    model = nn.Linear(4, 4)
    optimizer = Muon(model.parameters())
    amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0)
    model(torch.rand(1, 4)).sum().backward()
    optimizer.step()
    optimizer.step(product)
    assert optimizer.seen == [f32, f16, f32]
    with pytest.raises(KeyError):
        optimizer.step()
    assert product() == f16


def test_every_function_is_put_back():
    owners = (torch, F, torch.Tensor, torch._VF, torch.linalg, nn.LSTM, torch.jit, nn.modules.rnn)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        amp.initialize(nn.Linear(4, 4), verbosity=0)
        amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)
    assert F.softmax is not before[1]["softmax"]
    assert inspect.signature(F.softmax) == inspect.signature(before[1]["softmax"])
    assert pickle.loads(pickle.dumps(F.softmax)) is F.softmax
    assert pickle.loads(pickle.dumps(torch.bmm)) is torch.bmm
    amp._amp_state.handle._deactivate()
    assert [dict(vars(owner)) for owner in owners] == before


def scripted(x, weight):
    return F.softmax(F.linear(x, weight), dim=-1).matmul(weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_and_compiled_functions_work_after_initialize():
    amp.initialize(nn.Linear(4, 4), verbosity=0)
    torch._dynamo.reset()
    x = torch.rand(4, 4)
    with amp.disable_casts():
        expected = scripted(x, x)
    assert torch.equal(torch.jit.script(scripted)(x, x), expected)
    local = F

    @torch.jit.script
    class Scaled:  # the compiler finds `local` in the frame of its caller
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return local.softmax(x, dim=-1)

    assert Scaled()(x).dtype == f32
    assert product() == f16
    compiled = torch.compile(scripted, backend="aot_eager", fullgraph=True)
    # torch 2.11 compiles to code that looks torch's functions up again, and meets those that cast.
    tolerance = {} if RELEASE >= (2, 13) else {"rtol": 1e-2, "atol": 1e-2, "check_dtype": False}
    torch.testing.assert_close(compiled(x, x), expected, **tolerance)


def test_names_added_to_the_lists_are_cast_at_the_next_initialize():
    torch_overrides = amp.lists.torch_overrides
    torch_overrides.FP32_FUNCS.append("sigmoid")
    try:
        assert inside(lambda x: torch.sigmoid(x), tensor(f16, 2)).dtype == f32
    finally:
        torch_overrides.FP32_FUNCS.remove("sigmoid")
    assert inside(lambda x: torch.sigmoid(x), tensor(f16, 2)).dtype == f16


# --- the weight cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("region", REGIONS)
def test_a_weight_used_twice_is_cast_once_and_gets_both_gradients(region):
    """On newer PyTorch apex raised IndexError here."""
    used, x = nn.Parameter(torch.rand(4, 4) + 0.5), torch.rand(2, 4)
    with casts_of(used) as casts:
        out = REGIONS[region](lambda x: F.linear(F.linear(x, used), used), x)
    assert casts == [f16]
    out.sum().backward()
    weight_cache.clear()
    weight = used.detach().clone().requires_grad_()
    F.linear(F.linear(x, weight), weight).sum().backward()
    torch.testing.assert_close(used.grad, weight.grad, rtol=0.01, atol=0.01)


@contextlib.contextmanager
def casts_of(tensor):
    """The types that the tensor with the memory of `tensor` is cast to inside the block."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if "_to_copy" in str(func) and args[0].data_ptr() == tensor.data_ptr():
                seen.append(result.dtype)
            return result

    with Watch():
        yield seen


def test_the_cache_ends_with_the_forward_pass():
    model, seen = Runs(None), []
    model.function = lambda x: (torch.mv(model.weight, x), seen.append(weight_cache.copies()))
    amp.initialize(model, verbosity=0)
    model(torch.rand(4))
    assert seen[0][model.weight].dtype == f16
    assert not weight_cache.copies()


@pytest.mark.parametrize("edit", ["in place", "data", "load_state_dict"])
@pytest.mark.parametrize("region", REGIONS)
def test_weights_changed_after_evaluation_are_seen(edit, region):
    """apex went on with the cast made under no_grad until the next backward pass."""
    model = nn.Linear(4, 4, bias=False)
    amp.init() if region == "init" else amp.initialize(model, verbosity=0)
    with torch.no_grad():
        model(torch.ones(1, 4))
        if edit == "in place":
            model.weight.fill_(1.0)
    if edit == "data":
        model.weight.data.fill_(1.0)
    elif edit == "load_state_dict":
        model.load_state_dict({"weight": torch.ones(4, 4)})
    assert model(torch.ones(1, 4)).tolist() == [[4.0] * 4]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_compute_alike_twice(reentrant):
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def part(self, x):
            y = F.softmax(self.fc(x), -1)
            seen.append(y.dtype)
            return y * y

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0)
    loss = model(torch.rand(2, 4, requires_grad=True)).square().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert seen == [f32, f32]


# --- decorators and registered functions --------------------------------------------------------


def types(*tensors, **more):
    return [t.dtype for t in (*tensors, *more.values())]


def test_a_loss_on_the_result_of_a_half_function_computes_in_float():
    product = amp.half_function(lambda a, b: a @ b)
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    out = product(torch.rand(2, 2), torch.rand(2, 2))
    assert out.dtype == f16
    assert out.sum().dtype == f32


class Library:
    @staticmethod
    def scale(x):
        return types(x)[0]


def test_registered_functions_are_cast_until_the_handle_ends():
    """The decorators and the rest of it are in test_function_casts.py."""
    original = Library.scale
    amp.register_half_function(Library, "scale")
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert Library.scale(tensor(f32, 2)) == f16
    amp._amp_state.handle._deactivate()
    assert Library.scale is original


def test_a_registered_operation_wins_over_the_lists():
    amp.register_float_function(torch, "bmm")
    assert inside(lambda x: torch.bmm(x, x), tensor(f32, 1, 2, 2)).dtype == f32
    amp.register_half_function(F, "softmax")
    assert inside(lambda x: F.softmax(x, -1), tensor(f32, 2, 2)).dtype == f16


# --- copies, handles ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_follow_the_lists_too(make):
    model = make(amp.initialize(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), verbosity=0))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    out = model(torch.rand(2, 4))
    assert out.dtype == f32
    assert out.tolist() == [[0.25] * 4] * 2


def test_a_compiled_model_runs_under_autocast():
    torch._dynamo.reset()
    model = amp.initialize(nn.Linear(4, 4), verbosity=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.rand(2, 4)).dtype == f16


def test_handle_of_initialize_switches_casts_off_and_on():
    model = amp.initialize(nn.Linear(4, 4), verbosity=0)
    handle = amp._amp_state.handle
    assert handle.is_active()
    handle._is_active = False
    assert not handle.is_active()
    assert model(torch.rand(2, 4)).dtype == f32
    handle._is_active = True
    assert model(torch.rand(2, 4)).dtype == f16
    amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)
    handle._deactivate()
    assert model(torch.rand(2, 4)).dtype == f32
    assert product() == bf16  # by the latest
    amp.initialize(nn.Linear(4, 4), opt_level="O2", verbosity=0)
    assert not amp._amp_state.handle.is_active()


def test_handle_of_init_ends_and_starts_again():
    handle = amp.init(verbose=True)
    again = amp.init()  # replaces it; apex stacked a second layer of wrappers
    assert (handle.verbose, again.verbose) == (True, False)
    assert not handle.is_active()
    assert again.is_active()
    with torch.device("cpu"):  # another mode on top
        assert product() == f16
        again._deactivate()
        assert product() == f32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.overrides._len_torch_function_stack() == 0
    with again._disable_casts():
        pass
    with pytest.raises(RuntimeError, match="wrap_optimizer"):
        again.scale_loss(torch.zeros(()), None)
    off, loss = amp.init(enabled=False), torch.zeros((), requires_grad=True)
    assert not off.is_active()
    assert product() == f32
    with off.scale_loss(loss, None) as scaled:
        assert scaled is loss


def test_cache_of_the_handle_holds_casts_of_weights():
    handle = amp.init()
    weight = nn.Parameter(torch.rand(2, 2))
    F.linear(torch.rand(2, 2), weight)
    assert handle.has_cache
    assert handle.cache[weight].dtype == f16
    handle.remove_cache(weight)
    assert weight not in handle.cache
    F.linear(torch.rand(2, 2), weight)
    handle._clear_cache()
    assert not handle.cache
    handle = amp.init(enable_caching=False)
    F.linear(torch.rand(2, 2), weight)
    assert not handle.has_cache
    assert not handle.cache


def test_wrapped_optimizer_adds_losses_and_skips_overflows():
    handle = amp.init()
    model = nn.Linear(4, 1)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    before = model.weight.detach().clone()
    x = torch.rand(3, 4)
    for _ in range(2):
        with optimizer.scale_loss(0.1 * model(x).float().mean()) as scaled:
            scaled.backward()
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.2]), rtol=1e-3, atol=0)
    with pytest.raises(RuntimeError, match="num_loss"), optimizer.scale_loss(model(x).mean()):
        pass
    with pytest.raises(NotImplementedError):
        optimizer.step(lambda: None)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    with optimizer.scale_loss(model(x).float().mean() * float("inf")) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [2.0**15, 2.0**16]
    assert optimizer.param_groups[0]["lr"] == 0.1
