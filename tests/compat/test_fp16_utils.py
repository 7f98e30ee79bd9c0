"""``apex.fp16_utils``: casts of models, masters by hand, scalers, and ``FP16_Optimizer``."""

import copy
import functools
import io
import itertools
import operator
import pickle
import sys
import types
import warnings

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import _core, half_ops
from ampfuse.compat import apex
from ampfuse.compat.apex import fp16_utils, fused_adam_cuda
from ampfuse.compat.apex.amp.scaler import LossScaler as AmpScaler
from ampfuse.compat.apex.contrib.optimizers import FP16_Optimizer as ContribOptimizer
from ampfuse.compat.apex.fp16_utils import FP16_Optimizer
from ampfuse.compat.apex.parallel.LARC import LARC
from cases import bf16, clean_apex_names, f16, f32, f64, through_a_file

INF, NAN = float("inf"), float("nan")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batch():
    return torch.rand(6, 4, generator=torch.Generator().manual_seed(1))


# --- models -------------------------------------------------------------------------------------


def test_half_models():
    layers = network()
    layers.add_module("plain", nn.BatchNorm1d(2, affine=False))
    half = fp16_utils.network_to_half(layers)
    assert isinstance(half[0], fp16_utils.tofp16)
    assert half[1] is layers
    assert layers[0].weight.dtype == layers[4].running_mean.dtype == f16
    assert layers[1].weight.dtype == layers[1].running_mean.dtype == f32
    assert half(batch()).dtype == f16
    model = fp16_utils.FP16Model(network())
    assert model.network[0].weight.dtype == f16
    assert model.network[1].weight.dtype == f32
    assert model(batch()).dtype == f16
    bilinear = fp16_utils.FP16Model(nn.Bilinear(4, 4, 2))
    assert bilinear(batch(), batch()).dtype == f16


def test_convert_module_leaves_children_alone():
    model = network()
    model(batch()).sum().backward()
    model.register_buffer("mine", torch.ones(2))
    model.register_buffer("count", torch.ones(2, dtype=torch.long))
    fp16_utils.convert_module(model, f16)
    assert model.mine.dtype == f16
    assert model.count.dtype == torch.long
    assert model[0].weight.dtype == f32
    fp16_utils.convert_module(model[0], f16)
    assert model[0].weight.dtype == model[0].weight.grad.dtype == f16
    assert fp16_utils.convert_network(model, bf16) is model
    assert model[3].bias.dtype == bf16
    assert model[1].bias.dtype == f32
    assert fp16_utils.BN_convert_float(model.half())[1].bias.dtype == f32


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat):
    model = network().half()
    model[0].bias.requires_grad_(False)
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(params) == 5
    assert {m.dtype for m in masters} == {f32}
    assert all(m.is_leaf and m.requires_grad for m in masters)
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, i + 1.0)
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    assert torch.equal(joined(m.grad for m in masters), joined(p.grad.float() for p in params))
    with torch.no_grad():
        for m in masters:
            m.sub_(m.grad)
    before = joined(params).float()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    assert torch.equal(joined(params), (before - joined(p.grad for p in params).float()).half())
    params[0].grad = None
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    first = masters[0].grad[: params[0].numel()] if flat else masters[0].grad
    assert first is None or not first.any()


# --- scalers ------------------------------------------------------------------------------------


def test_static_scaler_and_small_things():
    scaler = fp16_utils.LossScaler(8.0)
    p = nn.Parameter(torch.ones(1))
    scaler.backward(p.sum())
    assert p.grad.item() == fp16_utils.clip_grad_norm([p], 10.0) == 8.0
    assert fp16_utils.to_python_float(p) == fp16_utils.to_python_float([1.0]) == 1.0
    assert scaler.has_overflow([p]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == scaler.cur_scale == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([8.0]), None)


def test_dynamic_scaler_follows_its_window_and_looks_at_elements():
    """apex looked at the sum, which overflows for finite gradients."""
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=3)
    scales = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4, 4, 8, 4, 4, 4, 8, 4, 2, 1, 1]
    assert fp16_utils.DynamicLossScaler().loss_scale == 2**32
    p = nn.Parameter(torch.ones(8))
    for grad in (None, torch.full((8,), 2e38)):
        p.grad = grad
        assert scaler.has_overflow([p]) is False
    p.grad[3] = NAN
    assert scaler.has_overflow([p]) is True
    assert scaler._has_inf_or_nan(p.grad)


