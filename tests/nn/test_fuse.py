"""``ampfuse.nn.fuse``: the same results as the model as it was, and a report of what was done."""

import copy
import operator
import pickle
import random
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse import amp
from ampfuse.experiments import models
from ampfuse.nn import BatchNormAct2d, fuse, unfuse
from ampfuse.nn.fuse import forwards
from cases import LEVELS, bf16, f32, f64, through_a_file
from trainings import assert_near, step_and_evaluation

X = torch.randn(3, 4, 5, 5, dtype=f64, generator=torch.Generator().manual_seed(1))


def last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


def check(model, *inputs, tolerance=1e-10, **options):
    """Fuse a copy of `model`, compare a step of both, and return copy and report."""
    fused = copy.deepcopy(model)
    report = fuse(fused)
    assert_near(
        step_and_evaluation(fused, inputs, **options),
        step_and_evaluation(model, inputs, **options),
        tolerance,
    )
    return fused, report


@pytest.fixture
def calls(monkeypatch):
    """The shapes that the fused operation ran on."""
    op, shapes = torch.ops.ampfuse.batch_norm_act, []

    def call(x, *args):
        shapes.append(x.shape)
        return op(x, *args)

    monkeypatch.setattr(torch.ops.ampfuse, "batch_norm_act", call)
    return shapes


# --- networks -----------------------------------------------------------------------------------


def dense(_):
    return pytest.importorskip("torchvision").models.DenseNet(8, (2, 2), 8, num_classes=5)


def shallow(name):
    """A block for each stage."""
    if name == "BasicBlock":
        resnet = pytest.importorskip("torchvision").models.resnet
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
    return pytest.importorskip("timm").create_model(name, num_classes=5, layers=(1, 1, 1, 1))


# How it is made, pixels of an image, batch norms with an add and a ReLU, with a ReLU, alone. At
# least 2x2 pixels everywhere: batch norm of two values is a sign.
NETWORKS = {
    "DenseNet": (dense, 32, 0, 10, 1),
    "digits": (lambda _: models.digits_net(4, 10, 1), 16, 0, 4, 0),
    "BasicBlock": (shallow, 40, 4, 5, 3),
    "resnet50": (shallow, 40, 4, 9, 4),
    "seresnext50_32x4d": (shallow, 40, 0, 9, 8),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_fused_whole_and_compute_the_same(name, calls, hardware):
    make, side, with_add, with_relu, alone = NETWORKS[name]
    model = make(name).to(hardware, memory_format=torch.channels_last)
    images = last(torch.randn(2, 1 if name == "digits" else 3, side, side)).to(hardware)
    with torch.no_grad():  # so that residuals count
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 1.0)
    keys = list(model.state_dict())
    # Rounding is amplified on the way through so many layers; a wrong wire is an error of 1.
    fused, report = check(model, images, tolerance=0.1)
    assert not report.left
    counts = {"with add and ReLU": with_add, "with ReLU": with_relu, "alone": alone}
    assert Counter(report.fused.values()) == Counter(counts)
    assert len(calls) == 2 * sum(counts.values())
    assert str(report).count("\n") == sum(counts.values())
    assert list(fused.state_dict()) == keys


@pytest.mark.parametrize(("dtype", "tolerance"), [(f64, 1e-10), (f32, 1e-3)])
def test_exact_where_it_can_be(dtype, tolerance, hardware):
    model = nn.Sequential(Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1)).to(hardware, dtype)
    check(model, last(torch.randn(4, 8, 6, 6, dtype=dtype)).to(hardware), tolerance=tolerance)


def test_half_is_as_exact_as_it_was(hardware):
    model = nn.Sequential(Residual(8), Residual(8)).to(hardware)
    images = last(torch.randn(4, 8, 6, 6).bfloat16()).to(hardware)
    exact = step_and_evaluation(copy.deepcopy(model).double(), [images.double()])
    half = copy.deepcopy(model).bfloat16()
    for module in half.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    plain = step_and_evaluation(copy.deepcopy(half), [images])
    fuse(half)
    for found, before, reference in zip(
        step_and_evaluation(half, [images]), plain, exact, strict=True
    ):
        errors = [(x.double() - reference).norm() for x in (found, before)]
        assert found.dtype == before.dtype
        assert errors[0] <= 1.5 * errors[1] + 1e-6


