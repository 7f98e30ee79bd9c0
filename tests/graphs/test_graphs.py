"""ampfuse.graphs: a captured step trains with the bits of eager ones.

Without a GPU a stand-in takes the place of torch's CUDA graphs, on the CPU kernels and on the CUDA
kernels in emulation; the same tests run on a GPU with the real ones.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler as lrs

from ampfuse import amp, graphs, optim
from ampfuse.graphs import make_graphed_step
from ampfuse.nn import fuse, recompute_norms
from cases import CODED, assert_same_bits, bf16, f16, never_waiting
from trainings import MODES

# --- a stand-in for CUDA graphs -------------------------------------------------------------------


class StandIn:
    """CUDA graphs on the CPU.

    Capturing runs the step and takes back what it wrote, as if nothing had been computed. A replay
    runs it with the parameter groups of the time of the capture, and what they read on the device,
    which is all that a graph knows of them, and sees that everything is where it was then.
    """

    def __init__(self) -> None:
        self.replays = 0

    def take_over(self, monkeypatch) -> None:
        class Stream:
            def wait_stream(self, other: object) -> None: ...

        def capture(call, *tensors):
            self.call = call
            original(call, *tensors)

        original = graphs.GraphedCall.capture
        monkeypatch.setattr(graphs.GraphedCall, "capture", capture)
        monkeypatch.setattr(graphs, "_check_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph.captured(self.call))


class Graph:
    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in

    @contextlib.contextmanager
    def captured(self, call):
        self.call, self.step = call, call._call.__self__
        optimizer = self.step._optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.on_device = optimizer._on_device
        memory = self.memory()
        self.addresses = [tensor.data_ptr() for tensor in memory]
        saved = [tensor.detach().clone() for tensor in memory]
        yield
        for tensor, value in zip(memory, saved, strict=True):
            tensor.data.copy_(value)

    def memory(self):
        """What the captured step reads or writes."""
        step, optimizer = self.step, self.step._optimizer
        captured = step._captured
        states = [sorted(optimizer.state[p].items()) for p in captured.params]
        states = [value for items in states for name, value in items if name != "step"]
        return [
            *captured.params,
            *captured.leaves,
            *step._buffers.values(),
            *step._scaling_tensors(),
            *(value for value in states if isinstance(value, torch.Tensor)),
            optimizer._table.steps(),
            optimizer._table.norm_averages(),
            torch.tensor([], dtype=torch.uint8).set_(
                optimizer._table.inspector.state_field("skip").untyped_storage()
            ),
        ]

    def replay(self) -> None:
        self.stand_in.replays += 1
        assert [tensor.data_ptr() for tensor in self.memory()] == self.addresses
        optimizer = self.step._optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        stepped = getattr(optimizer, "_opt_called", False)
        self._set(self.groups, self.on_device)
        # Edits of weights are no business of a graph.
        optimizer._table.masters.accept_model_weights()
        try:
            results = self.call._call(*self.call._tensors)
        finally:
            self._set(groups, None)
            optimizer._opt_called = stepped  # the host called no step
        for static, result in zip(self.call._results, results, strict=True):
            static.data.copy_(result)

    def _set(self, groups, on_device):
        optimizer = self.step._optimizer
        optimizer._on_device = on_device
        optimizer._hypers.forget()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


@pytest.fixture
def machine(device, monkeypatch):
    """The device to run on: the CPU (kernels of either kind) with the stand-in, or a GPU."""
    if device.type == "cpu":
        StandIn().take_over(monkeypatch)
    return device


@pytest.fixture
def stand_in(monkeypatch):
    stand_in = StandIn()
    stand_in.take_over(monkeypatch)
    return stand_in


# --- trainings ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None = None
    under_amp: bool = False

    def graphed(self, batch):
        return make_graphed_step(
            self.model,
            loss_fn,
            self.optimizer,
            batch,
            max_grad_norm=self.max_grad_norm,
        )

    def eager(self, inputs, *targets):
        """The loop that the docstring of make_graphed_step shows."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        loss = loss_fn(self.model(inputs), *targets)
        if self.under_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if self.max_grad_norm is not None:
            amp.clip_grad_norm_(optimizer, self.max_grad_norm)
        optimizer.step()
        return loss.detach()


