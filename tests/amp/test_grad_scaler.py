"""ampfuse.GradScaler in torch's documented recipes, beside torch.amp.GradScaler itself."""

import copy
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampfuse
from ampfuse import amp
from cases import LEVELS, assert_same, bf16, f16, f32, f64, never_waiting

inf, nan = math.inf, math.nan

# name: how to make the optimizer. The first two are ours, the others are driven torch's way.
OPTIMIZERS = {
    "ampfuse SGD": partial(ampfuse.optim.SGD, lr=0.1, momentum=0.9),
    "ampfuse AdamW": partial(ampfuse.optim.AdamW, lr=0.01),
    "torch SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "torch AdamW": partial(torch.optim.AdamW, lr=0.01),
    "torch AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "torch Adagrad": partial(torch.optim.Adagrad, lr=0.05),
}
TORCH = {"ampfuse SGD": "torch SGD", "ampfuse AdamW": "torch AdamW"}
ours = partial(ampfuse.GradScaler, "cpu")
torchs = partial(torch.amp.GradScaler, "cpu")
kinds = pytest.mark.parametrize(
    "kind", [ampfuse.optim.SGD, torch.optim.SGD], ids=["ampfuse", "torch"]
)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=g)
    return x, x[:, :4].argmax(1)


def loss_of(model, step):
    x, y = batch(step)
    with torch.autocast("cpu", dtype=bf16):
        return F.cross_entropy(model(x), y)


class One:
    """One weight, and an optimizer whose step is the gradient (SGD, lr 1)."""

    def __init__(self, dtype=f32, kind=ampfuse.optim.SGD, w=1.0, **options):
        self.w = nn.Parameter(torch.full((1,), w, dtype=dtype))
        self.optimizer = kind([self.w], lr=1.0, **options)

    def backward(self, scaler, gradient):
        scaler.scale((self.w * 1).sum().float() * gradient).backward()

    def train(self, scaler, gradient):
        self.optimizer.zero_grad()
        self.backward(scaler, gradient)
        self.step(scaler)

    def step(self, scaler):
        scaler.step(self.optimizer)
        scaler.update()


# --- torch's recipes ------------------------------------------------------------------------


def train(scaler, model, optimizer, loss=loss_of, clip=None, every=1, steps=12, scales=None):
    for step in range(steps):
        args = (scaler,) if loss is penalized else ()
        scaler.scale(loss(model, step, *args) / every).backward()
        if (step + 1) % every:
            continue
        if clip == "unscaled":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        elif clip:
            scaler.clip_grad_norm_(optimizer, 0.2)
        scaler.step(optimizer)
        scaler.update(scales and scales[step])
        optimizer.zero_grad()
    return [p.float() for p in model.parameters()]


def penalized(model, step, scaler):
    loss = loss_of(model, step)
    scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    with torch.autocast("cpu", dtype=bf16):
        return loss + sum((g * inverse).pow(2).sum() for g in scaled).sqrt()


def with_overflows(model, step):
    return loss_of(model, step) * (inf if step in (0, 5) else 1)


