"""However a model and its loss are written and run, half logits get no FP32 copy on the way.

What is allocated is the profiler's word, which sees into compiled code and backward passes. Loss
and gradients are compared with float64, and have to come as near as with FP32 outputs.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy as imported_by_name
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ampfuse import amp
from cases import f32
from programs import on_ranks

CLASSES, BATCH, WORDS = 512, 4, 17
LOGITS = BATCH * WORDS * CLASSES
X = torch.linspace(-1, 1, BATCH * WORDS * 6).sin().view(BATCH, WORDS, 6)
TARGET = (torch.arange(BATCH * WORDS) * 7919 % CLASSES).view(BATCH, WORDS)
FLAT = TARGET.view(-1)
FP32 = torch.ones(1)
IGNORED = int(FLAT[1])
MASK = TARGET % 3 > 0
PICKED = MASK.view(-1).nonzero()[:, 0]
# Columns, which are not contiguous.
COLUMN = torch.stack([FLAT, FLAT], 1)[:, 0]
WEIGHTS = torch.linspace(0, 1, 2 * CLASSES).view(CLASSES, 2)[:, 0]


class Net(nn.Module):
    def __init__(self, part=lambda layer, x: layer(x)):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(6, 32), nn.Tanh()), nn.Linear(32, CLASSES)
        self.part = part

    def forward(self, x):
        return self.head(self.part(self.body, x))


def initialized(level, net=Net, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": 1.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)[0]


# --- what is done to logits [batch, words, classes] ---------------------------------------------


def rows_of(y):
    return y.view(-1, CLASSES)


def ce(y, target=TARGET, **options):
    return F.cross_entropy(y.flatten(0, -2), target.flatten(), **options)


def nll(y, *args, **options):
    return F.nll_loss(F.log_softmax(rows_of(y), -1), *(args or (FLAT,)), **options)


def shifted(cut):
    return lambda y: ce(cut(y[:, :-1]), TARGET[:, 1:])


def after(look, mode=torch.no_grad):
    """The loss after a look at the logits that leaves no FP32 copy of them."""

    def loss(y):
        with mode():
            look(y)
        return ce(y)

    return loss


LOSSES = {
    "flatten": ce,
    "float": lambda y: ce(y.float()),
    "to": lambda y: ce(y.to(torch.float32)),
    "to dtype": lambda y: ce(y.to(dtype=torch.float32)),
    "type": lambda y: ce(y.type(torch.float32)),
    "type_as": lambda y: ce(y.type_as(FP32)),
    "contiguous": lambda y: ce(y.contiguous()),
    "reshape": lambda y: ce(y.reshape(-1, CLASSES)),
    "view": lambda y: ce(y.view(-1, CLASSES)),
    "shifted": shifted(lambda y: y),
    "shifted, contiguous": shifted(lambda y: y.contiguous().view(-1, CLASSES)),
    "shifted, float": shifted(lambda y: y.float().contiguous()),
    "shifted, reshaped": shifted(lambda y: y.reshape(-1, CLASSES)),
    "classes in between": lambda y: F.cross_entropy(y.transpose(1, 2), TARGET),
    "shifted, classes in between": lambda y: F.cross_entropy(
        y[:, :-1].transpose(1, 2), TARGET[:, 1:]
    ),
    "sum": lambda y: ce(y, reduction="sum") / 64,
    "smoothing": lambda y: ce(y, label_smoothing=0.1),
    "weights": lambda y: ce(y, weight=torch.linspace(0, 1, CLASSES, dtype=y.dtype)),
    "module": lambda y: nn.CrossEntropyLoss()(rows_of(y), FLAT),
    "log_softmax": nll,
    "modules": lambda y: nn.NLLLoss()(nn.LogSoftmax(-1)(rows_of(y)), FLAT),
    "transformers": None,  # see loss_named()
    "picked": lambda y: ce(rows_of(y)[PICKED], FLAT[PICKED]),
    "masked": lambda y: ce(y[MASK], TARGET[MASK]),
    "after a look": after(lambda y: (y.argmax(-1) == TARGET).sum()),
}
# These are run without a compiler alone.
EAGER = {
    "to device": lambda y: ce(y.to(dtype=f32, device="cpu")),
    "type name": lambda y: ce(y.type("torch.FloatTensor")),
    "clone": lambda y: ce(y.clone()),
    "cat": lambda y: ce(torch.cat([y])),
    "split": lambda y: ce(y.split(BATCH)[0]),
    "transposed twice": lambda y: ce(rows_of(y).t().t().contiguous(), FLAT),
    "unsqueezed in place": lambda y: ce(y.unsqueeze_(0).squeeze_(0)),
    "by name": lambda y: imported_by_name(rows_of(y), FLAT),
    "columns": lambda y: F.cross_entropy(rows_of(y), COLUMN, WEIGHTS.to(y.dtype)),
    "each": lambda y: ce(y, reduction="none", ignore_index=IGNORED).sum() / 64,
    "log_softmax, columns": lambda y: nll(y, COLUMN, WEIGHTS.to(y.dtype)),
    "log_softmax, sum": lambda y: nll(y, reduction="sum") / 64,
    "log_softmax, each": lambda y: nll(y, ignore_index=IGNORED, reduction="none").sum() / 64,
    "log_softmax, some": lambda y: nll(y, FLAT, WEIGHTS.to(y.dtype), ignore_index=IGNORED),
    **{
        f"after {name} in {mode.__name__}": after(look, mode)
        for mode in (torch.no_grad, torch.inference_mode)
        for name, look in {
            "top 5": lambda y: y.topk(5, dim=-1)[1],
            "the largest": lambda y: y.max(-1).values.sum().item(),
            "a search for NaN": lambda y: torch.isnan(y).any(),
        }.items()
    },
}


def loss_named(name):
    if name == "transformers":  # imported here, outside of what is compiled
        loss_utils = pytest.importorskip("transformers.loss.loss_utils")
        return lambda y: loss_utils.ForCausalLMLoss(y, TARGET, CLASSES)
    return (LOSSES | EAGER)[name]


# --- how the two are run --------------------------------------------------------------------------


def aot(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def part_compiled(model, loss_of):
    model.body.compile(backend="aot_eager")
    model.head = aot(model.head)
    return model, loss_of


def checkpointed(reentrant):
    def part(layer, x):
        return checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)

    return lambda: Net(part)


def around(model, loss_of):
    x = X.clone().requires_grad_()
    return (
        lambda _: checkpoint(lambda x: loss_of(model(x)), x, use_reentrant=False),
        lambda loss: loss,
    )


def one_graph(compiler=aot, **options):
    def run(model, loss_of):
        return compiler(lambda x: loss_of(model(x)), **options), lambda loss: loss

    return run


def with_logits(model, loss_of):
    def run(x):
        y = model(x)
        return loss_of(y), y.detach()

    return aot(run, fullgraph=True), lambda found: found[0]


def broken(model, loss_of):
    def run(x):
        x = x * 1
        torch._dynamo.graph_break()
        return loss_of(model(x))

    return aot(run), lambda loss: loss


# Of (model, loss): a function of the input, and one of what it returns, which gives the loss.
RUNS = {
    "eager": lambda m, loss: (m, loss),
    "checkpoint around": around,
    "compiled model": lambda m, loss: (aot(m), loss),
    "fullgraph": lambda m, loss: (aot(m, fullgraph=True), loss),
    "dynamic": lambda m, loss: (aot(m, dynamic=True), loss),
    "compiled in place": lambda m, loss: (m.compile(backend="aot_eager") or m, loss),
    "parts": part_compiled,
    "compiled loss": lambda m, loss: (m, aot(loss, fullgraph=True)),
    "dynamic loss": lambda m, loss: (m, aot(loss, dynamic=True)),
    "two graphs": lambda m, loss: (aot(m), aot(loss)),
    "one graph": one_graph(fullgraph=True),
    "one graph, dynamic": one_graph(dynamic=True),
    "one graph with logits": with_logits,
    "broken graph": broken,
}
# The mask ends the graph that has called the model, whose output leaves it in FP32.
LEAVE_A_GRAPH = {("one graph, dynamic", "masked"), ("broken graph", "masked")}
NETS = {"checkpoint": checkpointed(False), "reentrant checkpoint": checkpointed(True)}
INDUCTOR = {
    "model": lambda m, loss: (torch.compile(m), loss),
    "loss": lambda m, loss: (m, torch.compile(loss)),
    "one graph": one_graph(torch.compile, fullgraph=True),
    "dynamic": one_graph(torch.compile, dynamic=True),
    "reduce-overhead": one_graph(torch.compile, mode="reduce-overhead"),
}


def allocations(call):
    """Bytes of each tensor that is allocated, but by torch's products, some of which compute FP16
    in FP32 on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    products = [e for e in events if e.name() in ("aten::addmm", "aten::mm")]
    times = [range(e.start_ns(), e.end_ns() + 1) for e in products]
    return [
        e.nbytes()
        for e in events
        if e.name() == "[memory]" and not any(e.start_ns() in time for time in times)
    ]


