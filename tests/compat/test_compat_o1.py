"""O1 under apex's names: autocast outside of models too, on tensors of the CPU as well."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampfuse import amp as own_amp
from ampfuse.amp import session as sessions
from ampfuse.compat.apex import amp
from cases import bf16, clean_apex_names, f16, f32, f64


@pytest.fixture(autouse=True)
def clean():
    with clean_apex_names():
        yield


class Runs(nn.Module):
    """A model whose forward is a function given by a test."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args):
        return self.function(*args)


def initialized(**options):
    return amp.initialize(nn.Linear(4, 4), **{"verbosity": 0, **options})


# --- outside the model --------------------------------------------------------------------------


def product():
    return F.linear(torch.rand(2, 2), torch.rand(2, 2)).dtype


def in_backward():
    seen = []
    x = torch.rand(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(product()))
    (x * 2).sum().backward()
    return seen[0]


def in_evaluation():
    with torch.no_grad():
        return nn.Linear(2, 2).eval()(torch.rand(1, 2)).dtype


PLACES = [product, in_backward, in_evaluation]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("level", "expected"), [("O1", f16), ("O4", bf16)])
def test_casts_reach_all_of_the_thread(place, level, expected):
    assert place() == f32
    initialized(opt_level=level)
    assert place() == expected


def rounds(model):
    """Whether `model`, which returns FP32, has computed in half."""
    out = model(torch.rand(2, 4))
    assert out.dtype == f32
    return torch.equal(out, out.half())


ENDS = {
    "O0": lambda: initialized(opt_level="O0"),
    "O2": lambda: initialized(opt_level="O2"),
    "disabled": lambda: initialized(enabled=False),
    "no patches": lambda: initialized(patch_torch_functions=False),
    "ampfuse's own": lambda: own_amp.initialize(nn.Linear(2, 2), verbosity=0),
    "deactivated": lambda: amp._amp_state.handle._deactivate(),
    "inactive": lambda: setattr(amp._amp_state.handle, "_is_active", False),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ENDS)
def test_casts_outside_end_with_their_level(end, place):
    model = initialized()
    ENDS[end]()
    assert place() == f32
    stays = end not in ("deactivated", "inactive")
    assert rounds(model) == stays


def test_nothing_is_cast_at_other_levels_in_disabled_blocks_or_on_float64():
    seen = []
    amp.initialize(Runs(lambda: seen.append(product())), opt_level="O1", verbosity=0)
    at_o2 = amp.initialize(Runs(lambda: seen.append(product())), opt_level="O2", verbosity=0)
    initialized()
    at_o2()
    assert seen == [f32]  # the forward of a model at another level
    with amp.disable_casts():
        assert product() == f32
    double = torch.rand(2, 2, dtype=f64)
    assert F.linear(double, double).dtype == double.sum().dtype == f64
    sessions.latest().casts_cpu = False  # as while the model is on a GPU
    sessions.follow_latest()
    assert product() == f32


def test_a_forked_process_casts_nothing():
    """It loads data."""
    initialized()
    loader = torch.utils.data.DataLoader(
        range(1), num_workers=1, multiprocessing_context="fork", collate_fn=lambda _: str(product())
    )
    assert list(loader) == ["torch.float32"]
    assert product() == f16


class Muon(torch.optim.Optimizer):
    """Computes a product in its step."""

    def step(self, closure):
        return product(), closure()


def test_an_optimizers_step_is_not_cast():
    model = nn.Linear(4, 4)
    optimizer = Muon(model.parameters(), {})
    amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0)
    model(torch.rand(1, 4)).sum().backward()
    assert optimizer.step(product) == (f32, f16)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert product() == f16


# --- rules that are apex's alone (autocast.s: test_half_rules.py) -------------------------