def loss_fn(output, target):
    return nn.functional.mse_loss(output.float(), target)


def network(device, dtype=torch.float32, width=16):
    """On a GPU without what may choose another kernel in a capture, or other random numbers."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
    layers.append(nn.Linear(width, 3))
    if torch.device(device).type == "cuda":
        layers[1] = layers[3] = nn.Identity()
    return nn.Sequential(*layers).to(device, dtype)


def under_amp(level, kind, device, max_grad_norm=None, **options):
    model, masters = network(device), options.pop("master_weights", None)
    first, last = list(model[:3].parameters()), list(model[3:].parameters())
    optimizer = kind([{"params": first}, {"params": last, "weight_decay": 0.1}], **options)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, growth_interval=7, master_weights=masters
    )
    return Training(model, optimizer, max_grad_norm, True)


def alone(kind, dtype, device, max_grad_norm=None, width=16, **options):
    model = network(device, dtype, width)
    model.register_forward_pre_hook(lambda module, inputs: inputs[0].to(dtype))
    optimizer = kind(model.parameters(), **{"master_weights": True, **options})
    return Training(model, optimizer, max_grad_norm)


SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99)}
TRAININGS = {
    "O0": lambda d: under_amp("O0", torch.optim.AdamW, d, **ADAM),
    "O1": lambda d: under_amp("O1", torch.optim.SGD, d, **SGD),
    "O2": lambda d: under_amp("O2", torch.optim.AdamW, d, **ADAM),
    "O2, clipping": lambda d: under_amp("O2", torch.optim.SGD, d, 0.1, **SGD),
    "O3": lambda d: under_amp("O3", torch.optim.SGD, d, **SGD),
    "O4": lambda d: under_amp("O4", torch.optim.AdamW, d, **ADAM),
    "O5": lambda d: under_amp("O5", torch.optim.Adam, d, 0.1, **ADAM),
    "adamw": lambda d: alone(optim.AdamW, bf16, d, skip_nonfinite=True, **ADAM),
    "sgd": lambda d: alone(optim.SGD, bf16, d, 0.1, **SGD),
    "O2, split": lambda d: under_amp(
        "O2", torch.optim.AdamW, d, 0.1, master_weights="split", **ADAM
    ),
    **{
        f"split {coded} ema": lambda d, mode=MODES[f"split {coded} ema"]: alone(
            optim.AdamW, bf16, d, skip_nonfinite=True, width=700, **mode, **ADAM
        )
        for coded in CODED
    },
    "stochastic bf16 ema": lambda d: alone(
        optim.SGD, bf16, d, 0.1, master_weights=False, **MODES["stochastic bf16 ema"], **SGD
    ),
    "adagrad": lambda d: alone(optim.Adagrad, bf16, d, skip_nonfinite=True, lr=0.05),
    "lamb": lambda d: alone(optim.LAMB, f16, d, skip_nonfinite=True, lr=0.05),
    "novograd": lambda d: alone(optim.NovoGrad, bf16, d, skip_nonfinite=True, lr=0.05),
}
# The first step overflows, two in a row do, one after the scale has grown (7 good steps) and one
# before it would grow again, which it does at the end.
STEPS = 28
BAD = (0, 4, 5, 14, 20)
COMPACT = ("O2, split", "stochastic bf16 ema", *(f"split {coded} ema" for coded in CODED))
# With a static scale nothing is skipped.
STATIC = ("O0", "O3", "O4", "O5")


def batches(device, count=STEPS, bad=BAD):
    random = torch.Generator().manual_seed(11)
    for step in range(count):
        inputs = torch.randn(8, 6, generator=random)
        targets = torch.randn(8, 3, generator=random)
        if step in bad:
            targets[2, 1] = float("inf")  # the forward pass is as good as ever
        yield inputs.to(device), targets.to(device)


def one_cycle(optimizer, steps=STEPS):
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return lrs.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=cycles)


def everything(training):
    """All that training changes, by name."""
    optimizer = training.optimizer
    found = {f"model {k}": v for k, v in training.model.named_parameters()}
    found |= {f"buffer {k}": v for k, v in training.model.named_buffers()}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{k} {i}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    fields = ("skip", "grad_norm", "clip_coef", "loss_scale", "last_bad_row")
    fields += ("last_bad_bits", "skipped_steps", "found_inf", "sum_squares")
    for name in fields:
        found[f"step {name}"] = optimizer.param_table().inspector.state_field(name)
    if training.under_amp:
        found |= scaling(amp.state_dict(optimizer=optimizer)["loss_scaler0"])
    found["random numbers"] = torch.get_rng_state()
    if next(training.model.parameters()).is_cuda:
        found["random numbers of the device"] = torch.cuda.get_rng_state()
    return {name: value.detach().clone() for name, value in found.items()}


def scaling(state):
    return {f"scaler {k}": torch.tensor(float(v)) for k, v in state.items()}


def twins(name, device):
    return TRAININGS[name](device), TRAININGS[name](device)


def sample(device):
    return next(batches(device, 1, ()))


def run(train, feed, scheduler=None, last=STEPS):
    torch.manual_seed(5)
    losses = []
    for i, batch in enumerate(feed):
        losses.append(train(*batch).clone())
        if scheduler is not None and i + 1 < last:
            scheduler.step()
    return {f"loss {i}": loss for i, loss in enumerate(losses)}


def assert_trains_alike(ours, train, twin, feed, schedulers=(None, None)):
    """`ours` by `train`, its captured step, and `twin` eagerly; returns all that came out."""
    feed = list(feed)
    expected = run(twin.eager, feed, schedulers[1]) | everything(twin)
    found = run(train, feed, schedulers[0]) | everything(ours)
    assert_same_bits(found, expected)
    return found


# --- the bits of eager training -------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_graphed_steps_train_like_eager_ones(name, scheduled, machine):
    bad = () if name in STATIC else BAD
    ours, twin = twins(name, machine)
    schedulers = [one_cycle(t.optimizer) if scheduled else None for t in (ours, twin)]
    step = ours.graphed(sample(machine))
    found = assert_trains_alike(ours, step, twin, batches(machine, bad=bad), schedulers)
    skipped = int(found["step skipped_steps"])
    assert skipped >= len(bad) if bad else skipped == 0


@pytest.mark.parametrize("name", ["O1", "O2", "O5"])
def test_a_compiled_model_is_captured_too(name, machine):
    """It is compiled in the first calls, before the capture, and not again."""
    torch._dynamo.reset()
    ours, twin = twins(name, machine)
    compiled = dataclasses.replace(ours)
    compiled.model = torch.compile(ours.model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_trains_alike(ours, compiled.graphed(sample(machine)), twin, batches(machine))


class Recomputed(nn.Module):
    """The model inside, whose batch norms compute their outputs again in the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with recompute_norms():
            return self.model(x)


