"""optimizer.follow: a scheduler as a table on the device, indexed by applied steps."""

import copy
import pickle

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.utils._python_dispatch import TorchDispatchMode

from ampfuse import amp, optim
from cases import assert_same_bits, snapshot

STEPS = 12
SHAPES = ((7,), (3, 5), (), (40,))


def sgd(params, **options):
    return optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2, **options)


def adamw(params, **options):
    return optim.AdamW(params, lr=1e-2, betas=(0.9, 0.99), **options)


class WeightDecayAndBeta2(lrs.LRScheduler):
    """What a user may write: not only rates change."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (1 + self.last_epoch)
            group["betas"] = (group["betas"][0], 1 - 1 / (10 + self.last_epoch))
        return [group["lr"] for group in self.optimizer.param_groups]


def sequence(optimizer):
    warmup = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    decay = lrs.CosineAnnealingLR(optimizer, T_max=6)
    return lrs.SequentialLR(optimizer, [warmup, decay], milestones=[4])


def chain(optimizer):
    return lrs.ChainedScheduler(
        [lrs.ConstantLR(optimizer, factor=0.5, total_iters=3), lrs.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULES = {
    "step": (sgd, lambda o: lrs.StepLR(o, 3)),
    "lambda": (adamw, lambda o: lrs.LambdaLR(o, lambda k: 1 / (1 + k))),
    "restarts": (adamw, lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2)),
    "one cycle, momentum": (sgd, lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS)),
    "one cycle, betas": (adamw, lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS)),
    "cyclic": (sgd, lambda o: lrs.CyclicLR(o, 0.01, 0.3, step_size_up=2)),
    "sequence": (adamw, sequence),
    "chain": (sgd, chain),
    "weight decay and beta2": (adamw, WeightDecayAndBeta2),
}


def params_of(device="cpu", seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=random).to(device).requires_grad_() for s in SHAPES]


def set_gradients(params, step, bad=False):
    random = torch.Generator().manual_seed(100 + step)
    for i, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=random).to(param)
        if bad and i == 1:
            param.grad.view(-1)[0] = float("inf")


def two_groups(kind, params, **options):
    return kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.03}], **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_steps_like_the_scheduler(name, device):
    """Same bits as scheduler.step() after each step, for all groups; nothing else is touched."""
    kind, schedule = SCHEDULES[name]
    params, twins = params_of(device), params_of(device)
    ours, twin = two_groups(kind, params), two_groups(kind, twins)
    followed, stepped = schedule(ours), schedule(twin)
    groups, position = copy.deepcopy(ours.param_groups), followed.get_last_lr()
    ours.follow(followed, STEPS)
    assert followed.get_last_lr() == position
    for old, new in zip(groups, ours.param_groups, strict=True):
        for key in old.keys() - {"params"}:
            assert new[key] == old[key]
    rates = []
    for step in range(STEPS):
        expected = [group["lr"] for group in twin.param_groups]
        assert ours.learning_rates().tolist() == expected
        rates.append(expected)
        set_gradients(params, step)
        set_gradients(twins, step)
        ours.step()
        twin.step()
        if step + 1 < STEPS:
            stepped.step()
        assert_same_bits(snapshot(ours), snapshot(twin))
    if name != "weight decay and beta2":
        assert len({tuple(r) for r in rates}) > 2  # the rates did change


class NoItems(TorchDispatchMode):
    """Nothing reads a tensor's value on the host, which would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_the_present_rate_is_not_read_on_the_host():
    optimizer = sgd(params_of())
    optimizer.follow(lrs.StepLR(optimizer, 1, gamma=0.5), 3)
    with NoItems():
        rates = optimizer.learning_rates()
    assert rates.tolist() == [0.1]


