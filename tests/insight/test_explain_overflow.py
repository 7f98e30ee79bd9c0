"""Overflows planted in known places are found there, and a watched step has the bits of another."""

import contextlib
import functools
import logging
import math
import operator
import os
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ampfuse
from ampfuse import amp, insight, optim
from ampfuse.insight.operations import callers
from ampfuse.insight.overflow import SkipsInARow, call_after_updates
from ampfuse.torch_utils import Sample
from programs import on_ranks

INF = math.inf


class Op(nn.Module):
    """A function with a weight in front of it, so that there is a backward pass."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.function(x * self.weight)


class Exp(torch.autograd.Function):
    """The result leaves float16 above 11.09. The backward pass is wrong by far."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e6


class Unseen(torch.autograd.Function):
    """A kernel that torch does not dispatch."""

    @staticmethod
    def forward(ctx, x):
        y = x.detach().clone()
        y.numpy()[0, 0] = math.nan
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def planted(function):
    """The function as the second of three modules."""
    return nn.Sequential(nn.Identity(), Op(function), nn.Identity())


def ones(value=1.0):
    return torch.full((2, 8), float(value))


def half_mean(x):
    return x.float().mean()


def explained(model, x, loss=half_mean, dtype=torch.float16):
    """One step in which everything is of `dtype`."""
    model = model.to(dtype)
    with amp.explain_overflow(model) as watch:
        loss(model(x.to(dtype))).backward()
    return watch.explanation


def softmax_by_hand(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def masked(x):
    """A mask of -1e9, cast with everything else, that hides all."""
    mask = torch.full((2, 8), -1e9).half()
    return torch.softmax(x + mask, -1)


def masked_fill(x):
    return torch.softmax(x.masked_fill(torch.ones_like(x, dtype=torch.bool), -INF), -1)


# By name: function, value of the input, operation, kind, a word of the suggestion.
# fmt: off
FORWARD = {
    "softmax by hand": (softmax_by_hand, 20, "exp", "inf", "In a softmax, subtract the largest"),
    "exp": (torch.exp, 12, "exp", "inf", "torch.autocast"),
    "exp beyond FP32": (torch.exp, 100, "exp", "inf", "subtract the largest argument first"),
    "division by a small number": (lambda x: x / 1e-5, 8, "div", "inf", "Keep div in FP32"),
    "division by zero": (lambda x: x / (x - x), 8, "div", "inf", "divisor holds 0"),
    "a constant that is 0 in half":
        (lambda x: x / (x - x + 1e-8), 8, "div", "inf", "below 3e-8"),
    "sum": (lambda x: x.sum(-1), 1e4, "sum", "inf", "Reduce in FP32"),
    "squares": (lambda x: x.pow(2).sum(-1), 300, "pow", "inf", "Keep pow in FP32"),
    "norm": (lambda x: x.norm(dim=-1), 6e4, "norm", "inf", "Reduce in FP32"),
    "matmul": (lambda x: x @ x.T, 2e2, "matmul", "inf", "products are too large"),
    "addition in place": (lambda x: x.clone().add_(6e4), 3e4, "add", "inf", "Keep add in FP32"),
    "passed on in place": (lambda x: F.relu(x.exp() + 1, inplace=True).sub(1), 12, "exp", "inf",
                           "Otherwise: Keep exp in FP32"),
    "a cast": (lambda x: (x.float() * 1e4).half(), 20, "to", "inf", "do not fit"),
    "a mask of -1e9": (masked, 1, "to", "-inf", "torch.finfo(torch.float16).min"),
    "all masked": (masked_fill, 1, "softmax", "nan", "whole row is -inf"),
    "an inf where a mask is": (lambda x: x.exp() + torch.full_like(x, -INF), 12, "exp", "inf",
                               "Otherwise: Keep exp in FP32"),
    "log of zero": (lambda x: torch.log(x * 0), 1, "log", "-inf", "log1p"),
    "a Function": (Exp.apply, 12, "exp", "inf", "Keep exp in FP32"),
    "cross entropy": (lambda x: F.cross_entropy(x * 1e3, torch.tensor([0, 1])), 100, "mul", "inf",
                      "Keep mul in FP32"),
}
# Finite results whose gradients are not.
BACKWARD = {
    "a steep function": (lambda x: (x * 300) * 300, 1e-3, "mul", "inf", "FP32"),
    "sqrt at 0": (lambda x: torch.sqrt(x * 0), 1, "sqrt", "inf", "under the root"),
    "norm at 0, by hand": (lambda x: (x * 0).pow(2).sum().sqrt(), 1, "sqrt", "inf", "under the"),
    "a Function backward": (Exp.apply, 1, "Exp", "inf", "float16"),
    "pow at 0": (lambda x: (x * 0) ** 0.5, 1, "pow", "inf", "A base of 0"),
}
# fmt: on


# Attention's weights of queries and keys: what overflows, and what the suggestion says instead.
ATTENTION = {
    "matmul": lambda q, k: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1),
    "einsum": lambda q, k: (torch.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5).softmax(-1),
    "exp": lambda q, k: softmax_by_hand(q / q.shape[-1] ** 0.5 @ k.mT),
}
SUGGESTIONS = {
    "the query before the product, q / d**0.5 @ k.mT": lambda q, k, by: (
        q / q.shape[-1] ** 0.5 @ k.mT
    ).softmax(-1),
    "divided by {by} or more": lambda q, k, by: (q / by @ k.mT).softmax(-1),
    "F.scaled_dot_product_attention": lambda q, k, by: F.scaled_dot_product_attention(q, k, k),
    "subtract the largest argument first": lambda q, k, by: softmax_by_hand(
        (s := q / q.shape[-1] ** 0.5 @ k.mT) - s.amax(-1, keepdim=True)
    ),
    "torch.softmax": lambda q, k, by: torch.softmax(q / q.shape[-1] ** 0.5 @ k.mT, -1),
}