def convolutional(level, recomputed, device):
    """With fused batch norms."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 64), nn.Unflatten(1, (4, 4, 4))]
    layers += [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3)]
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    assert len(fuse(model).fused) == 2
    amp.initialize(model, optimizer, opt_level=level, growth_interval=7, verbosity=0)
    return Training(Recomputed(model) if recomputed else model, optimizer, under_amp=True)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fused_batch_norms_are_captured(level, recomputed, hardware, monkeypatch):
    if hardware.type == "cpu":
        StandIn().take_over(monkeypatch)
    bad = () if level in STATIC else BAD
    ours, twin = (convolutional(level, recomputed, hardware) for _ in range(2))
    step = ours.graphed(sample(hardware))
    assert_trains_alike(ours, step, twin, batches(hardware, bad=bad))


@pytest.mark.parametrize(
    "kind",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", ["O2", "O5", "adamw"])
def test_hundreds_of_steps(name, kind, monkeypatch):
    """With a schedule and overflows: planted ones, and those of a scale that grows."""
    device, count = torch.device(kind), 300
    if kind == "cpu":
        StandIn().take_over(monkeypatch)
    bad = () if name in STATIC else tuple(range(0, count, 37))
    ours, twin = twins(name, device)
    schedulers = [one_cycle(training.optimizer, count + 1) for training in (ours, twin)]
    step = ours.graphed(sample(device))
    found = assert_trains_alike(ours, step, twin, batches(device, count, bad), schedulers)
    assert int(found["step skipped_steps"]) >= len(bad)


@pytest.mark.parametrize("trained", [0, 6])
@pytest.mark.parametrize("name", TRAININGS)
def test_making_a_step_does_not_train(name, trained, machine):
    """After `trained` steps, the last of which is skipped and leaves its marks."""
    training = TRAININGS[name](machine)
    bad = () if name in STATIC else (5,)
    run(training.eager, batches(machine, trained, bad))
    before = everything(training)
    training.graphed(sample(machine))
    after = everything(training)
    if not trained:  # states are there now, as they start
        new = after.keys() - before.keys()
        start = training.optimizer.defaults.get("initial_accumulator_value", 0)
        for key in new:
            # Masters and averages start as the weights are; codes under a scale of 0 are zeros.
            if not key.startswith(("master_param", "ema")) and after[key].dtype != torch.uint8:
                assert bool((after[key] == start).all()) or "step" in key, key
        after = {key: value for key, value in after.items() if key not in new}
        for name in ("step loss_scale", "step grad_norm"):
            assert bool(before[name].isfinite()) == bool(after[name].isfinite())
    assert_same_bits(after, before)
    params = [*training.model.parameters(), *amp.master_params(training.optimizer)]
    assert all(param.grad is None for param in params)
    assert training.optimizer._on_device is None
    assert training.optimizer._rehearsal is None


@pytest.mark.parametrize("name", ["O1", "O2", "O5", "adamw"])
def test_eager_steps_in_between(name, machine):
    """With gradients of their own, and some that nobody steps on."""
    bad = () if name in STATIC else BAD
    ours, twin = twins(name, machine)
    schedulers = [one_cycle(training.optimizer) for training in (ours, twin)]
    step = ours.graphed(sample(machine))
    found, expected = {}, {}
    for i, batch in enumerate(batches(machine, bad=bad)):
        for training, results in ((ours, found), (twin, expected)):
            torch.manual_seed(i)
            if i % 5 == 2:
                loss_fn(training.model(batch[0]), batch[1]).backward()  # dropped by the next step
            train = step if training is ours and i % 3 else training.eager
            results[f"loss {i}"] = train(*batch).clone()
        for scheduler in schedulers if i + 1 < STEPS else ():
            scheduler.step()
    assert_same_bits(found | everything(ours), expected | everything(twin))


class Line(nn.Module):
    """weight * input: with inputs of 1 its gradient is 1, so a step subtracts the rate."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.weight * inputs