def step(model, run, loss_of):
    """The loss, the gradients by name, and the largest tensor of a step that is not the first."""
    losses = []

    def once():
        loss = loss_of(run(X.clone()))
        loss.backward()
        losses[:] = [loss.detach()]

    for _ in range(2):
        model.zero_grad()
        sizes = allocations(once)
    gradients = {
        name.replace("_orig_mod.", ""): p.grad.full_tensor()
        if isinstance(p.grad, DTensor)
        else p.grad
        for name, p in model.named_parameters()
    }
    return losses[0], gradients, max(sizes)


@functools.cache
def references(level, loss):
    """Loss and gradients in float64, and the errors of a model with FP32 outputs."""
    loss_of = loss_named(loss)
    model = initialized(level, cast_model_outputs=f32)
    exact = Net().double()
    exact.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
    expected = step(exact, lambda x: exact(x.double()), exact_of(loss_of))[:2]
    return expected, errors(step(model, model, loss_of), expected)


def exact_of(loss_of):
    """The same loss without casts to float32."""

    class Float64(torch.Tensor):
        def float(self, *_, **__):
            return self

        to = type = type_as = float

    return lambda y: loss_of(y.as_subclass(Float64)).as_subclass(torch.Tensor)


def errors(found, expected):
    loss, gradients = found[:2]
    apart = {"loss": ((loss.double() - expected[0]).abs() / expected[0].abs()).item()}
    for name, exact in expected[1].items():
        apart[name] = ((gradients[name].double() - exact).norm() / exact.norm()).item()
    return apart


