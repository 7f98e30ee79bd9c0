"""``amp.advise``: what it recommends and objects to, and that nothing of the user's changes."""

import copy
import dataclasses
import math
import random
import types

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampfuse
from ampfuse import amp
from ampfuse.amp import cast_state
from ampfuse.amp import session as sessions
from ampfuse.doctor import levels
from ampfuse.doctor.levels import Row
from cases import LEVELS, assert_same

QUICK = {"seconds": 100.0, "steps": 16}


class Net(nn.Module):
    """Random numbers, running statistics, and a layer that stands still."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.last.requires_grad_(False)

    def forward(self, x):
        return self.last(F.dropout(self.norm(self.first(x)), 0.1, self.training))


def error(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def training(model=None, kind=torch.optim.SGD, **options):
    """Model, loss function, batch and optimizer."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = kind(model.parameters(), **({"lr": 0.01} | options))
    return model, error, (torch.randn(12, 8), torch.randn(12, 1)), optimizer


def row_of(advice, level):
    return next(row for row in advice.rows if row.level == level)


def test_nothing_of_the_users_changes():
    model, loss_function, batch, optimizer = training(Net(), momentum=0.9)
    for _ in range(2):
        loss_function(model, batch).backward()
        optimizer.step()
    model.first.eval()
    other = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    amp.cast_everywhere()
    module = types.SimpleNamespace(function=torch.sigmoid)
    amp.register_float_function(module, "function")

    def process():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(numpy.random.get_state()),
            sessions._latest,
            dict(cast_state.thread.everywhere),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.cuda.matmul.fp32_precision,
            module.function,
            type(model),
            [part.training for part in model.modules()],
            [dict(part._forward_pre_hooks) for part in model.modules()],
            [(id(parameter), id(parameter.grad)) for parameter in model.parameters()],
            [{**g, "params": list(map(id, g["params"]))} for g in optimizer.param_groups],
        )

    def values():
        gradients = [parameter.grad for parameter in model.parameters()]
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], gradients))

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before, values_before = process(), values()
        advice = amp.advise(model, loss_function, batch, optimizer, **QUICK)
        assert process() == before
    assert_same(values(), values_before)
    assert [row.level for row in advice.rows] == list(LEVELS)
    assert all(row.losses for row in advice.rows)
    out = other(torch.ones(1, 2))
    assert torch.equal(out, out.bfloat16())  # at its level still
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)  # installs what was waiting
    assert module.function is not torch.sigmoid