def test_the_rate_of_a_step_is_the_schedulers(machine):
    model = Line().to(machine)
    optimizer = optim.SGD(model.parameters(), lr=1.0, skip_nonfinite=True)
    scheduler = lrs.LambdaLR(optimizer, lambda k: 2.0**-k)
    step = make_graphed_step(model, torch.sum, optimizer, (torch.ones(1, device=machine),))
    weight = 0.0
    for call in range(20):
        bad = call in (0, 3, 4, 11)
        step(torch.full((1,), float("inf") if bad else 1.0, device=machine))
        weight -= 0.0 if bad else 2.0**-call
        assert model.weight.item() == weight
        assert bool(optimizer.last_step.skipped) == bad
        scheduler.step()


def test_a_rate_on_the_device(machine):
    """A tensor is read where it is; schedulers write into it."""
    ours, twin = (
        alone(optim.AdamW, bf16, machine, lr=torch.tensor(0.05, device=machine)) for _ in range(2)
    )
    schedulers = [lrs.StepLR(training.optimizer, 4) for training in (ours, twin)]
    step = ours.graphed(sample(machine))
    assert_trains_alike(ours, step, twin, batches(machine, 20, ()), schedulers)
    assert ours.optimizer.param_groups[0]["lr"].item() < 1e-4


