"""ampfuse.graphs: a captured step trains with the bits of eager ones.

Without a GPU a stand-in takes the place of torch's CUDA graphs, on the CPU kernels and on the CUDA
kernels in emulation; the same tests run on a GPU with the real ones.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import lr_scheduler as lrs

from ampfuse import amp, graphs, optim
from ampfuse.graphs import make_graphed_step
from ampfuse.nn import fuse, recompute_norms
from cases import (
    MODES,
    QUANTIZED,
    assert_same_bits,
    bf16,
    f16,
    history_of_norms,
    never_waiting,
    slow_in_emulation,
)


class StandIn:
    """CUDA graphs on the CPU.

    Capturing runs the step and takes back what it wrote, as if nothing had been computed. A replay
    runs it with the parameter groups of the time of the capture, and what they read on the device,
    which is all that a graph knows of them, and sees that everything is where it was then.
    """

    def __init__(self) -> None:
        self.replays = 0

    def take_over(self, monkeypatch) -> None:
        def capture(call, *tensors):
            self.call = call
            original(call, *tensors)

        original = graphs.GraphedCall.capture
        monkeypatch.setattr(graphs.GraphedCall, "capture", capture)
        monkeypatch.setattr(graphs, "_check_device", lambda device: None)
        for name, instead in {
            "Stream": Mock(),
            "current_stream": Mock(),
            "stream": contextlib.nullcontext,
            "device": contextlib.nullcontext,
            "CUDAGraph": lambda: Graph(self),
            "graph": lambda graph, **_: graph.captured(self.call),
        }.items():
            monkeypatch.setattr(torch.cuda, name, instead)


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
            optimizer._rows.table.steps(),
            optimizer._rows.table.norm_averages(),
            captured.step_state(),
        ]

    def replay(self) -> None:
        self.stand_in.replays += 1
        assert [tensor.data_ptr() for tensor in self.memory()] == self.addresses
        optimizer = self.step._optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        stepped = getattr(optimizer, "_opt_called", False)
        self._set(self.groups, self.on_device)
        # A graph does not see edits of weights, and the host does not see the graph's.
        optimizer._rows.table.masters.accept_model_weights()
        try:
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.memory())):
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
        arguments = self.model, loss_fn, self.optimizer, batch
        return make_graphed_step(*arguments, max_grad_norm=self.max_grad_norm)

    def eager(self, inputs, *targets):
        """The loop that the docstring of make_graphed_step shows."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        loss = loss_fn(self.model(inputs), *targets)
        unscaled = contextlib.nullcontext(loss)
        with amp.scale_loss(loss, optimizer) if self.under_amp else unscaled as scaled_loss:
            scaled_loss.backward()
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
SPLIT = {"master_weights": "split"}
STOCHASTIC = {"master_weights": False, **MODES["stochastic bf16 ema"]}
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
    "O2, split": lambda d: under_amp("O2", torch.optim.AdamW, d, 0.1, **SPLIT, **ADAM),
    "stochastic bf16 ema": lambda d: alone(optim.SGD, bf16, d, 0.1, **STOCHASTIC, **SGD),
    "adagrad": lambda d: alone(optim.Adagrad, bf16, d, skip_nonfinite=True, lr=0.05),
    "lamb": lambda d: alone(optim.LAMB, f16, d, skip_nonfinite=True, lr=0.05),
    "novograd": lambda d: alone(optim.NovoGrad, bf16, d, skip_nonfinite=True, lr=0.05),
}


def skipping_spikes(training):
    """About a half of the steps: their norms are around 1.6."""
    training.optimizer.skip_spikes = 1.0
    training.optimizer.load_history(history_of_norms(0.4, 0.01))
    return training


for name in ("O2", "adamw"):
    TRAININGS[f"{name}, spikes"] = lambda d, name=name: skipping_spikes(TRAININGS[name](d))
