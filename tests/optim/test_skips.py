"""Skipped steps, non-finite or spikes: the run is the one without their batches, everywhere."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import ampfuse
from ampfuse import optim
from ampfuse.optim.last_step import StepHistory
from cases import (
    KINDS,
    NEVER_QUANTIZED,
    assert_same_bits,
    bf16,
    f32,
    f64,
    give_gradients,
    make,
    parameters,
    params_of,
    snapshot,
    through_a_file,
)

SHAPES = ((1,), (5, 8), (70, 60))
WARM = StepHistory(200, 3, 1, 0, 150, 1, math.inf, norms=196, log_mean=4.2, log_variance=0.01)
MODES = {
    "fp32": (f32, {}),
    "masters": (bf16, {"master_weights": True}),
    "split ema": (bf16, {"master_weights": "split", "ema_decay": 0.9}),
    "bf16 states": (bf16, {"master_weights": "split", "state_dtype": "bf16"}),
    "stochastic": (bf16, {"rounding": "stochastic"}),
    "8bit": (bf16, {"master_weights": "split", "state_dtype": "8bit"}),
}


def warm(optimizer, history=WARM):
    """Give `optimizer` a history of many norms around 67, that of random gradients here."""
    optimizer.load_history(torch.tensor(history, dtype=f64))
    return optimizer


def history_of(optimizer):
    return StepHistory(*optimizer.param_table().inspector.state_field("history").tolist())


def step(optimizer, i, scale=1.0):
    """Make a step whose gradients depend on `i`; returns why it was skipped."""
    give_gradients(params_of(optimizer), i, scale)
    optimizer.step()
    return int(optimizer.last_step.skipped)


# --- the rule ------------------------------------------------------------------------------------


def expected(norms, deviations):
    """The decisions, and the last mean and variance."""
    decisions, logs, mean, variance = [], 0, 0.0, 0.0
    for norm in norms:
        if not math.isfinite(norm):
            decisions.append(1)
        elif norm == 0:
            decisions.append(0)
        elif logs >= 100 and math.log(norm) > mean + deviations * max(0.1, math.sqrt(variance)):
            decisions.append(2)
        else:
            decisions.append(0)
            logs += 1
            weight = max(1 / logs, 0.01)
            off = math.log(norm) - mean
            mean += weight * off
            variance = (1 - weight) * (variance + weight * off**2)
    return decisions, mean, variance


@pytest.mark.parametrize(("spread", "deviations"), [(0.3, 3.0), (0.01, 6.0), (1.0, 1.0)])
def test_spikes_are_found_by_the_exponential_mean_of_log_norms(spread, deviations, device):
    random = torch.Generator().manual_seed(3)
    norms = (torch.randn(300, generator=random) * spread).exp() * 1e-3
    norms[[20, 110, 150, 151, 152, 220]] *= torch.tensor([3.0, *[300.0] * 5])
    norms[[10, 160]] = 0
    norms[[30, 170]] = math.inf
    norms[171] = math.nan
    param = nn.Parameter(torch.zeros(1, device=device))
    optimizer = optim.SGD([param], lr=1e-9, skip_spikes=deviations)
    decisions = []
    for norm in norms.tolist():
        param.grad = torch.full_like(param, norm)
        optimizer.step()
        decisions.append(int(optimizer.last_step.skipped))
    decided, mean, variance = expected(norms.tolist(), deviations)
    assert decisions == decided
    assert decisions[100:].count(2) >= 4
    assert decisions[20] == 0
    history = history_of(optimizer)
    assert (history.steps, history.nonfinite, history.spike) == (300, 3, decisions.count(2))
    assert history.log_mean == pytest.approx(mean, rel=1e-8)
    assert history.log_variance == pytest.approx(variance, rel=1e-6)
    assert history.norms == 300 - 2 - 3 - decisions.count(2)


def test_without_the_option_norms_are_not_followed(device):
    optimizer = make("adamw", parameters(SHAPES, device=device), max_grad_norm=1.0)
    warm(optimizer)
    assert step(optimizer, 0, 1e6) == 0
    assert history_of(optimizer) == WARM._replace(steps=201)


@pytest.mark.parametrize("level", [6.0, 6])
def test_a_norm_beyond_fp32_and_a_clipped_one_are_spikes(level, device):
    optimizer = make(
        "adamw", parameters(SHAPES, device=device), skip_spikes=level, max_grad_norm=1.0
    )
    warm(optimizer)
    assert step(optimizer, 0) == 0
    before = snapshot(optimizer)
    assert step(optimizer, 1, 1e37) == 2
    assert step(optimizer, 2, 10.0) == 2
    assert_same_bits(snapshot(optimizer), before)


# --- a run with bad batches is the one without them ----------------------------------------------

PLANTED = {2: math.nan, 3: 40.0, 6: math.inf, 7: -math.inf, 9: 1e5}


@pytest.mark.covers(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*KINDS, "muon"])
def test_bad_batches_leave_no_trace(name, mode, device):
    dtype, options = MODES[mode]
    if options.get("state_dtype", "fp32") != "fp32" and name in NEVER_QUANTIZED:
        options = {**options, "state_dtype": "bf16"}
    shapes = [shape for shape in SHAPES if name != "muon" or len(shape) == 2]
    held = parameters(shapes, dtype, device=device)
    runs = []
    for planted in ({}, PLANTED):
        params = copy.deepcopy(held)
        if name == "muon":
            optimizer = optim.Muon(params, lr=0.02, skip_spikes=6.0, **options)
        else:
            optimizer = make(name, params, skip_spikes=6.0, **options)
        warm(optimizer)
        for i in range(11):
            if i in planted:
                reason = 1 if not math.isfinite(planted[i]) else 2
                assert step(optimizer, i, planted[i]) == reason
            elif i not in PLANTED:
                assert step(optimizer, i) == 0
        runs.append((snapshot(optimizer), history_of(optimizer)))
    assert_same_bits(runs[1][0], runs[0][0])
    clean, history = runs[0][1], runs[1][1]
    assert (history.nonfinite, history.spike, history.in_a_row) == (6, 3, 0)
    assert history[-3:] == clean[-3:]


# Of 400 batches one in a hundred is bad: what its loss is multiplied by.
SPIKES = {210: 1e4, 350: 1e4}
BAD_BATCHES = {130: math.nan, 290: math.nan, **SPIKES}


def loss_on_digits(kind, seed, bad, **options):
    """The loss after a training, its mean over the last steps, and the optimizer. Batches of factor
    None are left out."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    inputs, targets = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if kind == "Muon":
        optimizer = optim.Muon(optim.muon_groups(model), lr=0.02, **options)
    else:
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, **options)
    losses = []
    for i in range(400):
        chosen = torch.randint(len(inputs), (64,))
        if bad.get(i, 1.0) is None:
            continue
        loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        (loss * bad.get(i, 1.0)).backward()
        optimizer.step()
        if i >= 360:
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(model(inputs), targets).item())
    return sum(losses) / len(losses), optimizer


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Muon", marks=pytest.mark.slow)])
def test_a_training_with_bad_batches_learns_as_one_without_them(kind, seed):
    without, _ = loss_on_digits(kind, seed, dict.fromkeys(BAD_BATCHES))
    loss, optimizer = loss_on_digits(kind, seed, BAD_BATCHES, skip_spikes=6.0)
    assert loss == without < 0.1
    skipped = {name: int(n) for name, n in optimizer.skipped_steps.items()}
    assert skipped == {"nonfinite": 2, "spike": 2}
    unguarded, _ = loss_on_digits(kind, seed, SPIKES)
    assert unguarded > 2 * without