@pytest.mark.parametrize(  # at O1 exp gives FP32
    ("written", "level"),
    [(w, level) for w in ATTENTION for level in ("O1", "O2") if (w, level) != ("exp", "O1")],
)
def test_suggestions_for_attention_help(written, level):
    class Attention(nn.Module):
        weights = staticmethod(ATTENTION[written])

        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
            for layer in (self.q, self.k):
                layer.weight.data.mul_(6 if written == "exp" else 200)

        def forward(self, x):
            return self.weights(self.q(x), self.k(x))

    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(2, 16, 64)

    def watched():
        with amp.explain_overflow(model) as watch:
            model(x)
        return watch.explanation

    cause = watched()  # without a backward pass
    assert cause.operation == written
    by = math.ceil(cause.largest_result / 65504)
    told = [words for words in SUGGESTIONS if words.format(by=by) in cause.suggestion]
    assert len(told) == (2 if written == "exp" else 3)
    places = [cause.suggestion.index(words.format(by=by)) for words in told]
    assert max(places) < cause.suggestion.index("BF16")
    for words in told:
        Attention.weights = staticmethod(functools.partial(SUGGESTIONS[words], by=by))
        assert watched() is None


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_an_overflow_is_found_where_it_originated(name):
    function, value, operation, kind, said = (FORWARD | BACKWARD)[name]
    phase = "forward" if name in FORWARD else "backward"
    x = value if isinstance(value, torch.Tensor) else ones(value)
    loss = half_mean if phase == "forward" else lambda y: y.float().sum()
    cause = explained(planted(function), x, loss)
    assert (cause.phase, cause.module, cause.module_type) == (phase, "1", "Op")
    assert (cause.operation, cause.kind, cause.dtype) == (operation, kind, torch.float16)
    assert said in cause.suggestion
    assert "test_explain_overflow.py" in cause.line
    assert not cause.is_harmless
    where = ", in" if phase == "forward" else " of"
    title = f"{kind} originated in the {phase} pass{where} {operation} of 1 (Op)."
    assert str(cause).startswith(title)


def test_the_explanation_has_the_numbers_of_the_overflow():
    """exp(12) is 162754.8, 2.48 times the largest float16."""
    cause = explained(planted(torch.exp), ones(12))
    assert cause.shape == (2, 8)
    assert cause.largest_input == 12
    assert cause.largest_result == pytest.approx(math.exp(12))
    assert "it would reach 1.628e+05, 2.48 times 65504" in str(cause)
    assert pickle.loads(pickle.dumps(cause)) == cause