QUANTIZED_MODES = [f"split {storage} ema" for storage in QUANTIZED]
for name in QUANTIZED_MODES:
    mode = {"skip_nonfinite": True, "width": 700, **MODES[name], **ADAM}
    TRAININGS[name] = functools.partial(alone, optim.AdamW, bf16, **mode)
# The first step overflows, two in a row do, one after the scale has grown (7 good steps) and one
# before it would grow again, which it does at the end.
STEPS = 28
BAD = (0, 4, 5, 14, 20)
# With a static scale nothing is skipped.
STATIC = ("O0", "O3", "O4", "O5")
COMPACT = ("O2, split", "stochastic bf16 ema", *QUANTIZED_MODES)


def batches(device, count=STEPS, bad=BAD):
    random = torch.Generator().manual_seed(11)
    for step in range(count):
        inputs = torch.randn(8, 6, generator=random)
        targets = torch.randn(8, 3, generator=random)
        if step in bad:
            targets[2, 1] = float("inf")  # the forward pass is as good as ever
        yield inputs.to(device), targets.to(device)


def one_cycle(optimizer):
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return lrs.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1, cycle_momentum=cycles)


def everything(training):
    """All that training changes, by name."""
    optimizer = training.optimizer
    tensors = {f"model {k}": v for k, v in training.model.named_parameters()}
    tensors |= {f"buffer {k}": v for k, v in training.model.named_buffers()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{k} {i}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    fields = ("skip", "grad_norm", "clip_coef", "loss_scale", "last_bad_row")
    fields += ("last_bad_bits", "history", "found_inf", "sum_squares")
    for name in fields:
        tensors[f"step {name}"] = optimizer.param_table().inspector.state_field(name)
    if training.under_amp:
        scaler = amp.state_dict(optimizer=optimizer)["loss_scaler0"]
        tensors |= {f"scaler {k}": torch.tensor(float(v)) for k, v in scaler.items()}
    tensors["random numbers"] = torch.get_rng_state()
    if next(training.model.parameters()).is_cuda:
        tensors["random numbers of the device"] = torch.cuda.get_rng_state()
    return {name: value.detach().clone() for name, value in tensors.items()}


def twins(name, device):
    return TRAININGS[name](device), TRAININGS[name](device)


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.1)


def sample(device):
    return next(batches(device, 1, ()))


def run(train, feed, scheduler=None):
    torch.manual_seed(5)
    losses = {}
    for i, batch in enumerate(feed):
        losses[f"loss {i}"] = train(*batch).clone()
        if scheduler is not None:
            scheduler.step()
    return losses


def assert_trains_alike(ours, train, twin, feed, schedulers=(None, None)):
    """`ours` by `train`, its captured step, and `twin` eagerly; returns all that came out."""
    feed = list(feed)
    expected = run(twin.eager, feed, schedulers[1]) | everything(twin)
    tensors = run(train, feed, schedulers[0]) | everything(ours)
    assert_same_bits(tensors, expected)
    return tensors


# --- the bits of eager training -------------------------------------------------------------------


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@pytest.mark.covers(1)
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("name", TRAININGS)
def test_graphed_steps_train_like_eager_ones(name, scheduled, machine):
    bad = () if name in STATIC else BAD
    ours, twin = twins(name, machine)
    step = ours.graphed(sample(machine))
    schedulers = [one_cycle(t.optimizer) if scheduled else None for t in (ours, twin)]
    tensors = assert_trains_alike(ours, step, twin, batches(machine, bad=bad), schedulers)
    _, nonfinite, spikes, *_ = tensors["step history"].tolist()
    assert nonfinite >= len(bad) if bad else nonfinite == 0
    assert (spikes > 3) == name.endswith("spikes")


def test_replays_count_as_steps(stand_in):
    """The host looks now and then; the replays themselves tell it nothing."""
    training = TRAININGS["adamw"](torch.device("cpu"))
    step = training.graphed(sample("cpu"))
    training.optimizer.load_history(torch.tensor([150, 150, 0, 0, 150, 1] + [0.0] * 4).double())
    history = training.optimizer.param_table().inspector.state_field("history")
    history[3] = 150  # in a row
    for _ in range(19):
        step._captured.note_replay()
    with pytest.raises(RuntimeError, match="skipped"):
        step._captured.note_replay()