RECIPES = {
    "typical": {},
    "clipping": {"clip": "unscaled"},
    "accumulation": {"clip": "unscaled", "every": 3},
    "gradient penalty": {"loss": penalized, "steps": 6},
    "overflows in between": {"loss": with_overflows},
    "a new scale": {"scales": [2.0**i if i % 2 else torch.tensor(2.0**-i) for i in range(12)]},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_as_with_torchs_scaler(recipe, name):
    results = []
    for make_scaler, optimizer in [(ours, name), (torchs, TORCH.get(name, name))]:
        model = network()
        scaler = make_scaler(init_scale=256.0, growth_interval=4)
        made = OPTIMIZERS[optimizer](model.parameters())
        weights = train(scaler, model, made, **RECIPES[recipe])
        results.append((weights, scaler.get_scale(), scaler._get_growth_tracker()))
    (found, *found_scale), (expected, *expected_scale) = results
    assert found_scale == expected_scale
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def two_losses(scaler, names):
    """torch's recipe of two losses of two models, one scaler, one update."""
    models = [network(0), network(1)]
    optimizers = [OPTIMIZERS[name](m.parameters()) for name, m in zip(names, models, strict=True)]
    for step in range(8):
        x, y = batch(step)
        a, b = (model(x) for model in models)
        loss0 = F.cross_entropy(2 * a + 3 * b, y)
        loss1 = F.cross_entropy(3 * a - 5 * b, y) * (inf if step == 3 else 1)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return [p for model in models for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("sgd", ["ampfuse SGD", "torch SGD"])
@pytest.mark.parametrize("adamw", ["ampfuse AdamW", "torch AdamW"])
def test_several_models_losses_and_optimizers_train_as_with_torchs(sgd, adamw):
    found, found_scale = two_losses(ours(growth_interval=2), (sgd, adamw))
    expected, expected_scale = two_losses(torchs(growth_interval=2), ("torch SGD", "torch AdamW"))
    assert found_scale == expected_scale
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_only_the_optimizer_with_the_overflow_skips_and_the_scale_halves_once(bad):
    scaler = ours()
    good, other, stock = One(), One(), One(kind=torch.optim.SGD)
    good.backward(scaler, 0.5)
    other.backward(scaler, bad)
    stock.backward(scaler, 0.5)
    for one in (good, other, stock):
        scaler.step(one.optimizer)
    scaler.update()
    assert [o.w.item() for o in (good, other, stock)] == [0.5, 1.0, 0.5]
    assert [bool(o.optimizer.last_step.skipped) for o in (good, other)] == [False, True]
    assert scaler.get_scale() == 32768.0


# --- half gradients, where torch's scaler refuses -------------------------------------------


def larc(params, lr):
    return ampfuse.optim.LARC(ampfuse.optim.SGD(params, lr=lr))


@pytest.mark.parametrize("kind", [ampfuse.optim.SGD, larc])
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_small_unscaled_gradients_survive_unscale(kind, dtype):
    one = One(dtype, kind)
    scaler = ours()
    one.backward(scaler, 1e-9)
    scaler.unscale_(one.optimizer)
    assert one.w.grad.dtype == f32
    assert one.w.grad.item() == pytest.approx(1e-9, rel=0.005)
    one.optimizer.zero_grad()
    one.backward(scaler, 0.25)
    assert one.w.grad.dtype == dtype, "the next backward gives half gradients again"


def test_other_optimizers_with_fp16_parameters_are_refused_as_by_torch():
    one = One(f16, torch.optim.SGD)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        one.train(ours(init_scale=8.0), 0.25)


def test_one_optimizer_takes_gradients_of_every_kind():
    """FP32, half, and one that has gaps in memory."""
    dense, half, gaps = parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    half.data = half.data.half()
    optimizer = ampfuse.optim.SGD(parameters, lr=1.0)
    scaler = ours(init_scale=16.0)
    scaler.scale(dense.sum() + half.sum().float()).backward()
    gaps.grad = torch.full((6,), 16.0)[::2]
    scaler.unscale_(optimizer)
    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.ones(parameter.shape))
    optimizer.zero_grad()
    scaler.update()
    for parameter in parameters:  # an inf in any of them is found
        parameter.grad = torch.full_like(parameter, inf)
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        scaler.update()
        assert scaler.get_scale() == before / 2
        parameter.grad = None


def test_float64_parameters_go_torchs_way():
    weight = nn.Parameter(torch.ones(3, dtype=f64))
    scaler = ours()
    scaler.scale((weight * 1e-12).sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert torch.equal(weight.grad, torch.full((3,), 1e-12, dtype=f64))


@kinds
def test_sparse_gradients_are_unscaled_or_refused_as_the_optimizer_takes_them(kind):
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = kind(embedding.parameters(), lr=1.0)
    scaler = ours(init_scale=16.0)
    scaler.scale(embedding(torch.tensor([1, 1])).sum()).backward()
    if kind is ampfuse.optim.SGD:
        with pytest.raises(RuntimeError, match=r"is sparse.*sparse=False"):
            scaler.unscale_(optimizer)
        return
    scaler.unscale_(optimizer)
    gradient = embedding.weight.grad.to_dense()
    assert torch.equal(gradient[:, 0], torch.tensor([0.0, 2.0, 0.0, 0.0]))


# --- clip_grad_norm_ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),  # FP16 gradients of torch's are refused, see above
    [
        *itertools.product((ampfuse.optim.SGD,), (f32, f16, bf16)),
        *itertools.product((torch.optim.SGD,), (f32, bf16)),
    ],
)
@pytest.mark.parametrize("how", ["unscaled first", "at once", "disabled"])
def test_clip_grad_norm_clips_unscaled_gradients(kind, dtype, how):
    one = One(dtype, kind)
    scaler = ours(enabled=how != "disabled")
    one.backward(scaler, 0.5)
    if how == "unscaled first":
        scaler.unscale_(one.optimizer)
    norm = scaler.clip_grad_norm_(one.optimizer, 0.25)
    one.step(scaler)
    assert norm.item() == pytest.approx(0.5, rel=1e-6)
    assert one.w.item() == pytest.approx(0.75, rel=1e-4)
    assert scaler.get_scale() == (1.0 if how == "disabled" else 65536.0)


# --- the state machine ----------------------------------------------------------------------


@kinds
def test_unscale_and_step_come_once_and_in_order(kind):
    one, scaler = One(kind=kind), ours()

    def refused(call, error, message, **arguments):
        with pytest.raises(error, match=message):
            call(*[] if call == scaler.update else [one.optimizer], **arguments)

    refused(scaler.step, AssertionError, "_scale is None")
    scaler.scale(torch.ones(()))
    refused(scaler.update, AssertionError, "No inf checks")
    one.backward(scaler, 0.25)
    refused(scaler.step, RuntimeError, "closure", closure=lambda: 0)
    assert one.w.item() == 1.0
    scaler.unscale_(one.optimizer)
    refused(scaler.unscale_, RuntimeError, "already been called")
    assert one.w.grad.item() == 0.25
    scaler.step(one.optimizer)
    refused(scaler.step, RuntimeError, "already been called")
    refused(scaler.unscale_, RuntimeError, "after step")
    assert one.w.item() == 0.75


@kinds
def test_skipping_the_step_oneself_leaves_no_trace(kind):
    """A loop may unscale, not like the norm, and update without a step."""
    one, scaler = One(kind=kind), ours()
    one.backward(scaler, inf)
    scaler.unscale_(one.optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0
    one.train(scaler, 0.25)
    assert one.w.item() == 0.75
    assert scaler.get_scale() == 32768.0
    one.optimizer.zero_grad()
    (one.w * 0.25).sum().backward()
    one.optimizer.step()  # a plain one, too
    assert one.w.item() == 0.5


@kinds
def test_a_disabled_scaler_scales_nothing(kind):
    one, scaler = One(kind=kind), ours(enabled=False)
    loss = (one.w * 0.25).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(one.optimizer)
    one.step(scaler)
    assert one.w.item() == 0.75
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


@pytest.mark.filterwarnings("error")
def test_on_a_machine_without_a_gpu_the_default_scales_on_the_cpu():
    scaler = ampfuse.GradScaler()
    assert scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 1.0) for name in ("growth_factor", "backoff_factor")),
        *((name, 0.0) for name in ("backoff_factor", "growth_interval", "init_scale", "min_scale")),
        ("max_scale", 0.5),
    ],
)
def test_bad_options_are_refused(name, value):
    more = {"min_scale": 1.0} if name == "max_scale" else {}
    with pytest.raises(AssertionError if value == 1.0 else ValueError):
        ours(**{name: value}, **more)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.sampled_from([2.0, 3.0, 1.5]))