# --- forwards -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Modules that the forwards below use."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.norm2 = nn.BatchNorm2d(channels)
        self.nothing = nn.Identity()
        self.relu = nn.ReLU(inplace=True)


class Residual(Block):
    def forward(self, x):
        out = self.relu(self.norm(self.conv(x)))
        return self.relu(self.norm2(self.conv2(out)) + x)


def module(forward, attributes=()):
    """A Block with this forward."""
    made = type("Made", (Block,), {"forward": forward})()
    for name, value in dict(attributes).items():
        setattr(made, name, value)
    return made.double()


def choose(self, x):
    parts = [x] if isinstance(x, torch.Tensor) else x
    return self.relu(self.norm(torch.cat(parts)))


# What fusing makes of the batch norm in each.
FORWARDS = {
    "functional": (lambda self, x: F.relu(self.norm(x), inplace=True), "with ReLU"),
    "method": (lambda self, x: self.norm(x).relu_(), "with ReLU"),
    "torch.add": (lambda self, x: torch.add(x, self.norm(self.conv(x))), "with add"),
    "no ReLU": (lambda self, x: self.norm(self.conv(x)) + x, "with add"),
    "identity": (
        lambda self, x: self.relu(self.nothing(self.norm(self.conv(x))).add_(x)),
        "with add and ReLU",
    ),
    "alpha": (lambda self, x: torch.add(self.norm(x), x, alpha=2), "alone"),
    "constant": (lambda self, x: self.relu(self.norm(x) + 1), "alone"),
    "NumPy's number": (lambda self, x: self.relu(self.norm(x)) * numpy.sqrt(3.0), "with ReLU"),
    "twice": (lambda self, x: self.norm(x) + self.norm(self.conv(x)), "with add"),
    "itself": (lambda self, x: (lambda out: out + out)(self.norm(x)), "alone"),
    "broadcast": (
        lambda self, x: self.relu(self.norm(self.conv(x)) + x.mean(1, True)),
        "with add and ReLU",
    ),
    "seen": (lambda self, x: (lambda out: out.relu() + out * 2)(self.norm(x)), "alone"),
    "written residual": (lambda self, x: operator.iadd(self.conv(x), self.norm(x)), "alone"),
    "in-place ReLU first": (
        lambda self, x: (lambda y: self.norm(self.conv2(self.relu(y))) + y)(self.conv(x)),
        "with add",
    ),
    "called ReLU": (lambda self, x: self.relu(self.norm(x)), "alone", {"relu": nn.SiLU()}),
    "positions": (
        lambda self, x: self.relu(self.norm(x)) + torch.arange(x.shape[-1], device=x.device),
        "with ReLU",
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_each_forward_is_fused_as_far_as_it_can_be(name):
    forward, what, *attributes = FORWARDS[name]
    _, report = check(module(forward, *attributes), X)
    assert report.fused["norm"] == what
    assert report.left["norm2"] == "the model does not call it"


def test_an_input_that_is_written_before_the_add():
    def forward(self, x):
        x = x * 1
        normed = self.norm(x)
        x.relu_()
        return normed + x

    model = module(forward)
    expected = copy.deepcopy(model)(X.detach())
    assert fuse(model).fused["norm"] == "alone"
    assert torch.equal(model(X.detach()), expected)


@pytest.mark.parametrize(
    "pack", [lambda a, b: (a,), lambda a, b: ([a, b],), lambda a, b: ((a, b),)]
)
def test_a_forward_may_ask_for_the_type_of_its_input(pack, calls):
    x = torch.randn(2, 3, 4, 5, 5, dtype=f64)
    check(module(choose), *x, make_output=lambda model, inputs: model(*pack(*inputs)))
    assert len(calls) == 2


@pytest.mark.parametrize(("forward", "count"), [(lambda self, x: self.norm(x), 2), (choose, 6)])
def test_graphs_are_shared_by_types_that_a_forward_treats_alike(forward, count, monkeypatch):
    """A graph for each mode, and for each type of argument only where ``forward`` checks it."""
    graphs, compiled = [], forwards._compiled
    monkeypatch.setattr(forwards, "_compiled", lambda *args: graphs.append(args) or compiled(*args))
    fuse(module(forward))
    assert len(graphs) == count


def test_modes_may_differ(calls):
    model = module(lambda self, x: self.relu(self.norm(x)) if self.training else self.norm(x) + x)
    check(model, X)
    assert len(calls) == 2


class Named(dict):
    """A dict that is built otherwise."""

    def __init__(self, **values):
        super().__init__(values)


@pytest.mark.parametrize(("kind", "is_fused"), [(OrderedDict, True), (dict, True), (Named, False)])
def test_a_fused_forward_returns_the_same_type(kind, is_fused):
    model = module(lambda self, x: kind(normed=self.norm(x), given=x))
    report = fuse(model)
    assert ("norm" in report.fused) is is_fused
    assert is_fused or "it makes a Named" in report.left["norm"]
    output = model(X)
    assert type(output) is kind
    assert list(output) == ["normed", "given"]


def plain(self, x):
    return self.norm(x)


def without_gradients(self, x):
    with torch.no_grad():
        y = self.norm(x)
    return x + y


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=bf16):
        return self.norm(x)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Filler(nn.Module):
    def forward(self, x, kept):
        kept.append(x)
        return x


def collects(self, x, *first):
    kept = [*first]
    return self.conv(self.norm(x), kept) + torch.stack(kept or [x]).sum(0)


class Overridden(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) * 2


def hooked(norm):
    norm.register_forward_hook(lambda *_: None)
    return norm


LEFT = {
    "branches": (lambda self, x: self.norm(x) if x.sum() > -1e9 else x, "cannot be traced"),
    "stores": (lambda self, x: setattr(self, "kept", x) or self.norm(x), "sets self.kept"),
    "counts": (
        lambda self, x: setattr(self, "count", self.count + 1) or self.norm(x),
        "sets self.count",
        {"count": 0},
    ),
    "draws": (lambda self, x: self.norm(x) if random.random() < 2 else x, "draws random numbers"),
    "constant": (lambda self, x: self.norm(x) * torch.ones(2).sum(), "computes ones from none"),
    "no_grad": (without_gradients, "cannot be traced"),
    "autocast": (under_autocast, "gradient mode or autocast"),
    "type": (
        lambda self, x: self.norm(y[0] if isinstance(y := self.conv(x), tuple) else y),
        "checks the type",
        {"conv": Pair()},
    ),
    "type of a number": (
        lambda self, x: self.norm(x) * (2 if isinstance(x.size(0), int) else 1),
        "checks the type",
    ),
    "fills": (collects, "an empty collection", {"conv": Filler()}),
    "extends": (lambda self, x: collects(self, x, x), "a collection again", {"conv": Filler()}),
    "class": (lambda self, x: self.norm(x) * (2 if x.__class__ is torch.Tensor else 1), "the type"),
    "number": (lambda self, x: self.norm(x) + torch.eye(x.shape[-1]), "function as a number"),
    "subclass": (plain, "Overridden has no fused version", {"norm": Overridden(4)}),
    "one dimension": (
        lambda self, x: self.norm(x.flatten(2)),
        "BatchNorm1d has no fused version",
        {"norm": nn.BatchNorm1d(4)},
    ),
    "hooked": (plain, "it has hooks", {"norm": hooked(nn.BatchNorm2d(4))}),
    "instance": (plain, "has a custom forward", {"forward": lambda x: x * 1}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name):
    forward, reason, *attributes = LEFT[name]
    model = module(forward, *attributes)
    expected = copy.deepcopy(model)(X)
    before, state = dict(model.__dict__), random.getstate()
    report = fuse(model)
    assert reason in report.left["norm"]
    assert not report.fused
    assert reason in str(report)
    assert random.getstate() == state
    assert model.__dict__.keys() == before.keys()
    assert torch.equal(model(X), expected)


def test_a_model_may_have_nothing_to_fuse():
    model = nn.Sequential(nn.Linear(2, 2))
    assert str(fuse(model)) == "nothing to fuse"
    assert not fuse(nn.BatchNorm2d(2)).fused


# --- what may happen to a fused model -----------------------------------------------------------


def two_blocks():
    return nn.Sequential(Residual(4), Residual(4)).double()


@pytest.mark.covers(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "hook",
    [
        lambda m, seen: m.register_forward_hook(lambda *_: seen.append(0)),
        lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(0)),
        lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(0)),
        lambda m, seen: nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(0) if module is m else None
        ),
    ],
    ids=["forward", "pre", "backward", "global"],
)
@pytest.mark.parametrize("name", ["0", "1.norm", "1.norm2", "1.relu"])
def test_hooks_run(name, hook, when):
    model = two_blocks()
    for block in model:  # backward hooks forbid it
        block.relu.inplace = False
    plain = copy.deepcopy(model)
    seen, expected = [], []
    if when == "after":
        fuse(model)
    handles = [hook(m.get_submodule(name), s) for m, s in ((model, seen), (plain, expected))]
    if when == "before":
        fuse(model)
    try:
        assert_near(step_and_evaluation(model, [X]), step_and_evaluation(plain, [X]), 1e-10)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == expected != []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "norm", Overridden(4).double()),
        lambda m: setattr(m[1], "relu", nn.SiLU()),
        lambda m: setattr(m[1], "norm2", nn.GroupNorm(2, 4).double()),
        lambda m: setattr(m[1], "norm2", BatchNormAct2d(4).double()),
        nn.SyncBatchNorm.convert_sync_batchnorm,
    ],
    ids=["batch norm", "ReLU", "group norm", "ours", "all batch norms"],
)
def test_modules_that_are_exchanged_later_run(change):
    model = two_blocks()
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        change(each)
    assert_near(step_and_evaluation(model, [X]), step_and_evaluation(plain, [X]), 1e-10)