@slow_in_emulation
@pytest.mark.parametrize("name", ["O1", "O2", pytest.param("O5", marks=pytest.mark.slow)])
def test_a_compiled_model_is_captured_too(name, machine):
    """It is compiled in the first calls, before the capture, and not again."""
    torch._dynamo.reset()
    ours, twin = twins(name, machine)
    compiled = dataclasses.replace(ours)
    compiled.model = torch.compile(ours.model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_trains_alike(ours, compiled.graphed(sample(machine)), twin, batches(machine))


class Recomputed(nn.Sequential):
    """Batch norms inside compute their outputs again in the backward pass."""

    def forward(self, x):
        with recompute_norms():
            return super().forward(x)


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


@pytest.mark.covers(1)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fused_batch_norms_are_captured(level, recomputed, hardware, monkeypatch):
    if hardware.type == "cpu":
        StandIn().take_over(monkeypatch)
    bad = () if level in STATIC else BAD
    ours, twin = (convolutional(level, recomputed, hardware) for _ in range(2))
    step = ours.graphed(sample(hardware))
    assert_trains_alike(ours, step, twin, batches(hardware, bad=bad))


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
            # Masters and averages start as the weights are; with a scale of 0 states are zeros.
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


@slow_in_emulation
@pytest.mark.parametrize("name", ["O1", "O2", "O5", "adamw"])
def test_eager_steps_may_come_in_between(name, machine):
    """With gradients of their own, and some that no step uses."""
    bad = () if name in STATIC else BAD
    ours, twin = twins(name, machine)
    schedulers = [one_cycle(training.optimizer) for training in (ours, twin)]
    step = ours.graphed(sample(machine))
    graphed, expected = {}, {}
    for i, batch in enumerate(batches(machine, bad=bad)):
        for training, results in ((ours, graphed), (twin, expected)):
            torch.manual_seed(i)
            if i % 5 == 2:
                loss_fn(training.model(batch[0]), batch[1]).backward()  # dropped by the next step
            train = step if training is ours and i % 3 else training.eager
            results[f"loss {i}"] = train(*batch).clone()
        for scheduler in schedulers:
            scheduler.step()
    assert_same_bits(graphed | everything(ours), expected | everything(twin))


def test_a_rate_on_the_device_is_read_where_it_is(machine):
    """A tensor is read where it is; schedulers write into it."""
    rates = [torch.tensor(0.05, device=machine) for _ in range(2)]
    ours, twin = (alone(optim.AdamW, bf16, machine, lr=rate) for rate in rates)
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


@pytest.mark.covers(1)
@pytest.mark.parametrize("edit", [load_everything, clear_states, clamp, load_model])
@pytest.mark.parametrize("name", ["O2", "O2, clipping", "O5", "adamw", *COMPACT])
def test_edits_in_between_are_seen(name, edit, machine):
    """Of weights, states and scales; the graph goes on in the memory it knows."""
    ours, twin = twins(name, machine)
    step = ours.graphed(sample(machine))
    graphed, expected = {}, {}
    for training, train, results in ((ours, step, graphed), (twin, twin.eager, expected)):
        saved = state_dict(training)  # before the first step: SGD has no buffers then
        torch.manual_seed(5)
        for i, batch in enumerate(batches(machine, 20, ())):
            results[f"loss {i}"] = train(*batch).clone()
            if i == 6:
                saved = state_dict(training)
            if i in (6, 13):
                edit(training, saved)
        results |= everything(training)
    assert_same_bits(graphed, expected)


@slow_in_emulation
@pytest.mark.parametrize("name", ["O2", "adamw", "sgd", *COMPACT])
def test_a_checkpoint_of_graphed_steps_resumes_eagerly_and_graphed(name, machine):
    feed = list(batches(machine, 24))
    whole = TRAININGS[name](machine)
    step = whole.graphed(sample(machine))
    run(step, feed[:10])
    saved = state_dict(whole)
    expected = run(step, feed[10:]) | everything(whole)
    # How many steps a process has skipped, and where, no checkpoint tells.
    history = [key for key in expected if key.startswith(("step last", "step skipped"))]
    for graphed in (False, True):
        resumed = TRAININGS[name](machine)
        train = resumed.graphed(sample(machine)) if graphed else resumed.eager
        load_everything(resumed, saved)
        tensors = run(train, feed[10:]) | everything(resumed)
        assert_same_bits(tensors, expected | {key: tensors[key] for key in history})


def test_a_step_made_again_goes_on(machine):
    ours, twin = twins("O2", machine)
    feed = list(batches(machine, 12))
    expected = run(twin.eager, feed) | everything(twin)
    torch.manual_seed(5)
    for i, batch in enumerate(feed):
        if i % 4 == 0:
            step = ours.graphed(sample(machine))
        assert torch.equal(step(*batch), expected[f"loss {i}"])
    tensors = everything(ours)
    assert_same_bits(tensors, {key: expected[key] for key in tensors})


@pytest.mark.parametrize("name", ["O0", "O2"])
def test_a_replay_is_seen_by_autograd(name, machine):
    """The host does not see what a graph writes; torch notices it by versions alone."""
    training = TRAININGS[name](machine)
    model, step = training.model, training.graphed(sample(machine))
    factor = torch.ones((), device=machine, requires_grad=True)
    written = [*model.parameters(), *model.buffers(), *amp.master_params(training.optimizer)]
    losses = [(factor * tensor).sum() for tensor in written]
    step(*sample(machine))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_replay_is_seen_by_the_cache_of_casts(machine):
    inputs, target = sample(machine)
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


class Attention(nn.Linear):
    def forward(self, tokens, mask, scale=1.0):
        return {"logits": (super().forward(tokens) * mask).sum(1), "scale": scale}


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_structured_batches_are_taken(kind, machine):
    def batch():
        tokens, mask = torch.randn(2, 5, 4), torch.rand(2, 5, 1) < 0.5
        inputs = {"tokens": tokens.to(machine), "mask": mask.to(machine), "scale": 2.0}
        inputs = inputs if kind is dict else kind(inputs.values())
        return inputs, {"labels": torch.randn(2, 4).to(machine)}, None

    def loss(output, target, weight):
        assert weight is None
        return (output["logits"] - target["labels"]).square().mean() * output["scale"]

    model = Attention(4, 4).to(machine)
    twin = copy.deepcopy(model)
    optimizer, other = (sgd(m) for m in (model, twin))
    step = make_graphed_step(model, loss, optimizer, batch())
    for _ in range(5):
        inputs, *targets = batch()
        other.zero_grad()
        expected = loss(twin(**inputs) if kind is dict else twin(*inputs), *targets)
        expected.backward()
        other.step()
        assert torch.equal(step(inputs, *targets), expected)
        assert torch.equal(model.weight, twin.weight)


def test_one_tensor_may_be_in_two_places_and_constants_stay(stand_in):
    """An autoencoder's sample may be (x, x); later targets may differ from inputs."""
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    step = make_graphed_step(model, lambda y, t, k: k * loss_fn(y, t), sgd(model), (x, x, 2))
    expected = 2 * loss_fn(model(x), -x)
    assert torch.equal(step(x, -x, 2), expected)
    with pytest.raises(ValueError, match=r"targets\[1\] is 3, and .* with 2"):
        step(x, -x, 3)


X, Y = sample("cpu")
WRONG = {
    "fewer rows": ((X[:5], Y[:5]), r"inputs is .* \(5, 6\), .* \(8, 6\)\. .*drop_last=True"),
    "fewer columns": ((X, Y[:, :1]), r"targets\[0\] is .* \(8, 1\)"),
    "type": ((X.double(), Y), "inputs is torch.float64 .* torch.float32"),
    "no target": ((X,), r"structure differs .*targets\[0\]"),
    "two targets": ((X, Y, Y), r"structure differs .*targets\[1\]"),
    "a list": (([X], Y), r"structure differs .*inputs\[0\]"),
    "a number": ((X, 3.0), r"targets\[0\] is 3.0, and .* with torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_batches_are_refused(name, stand_in):
    batch, text = WRONG[name]
    training = TRAININGS["O2"](torch.device("cpu"))
    step = training.graphed((X, Y))
    before = everything(training)
    with pytest.raises(ValueError, match=text):
        step(*batch)
    assert_same_bits(everything(training), before)
    assert stand_in.replays == 0
    step(X, Y)


@pytest.mark.parametrize("other", [X[:1], X.double()])
def test_a_captured_call_takes_no_other_tensors(other):
    """copy_ would repeat a batch of one, and convert types."""
    call = graphs.GraphedCall(lambda x: (x,))
    call._calls, call._graph, call._tensors = graphs.EAGER_CALLS, Mock(), [X.clone()]
    with pytest.raises(ValueError, match=r"a tensor is .* captured with torch.float32 \(8, 6\)"):
        call(-other)
    assert torch.equal(call._tensors[0], X)


# --- what cannot be captured ----------------------------------------------------------------------


def refused(**changes):
    training = alone(optim.AdamW, bf16, torch.device("cpu"), lr=0.1)
    arguments = {"model": training.model, "optimizer": training.optimizer, "loss_fn": loss_fn}
    make_graphed_step(**{**arguments, "sample_batch": sample("cpu"), **changes})


def initialized(kind=torch.optim.SGD, **options):
    model = network("cpu")
    optimizer = kind(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", **{"verbosity": 0, **options})
    return {"model": model, "optimizer": optimizer}


AN_ARRAY = (X, Y.numpy())
NOT_FUSED = "has no fused step"
REFUSED = {
    "torch's": (lambda m: {"optimizer": torch.optim.AdamW(m.parameters())}, TypeError, NOT_FUSED),
    "LARC": (lambda m: {"optimizer": optim.LARC(sgd(m))}, TypeError, f"LARC {NOT_FUSED}"),
    "generic": (lambda m: initialized(torch.optim.RMSprop), TypeError, NOT_FUSED),
    "no batch": (lambda m: {"sample_batch": X}, TypeError, r"\(inputs, \*targets\), got Tensor"),
    "an array": (lambda m: {"sample_batch": AN_ARRAY}, TypeError, r"\[0\] is a ndarray; pass"),
    "a norm": (lambda m: {"max_grad_norm": -1}, ValueError, "max_grad_norm is -1"),
    "loud": (lambda m: initialized(verbosity=2), RuntimeError, "verbosity=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_is_refused(case, stand_in):
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        refused(**changes(network("cpu")))


@pytest.mark.parametrize("spread", [nn.parallel.DistributedDataParallel, fully_shard])
def test_models_of_several_processes_are_refused(spread, one_process):
    for wrapped in (lambda model: model, torch.compile):
        with pytest.raises(TypeError, match=r"the model is in \w+, which communicates"):
            refused(model=wrapped(spread(network("cpu"))))


def test_there_are_no_graphs_on_a_cpu():
    with pytest.raises(ValueError, match="parameters are on cpu, but CUDA graphs need"):
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


class Attends(nn.Module):
    """Computes attention in the modes of its calls: fused, or from products."""

    def __init__(self, modes):
        super().__init__()
        self.mix, self.modes = nn.Linear(8, 8), iter(modes)

    def forward(self, x):
        y = self.mix(x).view(2, 1, 4, 8)
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends if next(self.modes) == "fused" else SDPBackend.MATH):
            return scaled_dot_product_attention(y, y, y).flatten(1)


@pytest.mark.parametrize("captured", ["fused", "math"])
def test_other_attention_in_the_capture_is_warned_of(captured, stand_in):
    model = Attends(["fused"] * 3 + [captured])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(2, 4, 8), torch.randn(2, 32))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make_graphed_step(model, nn.functional.mse_loss, optimizer, batch)
    said = [str(one.message) for one in warned if "attention" in str(one.message)]
    assert len(said) == (captured == "math")
    text = "attention with no fused kernel, eager steps with 1 x ScaledDotProduct"
    assert all(text in one for one in said)


# --- what a captured step does not see ------------------------------------------------------------


def of_group(**values):
    """A change of the first parameter group."""
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def replace_parameters(model, optimizer):
    optimizer.param_groups[0]["params"] = [*map(nn.Parameter, model.parameters())]


def move_weight(model, optimizer):
    model[0].weight.data = model[0].weight.data.clone()


# A change after the capture, and what the message says was changed.
CHANGES = {
    "eps": (of_group(eps=1e-5), "eps of parameter group 0"),
    "maximize": (of_group(maximize=True), "maximize of parameter group 0"),
    "amsgrad": (of_group(amsgrad=True), "momentum or amsgrad switch on"),
    "momentum starts": (of_group(momentum=0.9), "momentum or amsgrad switch on"),
    "momentum ends": (of_group(momentum=0.0), "momentum or amsgrad switch on"),
    "tensor": (of_group(lr=torch.tensor(0.1)), "the tensor that is lr of parameter group 0"),
    "added": (add_group, "list of parameters"),
    "replaced": (replace_parameters, "list of parameters"),
    "moved": (move_weight, r"memory \(p\.data.*"),
    "buffer": (
        lambda m, o: m[1].running_mean.set_(torch.zeros(16, dtype=bf16)),
        "the memory of buffer model.1.running_mean",
    ),
    "eval": (lambda m, o: m.eval(), "train or eval mode"),
    "a module's eval": (lambda m, o: m[1].eval(), "train or eval mode"),
    "frozen": (lambda m, o: m[0].weight.requires_grad_(False), "requires_grad of .*"),
    "clipping": (lambda m, o: setattr(o, "max_grad_norm", 1.0), "max_grad_norm"),
    "skipping": (lambda m, o: setattr(o, "skip_nonfinite", False), "skip_nonfinite"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_need_a_new_capture_are_refused(name, stand_in):
    change, text = CHANGES[name]
    training = TRAININGS["adamw"](torch.device("cpu"))
    if name.startswith("momentum"):
        momentum = 0.9 if name == "momentum ends" else 0.0
        training = alone(optim.SGD, bf16, torch.device("cpu"), lr=0.1, momentum=momentum)
    step = training.graphed(sample("cpu"))
    step(*sample("cpu"))
    change(training.model, training.optimizer)
    weights = copy.deepcopy(training.model.state_dict())
    with pytest.raises(RuntimeError, match=text + r" was changed (.|\n)*Capture it again"):
        step(*sample("cpu"))
    assert_same_bits(dict(training.model.state_dict()), dict(weights))
    assert stand_in.replays == 1


def test_a_change_that_is_undone_is_forgotten(stand_in):
    ours, twin = twins("adamw", torch.device("cpu"))
    step = ours.graphed(sample("cpu"))
    group = ours.optimizer.param_groups[0]
    eps, group["eps"] = group["eps"], 1e-3
    with pytest.raises(RuntimeError, match="undo the change"):
        step(*sample("cpu"))
    group["eps"] = eps
    assert_trains_alike(ours, step, twin, batches("cpu", 6))


# --- only a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAININGS)
def test_replays_do_not_wait(name):
    """With a scheduler on the host while the device is busy; batches on it or pinned."""
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
def test_the_graph_keeps_what_it_reads():
    """Sample, scheduler and gradients are gone, and their memory was written by others."""
    device = torch.device("cuda")
    ours, twin = twins("O2", device)
    step = ours.graphed(sample(device))
    expected = run(twin.eager, batches(device)) | everything(twin)
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
    tensors = run(step, batches(device)) | everything(ours)
    assert_same_bits(tensors, expected)
    assert all(bool(block.isnan().all()) for block in rubbish)