def check(level, loss, model, run, loss_of):
    expected, allowed = references(level, loss)
    taken = step(model, run, loss_of)
    for name, error in errors(taken, expected).items():
        assert error <= 1.25 * allowed[name] + 1e-6, (name, error, allowed[name])
    least = BATCH * (WORDS - 1) * CLASSES  # of shifted logits
    assert taken[2] < 4 * least, f"{taken[2]} bytes in one tensor, for half logits of {2 * LOGITS}"


# Where autocast is compiled, outputs leave the graph in FP32.
COMBINATIONS = [
    *((level, run, loss) for level in ("O2", "O5") for run in RUNS for loss in LOSSES),
    *((level, "eager", loss) for level in ("O1", "O3", "O4") for loss in LOSSES),
    *((level, "eager", loss) for level in ("O1", "O2", "O3", "O4", "O5") for loss in EAGER),
]


@pytest.mark.covers(1)
@pytest.mark.parametrize(("level", "run", "loss"), COMBINATIONS)
def test_no_fp32_tensor_is_as_large_as_the_logits(level, run, loss):
    torch._dynamo.reset()
    model = initialized(level)
    loss_of = loss_named(loss)
    run_and_loss = RUNS[run](model, loss_of)
    if (run, loss) in LEAVE_A_GRAPH:
        with pytest.raises(AssertionError, match="bytes in one tensor"):
            check(level, loss, model, *run_and_loss)
    else:
        check(level, loss, model, *run_and_loss)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("net", NETS)
def test_checkpointed_parts_make_no_fp32_logits(level, net):
    model = initialized(level, NETS[net])
    check(level, "flatten", model, model, ce)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("run", INDUCTOR)
@pytest.mark.parametrize("loss", ["flatten", "shifted, float", "log_softmax"])
def test_inductor_makes_no_fp32_logits(level, run, loss):
    torch._dynamo.reset()
    model = initialized(level)
    check(level, loss, model, *INDUCTOR[run](model, LOSSES[loss]))


# --- models of several processes -----------------------------------------------------------------


def accumulating(model, loss_of):
    """A pass under no_sync(), and one that sends both."""

    def run(x):
        with model.no_sync():
            (0 * loss_of(model(x))).backward()
        return model(x)

    return run, loss_of


def ddp(run=lambda m, loss: (m, loss), **options):
    return lambda m, loss: run(DistributedDataParallel(m, **options), loss)


def sharded(*policy):
    def run(model, loss_of):
        for part in (model.body, model.head, model):
            fully_shard(part, **dict(zip(["mp_policy"], policy, strict=False)))
        return model, loss_of

    return run


PARALLEL = {
    "DDP": ddp(),
    "static graph": ddp(static_graph=True),
    "unused": ddp(find_unused_parameters=True),
    "no_sync": ddp(accumulating),
    "compiled inside": lambda m, loss: (DistributedDataParallel(aot(m)), loss),
    "one graph": ddp(one_graph()),
    "FSDP2": sharded(),
    "FSDP2, FP32 reduced": sharded(MixedPrecisionPolicy(reduce_dtype=torch.float32)),
}


AT = ("O2", "flatten"), ("O5", "shifted, float")


@pytest.mark.parametrize(("level", "loss"), AT)
def test_parallel_models_make_no_fp32_logits(level, loss, one_process):
    """Every other one at each level. All in two processes: see below."""
    names = list(PARALLEL)[level == "O5" :: 2]
    assert_none_makes_fp32_logits(level, loss, names)


@pytest.mark.slow
@on_ranks(2)
def test_two_processes_make_no_fp32_logits():
    for level, loss in AT:
        assert_none_makes_fp32_logits(level, loss, PARALLEL)


def assert_none_makes_fp32_logits(level, loss, names):
    for name in names:
        torch._dynamo.reset()
        model = initialized(level)
        try:
            check(level, loss, model, *PARALLEL[name](model, LOSSES[loss]))
        except Exception as error:
            raise AssertionError(f"{level}, {name}, {loss}") from error