def test_a_loss_outside_of_the_model():
    cause = explained(planted(lambda x: x), ones(300), lambda y: (y * y).sum())
    assert (cause.phase, cause.module, cause.operation) == ("forward", None, "mul")
    assert "code outside of the model" in str(cause)
    assert "lambda y: (y * y).sum()" in cause.line
    cause = explained(planted(lambda x: x), ones(300), lambda y: F.mse_loss(y, -y))
    assert (cause.module, cause.operation) == (None, "mse_loss")
    assert "Reduce in FP32" in cause.suggestion


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_an_inf_in_the_batch_is_blamed_on_the_data(kind):
    x = torch.ones(4, 8)
    x[2, 5] = float(kind)
    cause = explained(planted(lambda x: x), x, dtype=torch.float32)
    assert (cause.phase, cause.kind) == ("data", kind)
    assert "'input'" in cause.tensor
    assert "batch element 2" in cause.tensor
    assert "Check the data" in cause.suggestion
    cause = explained(planted(lambda x: x), torch.ones(4, 8), lambda y: F.mse_loss(y, x))
    assert (cause.phase, cause.tensor, cause.module) == ("data", "an operand of mse_loss", None)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("value", "kind"), [(7e4, "inf"), (-1e5, "-inf")])
def test_weights_beyond_float16_are_named(level, value, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([-float("inf"), 1.0]))
    with torch.no_grad():
        model[2].weight[1, 2] = value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model[1].eval()
    with amp.explain_overflow(model) as watch:
        loss = model(torch.ones(3, 4)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    cause = watch.explanation
    assert (cause.phase, cause.tensor, cause.kind) == ("weights", "weight", kind)
    assert "when amp.initialize cast it to float16" in cause.suggestion


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_input_beyond_float16_is_of_the_line_that_calls_the_model(level):
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.full((3, 4), 1e5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with (
        amp.explain_overflow(model) as watch,
        amp.scale_loss(model(x).square().mean(), optimizer) as scaled,
    ):
        scaled.backward()
    assert "test_explain_overflow.py" in str(watch.explanation)
    assert "pytree.py" not in str(watch.explanation)


def with_a_bad_weight():
    model = planted(lambda x: x).half()
    model[1].weight.data[3] = math.nan
    return model


@pytest.mark.parametrize(
    ("make", "x", "lr", "expected", "said"),
    [
        (with_a_bad_weight, ones(), 0, ("weights", "1", "weight"), "intact checkpoint"),
        (lambda: planted(lambda x: x), ones(), 6e4, ("step", "1", "weight"), "lower the learning"),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(8)),
            torch.cat([ones(3e4), ones(-3e4)]),
            0,
            ("forward", "0", "running_var"),
            "Keep it in FP32",
        ),
        (lambda: planted(Unseen.apply), ones(), 0, ("forward", "1", "output"), "Keep it in FP32"),
    ],
    ids=["weights", "the step", "running statistics", "a kernel that torch does not dispatch"],
)
def test_places_that_are_no_operation(make, x, lr, expected, said):
    model = make().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with amp.explain_overflow(model) as watch:
        model(x.half()).float().sum().backward()
        if lr:
            optimizer.step()
    cause = watch.explanation
    assert (cause.phase, cause.module, cause.tensor) == expected
    assert said in cause.suggestion
    unseen = cause.operation == "an operation that torch does not show"
    assert unseen == (cause.tensor == "output")


def test_float32_diverges():
    cause = explained(planted(lambda x: x * 1e30 * 1e30), ones(), dtype=torch.float32)
    assert (cause.dtype, cause.operation) == (torch.float32, "mul")
    assert cause.largest_result == pytest.approx(1e60)
    assert "lower the learning rate" in cause.suggestion


@pytest.mark.parametrize("sign", [1, -1])
def test_casts_to_float8_are_explained(sign):
    cause = explained(
        planted(lambda x: (x * 1e5 * sign).to(torch.float8_e5m2)), ones(), dtype=torch.float32
    )
    assert cause.dtype == torch.float8_e5m2
    said = "fit into float8_e5m2" if sign > 0 else "torch.finfo(torch.float8_e5m2).min"
    assert said in cause.suggestion