IN_PLACE = "acos asin cosh exp expm1 log log10 log2 reciprocal rsqrt sinh tan".split()
METHODS = [*IN_PLACE, "erfinv", "pow", "cumprod", "cumsum", "renorm"]
ARGUMENTS = {"pow": [2], "cumprod": [0], "cumsum": [0], "renorm": [2, 0, 1.0]}
OVERWRITING = [(torch, name) for name in IN_PLACE] + [(torch.Tensor, name) for name in METHODS]


LEVELS = {f16: "O1", bf16: "O4"}
REGIONS = {
    "init": lambda low: amp.init(patch_type=low),
    "initialize": lambda low: initialized(opt_level=LEVELS[low]),
}
both = pytest.mark.parametrize("region", REGIONS)
halves = pytest.mark.parametrize("low", LEVELS)


@both
@halves
def test_functions_that_leave_the_range_of_half_do_not_overwrite_half(low, region):
    originals = [getattr(owner, f"{name}_") for owner, name in OVERWRITING]
    REGIONS[region](low)
    for owner, name in OVERWRITING:
        function, others = getattr(owner, f"{name}_"), ARGUMENTS.get(name, [])
        for dtype in (f32, f64):
            x = torch.rand(2, 2, dtype=dtype)
            assert function(x, *others) is x
            assert x.dtype == dtype
        with pytest.raises(NotImplementedError, match=rf"{name}_ .* x\.float\(\)"):
            function(torch.rand(2, 2).to(low), *others)
        with amp.disable_casts():  # apex raised here too
            assert function(torch.rand(2, 2).to(low), *others).dtype == low
    own_amp.restore_torch()
    assert [getattr(owner, f"{name}_") for owner, name in OVERWRITING] == originals


@both
@halves
def test_cpu_gives_float(low, region):
    original = torch.Tensor.cpu
    REGIONS[region](low)
    for dtype, expected in ((low, f32), (f32, f32), (f64, f64), (torch.int64, torch.int64)):
        x = torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point)
        out = x.cpu()
        assert out.dtype == expected
        if x.requires_grad:
            assert torch.autograd.grad(out.sum(), x)[0].dtype == dtype
    with amp.disable_casts():
        assert torch.ones(2, dtype=low).cpu().dtype == low
    amp._amp_state.handle._deactivate()
    assert torch.Tensor.cpu is original


@both
@halves
def test_a_power_that_is_assigned_is_float(low, region):
    """``**=`` reaches no function that autocast or a replaced ``Tensor.pow_`` could cast."""
    REGIONS[region](low)
    for dtype, expected in ((low, f32), (f32, f32), (f64, f64)):
        x = torch.full((2,), 300.0, dtype=dtype)
        x **= 2
        assert (x.dtype, x.tolist()) == (
            expected,
            [torch.tensor(300.0, dtype=dtype).item() ** 2] * 2,
        )


@pytest.mark.parametrize("later", ["O2", "disabled"])
def test_replaced_functions_outlive_o1_for_its_models_alone(later):
    seen = []
    model = amp.initialize(Runs(lambda: seen.append(torch.ones(1).half().cpu().dtype)), verbosity=0)
    ENDS[later]()
    model()
    assert seen == [f32]
    assert torch.ones(1).half().cpu().dtype == f16


@halves
def test_the_latest_call_decides_whether_binary_cross_entropy_takes_half(low):
    def loss(dtype):
        x, target = torch.rand(4).to(dtype), torch.rand(4)
        by_function = F.binary_cross_entropy(x, target)
        assert torch.equal(nn.BCELoss()(x, target), by_function)
        return by_function.dtype

    for turn_on in REGIONS.values():
        amp.init(patch_type=low, allow_banned=True)
        assert loss(low) == f32
        turn_on(low)
        assert loss(f32) == f32
        with pytest.raises(NotImplementedError, match="with_logits"):
            loss(low)
    amp._amp_state.handle._deactivate()
    amp.init(patch_type=low, allow_banned=True)
    assert loss(low) == f32