def test_every_level_trains_from_the_users_weights_as_a_loop_would():
    model, loss_function, batch, optimizer = training(kind=torch.optim.Adam)
    advice = amp.advise(model, loss_function, batch, optimizer, **QUICK)
    expected = []
    for _ in range(16):
        optimizer.zero_grad()
        loss = loss_function(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for row in advice.rows:
        assert row.losses == pytest.approx(expected, rel=1e-6 if row.level == "O0" else 0.02)
        assert len(row.milliseconds) >= len(row.losses)
    assert row_of(advice, "O0").deviation == 0 < row_of(advice, "O0").allowed


class Around(nn.Module):
    """A layer, and what is computed around it."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 1), function

    def forward(self, x):
        return self.function(self.layer, x)


def test_fp16_that_always_overflows_is_objected_to():
    """65504 is the largest FP16."""
    model = Around(lambda layer, x: layer(x * 1e4) * 1e4 * 1e-9)
    advice = amp.advise(*training(model, lr=1e-6), **QUICK)
    for level in ("O1", "O2"):
        assert "overflow at every loss scale" in row_of(advice, level).blocker
    assert "not finite" in row_of(advice, "O3").blocker
    for level in ("O4", "O5"):
        assert row_of(advice, level).losses
    assert advice.level in ("O0", "O4", "O5")


def test_o3_that_stands_still_is_objected_to():
    model, loss_function, batch, optimizer = training(lr=1e-6)
    tried = ("O2", "O3", "O5")
    advice = amp.advise(model, loss_function, batch, optimizer, levels=tried, **QUICK)
    row = row_of(advice, "O3")
    assert set(row.stale) >= {"0.weight", "2.weight"}
    assert "lost to rounding" in row.blocker
    assert row_of(advice, "O5").stale == ()  # its masters keep what rounds away
    moving = amp.advise(*training(lr=0.1), levels=["O3"], **QUICK)
    assert row_of(moving, "O3").stale == ()


def test_a_loss_that_half_precision_changes_is_objected_to():
    """Next to 100, BF16 has steps of 0.5."""
    model = Around(lambda layer, x: layer(x) + 100 - 100)
    advice = amp.advise(*training(model), levels=("O4", "O5"), **QUICK)
    for row in advice.rows[1:]:
        assert row.deviation > row.allowed > 0
        assert row.blocker == "the loss deviates from FP32's"
    assert advice.level == "O0"


def wide_only(layer, x):
    """A kernel that takes no BF16 weights."""
    if layer.weight.dtype is torch.bfloat16:
        raise torch.OutOfMemoryError("no kernel\nand more")
    return layer(x)


def test_a_level_that_raises_is_part_of_the_advice():
    advice = amp.advise(*training(Around(wide_only)), levels=("O4", "O5"), **QUICK)
    assert row_of(advice, "O5").blocker == "OutOfMemoryError: no kernel"
    assert row_of(advice, "O5").losses == ()
    assert row_of(advice, "O4").losses
    assert "OutOfMemoryError: no kernel" in str(advice)
    assert [row.level for row in advice.rows] == ["O0", "O4", "O5"]


# --- conclusions from numbers ---------------------------------------------------------------------


def row(level, time=10.0, loss=1.0, **more):
    return Row(level, (3.0,) * 8 + (loss,) * 8, (time,) * 16, **more)


def flat(level, loss):
    return Row(level, (loss,) * 16, (10.0 if level == "O0" else 5.0,) * 16)


SEEDS = [row("O0", loss=1.2)]  # so the spread is 0.2


def conclude(*rows):
    return levels.conclude([row("O0"), *rows], SEEDS, 1, "a CPU")


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        ([row("O4", 5.0), row("O2", 4.0)], "O2"),
        ([row("O4", 4.1), row("O2", 4.0)], "O4"),  # as fast, and without a loss scale
        ([row("O5", 4.1), row("O1", 4.0)], "O5"),
        ([row("O4", 5.0), row("O2", 4.0, loss=1.21)], "O4"),
        ([row("O4", 5.0), row("O2", 4.0, loss=1.19)], "O2"),
        ([row("O4", 5.0), row("O2", 4.0, loss=math.nan)], "O4"),
        ([row("O4", 5.0), row("O2", 4.0, skipped=1)], "O4"),
        ([row("O4", 5.0), row("O3", 4.0, stale=("w",))], "O4"),
        ([row("O4", 5.0), Row("O2", blocker="no kernel")], "O4"),
        ([row("O4", 9.6), row("O2", 12.0)], "O0"),
        ([Row("O2", blocker="no kernel")], "O0"),
        ([], "O0"),
    ],
)
def test_the_fastest_without_blocker_is_recommended(rows, level):
    advice = conclude(*rows)
    assert advice.level == level
    assert row_of(advice, "O0").allowed == pytest.approx(0.2)  # between seeds
    assert f"Train at {level}: " in str(advice)


def test_the_reason_names_the_faster_level_and_its_blocker():
    slow = conclude(row("O4", 9.8), row("O2", 20.0)).reason
    assert "no faster here (O4: 1.02x)" in slow
    fast = conclude(row("O4", 5.0), row("O5", 5.1), row("O2", 4.0, skipped=8)).reason
    assert "2.00x as fast as FP32" in fast
    assert "O2 is 2.50x as fast, but: overflows: 8 of 16 steps skipped." in fast
    for steps in (5, 16):
        reference = Row("O0", (300.0,) * steps, (1050.0,) * steps)
        rows = [reference, Row("O5", reference.losses, (700.0,) * steps)]
        advice = levels.conclude(rows, [reference], 1, "a CPU")
        assert advice.level == "O5"
        assert ("Only 5 steps were compared" in advice.reason) is (steps == 5)
        assert " 1050  1.00x " in str(advice)  # large numbers are whole


@pytest.mark.parametrize(
    ("unstable", "words"),
    [
        ([row("O0"), row("O0", loss=math.nan)], "the loss is not finite from step 9 on"),
        ([row("O0"), row("O0", loss=7.0)], "its loss rises from 3 to 7"),
        ([row("O0", loss=7.0), row("O0")], "its loss rises from 3 to 7"),
    ],
)
def test_nothing_is_compared_with_an_unstable_fp32(unstable, words):
    advice = levels.conclude([unstable[0], row("O4", 5.0)], unstable[1:], 1, "a CPU")
    assert advice.level == "O0"
    assert f"FP32, which is unstable itself: {words}. Lower" in advice.reason
    assert row_of(advice, "O4").blocker is not None


def test_a_loss_around_zero_may_end_higher_than_it_began():
    means = (0.1, 0.3, -0.1, 0.2, 0.1, -0.2, 0.0, 0.3)
    noisy = dataclasses.replace(row("O0"), losses=tuple(m for m in means for _ in range(2)))
    half = dataclasses.replace(noisy, level="O4", milliseconds=(5.0,) * 16)
    assert levels.conclude([noisy, half], [noisy], 1, "a CPU").level == "O4"


@pytest.mark.parametrize(
    ("reference", "loss", "is_good"),
    [
        # Where seeds make no difference, one percent of the loss's decrease is allowed.
        (row("O0"), row("O4", 5.0, 1.019), True),
        (row("O0"), row("O4", 5.0, 1.021), False),
        # Where a model no longer learns, the rounding of the loss is allowed.
        (flat("O0", 0.5), flat("O4", 0.5019), True),
        (flat("O0", 0.5), flat("O4", 0.502), False),
    ],
)
def test_a_level_is_good_while_its_losses_differ_no_more_than_allowed(reference, loss, is_good):
    advice = levels.conclude([reference, loss], [reference], 1, "a CPU")
    assert (advice.rows[1].blocker is None) is is_good
    assert (advice.level == "O4") is is_good
    assert advice.rows[1].allowed == pytest.approx(0.02 if reference == row("O0") else 0.5 / 256)


def test_distance_does_not_see_the_order_of_the_batches():
    easy_first, hard_first = [1.0, 3.0, 1.0] * 8, [3.0, 1.0, 1.0] * 8
    assert levels.distance(easy_first, hard_first, 3) == pytest.approx(0)
    assert levels.distance(easy_first, hard_first, 1) == pytest.approx(0)
    assert levels.distance([1.0, 2.0], [1.0, 2.5, 9.0], 1) == 0.5
    assert levels.distance([1.0, math.nan], [1.0, 2.0], 1) == math.inf


# --- what is given --------------------------------------------------------------------------------


def test_batches_of_a_loader_or_an_iterator_come_in_turn():
    model, _, _, optimizer = training()
    data = [(torch.randn(4, 8), torch.full((4, 1), float(i))) for i in range(3)]
    seen = []

    def loss_function(model, batch):
        seen.append(int(batch[1][0]))
        return error(model, batch)

    amp.advise(model, loss_function, iter(data), optimizer, levels=["O4"], **QUICK)
    assert seen[:1] == [0]  # the try-out
    assert seen[1:] != sorted(seen[1:])
    assert set(seen) == {0, 1, 2}


def sampled(rows, kind, generator):
    """A loader that draws the order of `rows` by the global generator, or by this one."""
    sampler = torch.utils.data.RandomSampler(rows, generator=generator)
    options = {
        "global": {"batch_size": 4, "shuffle": True},
        "loader": {"batch_size": 4, "shuffle": True, "generator": generator},
        "sampler": {"batch_size": 4, "sampler": sampler},
        "batches": {"batch_sampler": torch.utils.data.BatchSampler(sampler, 4, drop_last=False)},
        "workers": {"sampler": sampler, "num_workers": 1, "persistent_workers": True},
    }
    return torch.utils.data.DataLoader(rows, **options[kind])


@pytest.mark.parametrize("kind", ["global", "loader", "sampler", "batches", "workers"])
def test_a_loader_gives_the_batches_that_it_would_have_given(kind):
    model, _, _, optimizer = training()
    rows = [(torch.randn(8), torch.tensor([float(i)])) for i in range(12)]
    orders = []
    for is_advised in (False, True):
        torch.manual_seed(0)
        loader = sampled(rows, kind, torch.Generator().manual_seed(3))
        if is_advised:
            amp.advise(model, error, loader, optimizer, levels=["O4"], seconds=1e-6)
        orders.append([batch[1].tolist() for batch in loader])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", [list, lambda batch: {0: batch[0], 1: batch[1]}])
def test_a_list_or_dict_is_one_batch(kind):
    model, loss_function, batch, optimizer = training()
    advice = amp.advise(model, loss_function, kind(batch), optimizer, levels=["O4"], **QUICK)
    assert row_of(advice, "O4").losses[-1] < row_of(advice, "O4").losses[0]


def test_optimizers_of_other_kinds_are_advised():
    for kind in (torch.optim.Adadelta, ampfuse.optim.LAMB, torch.optim.RMSprop):
        advice = amp.advise(*training(Net(), kind), levels=["O3", "O5"], **QUICK)
        assert all(row.losses for row in advice.rows)


def test_what_torch_compile_made_is_trained_uncompiled():
    """For five steps, however short the budget is."""
    model, *others = training()
    advice = amp.advise(torch.compile(model), *others, seconds=1e-6, levels=["O4"])
    assert [len(row.losses) for row in advice.rows] == [5, 5]


class Secret:
    def __deepcopy__(self, memo):
        raise TypeError("no copies of this")


def refused(kind, words, **changes):
    names = ("model", "loss_function", "batch", "optimizer")
    arguments = {**dict(zip(names, training(), strict=True)), **QUICK, **changes}
    model, latest = arguments["model"], sessions._latest
    with pytest.raises(kind, match=words):
        amp.advise(**arguments)
    assert sessions._latest is latest
    if isinstance(model, nn.Module):
        assert not model._forward_pre_hooks
        assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_trained_as_a_copy_is_refused():
    model, _, _, optimizer = training()
    given = {"model": model, "optimizer": optimizer}
    for part, words in ((model, "used the original"), (model[:], "no gradient")):
        refused(ValueError, words, loss_function=lambda _, b, part=part: error(part, b), **given)
    model[1].secret = Secret()
    refused(TypeError, "no copies of this", **given)
    del model[1].secret
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    refused(ValueError, "already been through amp.initialize", **given)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model": "x"}, TypeError, "model must be one Module, not str"),
        ({"optimizer": ()}, TypeError, r"not tuple: write amp\.advise\(model, loss_func"),
        *(
            ({"loss_function": wrong}, TypeError, r"before the model ran: .*lambda model, batch: ")
            for wrong in (F.cross_entropy, nn.MSELoss(), lambda output: output.sum(), ())
        ),
        ({"model": nn.DataParallel(nn.Linear(8, 1))}, ValueError, "model.module"),
        ({"model": nn.Linear(8, 1)}, ValueError, "4 of the 4 tensors"),
        ({"batch": iter([])}, ValueError, "no batch"),
        ({"loss_function": lambda m, b: m(b[0])}, TypeError, r"shape \[12, 1\]"),
        ({"loss_function": lambda m, b: 1.0}, TypeError, "it returned a float"),
        ({"loss_function": lambda m, b: m(b[0]).sum() / 0}, ValueError, "already fails in FP32"),
        ({"loss_function": lambda m, b: {}["loss"]}, KeyError, "loss"),
        ({"levels": ["O7"]}, ValueError, "Unknown level 'O7'"),
        ({"levels": "O7"}, ValueError, "Unknown level 'O7'"),
        ({"loss_function": lambda m, b: m(b[0]) @ 1}, TypeError, "unsupported operand"),
        ({"steps": 0}, ValueError, "steps must be positive"),
        ({"seconds": 0}, ValueError, "seconds must be positive"),
    ],
)
def test_advise_refuses_wrong_arguments(changes, kind, words):
    refused(kind, words, **changes)