def test_there_may_be_nothing_to_explain():
    causal = torch.full((8, 8), -INF).triu(1)
    model = nn.Sequential(nn.Linear(8, 8), Op(lambda x: x @ x.T), nn.Linear(2, 2))
    with amp.explain_overflow(model) as watch:
        scores = model[0](torch.randn(8, 8))
        shown = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -INF)
        F.softmax(scores + causal, -1).add(F.softmax(shown, -1)).sum().backward()
    assert watch.explanation is None
    assert explained(planted(lambda x: x), ones()) is None
    # An inf that is selected away is in no gradient.
    selected = planted(lambda x: torch.where(x > 1e4, x, x.detach() * 1e5))
    assert explained(selected, ones(2e4)) is None


# --- loops ----------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.tensor([0, 1, 1, 0])


class Loop:
    """Trains in FP16: at a level, or under autocast with a scaler."""

    def __init__(self, model, level=None, optimizer=torch.optim.AdamW, scaler=None, **options):
        self.model, self.optimizer = model, optimizer(model.parameters(), lr=1e-2)
        self.scaler = scaler("cpu", init_scale=2.0**24) if scaler else None
        self.tells = self.scaler if scaler is torch.amp.GradScaler else self.optimizer
        if level:
            options = {"init_scale": 2.0**24, "verbosity": 0, **options}
            amp.initialize(model, self.optimizer, opt_level=level, **options)

    def step(self, x, y):
        self.optimizer.zero_grad()
        if self.scaler:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        loss = F.cross_entropy(self.model(x), y)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()


LOOPS = {
    "torch.amp": {"scaler": torch.amp.GradScaler},
    "ampfuse.GradScaler": {"scaler": ampfuse.GradScaler, "optimizer": optim.AdamW},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2, foreign optimizer": {"level": "O2", "optimizer": torch.optim.RMSprop},
}
UNSCALED = {level: {"level": level} for level in ("O0", "O3", "O4", "O5")}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_dynamic_scale_that_adapts(kind):
    loop = Loop(mlp(), **LOOPS[kind])
    with amp.explain_overflow(loop.model) as watch:
        loop.step(*batch())
    cause = watch.explanation
    assert cause.phase == "backward"
    assert (cause.scale, cause.dynamic, cause.is_harmless) == (2.0**24, True, True)
    assert cause.suggestion.startswith("None needed: the dynamic loss scale of 16777216 is still")
    skipped = 0
    for _ in range(20):
        with amp.explain_overflow(loop.model) as watch:
            loop.step(*batch())
        skipped += watch.explanation is not None
    assert watch.explanation is None
    assert 0 < skipped < 20


# Losses that the program multiplies itself.
BY_HAND = {
    "loss * scale": operator.mul,
    "an integer": lambda loss, scale: loss * int(scale),
    "a tensor first": lambda loss, scale: torch.tensor(scale) * loss,
    "in place": lambda loss, scale: (loss * 1).mul_(scale),
}


@pytest.mark.parametrize("level", ["O1", "O2", *BY_HAND])
def test_a_static_scale_that_is_too_high(level):
    def explained(scale):
        if level in BY_HAND:
            model = mlp()
            with amp.explain_overflow(model) as watch, torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(batch()[0]), batch()[1])
                BY_HAND[level](loss, scale).backward()
        else:
            loop = Loop(mlp(), level, loss_scale=scale)
            Loop(mlp(), level)  # another training, whose scale is dynamic
            with amp.explain_overflow(loop.model) as watch:
                loop.step(*batch())
        return watch.explanation

    cause = explained(2.0**24)
    assert (cause.phase, cause.scale, cause.dynamic) == ("backward", 2.0**24, False)
    assert "static loss scale of 16777216 is too high" in cause.suggestion
    assert not cause.is_harmless
    # With the scale that it names there is no overflow in that place, with twice as much there is.
    origin = (cause.module, cause.operation)
    for scale, fits in ((cause.fitting_scale, True), (2 * cause.fitting_scale, False)):
        again = explained(scale)
        assert (again is None or (again.module, again.operation) != origin) == fits