def test_the_scale_follows_torchs(overflows, interval, factor):
    scalers = [
        make(init_scale=8.0, growth_interval=interval, growth_factor=factor, backoff_factor=0.25)
        for make in (ours, torchs)
    ]
    ones = [One(), One(kind=torch.optim.SGD)]
    for overflow in overflows:
        for scaler, one in zip(scalers, ones, strict=True):
            one.train(scaler, inf if overflow else 2.0**-12)
        found, expected = scalers
        assert found.get_scale() == max(expected.get_scale(), 2.0**-24)
        if expected.get_scale() < 2.0**-23:
            return  # from here on torch's scale goes to 0
        assert found._get_growth_tracker() == expected._get_growth_tracker()
        assert torch.equal(ones[0].w, ones[1].w)


@pytest.mark.parametrize(
    ("options", "gradients", "expected"),
    [
        (
            {"init_scale": 8.0, "min_scale": 4.0, "max_scale": 16.0},
            (inf, inf, inf, 0.5, 0.5, 0.5, inf),
            [4.0, 4.0, 4.0, 8.0, 16.0, 16.0, 8.0],
        ),
        ({"init_scale": 2.0**126, "max_scale": inf}, (0.0, 0.0, inf), [2.0**127] * 2 + [2.0**126]),
    ],
)
def test_the_scale_stays_between_floor_and_ceiling(options, gradients, expected):
    one, scaler, scales = One(), ours(growth_interval=1, **options), []
    for gradient in gradients:
        one.train(scaler, gradient)
        scales.append(scaler.get_scale())
    assert scales == expected