# --- FP16_Optimizer -----------------------------------------------------------------------------


class CopiedAdam(torch.optim.Optimizer):
    """A copy of 2019's FusedAdam, as repositories have it."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        self.grad_norms = grad_norms
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    zeros = torch.zeros_like(p.data)
                    state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
                state["step"] += 1
                moments, out = (state["exp_avg"], state["exp_avg_sq"]), torch.tensor([])
                given = (group["lr"], 0.9, 0.999, 1e-8, scale, state["step"], 1, 1)
                fused_adam_cuda.adam(
                    p.data, out, *moments, p.grad.data, *given, group["weight_decay"]
                )


ClippedAdam = functools.partial(apex.optimizers.FusedAdam, max_grad_norm=1.0)


def start(kind=torch.optim.SGD, lr=0.1, larc=None, wrapper=FP16_Optimizer, **options):
    """A half model and FP16_Optimizer, with LARC "within" it or "around" it.

    For contrib's own FP16_Optimizer, biases and weights are two groups.
    """
    model = fp16_utils.network_to_half(network())
    params = list(model.parameters())
    if wrapper is ContribOptimizer:
        params = [{"params": [p for p in params if p.dim() == dim]} for dim in (1, 2)]
    inner = kind(params, lr=lr)
    optimizer = wrapper(LARC(inner, 0.3) if larc == "within" else inner, **options)
    return model, LARC(optimizer, 0.3) if larc == "around" else optimizer


def loss_of(model):
    return model(batch()).float().pow(2).mean()


def grads(optimizer):
    """Copies of the FP32 gradients."""
    return [g.clone() for group in optimizer.inspect_master_grad_data() for g in group]


def joined(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def fp32_params(optimizer):
    """The FP32 values of all parameters."""
    return joined(p for group in optimizer.param_groups for p in group["params"])


def masters(optimizer):
    return joined(optimizer.all_fp32_from_fp16_params)


def train(model, optimizer, steps=3, factor=1.0):
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model) * factor)
        optimizer.step()


DYNAMIC_64 = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0}}
KINDS = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "RMSprop": torch.optim.RMSprop,
    "FusedAdam that clips": ClippedAdam,
    "copied FusedAdam": CopiedAdam,
}


@pytest.mark.covers(2)
@pytest.mark.parametrize("larc", [None, "within", "around"])
@pytest.mark.parametrize("scaling", [{}, {"static_loss_scale": 64.0}, DYNAMIC_64], ids=str)
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [*((kind, FP16_Optimizer) for kind in KINDS), ("FusedAdam that clips", ContribOptimizer)],
)
def test_it_steps_as_the_optimizer_of_fp32_parameters(kind, wrapper, scaling, larc):
    """Also after an overflow, and with gradients that were left scaled or are clipped."""
    kind = functools.partial(KINDS[kind], weight_decay=0.1)
    model, optimizer = start(kind, larc=larc, wrapper=wrapper, **scaling)
    split = [group["params"] for group in optimizer.param_groups]
    twins = [[nn.Parameter(p.detach().clone()) for p in params] for params in split]
    plain = kind([{"params": params} for params in twins], lr=0.1)
    plain = LARC(plain, 0.3) if larc else plain
    flat = [p for params in twins for p in params]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, plain)]
    for step in range(4):
        overflows = step == 1 and scaling == DYNAMIC_64
        optimizer.zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        loss = loss_of(model) * (NAN if overflows else 1.0)
        optimizer.backward(loss, update_master_grads=step != 2)
        if step == 2:
            optimizer.update_master_grads()
        if step == 3:
            optimizer.clip_master_grads(0.01)
        assert optimizer.overflow is overflows
        if not overflows:
            for q, g in zip(flat, grads(optimizer), strict=True):
                q.grad = g
            plain.step()
        optimizer.step()
        torch.testing.assert_close(fp32_params(optimizer), joined(flat), rtol=1e-5, atol=1e-6)
        assert torch.equal(masters(optimizer).half(), joined(optimizer.all_fp16_params))
        assert {half.dtype for half in optimizer.all_fp16_params} == {f16}
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**step
        for schedule in schedules:
            schedule.step()
    if scaling == DYNAMIC_64:
        assert optimizer.loss_scale == 32.0


def test_lists_and_attributes():
    _, optimizer = start(static_loss_scale=4.0)
    inner = optimizer.optimizer
    assert isinstance(inner, torch.optim.SGD)
    assert [p.dtype for p in optimizer.all_fp16_params] == [f16] * 4
    assert [p.dtype for p in optimizer.all_fp32_from_fp16_params] == [f32] * 4
    assert len(optimizer.all_fp32_from_fp32_params) == 2  # batch norm
    assert optimizer.loss_scale == 4.0
    optimizer.loss_scale = 8.0
    assert optimizer.loss_scaler.loss_scale() == 8.0
    for name in ("param_groups", "state"):
        assert getattr(optimizer, name) is getattr(inner, name)
        other = copy.copy(getattr(inner, name))
        setattr(optimizer, name, other)
        assert getattr(inner, name) is other
    assert optimizer.verbose is True
    assert optimizer.master_weights is inner.master_weights is True  # as any other attribute
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    assert not hasattr(FP16_Optimizer.__new__(FP16_Optimizer), "state")  # and no recursion
    with pytest.raises(TypeError, match="takes the optimizer, not Linear"):
        FP16_Optimizer(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="float64"):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=f64))], lr=1.0))
    extra = nn.Parameter(torch.ones(2, dtype=f16))
    optimizer.add_param_group({"params": extra})
    assert optimizer.fp16_groups[1][0] is extra


def test_gradients_are_unscaled_and_accumulate():
    model, optimizer = start(static_loss_scale=64.0)
    optimizer.backward(loss_of(model))
    once = grads(optimizer)
    assert {g.dtype for g in once} == {f32}
    loss_of(plain := network()).backward()
    exact = joined(p.grad for p in plain.parameters())
    torch.testing.assert_close(joined(once), exact, rtol=1e-2, atol=2e-3)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.update_master_grads()
    torch.testing.assert_close(joined(grads(optimizer)), 2 * joined(once), rtol=2e-3, atol=1e-5)
    optimizer.zero_grad()
    (loss_of(model) * optimizer.loss_scale).backward()  # without optimizer.backward
    optimizer.update_master_grads()
    torch.testing.assert_close(grads(optimizer), once)


def read_master_norms(optimizer):
    return [p.grad.norm() for p in optimizer.param_groups[0]["params"]]


# What a loop does between backward and step. None of it changes the step.
ACTIONS = {
    "update": lambda optimizer: optimizer.update_master_grads(),
    "look": read_master_norms,
    "look_at_model": lambda optimizer: [p.grad.norm() for p in optimizer.all_fp16_params],
}
BETWEEN = ("update", "look update", "update look update update", "look_at_model update")


@pytest.mark.covers(2)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("scaling", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("first", ["backward", "delayed", "own"])
def test_master_gradients_can_be_updated_any_number_of_times(first, scaling, between):
    """The loss scale adapts once per pass."""
    weights, counted = [], []
    for actions in ("", between):
        model, optimizer = start(**scaling)
        for _ in range(3):
            (model if first == "own" else optimizer).zero_grad()
            if first == "own":
                (loss_of(model) * optimizer.loss_scale).backward()
            else:
                optimizer.backward(loss_of(model), update_master_grads=first == "backward")
            if first != "backward":
                optimizer.update_master_grads()
            for action in actions.split():
                ACTIONS[action](optimizer)
            optimizer.step()
        weights.append(fp32_params(optimizer))
        counted.append(optimizer.loss_scaler.state_dict())
    assert torch.equal(*weights)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("looks", [False, True])
def test_gradients_after_the_models_zero_grad_are_new(looks):
    """The optimizer does not see that call."""
    model, optimizer = start(static_loss_scale=64.0)
    optimizer.backward(loss_of(model) * 3)
    if looks:
        read_master_norms(optimizer)
    model.zero_grad()
    (loss_of(model) * 64).backward()
    optimizer.update_master_grads()
    other, expected = start(static_loss_scale=64.0)
    expected.backward(loss_of(other))
    assert torch.equal(joined(grads(optimizer)), joined(grads(expected)))


def test_half_models_on_a_cpu_use_ampfuses_half_ops():
    """A half model on the CPU uses the kernels of ``initialize("O2")``."""
    half_ops.reset()
    try:
        start(static_loss_scale=64.0)
        assert _core.EXTENSION.half_ops()
        with ampfuse.cpu_half_ops(False):
            start(static_loss_scale=64.0)
            assert not _core.EXTENSION.half_ops()
    finally:
        half_ops.reset()


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_clipping(norm_type):
    """Gradients of two passes are clipped, through a graph that the first one keeps."""
    model, optimizer = start(static_loss_scale=64.0)
    loss = loss_of(model)
    optimizer.backward(loss, retain_graph=True)
    once = joined(grads(optimizer))
    optimizer.backward(loss)
    assert torch.equal(joined(grads(optimizer)), 2 * once)
    norm = torch.linalg.vector_norm(2 * once, norm_type)
    torch.testing.assert_close(optimizer.clip_master_grads(0.01, norm_type), norm)
    grad = joined(grads(optimizer))
    clipped = torch.linalg.vector_norm(grad, norm_type)
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0)
    before = fp32_params(optimizer)
    optimizer.step()
    torch.testing.assert_close(fp32_params(optimizer), before - 0.1 * grad)
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward(loss)


@pytest.mark.parametrize("own", [False, True], ids=["optimizer.backward", "loss.backward"])
def test_overflow(own, capsys):
    model, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    before = joined(model.parameters())
    if own:
        (loss_of(model) * INF).backward()
        optimizer.update_master_grads()
    else:
        optimizer.backward(loss_of(model) * INF)
    assert optimizer.overflow is True
    assert optimizer.loss_scale == 2.0**9
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "overflow" in capsys.readouterr().out
    assert optimizer.step() is None
    assert torch.equal(joined(model.parameters()), before)
    train(model, optimizer, steps=1)
    assert optimizer.overflow is False
    assert not torch.equal(joined(model.parameters()), before)


def test_with_a_static_scale_only_the_script_skips():
    model, optimizer = start(static_loss_scale=8.0)
    before = joined(model.parameters())
    optimizer.backward(loss_of(model) * NAN)
    assert optimizer.overflow is False
    optimizer.overflow = True
    optimizer.step()
    assert optimizer.overflow is True
    assert torch.equal(joined(model.parameters()), before)
    optimizer.overflow = False
    optimizer.step()
    assert model[1][0].weight.isnan().any()


@pytest.mark.parametrize("options", [{"static_loss_scale": 8.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, apex.optimizers.FusedAdam])
def test_contribs_skips_overflows_at_any_scale(kind, options):
    model, optimizer = start(kind, 0.01, wrapper=ContribOptimizer, **options)
    start_scale, before = optimizer.cur_scale, joined(model.parameters())
    optimizer.backward(loss_of(model) * INF)
    optimizer.step()
    assert torch.equal(joined(model.parameters()), before)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    scale = optimizer.cur_scale
    assert scale == (start_scale / 2 if optimizer.dynamic_loss_scale else 8.0)
    train(model, optimizer, steps=1)
    assert optimizer.fp32_groups == [group["params"] for group in optimizer.param_groups]
    assert {param.dtype for group in optimizer.fp32_groups for param in group} == {f32}
    assert not torch.equal(joined(model.parameters()), before)
    if optimizer.dynamic_loss_scale:
        optimizer.loss_scaler._unskipped = 999
        train(model, optimizer, steps=1, factor=1e-3)
        assert optimizer.cur_scale == 2 * scale
        optimizer.cur_scale = 1.0
        optimizer.backward(loss_of(model) * INF)
        assert optimizer.cur_scale == 1.0
    for optimizers in (optimizer, [optimizer]):
        with pytest.raises(RuntimeError, match="FP16_Optimizer"):
            apex.amp.initialize(model, optimizers, opt_level="O2")


def test_contribs_gives_a_copied_step_the_norm_of_each_group():
    model, optimizer = start(CopiedAdam, wrapper=ContribOptimizer, static_loss_scale=8.0)
    optimizer.backward(loss_of(model))
    expected = [joined(p.grad for p in group).norm() for group in optimizer.fp32_groups]
    optimizer.step()
    torch.testing.assert_close(optimizer.optimizer.grad_norms, expected)


def test_zero_grad_zeroes_unless_told_to_drop():
    model, optimizer = start(static_loss_scale=2.0)
    weights, exact = list(model.parameters()), optimizer.all_fp32_from_fp16_params
    for given, dropped in (({}, False), ({"set_grads_to_None": True}, True)):
        optimizer.backward(loss_of(model))
        assert optimizer.inspect_master_grad_data()[0][0].any()
        optimizer.zero_grad(**given)
        assert [p.grad is None for p in weights] == [dropped] * len(weights)
        assert all(p.grad is None or not p.grad.any() for p in [*weights, *exact])


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_an_optimizer_that_has_stepped_keeps_its_state(dtype):
    p = nn.Parameter(torch.randn(5).to(dtype))
    inner = torch.optim.Adam([p], lr=0.1)
    p.grad = torch.ones_like(p)
    inner.step()
    kept = inner.state[p]["exp_avg"].clone()
    assert kept.dtype == dtype
    (master,) = FP16_Optimizer(inner).all_fp32_from_fp16_params
    assert set(inner.state) == {master}
    assert inner.state[master]["step"] == 1
    assert inner.state[master]["exp_avg"].dtype == f32
    assert torch.equal(inner.state[master]["exp_avg"], kept.float())


def closure_of(model, optimizer, zeroes="optimizer", factors=None):
    """A closure that evaluates the loss, times the next of `factors`."""

    def closure():
        (model if zeroes == "model" else optimizer).zero_grad()
        loss = loss_of(model) * (next(factors) if factors else 1.0)
        optimizer.backward(loss)
        return loss

    return closure


def test_closures():
    """LBFGS evaluates the model many times; each evaluation has to see the latest masters."""
    model, weights = fp16_utils.network_to_half(nn.Sequential(nn.Linear(4, 1))), []
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=8)
    optimizer = FP16_Optimizer(lbfgs, static_loss_scale=8)
    model.register_forward_pre_hook(lambda *_: weights.append(model[1][0].weight.clone()))
    closure = closure_of(model, optimizer)
    first = optimizer.step(closure)
    assert len(weights) > 2
    assert not torch.equal(weights[0], weights[-1])
    assert closure() < 0.1 * first


@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
@pytest.mark.parametrize(("larc", "overflows"), [(None, 2), ("within", 2), ("around", 0)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_closure_that_overflows_is_repeated(kind, larc, overflows, zeroes):
    model, optimizer = start(kind, larc=larc, dynamic_loss_scale=True)
    before, factors = masters(optimizer), iter([INF] * overflows + [1.0])
    assert torch.isfinite(optimizer.step(closure_of(model, optimizer, zeroes, factors)))
    assert optimizer.loss_scale == 2.0 ** (16 - overflows)
    assert not torch.equal(masters(optimizer), before)


def test_a_closure_that_always_overflows_ends():
    scales = {"init_scale": 8.0, "min_loss_scale": 2.0}
    model, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args=scales)
    with pytest.raises(RuntimeError, match="smallest"):
        optimizer.step(closure_of(model, optimizer, factors=itertools.repeat(NAN)))


def test_a_scheduler_of_the_inner_optimizer_does_not_warn():
    model, optimizer = start()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            train(model, optimizer, steps=1)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("larc", [None, "within", "around"])
def test_gradients_left_scaled_keep_their_scale(larc):
    """Gradients scaled by 64 are unscaled by 64, whatever the scale is by then."""
    gradients = []
    for scale in (64.0, 16.0):
        model, optimizer = start(larc=larc, static_loss_scale=64.0)
        optimizer.backward(loss_of(model), update_master_grads=False)
        optimizer.loss_scale = scale
        optimizer.update_master_grads()
        gradients.append(joined(grads(optimizer)))
    assert gradients[0].any()
    assert torch.equal(*gradients)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.covers(2)
@pytest.mark.parametrize("larc", [None, "within", "around"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_first", [True, False])
def test_stop_and_resume_gives_the_same_bits(kind, model_first, larc):
    through, optimizer = start(KINDS[kind], larc=larc, dynamic_loss_scale=True)
    train(through, optimizer, steps=3)
    saved = through_a_file({"model": through.state_dict(), "optimizer": optimizer.state_dict()})
    train(through, optimizer, steps=3)
    keys = "loss_scaler dynamic_loss_scale overflow first_closure_call_this_step"
    assert {*saved["optimizer"]} == {*keys.split(), "optimizer_state_dict", "fp32_from_fp16"}
    model, again = start(KINDS[kind], larc=larc, dynamic_loss_scale=True)
    train(model, again, steps=1)
    loads = [(model, saved["model"]), (again, saved["optimizer"])]
    for loaded, state in loads if model_first else reversed(loads):
        loaded.load_state_dict(state)
    train(model, again, steps=3)
    assert torch.equal(masters(again), masters(optimizer))
    assert again.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()


def test_loading_fills_the_masters_in_place():
    model, optimizer = start(static_loss_scale=4.0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["first_closure_call_this_step"] is True
    train(model, optimizer)
    before = list(optimizer.all_fp32_from_fp16_params)
    optimizer.overflow = True
    optimizer.load_state_dict(saved)
    assert optimizer.overflow is False
    assert all(map(operator.is_, optimizer.all_fp32_from_fp16_params, before))
    assert torch.equal(masters(optimizer), joined(saved["fp32_from_fp16"][0]))
    saved["fp32_from_fp16"] = [saved["fp32_from_fp16"][0][:1]]  # of another model
    with pytest.raises(ValueError, match="master"):
        optimizer.load_state_dict(saved)


# The class of apex's scaler, its attributes, the class that it loads as, and the clean passes that
# it had counted.
AMP = {"_loss_scale": 1024.0, "dynamic": True, "_max_loss_scale": 2.0**24, "_min_loss_scale": None}
AMP |= {"_scale_seq_len": 2000, "_unskipped": 7, "_has_overflow": False}
AMP |= {"_overflow_buf": torch.tensor([0], dtype=torch.int32)}
DYNAMIC = {"cur_scale": 1024.0, "cur_iter": 10, "last_overflow_iter": 5}
DYNAMIC |= {"scale_factor": 2.0, "scale_window": 1000}
STATIC, MODULE = {"cur_scale": 1024.0}, "apex.fp16_utils.loss_scaler"
OLD = {
    "amp": ("apex.amp.scaler", "LossScaler", AMP, AmpScaler, 7),
    "dynamic": (MODULE, "DynamicLossScaler", DYNAMIC, fp16_utils.DynamicLossScaler, 4),
    "static": (MODULE, "LossScaler", STATIC, fp16_utils.LossScaler, 0),
}


def _old_pickle(module, name, state):
    """The bytes that torch.save wrote for such an object where apex was installed."""
    kind = type(name, (), {"__module__": module})
    instance, file, parts = kind(), io.BytesIO(), module.split(".")
    vars(instance).update(state)
    with clean_apex_names():
        for end in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:end])] = types.ModuleType(parts[end - 1])
        setattr(sys.modules[module], name, kind)
        torch.save(instance, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("which", OLD)
def test_checkpoints_of_apex_with_pickled_scalers(which, weights_only):
    module, name, attributes, kind, unskipped = OLD[which]
    file = _old_pickle(module, name, attributes)
    with clean_apex_names():
        apex.install()
        scaler = torch.load(file, weights_only=weights_only)
    assert type(scaler) is kind
    dynamic = which != "static"
    model, optimizer = start(torch.optim.Adam, dynamic_loss_scale=True)
    train(model, optimizer, steps=2)
    state = optimizer.state_dict()
    # As apex saved it: an object, and no masters in the state of the inner optimizer.
    state |= {"loss_scaler": scaler, "dynamic_loss_scale": dynamic}
    state = copy.deepcopy(state)
    for entry in state["optimizer_state_dict"]["state"].values():
        entry.pop("master_param", None)
    other, again = start(torch.optim.Adam)
    again.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    assert again.dynamic_loss_scale is dynamic
    assert again.loss_scale == 1024.0
    assert again.loss_scaler._unskipped == unskipped
    assert torch.equal(masters(again), masters(optimizer))


def test_nonsense_in_a_pickled_scaler_is_refused():
    nonsense = {"_loss_scale": "nonsense", "dynamic": True}
    file = _old_pickle("apex.amp.scaler", "LossScaler", nonsense)
    with clean_apex_names():
        apex.install()
        with pytest.raises(Exception, match="nonsense"):
            torch.load(file, weights_only=True)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "scaling",
    [
        {"static_loss_scale": 64.0},
        {"dynamic_loss_scale": True},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 4.0}},
    ],
)
def test_checkpoints_of_2018_and_2019(scaling, flat):
    """State dicts as apex saved them: in 2018 one flat tensor a group; no masters inside."""
    contrib = functools.partial(start, ClippedAdam, 0.05, wrapper=ContribOptimizer)
    model, optimizer = contrib(**scaling)
    train(model, optimizer)
    saved = through_a_file(optimizer.state_dict())
    keys = "dynamic_loss_scale cur_scale cur_iter last_overflow_iter scale_factor scale_window"
    assert {*saved} == {*keys.split(), "optimizer_state_dict", "fp32_groups"}
    assert saved["cur_scale"] == optimizer.cur_scale
    assert saved["scale_factor"] == scaling.get("dynamic_loss_args", {}).get("scale_factor", 2.0)
    saved |= {"cur_iter": 14, "last_overflow_iter": 10}  # three passes since
    inner = saved["optimizer_state_dict"]
    for entry in inner["state"].values():
        entry.pop("master_param", None)
    if flat:
        saved["fp32_groups_flat"] = [joined(group) for group in saved.pop("fp32_groups")]
        old = [group["params"] for group in inner["param_groups"]]
        inner["state"] = {
            i: {"step": int(inner["state"][keys[0]]["step"])}
            | {n: joined(inner["state"][k][n] for k in keys) for n in ("exp_avg", "exp_avg_sq")}
            for i, keys in enumerate(old)
        }
        for i, group in enumerate(inner["param_groups"]):
            group["params"] = [i]
    other, again = contrib(dynamic_loss_scale=True)
    train(other, again, steps=1)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    assert again.loss_scaler._unskipped == 3
    assert again.dynamic_loss_scale == optimizer.dynamic_loss_scale
    for each in ((model, optimizer), (other, again)):
        train(*each)
    assert torch.equal(fp32_params(again), fp32_params(optimizer))


@pytest.mark.parametrize("other", ["longer", "shorter", "more groups"])
def test_a_flat_state_of_another_model_is_refused(other):
    _, optimizer = start(ClippedAdam, 0.05, wrapper=ContribOptimizer)
    state = optimizer.state_dict()
    flat = joined(param for group in state.pop("fp32_groups") for param in group)
    sizes = {"longer": [flat.numel() + 1], "shorter": [flat.numel() - 1]}
    state["fp32_groups_flat"] = [torch.zeros(n) for n in sizes.get(other, [flat.numel(), 1])]
    before = fp32_params(optimizer).clone()
    with pytest.raises(ValueError, match="saved from another model"):
        optimizer.load_state_dict(state)
    assert torch.equal(fp32_params(optimizer), before)


def test_a_static_scale_that_becomes_dynamic_has_the_bounds_of_its_class():
    _, optimizer = start(wrapper=ContribOptimizer)
    args = {"scale_factor": 4.0, "scale_window": 7}
    _, saved = start(wrapper=ContribOptimizer, dynamic_loss_scale=True, dynamic_loss_args=args)
    optimizer.load_state_dict(through_a_file(saved.state_dict()))
    scaler = optimizer.loss_scaler
    assert (scaler._min_loss_scale, scaler._scale_factor, scaler._scale_seq_len) == (1.0, 4.0, 7)