def test_the_scale_is_that_of_the_pass_that_overflowed():
    """The scale adapts between passes that accumulate."""
    fitting = []
    for passes in (1, 2):
        loop, (x, y) = Loop(mlp(), "O2"), batch()
        with amp.explain_overflow(loop.model) as watch:
            for _ in range(passes):
                loss = F.cross_entropy(loop.model(x), y)
                with amp.scale_loss(loss, loop.optimizer) as scaled:
                    scaled.backward()
        assert watch.explanation.scale == 2.0**24
        fitting.append(watch.explanation.fitting_scale)
    assert fitting[0] == fitting[1]


@pytest.mark.covers(2)
@pytest.mark.parametrize("factor", [0.0, -1.0, 0.5, 3.0, torch.tensor(0.0), torch.tensor(3.0)])
@pytest.mark.parametrize("operation", ["exp", "mul"])
@pytest.mark.parametrize("scale", [None, 128.0])
def test_a_factor_of_a_part_of_the_loss_is_no_loss_scale(factor, operation, scale):
    """Overflows forward, and backward."""
    function, value, *_ = FORWARD["exp"] if operation == "exp" else BACKWARD["a steep function"]
    model, extra = planted(function).half(), torch.ones(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with amp.explain_overflow(model) as watch:
        loss = model(ones(value).half()).float().sum()
        scaler.scale(loss).backward()
        (loss.detach() + extra.sum() * factor).backward()
    cause = watch.explanation
    assert (cause.operation, cause.scale, cause.dynamic) == (operation, scale or 1.0, bool(scale))
    assert cause.suggestion in str(cause)


def test_modules_without_parameters_yet_and_transforms_are_explained():
    model = nn.Sequential(nn.LazyLinear(4), planted(lambda x: x * 300 * 300))
    model[1][1].weight = nn.Parameter(torch.full((4,), 1e-3).half())
    with amp.explain_overflow(model) as watch, torch.autocast("cpu", dtype=torch.float16):
        (model(ones()).float().sum() * 100).backward()
    assert (watch.explanation.phase, watch.explanation.module) == ("backward", "1.1")
    model = mlp()
    with amp.explain_overflow(model) as watch:
        torch.func.grad(lambda x: torch.func.functional_call(model, {}, (x * INF,)).sum())(ones())
    assert watch.explanation.operation == "mul"


def test_complex_factors_are_no_loss_scales():
    with amp.explain_overflow(planted(torch.exp)) as watch:
        for factor in (2j, torch.tensor(2j)):
            (watch.model(ones()).to(torch.complex64).sum() * factor).abs().backward()
    assert watch.explanation is None


@pytest.mark.parametrize("scale", [0.0, -2.0, INF, math.nan, 1e308, 5e-324])
def test_no_scale_fits_where_there_is_none(scale):
    known = {"aten": "aten.mul.Tensor", "largest_result": 1e9, "scale": scale}
    of_tensor = ("output", "inf", (2,), torch.float16, "cpu")
    cause = insight.Explanation("backward", "1", "Op", "mul", *of_tensor, **known)
    assert cause.fitting_scale is None
    assert not cause.is_harmless
    assert cause.suggestion in str(cause)


class Net(nn.Module):
    """Convolutions, attention and a recurrent network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.lstm = nn.LSTM(8, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(self.attention(self.conv(x).flatten(2).transpose(1, 2)))[0].mean(1)


@pytest.mark.parametrize("how", ["watched", "armed"])
@pytest.mark.parametrize("kind", [*LOOPS, *UNSCALED])
def test_a_watched_step_has_the_same_bits(kind, how):
    """With overflows in the first steps, and a dropout that draws random numbers."""
    trained = []
    for watched in (False, True):
        torch.manual_seed(0)
        x, y = batch()
        model = nn.Sequential(mlp(), nn.Dropout(0.1))
        if kind == "O5":
            model, x = Net(), torch.randn(4, 3, 6, 6)
        loop = Loop(model, **(LOOPS | UNSCALED)[kind])
        armed = watched and how == "armed"
        watch = amp.explain_overflow(loop.model, loop.tells, after=2) if armed else None
        for _ in range(14):
            around = amp.explain_overflow(loop.model) if watched and not armed else None
            with around or contextlib.nullcontext():
                loop.step(x, y)
        trained.append([p.detach().clone() for p in loop.model.parameters()])
        if watch is not None:
            assert kind in UNSCALED or watch.explanation.is_harmless
            watch.remove()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())
        assert not any(p._backward_hooks for p in loop.model.parameters())
    assert all(map(torch.equal, *trained))


def test_accumulation_and_recomputed_activations_are_explained():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = planted(lambda x: x)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    model = Checkpointed().half()
    with amp.explain_overflow(model) as watch:
        for value in (1, 2, 1e5):  # the third is beyond float16
            half_mean(model(ones(value).half().requires_grad_())).backward()
    assert (watch.explanation.phase, watch.explanation.operation) == ("forward", "to")


# --- armed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOOPS)
def test_after_three_skipped_steps_in_a_row_the_next_is_explained_once(kind, caplog):
    loop = Loop(mlp(), **LOOPS[kind])
    for _ in range(12):  # the scale finds its value
        loop.step(*batch())
    x, y = batch()
    with torch.no_grad():
        weight = loop.model[3].weight
        weight.copy_(6e4 * weight.float() / weight.float().abs().max())
    watch = amp.explain_overflow(loop.model, loop.tells, after=3)
    with caplog.at_level(logging.WARNING, "ampfuse.amp"):
        for _ in range(3):
            loop.step(x, y)
            assert watch.explanation is None
        loop.step(x, y)
        assert watch.explanation is not None
        loop.step(x, y)  # it is told once
    cause = watch.explanation
    told = [r.message for r in caplog.records if "in a row" in r.message]
    assert told == [f"Skipped steps in a row: 3. {cause}"]
    assert cause.phase == "forward"
    assert (cause.module, cause.operation) == ("3", "linear")
    watch.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())
    assert not loop.optimizer._optimizer_step_post_hooks
    assert "update" not in vars(loop.scaler or loop)


def test_a_scaler_that_is_disabled_skips_nothing():
    loop = Loop(mlp(), **LOOPS["torch.amp"])
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch = amp.explain_overflow(loop.model, loop.scaler, after=1)
    loop.step(*batch())
    watch.remove()
    assert watch.explanation is None


@pytest.mark.parametrize("first", [0, 1])
def test_watches_of_one_scaler_are_removed_in_any_order(first):
    loop = Loop(mlp(), **LOOPS["torch.amp"])
    told = []
    ends = [
        call_after_updates(loop.scaler, lambda skipped, place=place: told.append(place))
        for place in range(2)
    ]
    for place in (first, 1 - first):
        loop.step(*batch())
        ends[place]()
    loop.step(*batch())
    assert told == [0, 1, 1 - first]


def test_a_package_named_after_torch_is_the_users():
    library = f"{os.path.dirname(torch.__file__)}vision/ops.py"
    code = compile("def run(x): return callers(sys._getframe())", library, "exec")
    names = {"callers": callers, "sys": sys}
    exec(code, names)
    assert names["run"](1)[0] == (library, 1)


def makes_inf(graph, inputs):
    """A backend that compiles relu wrongly, while `broken`."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") == "relu":
            node.target = lambda x, **_: x * (INF if makes_inf.broken else 1.0)
    graph.recompile()
    return graph.forward


