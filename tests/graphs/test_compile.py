"""torch.compile with ampfuse: the bits of uncompiled runs, one graph, and no compiling anew."""

import collections
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import ampfuse
from ampfuse import amp, optim
from cases import LEVELS, assert_same_bits

DYNAMIC = ("O1", "O2")
OVERFLOW = 2  # the step with one, at the dynamic levels


@pytest.fixture(autouse=True)
def compiler():
    """Forgets other tests. To compile a function again is an error, as is a warning of Dynamo's."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.wide, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        x = F.layer_norm(F.gelu(self.wide(x)), (8,))
        return self.out(F.softmax(x, dim=-1) + x)


def batch(i, device="cpu"):
    random = torch.Generator().manual_seed(i)
    x = torch.randn(6, 2, 5, 5, generator=random)
    return x.to(device), torch.randint(3, (6,), generator=random).to(device)


def build(kind=optim.AdamW, device="cpu", **options):
    torch.manual_seed(0)
    model = Net().to(device)
    return model, kind(model.parameters(), **{"lr": 1e-2, **options})


def factor(level, i):
    return torch.tensor(float("inf") if level in DYNAMIC and i == OVERFLOW else 1.0)


def train(level, run, optimizer, steps=4, device="cpu"):
    losses = {}
    for i in range(steps):
        x, y = batch(i, device)
        # (By torch's operations: of half logits an eager step would use ampfuse's.)
        loss = F.cross_entropy(run(x).float(), y) * factor(level, i)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {i}"] = loss.detach()
    return losses


def everything(model, optimizer):
    tensors = dict(model.state_dict())
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{k} {i}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    if getattr(optimizer, "_amp_session", None) is not None:
        scaler = amp.state_dict(optimizer=optimizer)["loss_scaler0"]
        tensors |= {k: torch.tensor(float(v)) for k, v in scaler.items()}
    if hasattr(optimizer, "last_step"):
        tensors["skipped"] = optimizer.skipped_steps["nonfinite"]
    return {name: value.detach().clone() for name, value in tensors.items()}


# --- models ---------------------------------------------------------------------------------------


COMPILED_AFTER, COMPILED_BEFORE = ("initialize", "compile"), ("compile", "initialize")
EACH = [COMPILED_AFTER, COMPILED_BEFORE]
ALL_ORDERS = [
    *EACH,
    ("initialize", "compile in place"),
    ("compile in place", "initialize"),
    ("compile a part", "initialize"),
]


def run_compiled(level, order, backend="aot_eager", mode=None, device="cpu", **options):
    """The results of a training; `order` is what is done to the model before."""
    model, optimizer = build(device=device)
    run, how = model, {"backend": backend, "mode": mode, "fullgraph": True}
    for action in order:
        if action == "initialize":
            made = amp.initialize(run, optimizer, opt_level=level, verbosity=0, **options)
            assert made[0] is run
        elif action == "fuse norms":
            ampfuse.nn.fuse(run, ["norms"])
        elif action == "compile":
            run = torch.compile(run, **how)
        elif action == "compile in place":
            run.compile(**how)
        else:
            run.wide = torch.compile(run.wide, **how)
    tensors = train(level, run, optimizer, device=device) | everything(model, optimizer)
    return {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}


QUICK = [
    ("O2", False, ALL_ORDERS),
    ("O1", False, EACH),
    ("O2", True, [COMPILED_BEFORE]),
    ("O1", True, [COMPILED_AFTER]),
]
SLOW = [("O1", False, ALL_ORDERS[2:]), ("O2", True, [COMPILED_AFTER])]
SLOW += [("O1", True, [COMPILED_BEFORE])]
SLOW += [(level, False, EACH) for level in LEVELS if level not in DYNAMIC]


@pytest.mark.parametrize(
    ("level", "fuse", "orders"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_compiled_models_train_to_the_bits_of_uncompiled_ones(level, fuse, orders):
    # A compiled model leaves its activations to the compiler.
    expected = run_compiled(level, ["fuse norms"] * fuse + ["initialize"])
    assert expected["skipped"] == (level in DYNAMIC)
    for order in orders:
        torch._dynamo.reset()
        counters.clear()
        assert_same_bits(run_compiled(level, order, fuse=fuse), expected)
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("order", "mode"),
    [(COMPILED_AFTER, None), (COMPILED_BEFORE, None), (COMPILED_AFTER, "reduce-overhead")],
)
@pytest.mark.parametrize("level", LEVELS)
def test_inductor_trains_alike(level, order, mode, hardware):
    if mode is not None and hardware.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    expected = run_compiled(level, ["initialize"], device=hardware)
    compiled = run_compiled(level, order, "inductor", mode, hardware)
    assert counters["stats"]["unique_graphs"] == 1
    for name in ("skipped", "loss_scale", "unskipped"):
        assert compiled[name] == expected[name]
    tolerance = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 5e-3}.get(level, 4e-2)
    for i in range(OVERFLOW):  # later on Adam makes much of gradients that are next to nothing
        loss = compiled[f"loss {i}"], expected[f"loss {i}"]
        torch.testing.assert_close(*loss, rtol=tolerance, atol=tolerance)


def test_a_wrapper_that_initialize_refuses_is_refused_compiled():
    class DistributedDataParallel(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(RuntimeError, match="wrapped in DistributedDataParallel"):
        amp.initialize(torch.compile(DistributedDataParallel(nn.Linear(2, 2))), verbosity=0)


# --- steps and passes -----------------------------------------------------------------------------


class Plain(torch.optim.RMSprop):
    """An optimizer with a step of its own, on masters."""


def whole_step(level, kind):
    """A model, its optimizer, their scaler, and a step: two passes, clipping, update."""
    model, optimizer = build(kind)
    scaler = ampfuse.GradScaler("cpu", init_scale=2.0**10) if level == "scaler" else None
    if level in LEVELS:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward(loss, delay):
        if scaler is not None:
            scaler.scale(loss).backward()
        elif level is not None:
            with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
                scaled.backward()
        else:
            loss.backward()

    def step(x, y, factor):
        loss = F.cross_entropy(model(x), y) * factor
        backward(loss, delay=True)
        backward(F.cross_entropy(model(x.flip(0)), y), delay=False)
        if scaler is None:
            amp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
        else:
            scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, scaler, step


STEPS = [("scaler", optim.AdamW), ("O1", optim.SGD), ("O2", optim.AdamW)]
OTHER_STEPS = [(None, optim.AdamW), ("O2", Plain), ("scaler", Plain)]


@pytest.mark.parametrize(
    ("level", "kind", "backend"),
    [
        *((*step, "aot_eager") for step in STEPS),
        ("O1", optim.AdamW, "eager"),  # whose graphs run the model's operators in Python
        *(pytest.param(*step, "aot_eager", marks=pytest.mark.slow) for step in OTHER_STEPS),
    ],
)
def test_a_compiled_step_of_training_leaves_amp_uncompiled(level, kind, backend):
    """Only the uses of the model are compiled, and after two steps nothing is."""
    results = []
    for compiled in (False, True):
        model, optimizer, scaler, step = whole_step(level, kind)
        if compiled:
            torch._dynamo.config.error_on_recompile = False  # torch's own steps
            step = torch.compile(step, backend=backend)
        losses, graphs = {}, []
        for i in range(4):
            losses[f"loss {i}"] = step(*batch(i), factor(level, i))
            graphs.append(counters["stats"]["unique_graphs"])
        results.append(everything(model, optimizer) | {"losses": losses})
        if scaler is not None:
            results[-1]["scale"] = torch.tensor(scaler.get_scale())
    # Uncompiled, the loss reads half logits: its last bit is not torch's.
    torch.testing.assert_close(*(each.pop("losses") for each in results), rtol=1e-6, atol=0)
    assert_same_bits(*results)
    assert 2 <= graphs[1] == graphs[-1] <= 4


@pytest.mark.parametrize("level", ["O2", pytest.param("O5", marks=pytest.mark.slow)])
def test_a_shape_that_comes_between_two_passes_compiles_too(level):
    """Dynamo looks at the gradients that there are then, and they stay as they are."""
    results = []
    torch._dynamo.config.error_on_recompile = False
    for compiled in (False, True):
        model, optimizer = build()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for rows in (6, 4):
            x, y = batch(0)
            with amp.scale_loss(F.cross_entropy(run(x[:rows]), y[:rows]), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        results.append(everything(model, optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.LAMB])
def test_a_compiled_optimizer_step_is_the_step(kind):
    results = []
    for compiled in (False, True):
        model, optimizer = build(kind)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for i in range(3):
            x, y = batch(i)
            F.cross_entropy(model(x), y).backward()
            step()
            optimizer.zero_grad()
        results.append(everything(model, optimizer))
    assert_same_bits(*results)
    assert not counters["stats"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="ampfuse does this in its extension"):
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()


# --- what casts see in compiled code --------------------------------------------------------------


def own(x):
    return x.exp()


IN_FLOAT, IN_HALF = amp.float_function(own), amp.half_function(own)
WIDEST, HALF_LINEAR = amp.promote_function(torch.mul), amp.half_function(F.linear)


class Part(nn.Module):
    """A layer, and something after it."""

    def __init__(self, after, results=lambda y: y):
        super().__init__()
        self.layer, self.after, self.results = nn.Linear(4, 4), after, results

    def forward(self, x):
        return self.results(self.after(self.layer, self.layer(x), x))


def without_casts(layer, y, x):
    with amp.disable_casts():
        return layer(y.float()) + F.softmax(y, -1)


def breaking(layer, y, x):
    torch._dynamo.graph_break()
    return layer(y).mean(0)


AFTER = {
    "float_function": lambda layer, y, x: IN_FLOAT(y) * 2,
    "half_function": lambda layer, y, x: (IN_HALF(x) * 2).mean(),
    "promote_function": lambda layer, y, x: WIDEST(y, x),
    "half_function of torch's": lambda layer, y, x: HALF_LINEAR(x, layer.weight) + y,
    "disable_casts": without_casts,
    "graph break": breaking,
}


def same_compiled(function, x, fullgraph=True):
    """`function` and compiled give results of the same classes, types and bits."""
    expected = function(x)
    result = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)(x)
    if not isinstance(expected, torch.Tensor):
        assert type(result) is type(expected)
    if isinstance(expected, dict):
        assert list(result) == list(expected)
    for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return result


@pytest.mark.covers(1)
@pytest.mark.parametrize("latest", ["O1", "O2"])
@pytest.mark.parametrize("name", AFTER)
def test_compiled_functions_get_the_types_that_they_ask_for(name, latest):
    """They are those of the model's own level, whichever model was initialized last."""
    model = amp.initialize(Part(AFTER[name]), opt_level="O1", verbosity=0)
    amp.initialize(nn.Linear(1, 1), opt_level=latest, verbosity=0)
    same_compiled(model, torch.rand(3, 4), fullgraph=name != "graph break")


