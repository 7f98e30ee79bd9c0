"""The launches and uploads of a step on CUDA, counted by the emulated runtime."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.profiler import profile

import ampfuse
from ampfuse import _core, amp, ops, optim
from cases import KINDS, MODES, has_mode, make, nn_ops

# name: the optimizer over parameters, and the launches of its step: inspect or prepare, then the
# update, which is two for LAMB; LARC measures the weights before.
STEPS = {
    name: (functools.partial(make, name), 3 if name.startswith("lamb") else 2) for name in KINDS
}
STEPS["LARC"] = (lambda p, **o: optim.LARC(optim.SGD(p, lr=0.1, weight_decay=0.1, **o)), 3)
steps = pytest.mark.parametrize(("make", "expected"), STEPS.values(), ids=STEPS)


@pytest.fixture
def launches(emulated):
    """launches(body): how many kernels body() launched."""

    def launches(body):
        before = _core.C.launch_count()
        body()
        return _core.C.launch_count() - before

    return launches


def parameters(dtype=torch.float32):
    """Rows of no element, of one chunk and of three, and one that never has a gradient."""
    return [torch.randn(n).to(dtype).requires_grad_() for n in (0, 5, 70000, 3)]


def set_gradients(params, bad=False):
    for param in params[:-1]:
        param.grad = torch.randn_like(param)
    if bad:
        params[1].grad[2] = torch.nan


def launches_for_new_states(name, mode):
    """Those of the first steps beside `expected`: for averages of joined masters, and to quantize
    sums that do not start at zero. Adagrad makes its states at once, others with gradients."""
    joined = mode.startswith("split") and mode.endswith("ema")
    if name.startswith("adagrad"):
        return [(3 if joined else 0) + (1 if "8bit" in mode else 0), 0]
    return [0, 2 if joined else 0]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, mode in itertools.product(STEPS, ("FP32", *MODES))
        if has_mode(name, mode)
    ],
)
def test_a_step_has_the_expected_launches(name, mode, clip, launches):
    make, expected = STEPS[name]
    params = parameters(torch.float32 if mode == "FP32" else torch.bfloat16)
    optimizer = make(params, max_grad_norm=clip, **MODES.get(mode, {}))
    for step, more in enumerate([*launches_for_new_states(name, mode), 0, 0]):
        if step > 0:  # the first has no gradients
            set_gradients(params, bad=step == 3)
        assert launches(optimizer.step) == expected + more
    optimizer.meter(every=1, changed_bits=True)
    for bad in (False, True):
        set_gradients(params, bad)
        assert launches(optimizer.step) == expected


@steps
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scalers_step_launches_as_many_and_its_update_one(make, expected, clip, launches):
    params = parameters()
    optimizer = make(params, max_grad_norm=clip)
    scaler = ampfuse.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for bad in (False, True, False):
        set_gradients(params, bad)
        assert launches(lambda: scaler.step(optimizer)) == expected
        assert launches(scaler.update) == 1


@steps
@pytest.mark.parametrize("level", ["O0", "O2", "O5", "O5 split"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_under_scale_loss_launches_as_many(make, expected, level, clip, launches):
    """The backward pass inspects, so the step only prepares: as many launches."""
    model = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 3))
    optimizer = make(model.parameters(), max_grad_norm=clip)
    level, _, split = level.partition(" ")
    options = {"master_weights": split} if split else {}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **options
    )
    for bad in (False, True, False):

        def backward(value=torch.inf if bad else 1.0):
            optimizer.zero_grad()
            loss = model(torch.full((2, 8), value)).float().square().sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

        assert launches(backward) == 2  # inspect, and the rule of the loss scale
        assert launches(optimizer.step) == expected


def test_larc_that_is_switched_off_measures_nothing(launches):
    params = parameters()
    optimizer = optim.SGD(params, lr=0.1)
    larc = optim.LARC(optimizer)
    set_gradients(params)
    assert [launches(each.step) for each in (optimizer, larc, optimizer)] == [2, 3, 2]


@pytest.mark.parametrize("tensors", [1, 50])
def test_an_operation_on_a_list_is_one_launch(tensors, launches):
    """An operation on a list is one launch, and so is a norm of each tensor."""
    x = [torch.randn(1000) for _ in range(tensors)]
    found_inf = torch.zeros(1)
    assert launches(lambda: ops.scale(x, x, 2.0)) == 1
    assert launches(lambda: ops.l2norm(x, per_tensor=True)) == 1
    assert launches(lambda: ops.unscale(x, x, torch.ones(1), found_inf)) == 1


def test_a_pass_like_the_last_uploads_nothing(emulated):
    """Under scale_loss gradients go to none and come back; new ones are one copy of pointers."""
    params = parameters(torch.half)[:-1]
    optimizer = optim.AdamW(params, lr=0.1, master_weights=True)
    same = [torch.randn_like(param) for param in params]

    def copies(gradients):
        before = _core.C.copy_count()
        optimizer.param_table().gradients.begin_backward()
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.end_backward(torch.tensor(8.0), True)
        optimizer.step()
        return _core.C.copy_count() - before

    copies(same)
    assert copies(same) == 0
    assert copies([gradient.clone() for gradient in same]) == 1
    optimizer.param_groups[0]["lr"] = 0.2
    assert copies(same) == 2  # gradients for the backward pass, the rate for the step
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    assert copies(same) == 0


def operations(body):
    """Names of torch's operations in body() that do more than allocate."""
    with profile() as profiled:
        body()
    names = {event.name for event in profiled.events() if event.name.startswith("aten::")}
    return {name for name in names if "empty" not in name and name != "aten::detach"}


@pytest.mark.parametrize(
    ("height", "training", "expected"),
    [(8, True, 4), (30, True, 4), (257, True, 6), (8, False, 3)],
    ids=["a span", "spans", "many spans", "frozen"],
)
@pytest.mark.parametrize("residual", [False, True])
def test_a_batch_norm_launches_sums_and_map(residual, height, training, expected, launches):
    """Forward: sums, whose last blocks finish them, and the map; backward the same. Sums over very
    many rows are finished by a launch of their own. torch computes nothing in between.
    """
    images = (torch.randn(1, 16, height, height) for _ in range(3))
    x, z, dy = (t.to(memory_format=torch.channels_last) for t in images)
    inputs = [t.requires_grad_() for t in (x, z, torch.ones(16), torch.zeros(16))]
    tensors = [x, z if residual else None, *inputs[2:], torch.zeros(16), torch.ones(16)]
    batches = torch.tensor(0)

    def step():
        for tensor in inputs:
            tensor.grad = None
        nn_ops().batch_norm_act(*tensors, training, 0.1, 1e-5, True, batches).backward(dy)

    assert launches(step) == expected
    assert not training or operations(step) == set()


def test_an_iteration_calls_the_extension_eight_times(monkeypatch):
    """zero_grad: 2; scale_loss: 2 at its start, 1 at its end, 1 for the scale; step: 2."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def iterate():
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    for _ in range(3):
        iterate()
    calls = []

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    classes = [kind for kind in vars(_core.C).values() if isinstance(kind, type)]
    for owner in (_core.C, *classes):
        for name, function in list(vars(owner).items()):
            if callable(function) and not isinstance(function, type) and name[0] != "_":
                count(owner, name)
    before = ["matches", "zero_grad"]
    before += ["matches", "begin_backward", "end_backward", "update_scale"]
    usual = ["collect", "update"]
    for step in (usual, ["collect", "set_hyper", "update"], usual):
        iterate()
        assert calls == [*before, *step]
        calls.clear()
        optimizer.param_groups[0]["lr"] = 1e-5