# Whether it stays broken after the first skipped steps, the function, and what is said.
COMPILED = {
    "only the compiled program": (True, F.relu, ["Only the compiled program overflows"]),
    "no longer": (False, F.relu, []),
    "both": (True, lambda x: F.relu(x * INF), ["originated in the forward pass, in mul"]),
}


@pytest.mark.covers(1)
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("kind", LOOPS)
def test_an_overflow_of_the_compiled_program(kind, case, after, caplog):
    stays, function, expected = COMPILED[case]
    torch._dynamo.reset()
    loop = Loop(nn.Sequential(Op(F.relu), nn.Linear(8, 2)), **LOOPS[kind])
    for _ in range(12):  # the scale finds its value
        loop.step(*batch())
    loop.model[0].function = function
    loop.model.compile(backend=makes_inf)
    watch = amp.explain_overflow(loop.model, loop.tells, after=after)
    with caplog.at_level(logging.WARNING, "ampfuse.amp"):
        for step in range(2 + 2 * after):
            makes_inf.broken = stays or step < after
            loop.step(*batch())
    told = [r.message for r in caplog.records if "in a row" in r.message]
    assert len(told) == len(expected)
    assert all(text in message for text, message in zip(expected, told, strict=True))
    watch.remove()


def test_armed_survives_an_exception_in_forward():
    loop = Loop(mlp(), "O2")
    watch = amp.explain_overflow(loop.model, loop.tells, after=2)
    for _ in range(2):
        loop.step(*batch())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loop.step(torch.ones(4, 5), batch()[1])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert watch.explanation is None
    loop.step(*batch())
    with torch.no_grad():  # evaluation is not watched
        loop.model(batch()[0])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    loop.step(*batch())
    assert watch.explanation.phase == "backward"