def test_state_dicts_are_torchs_both_ways():
    one = One()
    scaler = ours(init_scale=8.0, growth_interval=3)
    one.train(scaler, 0.5)
    theirs = torchs()
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == scaler.state_dict()
    back = ours()
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == scaler.state_dict()
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert copied.state_dict() == scaler.state_dict()
        one.train(copied, 0.5)
        assert copied._get_growth_tracker() == 2


# --- together with amp ----------------------------------------------------------------------


# torch's scaler does not see masters, and unscales no FP16 gradients.
DRIVEN = [
    *((ours, level, unscale) for level in LEVELS for unscale in (True, False)),
    *((torchs, level, unscale) for level in ("O0", "O1", "O4") for unscale in (True, False)),
    (torchs, "O3", False),
]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize(("scaler_of", "level", "unscale"), DRIVEN)
def test_a_grad_scaler_drives_optimizers_that_went_through_initialize(
    scaler_of, level, unscale, kind
):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = kind(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = scaler_of(init_scale=1024.0)
    expected = torch.ones(1, 1, requires_grad=True)
    reference = kind([expected], lr=1.0)
    for gradient in (0.25, inf, 0.125):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).float().sum() * gradient).backward()
        if unscale:
            scaler.unscale_(optimizer)
            if math.isfinite(gradient):
                assert [p.grad.item() for p in amp.master_params(optimizer)] == [gradient]
        scaler.step(optimizer)
        scaler.update()
        if math.isfinite(gradient):
            expected.grad = torch.full((1, 1), gradient)
            reference.step()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(model.weight.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("batch_norm", [True, False])  # of which torch's sees the gradients
def test_torchs_is_refused_where_it_cannot_see_the_gradients(level, kind, unscale, batch_norm):
    model = network().append(nn.BatchNorm1d(4) if batch_norm else nn.Identity())
    optimizer = kind(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = torchs(init_scale=4.0)
    scaler.scale(model(torch.ones(2, 8)).square().sum()).backward()
    before = copy.deepcopy(model.state_dict())
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Write `with amp\.scale_loss\(loss, optimizer\)"):
        scaler.step(optimizer)
    assert_same(model.state_dict(), before)
    assert all(state.get("step", 0) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("level", ["no level", "O1", "O4"])
def test_torchs_steps_where_it_saw_no_gradient(level):
    model = network()
    optimizer = ampfuse.optim.SGD(model.parameters(), lr=1.0)
    if level in LEVELS:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before, scaler = copy.deepcopy(model.state_dict()), torchs()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("what", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize(
    "given", [nn.Linear(1, 1), [nn.Parameter(torch.ones(1))]], ids=["model", "list"]
)
def test_a_grad_scaler_refuses_what_is_no_optimizer(what, given):
    scaler = ours()
    scaler.scale(torch.ones(()))
    arguments = (1.0,) if what == "clip_grad_norm_" else ()
    with pytest.raises(TypeError, match=rf"optimizer, not .*: write scaler\.{what}\(optimizer"):
        getattr(scaler, what)(given, *arguments)


@pytest.mark.gpu
def test_the_host_never_waits_for_a_grad_scaler():
    model = network().cuda().half()
    optimizer = ampfuse.optim.AdamW(model.parameters(), lr=0.01, master_weights=True)
    scaler = ampfuse.GradScaler()
    x, y = (t.cuda() for t in batch(0))

    def step():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x.half()).float(), y)).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    with never_waiting():
        step()