@both
@halves
def test_half_arguments_are_refused_wherever_they_are(low, region):
    REGIONS[region](low)
    x, half = torch.rand(4), torch.rand(4).to(low)
    for arguments in ({"input": half, "target": x}, {"input": x, "target": half}):
        with pytest.raises(NotImplementedError, match="with_logits"):
            F.binary_cross_entropy(**arguments)
        with pytest.raises(NotImplementedError, match="with_logits"):
            F.binary_cross_entropy(*arguments.values())
    with pytest.raises(NotImplementedError, match="exp_"):
        torch.exp_(input=half)
    assert x.pow_(half) is x  # only what is overwritten counts


# --- weights that change -----------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["in place", "data", "load_state_dict"])
@both
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

    def part(x):
        seen.append(product())
        return x * x

    def forward(x):
        return checkpoint(part, x, use_reentrant=reentrant)

    model = amp.initialize(Runs(forward), verbosity=0)
    model(torch.rand(2, requires_grad=True)).sum().backward()
    assert seen == [f16, f16]


# --- handles -----------------------------------------------------------------------------------


class Head(nn.Linear):
    """It notes what ``loss_fn`` gets, and what two kinds of products in the model give."""

    def loss_fn(self, logits):
        self.seen = [logits.dtype]
        return logits.float().pow(2).mean()

    def forward(self, x):
        loss = self.loss_fn(super().forward(x))
        self.seen += [super().forward(x).dtype, torch.prod(self.weight, 1).dtype]
        return loss


@both
def test_registered_functions_are_cast_once_until_the_handle_ends(region):
    """Layers register in their constructors, again and again. A function of torch's that is
    registered wins over autocast. The decorators and the rest: test_function_casts.py.
    """
    original, model, x = Head.loss_fn, Head(4, 2), torch.randn(2, 4)
    for _ in range(3):
        for _ in range(3):
            amp.register_float_function(Head, "loss_fn")
        amp.register_half_function(F, "softmax")
        REGIONS[region](f16)
    assert Head.loss_fn is not original
    assert Head.loss_fn.__wrapped__ is original
    model(x)
    assert model.seen[0] == f32
    assert F.softmax(x, -1).dtype == f16
    amp._amp_state.handle._deactivate()
    assert Head.loss_fn is original
    assert F.softmax(x, -1).dtype == f32


def test_handle_of_initialize_switches_casts_off_and_on():
    model = initialized()
    handle = amp._amp_state.handle
    assert handle.is_active()
    handle._is_active = False
    assert not handle.is_active()
    assert not rounds(model)
    handle._is_active = True
    assert rounds(model)
    initialized(opt_level="O4")
    handle._deactivate()
    assert not rounds(model)
    assert product() == bf16  # by the latest
    initialized(opt_level="O2")
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
    assert again.cache == {}
    again.remove_cache(nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match="wrap_optimizer"):
        again.scale_loss(torch.zeros(()), None)
    off, loss = amp.init(enabled=False), torch.zeros((), requires_grad=True)
    assert not off.is_active()
    assert product() == f32
    with off.scale_loss(loss, None) as scaled:
        assert scaled is loss


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


# --- amp.init after initialize ------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_init_casts_in_the_models_of_initialize(level):
    """espnet and neural_sp register the loss between the two; the scale stays with amp."""
    model = Head(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    state, x = amp.state_dict(), torch.randn(2, 4)
    amp.register_float_function(Head, "loss_fn")
    for _ in range(2):  # a second call replaces the first
        handle = amp.init()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert model.seen == [f32, f16, f32]
    assert amp.state_dict() == {"loss_scaler0": state["loss_scaler0"] | {"unskipped": 2}}
    assert list(handle.models) == [model]
    handle._deactivate()
    model(x)
    before_init = {"O0": [f32, f32, f32], "O1": [f16, f16, f32]}
    assert model.seen == before_init.get(level, [f16, f16, f16])
    amp.init(enabled=False)
    assert amp.init().models == handle.models