def test_an_exception_in_a_watched_block_passes_and_the_origin_is_kept():
    model = planted(torch.exp).half()
    watch = amp.explain_overflow(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), watch:
        half_mean(model(ones(12).half()) @ torch.ones(1, 1).half())
    assert watch.explanation.operation == "exp"
    with pytest.raises(RuntimeError, match="already"), watch, watch:
        pass


def test_what_does_not_tell_of_skipped_steps():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"SGD does not report skipped steps\. Pass the Grad"):
        amp.explain_overflow(model, optimizer, after=3)
    for after in (0, 1.5, "3"):
        with pytest.raises(ValueError, match=f"after must be .* at least 1, got {after!r}"):
            amp.explain_overflow(model, optimizer, after=after)
    with pytest.raises(TypeError, match="model must be a module, not list"):
        amp.explain_overflow([model])


def test_counts_on_a_device_are_not_waited_for(monkeypatch):
    class Slow(Sample):
        asked = 0

        def has_arrived(self):
            Slow.asked += 1
            return Slow.asked % 3 == 0

        def values(self):
            assert Slow.asked % 3 == 0
            return super().values()

    monkeypatch.setattr(insight.overflow, "Sample", Slow)
    skips, told = SkipsInARow(3), []
    for step in range(40):
        if skips.are_enough(torch.tensor(float(10 <= step < 20 or step >= 30))):
            told.append(step)
    assert len(told) == 2
    assert 12 <= told[0] < 20
    assert 32 <= told[1] < 40


# --- what is around a model -----------------------------------------------------------------------


def sharded(model):
    """Under FSDP2: parameters are DTensors, and others while the model runs."""
    for part in (*model, model):
        fully_shard(part)
    return model


@on_ranks(2)
def test_the_rank_that_overflowed_explains_and_the_other_says_so():
    """Half precision and an exp that leaves its range on the second process only."""
    for spread, kind in ((nn.parallel.DistributedDataParallel, "Op"), (sharded, "FSDPOp")):
        model = nn.Sequential(nn.Linear(8, 8), Op(torch.exp), nn.Linear(8, 1)).half()
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(8))
            model[0].bias.zero_()
            model[2].weight.fill_(1.0)  # or the sign of the infinite gradients would be random
        model = spread(model)
        texts = []
        for value in (20.0 * dist.get_rank(), 0.0):
            with insight.explain_overflow(model) as watch:
                model(ones(value).half()).float().sum().backward()
                model.zero_grad()
            texts.append(str(watch.explanation))
        cause, then = texts
        if dist.get_rank() == 0:
            assert cause.startswith("inf came from another process")
            assert "this process made none" in cause
        else:
            assert cause.startswith(f"inf originated in the forward pass, in exp of 1 ({kind}).")
        assert then == "None"


@on_ranks(2)
def test_modules_of_a_sharded_model_have_the_names_that_they_have_in_one_process():
    for function, lr, expected in (
        (lambda x: x * 300 * 300, 0.0, ("backward", "1", "mul", "output")),
        (torch.clone, 1e38, ("step", "0", "step", "bias")),
    ):
        model = sharded(nn.Sequential(nn.Linear(8, 8), Op(function)))
        if not lr:
            model.half()
        optimizer = optim.SGD(model.parameters(), lr=lr)
        with insight.explain_overflow(model) as watch:
            (model(ones(1e-3).to(model[0].weight.dtype)).float().sum() * 100).backward()
            optimizer.step()
        cause = watch.explanation
        assert (cause.phase, cause.module, cause.operation, cause.tensor) == expected