@pytest.mark.parametrize("kind", [sgd, adamw])
def test_skipped_steps_use_up_no_rate(kind, device):
    params, twins = params_of(device), params_of(device)
    ours, twin = kind(params, skip_nonfinite=True), kind(twins, skip_nonfinite=True)
    ours.follow(lrs.OneCycleLR(ours, 0.5, total_steps=8), 8)
    twin.follow(lrs.OneCycleLR(twin, 0.5, total_steps=8), 8)
    bad = (0, 3, 4, 7, 11)
    for step in range(12):
        set_gradients(params, step, step in bad)
        ours.step()
        assert bool(ours.last_step.skipped) == (step in bad)
        if step not in bad:
            set_gradients(twins, step)
            twin.step()
        if step > 0:  # a skipped first step leaves states of zeros
            assert_same_bits(snapshot(ours), snapshot(twin))


def test_after_the_end_the_last_row_stays():
    params, twins = params_of(), params_of()
    ours, twin = sgd(params), sgd(twins)
    ours.follow(lrs.StepLR(ours, 1, gamma=0.5), 3)
    for step in range(6):
        twin.param_groups[0]["lr"] = 0.1 * 0.5 ** min(step, 2)
        set_gradients(params, step)
        set_gradients(twins, step)
        ours.step()
        twin.step()
    assert_same_bits(snapshot(ours), snapshot(twin))
    assert ours.learning_rates().tolist() == [0.025]


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("order", ["follow, load", "load, follow", "loaded before a step"])
@pytest.mark.parametrize("kind", [sgd, adamw])
def test_a_resumed_run_goes_on_in_the_table(kind, order):
    def make(params):
        optimizer = two_groups(kind, params)
        return optimizer, lrs.OneCycleLR(optimizer, 0.5, total_steps=STEPS)

    params = params_of()
    whole, schedule = make(params)
    whole.follow(schedule, STEPS)
    run(whole, params, range(5))
    saved = copy.deepcopy(whole.state_dict())
    assert [group["schedule_step"] for group in saved["param_groups"]] == [5, 5]
    weights = [param.detach().clone() for param in params]
    run(whole, params, range(5, STEPS))

    again = [weight.requires_grad_() for weight in weights]
    resumed, schedule = make(again)
    if order == "loaded before a step":  # the table has run already
        resumed.follow(schedule, STEPS)
        kept = [weight.detach().clone() for weight in again]
        run(resumed, again, range(3))
        with torch.no_grad():
            for weight, old in zip(again, kept, strict=True):
                weight.copy_(old)
        resumed.load_state_dict(saved)
    elif order == "follow, load":
        resumed.follow(schedule, STEPS)
        resumed.load_state_dict(saved)
    else:
        resumed.load_state_dict(saved)
        resumed.follow(schedule, STEPS)
    run(resumed, again, range(5, STEPS))
    assert_same_bits(snapshot(resumed), snapshot(whole))
    plain = torch.optim.SGD if kind is sgd else torch.optim.AdamW
    two_groups(plain, params_of(), lr=0.1).load_state_dict(saved)  # torch's loads it too


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_follow_from_where_they_were_made(way):
    params = params_of()
    ours = adamw(params)
    ours.follow(lrs.OneCycleLR(ours, 0.5, total_steps=STEPS), STEPS)
    run(ours, params, range(4))
    twin = way(ours)
    run(ours, params, range(4, STEPS))
    run(twin, twin.param_groups[0]["params"], range(4, STEPS))
    assert_same_bits(snapshot(twin), snapshot(ours))


def test_new_parameters_keep_the_position():
    """Rows are forgotten when parameters are replaced; a group added later has its own rate."""
    params = params_of()
    ours = sgd(params)
    ours.follow(lrs.StepLR(ours, 1, gamma=0.5), STEPS)
    run(ours, params, range(2))
    params[0] = params[0].detach().clone().requires_grad_()
    ours.param_groups[0]["params"][0] = params[0]
    ours.add_param_group({"params": [torch.ones(3, requires_grad=True)], "lr": 7.0})
    set_gradients(params, 2)
    ours.step()
    assert ours.learning_rates().tolist() == [0.1 * 0.5**3, 7.0]


