"""``ampfuse.plan`` against what trainings hold and allocate."""

import copy
import dataclasses
import functools
import gc
import importlib
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampfuse
from ampfuse import amp, half_ops, hardware
from ampfuse.amp import session
from ampfuse.cli import main
from ampfuse.insight.memory import bytes_of
from ampfuse.insight.memory_plan import PlannedTraining
from cases import most_allocated


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Text(nn.Module):
    """Tied weights, a plain tensor as an attribute, blocks."""

    def __init__(self, width=64, vocabulary=4096, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.places = torch.arange(width)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(64, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def images(count):
    return torch.randn(count, 3, 64, 64).to(memory_format=torch.channels_last)


def of_text(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_images(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


CASES = {
    "text": (Text, of_text, lambda: (torch.randint(4096, (8, 128)), torch.randint(4096, (8, 128)))),
    "images": (Images, of_images, lambda: (images(8), torch.randint(10, (8,)))),
}


@functools.cache
def planned(case, level="O5"):
    make, loss_function, batch_of = CASES[case]
    options = {"loss_function": loss_function, "opt_level": level, "device": "cpu"}
    return ampfuse.plan(make, batch_of(), **options)


def held_by(model, batch, loss_function=None, make=ampfuse.optim.AdamW, device="cpu", **options):
    """What one pass of a training holds at a level, with options of the optimizer and changes."""

    def optimizer_of(model):
        return make(list(model.parameters()))

    training = PlannedTraining(model, batch, loss_function, device, optimizer_of, **options)
    return lambda level, options=(), *changes: training.held(level, dict(options), changes)


def trained(case, level, compiled=False, **options):
    """The bytes that a training holds between two steps, and the peak of a step."""
    make, loss_function, batch_of = CASES[case]
    torch.manual_seed(0)
    model, batch = make(), batch_of()
    optimizer = ampfuse.optim.AdamW(model.parameters(), **options)
    masters = {"master_weights": options["master_weights"]} if "master_weights" in options else {}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **masters)
    # Without instructions for BF16 our kernels work on FP32 copies.
    half_ops.use(False, rules=level == "O4")
    if compiled:
        model.compile()

    def step():
        optimizer.zero_grad()
        with amp.scale_loss(loss_function(model, batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    step()
    held = amp.memory_report(model, optimizer).held
    gc.collect()
    made, _ = most_allocated(step)
    return held, sum(held.values()) - held["gradients"] + made  # gradients go first


MODES = {
    "O0": ("O0", {}, "O0"),
    "O4": ("O4", {}, "O4"),
    "O5": ("O5", {}, "O5"),
    "split": ("O5", {"master_weights": "split"}, '+ master_weights="split"'),
    "8bit": ("O5", {"master_weights": "split", "state_dtype": "8bit"}, '+ state_dtype="8bit"'),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_training_holds_what_was_planned(case, mode):
    level, options, name = MODES[mode]
    row = planned(case, level).held[name]
    held, peak = trained(case, level, **options)
    for kind in ("weights", "gradients", "masters", "average"):
        assert row[kind] == held[kind], kind
    assert 0 <= held["states"] - row["states"] < 1000  # step counts
    if level == "O0" or hardware.cpu_has_bf16():  # else torch's products take FP32 memory
        assert row["peak"] == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O5"])
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_training_holds_what_was_planned(case, level):
    make, loss_function, batch_of = CASES[case]
    held = held_by(make(), batch_of(), loss_function, compiled=True)
    if level == "O0" or hardware.cpu_has_bf16():  # else torch's products take FP32 memory
        _, peak = trained(case, level, compiled=True)
        assert held(level)["peak"] == pytest.approx(peak, rel=0.05)


def test_what_compiled_models_keep_for_the_backward_pass():
    make, loss_function, batch_of = CASES["text"]
    held = held_by(make(), batch_of(), loss_function, compiled=True)
    saved = [held("O5", (), *changes) for changes in ((), ("checkpointing",))]
    for kind in ("weights", "gradients", "masters", "states"):
        assert saved[0][kind] == planned("text").held["O5"][kind]
    # Blocks are compiled as they are checkpointed.
    assert saved[1]["activations"] < 0.8 * saved[0]["activations"]
    plan = ampfuse.plan(nn.Linear(4, 4), torch.randn(2, 4), "SGD", device="cpu", compiled=True)
    assert plan.heading == "SGD, 20 parameters, on cpu, compiled"


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *parts):
        return sum(parts).sum() * self.weight


@pytest.mark.parametrize(
    ("device", "settings", "is_fused"),
    [("cpu", {}, True), ("cuda", {}, False), ("cpu", {"realize_acc_reads_threshold": 8}, False)],
)
def test_inductors_own_settings_say_what_a_compiled_model_fuses(device, settings, is_fused):
    """Ten tensors are more than one of its kernels reads on a GPU."""
    inductor = importlib.import_module("torch._inductor.config")
    if is_fused and not hasattr(inductor, "realize_cpu_acc_reads_threshold"):
        pytest.skip("this torch has one limit for CPUs and GPUs")
    with inductor.patch(settings):
        parts = tuple(torch.randn(10, 64, 64))
        held = held_by(Sum(), parts, None, torch.optim.SGD, device, compiled=True)("O0")
    assert (held["peak"] < 4 * 64 * 64) is is_fused


def test_what_reduces_the_peak_does():
    make, loss_function, batch_of = CASES["text"]
    options = {"loss_function": loss_function, "device": "cpu"}
    plan = ampfuse.plan(lambda: make(vocabulary=256, depth=6), batch_of(), **options)
    peaks = [row["peak"] for row in plan.held.values()]
    assert list(plan.held)[:3] == ["O0", "O4", "O5"]
    assert peaks == sorted(peaks, reverse=True)
    rows = plan.held["+ activation checkpointing"], plan.held['+ state_dtype="8bit"']
    assert rows[0]["activations"] < rows[1]["activations"] / 2


def test_batch_norms_are_recomputed_where_there_are_any():
    held = planned("images").held
    before, after = held['+ state_dtype="8bit"'], held["+ recompute_norms"]
    assert after["activations"] < 0.8 * before["activations"]
    assert "+ recompute_norms" not in planned("text").held


def test_language_models_of_transformers_are_planned_without_logits():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = hf.LlamaConfig(vocab_size=32000, intermediate_size=128, use_cache=False, **sizes)
    tokens = torch.empty(2, 256, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    eager, compiled = (held_by(model, batch, compiled=each) for each in (False, True))
    after = eager("O5", (), "linear_cross_entropy")["peak"]
    assert eager("O5")["peak"] - after > 0.5 * 2 * 255 * 32000 * 2
    assert compiled("O5", (), "linear_cross_entropy")["peak"] <= after
    with torch.no_grad():  # the loss is that of the model
        model, text = hf.LlamaForCausalLM(config), torch.randint(32000, (2, 16))
        batch = {"input_ids": text, "labels": text}
        ours = ampfuse.insight.memory_plan._language_loss(model, batch)
        torch.testing.assert_close(ours, model(**batch).loss)


def test_eight_billion_parameters_are_planned_on_any_machine():
    def build():
        return Text(16384, 128_256, 3)

    tokens = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    plan = ampfuse.plan(build, tokens, budget="80GB", device="cpu")
    n = plan.parameters
    assert 7e9 < n < 9e9
    assert plan.held["O0"]["states"] == 8 * n
    assert not plan.fits("O5")
    assert plan.suggestion.startswith('O5 fits with master_weights="split"')
    assert "fits 80 GB" in str(plan)


@pytest.mark.parametrize(
    ("budget", "says"), [("1GB", "O5 fits as it is."), ("5kB", "Nothing here fits: at"), (None, "")]
)
def test_a_budget_has_a_suggestion(budget, says):
    plan = ampfuse.plan(nn.Linear(64, 64), torch.randn(4, 64), budget=budget, device="cpu")
    assert plan.suggestion.startswith(says)
    assert bool(plan.suggestion) == bool(budget)
    assert ("fits" in str(plan)) == bool(budget)
    if budget is None:
        with pytest.raises(ValueError, match="pass budget="):
            plan.fits("O5")


def test_the_smallest_change_is_named():
    model, batch = nn.Linear(512, 512), torch.randn(4, 512)
    peaks = ampfuse.plan(model, batch, device="cpu").held
    split = peaks['+ master_weights="split"']["peak"]
    plan = ampfuse.plan(model, batch, budget=split, device="cpu")
    assert plan.suggestion == 'O5 fits with master_weights="split".'
    plan = ampfuse.plan(model, batch, budget=split - 1, device="cpu")
    assert plan.suggestion == 'O5 fits with master_weights="split", state_dtype="8bit".'


@pytest.mark.parametrize(("level", "levels"), [("O0", ["O0"]), ("O2", ["O0", "O1", "O2"])])
def test_a_plan_has_the_levels_that_are_asked_for(level, levels):
    plan = ampfuse.plan(nn.Linear(64, 64), torch.randn(4, 64), opt_level=level, device="cpu")
    assert [mode for mode in plan.held if not mode.startswith("+")] == levels
    assert ('+ master_weights="split"' in plan.held) == (level == "O2")
    # FP16 weights are not rounded at random: without masters they would lose updates.
    assert not any("no masters" in mode for mode in plan.held)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("SGD", 0),
        (lambda params: ampfuse.optim.SGD(params, lr=0.1, momentum=0.9), 4),
        ("Lion", 4),
        (torch.optim.Adam, 8),
        (lambda params: torch.optim.AdamW(params, fused=True), 8),
        (lambda params: ampfuse.optim.AdamW(params, state_dtype="bf16"), 4),
    ],
)
def test_a_plan_counts_the_states_of_each_optimizer(optimizer, states):
    plan = ampfuse.plan(nn.Linear(64, 64), torch.randn(4, 64), optimizer, device="cpu")
    assert {row["states"] for mode, row in plan.held.items() if mode[0] == "O"} == {states * 4160}


def test_options_of_the_optimizer_are_kept():
    def make(params):
        return ampfuse.optim.AdamW(params, master_weights="split", ema_decay=0.9)

    held = ampfuse.plan(nn.Linear(64, 64), torch.randn(4, 64), make, device="cpu").held
    assert held["O5"]["masters"] == 2 * 4160
    assert held["O5"]["average"] == 4 * 4160
    assert '+ master_weights="split"' not in held


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ampfuse.optim.AdamW])
def test_a_plan_counts_the_types_of_states_of_each_group(kind):
    def make(params):
        groups = [{"params": params[:1], "state_dtype": "bf16"}, {"params": params[1:]}]
        return kind(groups)

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    held = ampfuse.plan(model, torch.randn(4, 64), make, device="cpu").held
    assert held["O5"]["states"] == (4 + 8) * 4096
    # A group's type takes precedence over the optimizer's.
    assert held['+ state_dtype="8bit"']["states"] == 4 * 4096 + 2 * (4096 + 4 * 32)


def test_gradients_that_accumulate_live_throughout():
    make, loss_function, batch_of = CASES["text"]
    one = planned("text").held["O5"]
    two = held_by(make(), batch_of(), loss_function, accumulate=True)("O5")
    assert two["accumulators"] == 2 * one["gradients"]
    assert two["peak"] > one["peak"] + one["gradients"]


def test_planning_changes_nothing():
    make, loss_function, batch_of = CASES["images"]
    model, batch = make(), batch_of()
    before, latest = copy.deepcopy(model.state_dict()), session._latest
    state = torch.get_rng_state(), random.getstate()
    ampfuse.plan(model.eval(), batch, loss_function=loss_function, device="cpu", fuse=True)
    assert not model.training
    assert session._latest is latest
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert type(model) is Images
    kinds = {nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d}
    assert {type(each) for each in model.layers} == kinds
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def of_values(model, batch):
    return model(batch) * batch.sum().item()


def of_group(state_dtype):
    return lambda params: torch.optim.SGD([{"params": params, "state_dtype": state_dtype}])


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"model": 3}, TypeError, "a module, or a function that builds one"),
        ({"model": lambda: 3}, TypeError, "Got int"),
        ({"model": nn.ReLU()}, ValueError, "no parameter that requires a gradient"),
        ({"optimizer": lambda params: 3}, TypeError, "got int"),
        ({"device": "xpu"}, ValueError, '"cpu" or "cuda"'),
        ({"optimizer": "Adan"}, ValueError, "'Adan' is not an optimizer of ampfuse.optim or"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)}, TypeError, "lambda params"),
        ({"optimizer": of_group("9bit")}, ValueError, "state_dtype is '9bit'"),
        ({"opt_level": "O6"}, ValueError, "one of O0, O1, O2, O3, O4, O5, got 'O6'"),
        ({"budget": "much"}, ValueError, "budget must be"),
        ({"loss_function": of_values}, RuntimeError, "depends on values"),
        ({"batch": torch.ones(2, 5)}, RuntimeError, "reduction dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_plan_refuses_wrong_arguments(wrong, error, says):
    arguments = {"model": nn.Linear(4, 4), "batch": torch.randn(2, 4), "device": "cpu"} | wrong
    with pytest.raises(error, match=says):
        ampfuse.plan(**arguments)


def test_a_plan_refuses_a_model_under_amp():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O5", verbosity=0)
    with pytest.raises(ValueError, match="been through"):
        ampfuse.plan(model, torch.randn(2, 4))


@pytest.fixture
def command(capsys):
    """The command in this process: its exit status, the output, and its own line of the errors."""

    def run(*arguments):
        status = main(["plan", "--device", "cpu", *arguments])
        output, errors = capsys.readouterr()
        *_, line = errors.splitlines() or [""]
        return status, output, line

    return run


def test_the_command_plans_models_by_name(command):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    sizes = "hidden_size=64 num_hidden_layers=1 num_attention_heads=4 intermediate_size=128"
    for arguments, says in (
        (["--timm", "resnet18", "--image", "64", "--optimizer", "SGD"], "SGD, 11,689,512 param"),
        (["--hf", "llama", "--tokens", "64", "--set", *sizes.split()], "LinearCrossEntropy"),
    ):
        status, output, _ = command("--budget", "1GB", *arguments)
        assert status == 0
        assert says in output
        assert "fits" in output
    for arguments, says in (
        (["--timm", "resnet19"], "not a model of timm"),
        (["--hf", "vit"], "not a causal language model"),
        # These messages are of several lines.
        (["--timm", "vit_tiny_patch16_224", "--image", "64", "--compile"], "Input height (64)"),
        (["--hf", "llama", "--set", "hidden_size=65"], "hidden size (65) is not a multiple"),
        (["--hf", "llama", "--set", "x"], "expected KEY=VALUE"),
        (["--timm", "resnet18", "--level", "O7"], "one of O0"),
    ):
        status, _, error = command(*arguments)
        assert status == 2
        assert error.startswith("ampfuse plan: error: ")
        assert says in error


def test_the_command_passes_its_options_on(command, monkeypatch):
    pytest.importorskip("timm")
    plan, given = ampfuse.plan(nn.Linear(64, 64), torch.randn(4, 64), device="cpu"), []

    def record(model, batch, optimizer, **options):
        given.append((batch.shape, optimizer, options))
        return dataclasses.replace(plan, budget=bytes_of(options["budget"]))

    monkeypatch.setattr(ampfuse, "plan", record)
    sizes = ["--batch", "3", "--image", "64", "--level", "O2", "--optimizer", "SGD"]
    flags = "fuse", "compile", "accumulate"
    for flag, (budget, expected) in zip(flags, (("1GB", 0), ("1kB", 1), ("1GB", 0)), strict=True):
        options = [*sizes, "--budget", budget, f"--{flag}"]
        status, output, _ = command("--timm", "resnet18", *options)
        assert (status, output) == (
            expected,
            f"{dataclasses.replace(plan, budget=bytes_of(budget))}\n",
        )
        shape, optimizer, passed = given.pop()
        assert (*shape, optimizer) == (3, 3, 64, 64, "SGD")
        known = {"opt_level": "O2", "budget": budget, "device": "cpu"}
        on = {
            "fuse": flag == "fuse",
            "compiled": flag == "compile",
            "accumulate": flag == "accumulate",
        }
        assert passed == known | on


class Attention(nn.Module):
    """Attention and dropout, directly and by torch's module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.dropout(x, 0.5, self.training)


def test_dropout_and_attention_keep_what_they_keep_on_a_gpu():
    batch = torch.empty(2, 128, 64, device="meta")
    functions = F.dropout, F.scaled_dot_product_attention
    on = ampfuse.plan(Attention, batch, device="cuda").held
    elements, probabilities = 2 * 128 * 64, 2 * 4 * 128 * 128
    less = held_by(Attention(), batch)("O0")["activations"] - on["O0"]["activations"]
    # Each block's mask and product of probabilities, and 4 - 1 bytes of each other mask.
    assert less > 2 * 2 * 4 * probabilities + 3 * 3 * 2 * elements
    assert "+ activation checkpointing" in on  # which finds the same operations again
    assert (F.dropout, F.scaled_dot_product_attention) == functions


def test_changes_that_do_not_apply():
    model, batch = nn.Linear(256, 256), torch.randn(2, 256)
    plan = ampfuse.plan(model, batch, "RMSprop", device="cpu")  # steps by torch's own code
    assert list(plan.held) == ["O0", "O4", "O5"]
    assert plan.notes == ["The states of RMSprop are not counted."]
    assert '+ state_dtype="8bit"' not in ampfuse.plan(model, batch, "LAMB", device="cpu").held
    muon = ampfuse.plan(nn.Sequential(model, model, nn.Linear(256, 2)), batch, "Muon", device="cpu")
    assert muon.heading.startswith("Muon, 66,306 parameters")

    class Picky(Block):
        def forward(self, x):
            assert "checkpoint" not in str(self.forward), "no checkpointing here"
            return super().forward(x)

    blocks = nn.Sequential(*(Picky(64) for _ in range(3)))
    plan = ampfuse.plan(blocks, torch.randn(512, 64), device="cpu")
    assert plan.notes == ["activation checkpointing could not be planned: no checkpointing here"]


def test_a_change_that_saves_nothing_is_left_out_of_later_rows():
    def make(params):
        return ampfuse.optim.AdamW(params, state_dtype="bf16")

    # Parameters of so few elements have FP32 states under "8bit".
    held = ampfuse.plan(nn.Linear(32, 32), torch.randn(4, 32), make, device="cpu").held
    assert '+ state_dtype="8bit"' not in held
    after = held['+ no masters, rounding="stochastic"']
    assert after["states"] == held["O5"]["states"]


def test_each_change_is_compared_with_the_row_it_extends():
    """Not with FP32, which holds less here: it needs no accumulators beside the gradients."""
    options = {"accumulate": True, "device": "cpu"}
    held = ampfuse.plan(nn.Linear(512, 512), torch.randn(4, 512), **options).held
    split = held['+ master_weights="split"']["peak"]
    assert held["O0"]["peak"] < split < held["O5"]["peak"]
    plan = ampfuse.plan(nn.Linear(512, 512), torch.randn(4, 512), budget=split, **options)
    assert plan.suggestion == 'O5 fits with master_weights="split".'