# --- what is edited and loaded in between ---------------------------------------------------------


def clamp(training, saved):
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.1, 0.1)


def load_model(training, saved):
    training.model.load_state_dict(saved["model"])


def load_everything(training, saved):
    load_model(training, saved)
    training.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch takes over some
    if training.under_amp:
        amp.load_state_dict(saved["amp"], optimizer=training.optimizer)


def clear_states(training, saved):
    for state in training.optimizer.state.values():
        for name in [name for name in state if not name.startswith("master_")]:
            del state[name]


def state_dict(training):
    saved = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    if training.under_amp:
        saved["amp"] = amp.state_dict(optimizer=training.optimizer)
    return copy.deepcopy(saved)


@pytest.mark.parametrize("edit", [clamp, load_model, load_everything, clear_states])
@pytest.mark.parametrize("name", ["O2", "O2, clipping", "O5", "adamw", *COMPACT])
def test_edits_in_between_are_seen(name, edit, machine):
    """Of weights, states and scales; the graph goes on in the memory it knows."""
    ours, twin = twins(name, machine)
    step = ours.graphed(sample(machine))
    found, expected = {}, {}
    for training, train, results in ((ours, step, found), (twin, twin.eager, expected)):
        saved = state_dict(training)  # before the first step: SGD has no buffers then
        torch.manual_seed(5)
        for i, batch in enumerate(batches(machine, 20, ())):
            results[f"loss {i}"] = train(*batch).clone()
            if i == 6:
                saved = state_dict(training)
            if i in (6, 13):
                edit(training, saved)
        results |= everything(training)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["O2", "adamw", "sgd", *COMPACT])
def test_a_checkpoint_of_graphed_steps_resumes_eagerly_and_graphed(name, machine):
    feed = list(batches(machine, 24))
    whole = TRAININGS[name](machine)
    step = whole.graphed(sample(machine))
    run(step, feed[:10])
    saved = state_dict(whole)
    expected = run(step, feed[10:]) | everything(whole)
    for graphed in (False, True):
        resumed = TRAININGS[name](machine)
        train = resumed.graphed(sample(machine)) if graphed else resumed.eager
        load_everything(resumed, saved)
        found = run(train, feed[10:]) | everything(resumed)
        # How many steps a process has skipped, and where, no checkpoint tells.
        history = [
            key for key in found if key.startswith(("step last", "step skipped", "step sched"))
        ]
        for results in (found, expected):
            for key in history:
                results.pop(key, None)
        assert_same_bits(found, expected)


def test_a_step_made_again_goes_on(machine):
    ours, twin = twins("O2", machine)
    feed = list(batches(machine, 12))
    expected = run(twin.eager, feed) | everything(twin)
    torch.manual_seed(5)
    for i, batch in enumerate(feed):
        if i % 4 == 0:
            step = ours.graphed(sample(machine))
        assert torch.equal(step(*batch), expected[f"loss {i}"])
    found = everything(ours)
    assert_same_bits(found, {key: expected[key] for key in found})