# --- checkpoints and copies ----------------------------------------------------------------------


def through_dcp(optimizer, fresh, **options):
    options = dcp.StateDictOptions(**options)
    models = []
    for one in (optimizer, fresh):
        models.append(nn.Module())
        for i, param in enumerate(params_of(one)):
            models[-1].register_parameter(f"p{i}", param)
    saved = dcp.get_optimizer_state_dict(models[0], optimizer, options=options)
    assert "step_history" not in optimizer.param_groups[0]
    dcp.set_optimizer_state_dict(models[1], fresh, copy.deepcopy(saved), options=options)
    assert "step_history" not in fresh.param_groups[0]
    return fresh


RESUMES = {
    "state dict": lambda optimizer, fresh: (
        fresh.load_state_dict(through_a_file(optimizer.state_dict())) or fresh
    ),
    "dcp": through_dcp,
    "dcp flat": lambda *both: through_dcp(*both, flatten_optimizer_state_dict=True),
    "deepcopy": lambda optimizer, _: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, _: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", RESUMES)
def test_a_resumed_run_decides_alike(way, used):
    """Also in an optimizer that was used for another training before."""
    options = {"skip_spikes": 6.0, "betas": (0.9, 0.99)}
    held = parameters(SHAPES)
    optimizer = warm(optim.AdamW(held, **options), WARM._replace(norms=97, log_variance=1e-4))
    assert [step(optimizer, i, scale) for i, scale in enumerate((1, 9, math.inf))] == [0, 0, 1]
    fresh = optim.AdamW(copy.deepcopy(held), **options)
    if used:
        warm(fresh, WARM._replace(log_mean=-5.0))
        step(fresh, 9)
    other = RESUMES[way](optimizer, fresh)
    with torch.no_grad():
        for param, source in zip(params_of(other), held, strict=True):
            param.copy_(source)
    results = []
    for one in (optimizer, other):
        reasons = [step(one, i, s) for i, s in enumerate((1, 1, 30, 1, math.nan, 1, 300), 3)]
        assert reasons == [0, 0, 2, 0, 1, 0, 2]
        results.append((snapshot(one), history_of(one)))
    assert_same_bits(results[1][0], results[0][0])
    assert repr(results[0][1]) == repr(results[1][1])
    assert {k: int(v) for k, v in other.skipped_steps.items()} == {"nonfinite": 5, "spike": 3}


def test_a_state_dict_of_torch_starts_anew_and_torch_loads_ours():
    held = parameters(SHAPES)
    optimizer = warm(optim.AdamW(held, skip_spikes=6.0))
    step(optimizer, 0)
    twin = torch.optim.AdamW(copy.deepcopy(held))
    twin.load_state_dict(optimizer.torch_state_dict())
    assert "step_history" not in twin.param_groups[0]
    optimizer.load_state_dict(twin.state_dict())
    assert history_of(optimizer) == StepHistory(*[0.0] * 10)


def test_a_damaged_history_is_refused():
    optimizer = optim.AdamW(parameters(SHAPES))
    step(optimizer, 0)
    saved = optimizer.state_dict()
    saved["step_history"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"step_history for the optimizer has shape \(3,\)"):
        optimizer.load_state_dict(saved)


def test_a_group_that_is_added_and_moved_parameters_keep_the_history():
    held = parameters(SHAPES)
    optimizer = warm(optim.AdamW(held[:2], skip_spikes=6.0))
    assert step(optimizer, 0, 100.0) == 2
    optimizer.add_param_group({"params": held[2:]})
    assert step(optimizer, 1, 100.0) == 2
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(1))
    assert step(optimizer, 2, 100.0) == 2
    assert history_of(optimizer).spike == 4