@pytest.mark.parametrize("level", [None, "O0", "O5"])
def test_a_pickled_model_loads_as_it_was(level, calls):
    model = two_blocks().float() if level else two_blocks()
    x = X.float() if level else X
    fuse(model)
    if level:
        amp.initialize(model[0], opt_level=level, verbosity=0)
    expected = step_and_evaluation(copy.deepcopy(model), [x])
    loaded = through_a_file(model, weights_only=False)
    pickle.loads(pickle.dumps(model))
    calls.clear()
    assert_near(step_and_evaluation(loaded, [x]), expected, 1e-2 if level else 1e-10)
    assert not calls
    assert len(fuse(loaded).fused) == 4
    loaded(x)
    assert calls


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("wrap", [compiled, nn.parallel.DistributedDataParallel])
def test_a_wrapped_model_computes_the_same(wrap, one_process):
    model = two_blocks()
    fused = copy.deepcopy(model)
    fuse(fused)
    assert_near(step_and_evaluation(wrap(fused), [X]), step_and_evaluation(model, [X]), 1e-10)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("several", [False, True])
def test_initialize_fuses_on_request(level, several, calls, caplog):
    models = [nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)]
    given = models if several else models[0]
    caplog.set_level("INFO", "ampfuse.amp")
    assert amp.initialize(given, opt_level=level, fuse=True) is given
    assert "fuse=True" in caplog.text
    assert "1 of 1 places fused" in caplog.text
    count = 2 if several else 1
    for model in models[:count]:
        model(torch.randn(2, 2, 3, 3)).sum().backward()
    assert len(calls) == count
    unfuse(models[0])
    models[0](torch.randn(2, 2, 3, 3))
    assert len(calls) == count
    fuse(models[0])  # under the casts
    models[0](torch.randn(2, 2, 3, 3))
    assert len(calls) == count + 1