def test_a_replay_is_seen_by_autograd_and_by_caches(machine):
    """A graph writes behind the host's back, which torch notices by versions alone."""
    inputs, target = sample(machine)
    training = TRAININGS["O0"](machine)  # whose weights autograd saves as they are
    step = training.graphed((inputs, target))
    loss = loss_fn(training.model(inputs), target)
    step(inputs, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    training = TRAININGS["O1"](machine)
    model, step = training.model, training.graphed((inputs, target))

    def output():
        with torch.autocast(machine.type, dtype=f16):
            return model.eval()(inputs)

    with torch.autocast(machine.type, dtype=f16):
        before = output()
        model.train()
        step(inputs, target)
        after = output()
    assert not torch.equal(after, before)
    assert torch.equal(after, output())


# --- batches --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens, mask, scale=1.0):
        return {"logits": (self.layer(tokens) * mask).sum(1), "scale": scale}


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_structured_batches(kind, machine):
    def batch(seed):
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randn(2, 5, 4, generator=random).to(machine)
        mask = (torch.rand(2, 5, 1, generator=random) < 0.5).to(machine)
        inputs = {"tokens": tokens, "mask": mask, "scale": 2.0}
        inputs = inputs if kind is dict else kind(inputs.values())
        return inputs, {"labels": torch.randn(2, 4, generator=random).to(machine)}, None

    def loss(output, target, weight):
        assert weight is None
        return (output["logits"] - target["labels"]).square().mean() * output["scale"]

    torch.manual_seed(0)
    model = Attention().to(machine)
    twin = copy.deepcopy(model)
    optimizer, other = (optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = make_graphed_step(model, loss, optimizer, batch(0))
    for seed in range(1, 6):
        inputs, *targets = batch(seed)
        other.zero_grad()
        output = twin(**inputs) if kind is dict else twin(*inputs)
        expected = loss(output, *targets)
        expected.backward()
        other.step()
        assert torch.equal(step(inputs, *targets), expected)
        assert torch.equal(model.layer.weight, twin.layer.weight)


def test_one_tensor_in_two_places(stand_in):
    """An autoencoder's sample may be (x, x); later targets may differ from inputs."""
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3)
    step = make_graphed_step(model, loss_fn, optimizer, (x, x))
    expected = loss_fn(model(x), -x)
    assert torch.equal(step(x, -x), expected)


def wrong_batches():
    x, y = sample("cpu")
    return [
        ((x[:5], y[:5]), r"inputs is .* \(5, 6\), .* \(8, 6\)\. .*drop_last=True"),
        ((x, y[:, :1]), r"targets\[0\] is .* \(8, 1\)"),
        ((x.double(), y), "inputs is torch.float64 .* torch.float32"),
        ((x,), r"another structure .*targets\[0\]"),
        ((x, y, y), r"another structure .*targets\[1\]"),
        (([x], y), r"another structure .*inputs\[0\]"),
        ((x, 3.0), r"targets\[0\] is 3.0, and .* with torch.float32"),
    ]


@pytest.mark.parametrize("case", range(len(wrong_batches())))
def test_other_batches_are_refused(case, stand_in):
    batch, text = wrong_batches()[case]
    training = TRAININGS["O2"](torch.device("cpu"))
    step = training.graphed(sample("cpu"))
    before = everything(training)
    with pytest.raises(ValueError, match=text):
        step(*batch)
    assert_same_bits(everything(training), before)
    assert stand_in.replays == 0
    step(*sample("cpu"))


def test_a_captured_constant_may_not_change(stand_in):
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3)
    step = make_graphed_step(model, lambda out, k: (out * k).sum(), optimizer, (x, 2))
    step(x, 2)
    with pytest.raises(ValueError, match=r"targets\[0\] is 3, and .* with 2"):
        step(x, 3)


# --- what cannot be captured ----------------------------------------------------------------------


def refused(**changes):
    training = alone(optim.AdamW, bf16, torch.device("cpu"), lr=0.1)
    arguments = {"model": training.model, "optimizer": training.optimizer, "loss_fn": loss_fn}
    make_graphed_step(**{**arguments, "sample_batch": sample("cpu"), **changes})


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.1)