# --- what people see -----------------------------------------------------------------------------


def test_a_line_is_logged_for_each_power_of_two(caplog):
    """Steps that were skipped before the checkpoint count, but were logged then."""
    (param,) = parameters([(70, 60)])
    optimizer = warm(optim.AdamW([("head", param)], skip_spikes=6.0))
    for i in range(9):
        step(optimizer, i, 20.0)
    for _ in range(8):
        param.grad[3, 3] = math.nan
        optimizer.step()
    spike, bad = caplog.messages
    assert spike.startswith("Step 204 was skipped: its gradient norm, 13")
    assert "is a spike, more than 6.0 deviations above 66.69 on the logarithmic scale." in spike
    assert spike.endswith(" 8 of 204 steps so far.")
    assert bad.startswith("Step 212 was skipped: the gradient of head was not finite.")
    assert bad.endswith(" 16 of 212 steps so far.")


@pytest.mark.parametrize("way", RESUMES)
def test_a_resumed_run_does_not_log_skips_again(way, caplog):
    held = parameters(SHAPES)
    optimizer = warm(optim.AdamW(held, max_skipped_steps=4), WARM._replace(in_a_row=0))
    for i in range(3):
        step(optimizer, i, math.nan)
    other = RESUMES[way](optimizer, optim.AdamW(copy.deepcopy(held), max_skipped_steps=4))
    caplog.clear()
    for i in range(20):
        step(other, i)
    assert not caplog.messages


@pytest.mark.parametrize("is_empty", [True, False])
def test_the_truth_of_the_state_changes_no_checkpoint(is_empty):
    """As torch.optim._stateless asks for it; torch.distributed.checkpoint alone gets all states."""
    options = {"state_dtype": "8bit", "master_weights": "split", "skip_spikes": 6.0}
    optimizer = optim.AdamW(parameters(SHAPES, bf16), **options)
    if not is_empty:
        step(optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    assert bool(optimizer.state) != is_empty
    after = optimizer.state_dict()
    assert after.keys() == before.keys()
    assert repr(after) == repr(before)


@pytest.mark.parametrize(("limit", "at"), [(1, range(4, 20)), (7, [10, 17]), (None, [])])
@pytest.mark.parametrize(
    ("scale", "words"), [(math.nan, "the last was in head"), (50.0, "is far above the mean, 6")]
)
def test_too_many_skips_in_a_row_raise(scale, words, limit, at):
    (param,) = parameters([(70, 60)])
    optimizer = warm(optim.AdamW([("head", param)], skip_spikes=6.0, max_skipped_steps=limit))
    for i in range(4):
        step(optimizer, i)
    for i in range(4, 20):
        if i in at:
            many = f"{(i - 3) // limit * limit} steps in a row were skipped: .*{words}"
            with pytest.raises(RuntimeError, match=many):
                step(optimizer, i, scale)
        else:
            step(optimizer, i, scale)


def test_a_scaler_backs_off_for_overflows_alone():
    held = parameters(SHAPES)
    optimizer = warm(optim.AdamW(held, skip_spikes=6.0))
    scaler = ampfuse.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    scales = []
    for i, factor in enumerate((1.0, 90.0, math.inf, 1.0)):
        gradients = give_gradients(held, i, factor)
        optimizer.zero_grad()
        loss = sum((p * g * factor).sum() for p, g in zip(held, gradients, strict=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append((int(optimizer.last_step.skipped), scaler.get_scale()))
    assert scales == [(0, 8.0), (2, 8.0), (1, 4.0), (0, 4.0)]