Pair = collections.namedtuple("Pair", ["first", "rest"])
RESULTS = {
    "dict": lambda y: {"a": y, "b": [y.float(), (y, y)]},
    "OrderedDict": lambda y: collections.OrderedDict(a=y.float(), b=y),
    "namedtuple": lambda y: Pair(y, [y, (y.float(),)]),
    "torch's": lambda y: y.max(1)[:1],
}


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_in_containers_compile(name, level):
    model = Part(lambda layer, y, x: y, RESULTS[name])
    amp.initialize(model, opt_level=level, verbosity=0)
    same_compiled(model, torch.rand(3, 4))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_results_of_transformers_compile(level):
    output = pytest.importorskip("transformers.modeling_outputs").SequenceClassifierOutput
    model = Part(lambda layer, y, x: y, lambda y: output(loss=y.float().sum(), logits=y))
    amp.initialize(model, opt_level=level, verbosity=0)
    same_compiled(model, torch.rand(3, 4))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_models_on_what_models_return(level):
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    first, second = amp.initialize(models, opt_level=level, verbosity=0)
    x = torch.rand(3, 4)
    same_compiled(lambda x: second(first(x)), x)
    same_compiled(second, first(x))


# --- tools ----------------------------------------------------------------------------------------


def test_explain_overflow_sees_into_a_compiled_model():
    model, optimizer = build()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    train("O2", run, optimizer, 1)
    with torch.no_grad():
        model.out.weight.fill_(6e4)[:, ::2].neg_()
    with amp.explain_overflow(run) as watch:
        train("O2", run, optimizer, 1)
    assert (watch.explanation.module, watch.explanation.operation) == ("out", "linear")
    train("O2", run, optimizer, 2)
    assert counters["stats"]["unique_graphs"] == 1