def initialized(kind=torch.optim.SGD, **options):
    model = network("cpu")
    optimizer = kind(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", **{"verbosity": 0, **options})
    return {"model": model, "optimizer": optimizer}


REFUSED = {
    "torch's": (
        lambda m: {"optimizer": torch.optim.AdamW(m.parameters())},
        TypeError,
        r"AdamW has no fused step.*ampfuse\.optim",
    ),
    "LARC": (lambda m: {"optimizer": optim.LARC(sgd(m))}, TypeError, "LARC has no fused step"),
    "generic": (lambda m: initialized(torch.optim.RMSprop), TypeError, "has no fused step"),
    "no batch": (
        lambda m: {"sample_batch": torch.ones(3)},
        TypeError,
        r"sample_batch is a Tensor; .*\(inputs, \*targets\)",
    ),
    "an array": (
        lambda m: {"sample_batch": (torch.ones(8, 6), torch.ones(8, 3).numpy())},
        TypeError,
        r"targets\[0\] is a ndarray; pass tensors",
    ),
    "a norm": (lambda m: {"max_grad_norm": -1}, ValueError, "max_grad_norm is -1"),
    "loud": (lambda m: initialized(verbosity=2), RuntimeError, "verbosity=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_is_refused(case, stand_in):
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        refused(**changes(network("cpu")))


@pytest.mark.parametrize("spread", [nn.parallel.DistributedDataParallel, fully_shard])
def test_models_of_several_processes_are_refused(spread, tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for wrapped in (lambda model: model, torch.compile):
            with pytest.raises(TypeError, match=r"the model is in \w+, which communicates"):
                refused(model=wrapped(spread(network("cpu"))))
    finally:
        dist.destroy_process_group()


def test_there_are_no_graphs_on_a_cpu():
    with pytest.raises(ValueError, match="parameters are on cpu, and CUDA graphs need"):
        refused()


def test_a_failed_making_leaves_no_trace(stand_in):
    """An error in the user's model, in the first rehearsal or in the capture itself."""
    training, twin = twins("O2", torch.device("cpu"))
    run(training.eager, batches("cpu", 3))
    run(twin.eager, batches("cpu", 3))
    before = everything(training)
    for failing in (1, 4):
        calls = []

        def loss(output, target, calls=calls, failing=failing):
            calls.append(0)
            if len(calls) == failing:
                raise KeyError("the user's")
            return loss_fn(output, target)

        with pytest.raises(KeyError, match="the user's"):
            make_graphed_step(training.model, loss, training.optimizer, sample("cpu"))
        assert_same_bits(everything(training), before)
    assert_trains_alike(training, training.eager, twin, batches("cpu", 5))


# --- what a captured step does not see ------------------------------------------------------------


def replaced(group):
    group["params"][0] = group["params"][0].detach().clone().requires_grad_()


def moved(model):
    model[0].weight.data = model[0].weight.data.clone()


CHANGES = {
    "eps": (
        lambda m, o: o.param_groups[0].update(eps=1e-5),
        "eps of parameter group 0 was changed",
    ),
    "maximize": (lambda m, o: o.param_groups[0].update(maximize=True), "maximize of parameter gr"),
    "amsgrad": (
        lambda m, o: o.param_groups[0].update(amsgrad=True),
        "momentum or amsgrad switch on was changed",
    ),
    "tensor": (
        lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.1)),
        "the tensor that is lr of parameter group 0 was changed",
    ),
    "added": (
        lambda m, o: o.add_param_group({"params": [torch.ones(2, requires_grad=True)]}),
        "list of parameters was changed",
    ),
    "replaced": (lambda m, o: replaced(o.param_groups[0]), "list of parameters was changed"),
    "moved": (lambda m, o: moved(m), r"memory \(p\.data.* was changed"),
    "buffer": (
        lambda m, o: m[1].running_mean.set_(torch.zeros(16, dtype=bf16)),
        "the memory of buffer model.1.running_mean was changed",
    ),
    "eval": (lambda m, o: m.eval(), "train or eval mode was changed"),
    "frozen": (lambda m, o: m[0].weight.requires_grad_(False), "requires_grad of .* was changed"),
    "clipping": (lambda m, o: setattr(o, "max_grad_norm", 1.0), "max_grad_norm was changed"),
    "skipping": (lambda m, o: setattr(o, "skip_nonfinite", False), "skip_nonfinite was changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_need_a_new_capture_are_refused(name, stand_in):
    change, text = CHANGES[name]
    training = TRAININGS["adamw"](torch.device("cpu"))
    step = training.graphed(sample("cpu"))
    step(*sample("cpu"))
    change(training.model, training.optimizer)
    weights = copy.deepcopy(training.model.state_dict())
    with pytest.raises(RuntimeError, match=text + r"(.|\n)*Make the step anew"):
        step(*sample("cpu"))
    assert_same_bits(dict(training.model.state_dict()), dict(weights))
    assert stand_in.replays == 1


@pytest.mark.parametrize(("then", "now"), [(0.9, 0.0), (0.0, 0.9)])
def test_momentum_neither_starts_nor_ends(then, now, stand_in):
    training = alone(optim.SGD, bf16, torch.device("cpu"), lr=0.1, momentum=then)
    step = training.graphed(sample("cpu"))
    training.optimizer.param_groups[0]["momentum"] = now
    with pytest.raises(RuntimeError, match="momentum or amsgrad switch on was changed"):
        step(*sample("cpu"))


def test_a_change_that_is_undone_is_forgotten(stand_in):
    ours, twin = twins("adamw", torch.device("cpu"))
    step = ours.graphed(sample("cpu"))
    group = ours.optimizer.param_groups[0]
    eps, group["eps"] = group["eps"], 1e-3
    with pytest.raises(RuntimeError, match="undo the change"):
        step(*sample("cpu"))
    group["eps"] = eps
    assert_trains_alike(ours, step, twin, batches("cpu", 6))


def test_marked_rows_have_new_versions_and_agree(device):
    """What the host does after a replay, whose writes it does not see."""
    training = TRAININGS["O2"](device)
    training.eager(*sample(device))
    optimizer, weight = training.optimizer, training.model[0].weight
    masters = list(amp.master_params(optimizer))
    written = [*training.model.parameters(), *masters]
    versions = [tensor._version for tensor in written]
    with torch.no_grad():
        weight.mul_(2)
    before = masters[0].detach().clone()
    optimizer._table.plan.mark_stepped()
    versions[0] += 1  # the edit
    assert [tensor._version for tensor in written] == [version + 1 for version in versions]
    optimizer._table.masters.refresh()
    assert torch.equal(masters[0], before)


def test_schedulers_do_not_warn(stand_in, recwarn):
    training = TRAININGS["O2"](torch.device("cpu"))
    step = training.graphed(sample("cpu"))
    scheduler = lrs.StepLR(training.optimizer, 2)
    step(*sample("cpu"))
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


# --- only a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAININGS)
def test_replays_do_not_wait(name):
    """With a scheduler on the host, behind a device that is busy; batches on it or pinned."""
    device = torch.device("cuda")
    training = TRAININGS[name](device)
    scheduler = one_cycle(training.optimizer)
    step = training.graphed(sample(device))
    feed = list(batches(device, 6, ()))
    feed += [tuple(t.pin_memory() for t in batch) for batch in batches("cpu", 6, ())]
    for batch in feed:  # what is loaded and allocated at its first use does wait
        step(*batch)
        scheduler.step()
    torch.cuda._sleep(1)
    with never_waiting():
        torch.cuda._sleep(1_000_000_000)
        for batch in feed:
            step(*batch)
            scheduler.step()
        assert not torch.cuda.current_stream().query(), "the host waited for the device"
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_no_synchronisation_in_a_profile_of_replays():
    device = torch.device("cuda")
    training = TRAININGS["O2, clipping"](device)
    step = training.graphed(sample(device))
    feed = list(batches(device, 20))
    step(*feed[0])
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)
    with profile, torch.profiler.record_function("replays"):
        for batch in feed:
            step(*batch)
    (span,) = [e for e in profile.events() if e.name == "replays" and e.device_type.name == "CPU"]
    names = [
        event.name
        for event in profile.events()
        if span.time_range.start <= event.time_range.start <= span.time_range.end
    ]
    assert sum("GraphLaunch" in name for name in names) == len(feed)
    waits = [name for name in names if "Synchronize" in name or name == "cudaMemcpy"]
    assert not waits


@pytest.mark.gpu
def test_the_graph_keeps_what_it_reads():
    """Sample, scheduler and gradients are gone, and their memory was written by others."""
    device = torch.device("cuda")
    ours, twin = twins("O2", device)
    step = ours.graphed(sample(device))
    expected = run(twin.eager, batches(device)) | everything(twin)
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
    found = run(step, batches(device)) | everything(ours)
    assert_same_bits(found, expected)
    assert all(bool(block.isnan().all()) for block in rubbish)