def test_following_ends_with_none():
    params, twins = params_of(), params_of()
    ours, twin = adamw(params), adamw(twins)
    scheduler = lrs.OneCycleLR(twin, 0.5, total_steps=STEPS)
    ours.follow(lrs.OneCycleLR(ours, 0.5, total_steps=STEPS), STEPS)
    for step in range(4):
        run(ours, params, [step])
        run(twin, twins, [step])
        scheduler.step()
    ours.follow(None)
    assert ours.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
    assert ours.param_groups[0]["betas"] == twin.param_groups[0]["betas"]
    assert "schedule_step" not in ours.state_dict()["param_groups"][0]
    run(ours, params, [4])
    run(twin, twins, [4])
    assert_same_bits(snapshot(ours), snapshot(twin))


def test_a_scheduler_that_still_steps_is_told_of():
    params = params_of()
    ours = sgd(params)
    scheduler = lrs.StepLR(ours, 1)
    ours.follow(scheduler, 5)
    run(ours, params, range(1))
    before = snapshot(ours)
    scheduler.step()
    set_gradients(params, 1)
    with pytest.raises(RuntimeError, match=r"lr of parameter group 0 .*follow\(None\)"):
        ours.step()
    assert_same_bits(snapshot(ours), before)


def test_other_options_may_change_by_hand():
    params, twins = params_of(), params_of()
    ours, twin = sgd(params), sgd(twins)
    ours.follow(lrs.ConstantLR(ours, factor=1.0), 5)
    for optimizer, tensors in ((ours, params), (twin, twins)):
        run(optimizer, tensors, range(1))
        optimizer.param_groups[0]["weight_decay"] = 0.5
        run(optimizer, tensors, range(1, 3))
    assert_same_bits(snapshot(ours), snapshot(twin))


def test_under_amp_with_masters():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    twin = copy.deepcopy(model)
    steps = 8

    def train(model, follow):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        scheduler = lrs.OneCycleLR(optimizer, 0.1, total_steps=steps)
        if follow:
            optimizer.follow(scheduler, steps)
        random = torch.Generator().manual_seed(1)
        for step in range(steps):
            batch = torch.randn(4, 6, generator=random)
            optimizer.zero_grad()
            with amp.scale_loss(model(batch).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            if not follow and step + 1 < steps:
                scheduler.step()
        return snapshot(optimizer)

    assert_same_bits(train(model, True), train(twin, False))


class Writes(lrs.LRScheduler):
    def __init__(self, optimizer, name):
        self.name = name
        super().__init__(optimizer)

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group[self.name] = 0.1 * self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


def test_what_cannot_be_tabulated_is_refused():
    ours, other = adamw(params_of()), adamw(params_of())
    still = optim.SGD(params_of(), lr=0.1)
    plateau = lrs.ReduceLROnPlateau(ours)
    cases = [
        (plateau, 5, TypeError, "metric"),
        ("cosine", 5, TypeError, "not str"),
        (lrs.StepLR(other, 1), 5, ValueError, "StepLR schedules another optimizer"),
        (lrs.StepLR(ours, 1), 0, ValueError, "steps is 0"),
        (lrs.OneCycleLR(ours, 0.1, total_steps=4), 6, ValueError, "tabulated for 6 steps"),
        (Writes(ours, "eps"), 5, ValueError, "changes eps of parameter group 0"),
        (Writes(still, "momentum"), 5, ValueError, "start with a momentum above 0"),
    ]
    for scheduler, steps, error, text in cases:
        optimizer = still if "momentum" in text else ours
        with pytest.raises(error, match=text):
            optimizer.follow(scheduler, steps)
        assert optimizer._schedule is None
    momentum = lrs.LambdaLR(still, lambda k: 1.0)
    momentum.step = lambda: still.param_groups[0].update(momentum=0.5)  # somebody's patch
    still.follow(momentum, 3)  # writes to the real groups, not to the copy's: no table
    assert still._schedule.columns == [{}]
