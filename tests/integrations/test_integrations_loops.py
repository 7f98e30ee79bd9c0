"""A training by each framework, at each level, against a loop of ampfuse alone: equal bits."""

import unittest.mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import lightning
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers import get_linear_schedule_with_warmup as linear_schedule

import ampfuse
from ampfuse import amp
from ampfuse.integrations import fabric
from ampfuse.integrations.accelerate import initialize
from ampfuse.integrations.lightning import AmpFuse
from ampfuse.integrations.transformers import AmpFuseTrainer
from cases import assert_same, history_of_norms
from trainings import quiet_trainer

EPOCHS, STEPS, PASSES = 2, 6, 2  # steps of an epoch, and backward passes for each
OVERFLOW = 2  # the step of an epoch in which the last loss is inf, where that skips it
SPIKE = 4  # ... and in which it is large
MAX_NORM = 0.05
ADAMW, RMSPROP = ampfuse.optim.AdamW, torch.optim.RMSprop


class Guarded(ADAMW):
    """Skips spikes, as after a hundred steps."""

    def __init__(self, params, **options):
        super().__init__(params, skip_spikes=20.0, **options)
        self.load_history(history_of_norms(0.1))


RUNS = [("O1", ADAMW), ("O2", RMSPROP), ("O5", Guarded)]
MORE_RUNS = [("O0", ADAMW), ("O2", ADAMW), ("O4", torch.optim.SGD), ("O5", torch.optim.AdamW)]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in MORE_RUNS]
pytestmark = pytest.mark.filterwarnings("ignore")  # their advice


@pytest.fixture(autouse=True)
def no_state_stays():
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


class Net(nn.Module):
    """`factor` is what the loss is multiplied by."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x, factor):
        return {"loss": (self.layers(x) - x).float().pow(2).mean() * factor.mean()}


def rows(level):
    """The rows of an epoch; four are a batch."""
    factors = torch.ones(STEPS, PASSES, 4)
    if level not in (None, "O0"):
        factors[OVERFLOW, -1] = float("inf")
    if level == "O5":
        factors[SPIKE, -1] = 100.0  # which clipping makes an ordinary step if nothing skips it
    x = torch.randn(factors.numel(), 8, generator=torch.Generator().manual_seed(1))
    return [{"x": a, "factor": b} for a, b in zip(x, factors.flatten(), strict=True)]


def clip(loop):
    amp.clip_grad_norm_(loop.optimizer, MAX_NORM)


class Loop:
    """By ampfuse alone."""

    own_clip = staticmethod(clip)  # what the framework's clipping is

    def __init__(self, level, make=ADAMW, clip=clip):
        self.level, self.make, self.clip, self.model = level, make, clip, Net()
        self.batches = DataLoader(rows(level), batch_size=4)
        params = list(self.model.parameters())
        groups = [{"params": [p for p in params if p.ndim == ndim]} for ndim in (2, 1)]
        self.optimizer = make([group | {"weight_decay": 0.0} for group in groups], lr=1e-2)
        self.schedule = linear_schedule(self.optimizer, 0, EPOCHS * STEPS)
        self.set_up()

    def set_up(self):
        amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0)
        self.amp = amp

    def run(self, folder=None, resume=False):
        """All epochs; after the first the state is saved in `folder`. Or those after that state."""
        if resume:
            self.load(folder)
        for epoch in range(int(resume), EPOCHS):
            self.epoch()
            if folder and epoch == 0:
                self.save(folder)
        return self

    def epoch(self):
        for i, batch in enumerate(self.batches):
            self.backward(self.model(**batch)["loss"] / PASSES)
            if i % PASSES == PASSES - 1:
                self.clip(self)
                self.optimizer.step()
                if not self.optimizer.last_step.skipped:
                    self.schedule.step()
                self.optimizer.zero_grad()

    def backward(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def left(self):
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scaler = self.amp.state_dict() if self.amp else None
        states = [dict(self.model.state_dict()), optimizer.state_dict(), scaler]
        return [*states, self.schedule.state_dict()["last_epoch"]]


class ByFabric(Loop):
    def own_clip(loop):
        torch.nn.utils.clip_grad_norm_(amp.master_params(loop.optimizer), MAX_NORM)

    def set_up(self):
        self.amp = fabric.AmpFuse(self.level, verbosity=0)
        self.fabric = lightning.Fabric(accelerator="cpu", plugins=self.amp)
        self.model, self.optimizer = self.amp.setup(self.fabric, self.model, self.optimizer)
        self.backward = self.fabric.backward
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}
        parts["schedule"] = self.schedule
        self.save = lambda folder: self.fabric.save(folder / "all.ckpt", parts)
        self.load = lambda folder: self.fabric.load(folder / "all.ckpt", parts)
        limits = {"max_norm": MAX_NORM, "error_if_nonfinite": False}
        self.clip = lambda _: self.fabric.clip_gradients(self.model, self.optimizer, **limits)


class ByAccelerate(Loop):
    def own_clip(loop):
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), MAX_NORM)

    def set_up(self, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES, **options)
        if self.level:
            initialize(self.accelerator, self.model, self.optimizer, self.level, verbosity=0)
        parts = self.model, self.optimizer, self.batches, self.schedule
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(*parts)
        self.amp = self.accelerator.scaler
        self.save, self.load = self.accelerator.save_state, self.accelerator.load_state

    def epoch(self):
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch)["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                skipped = bool(self.optimizer.optimizer.last_step.skipped)
                assert self.accelerator.optimizer_step_was_skipped == skipped


class Lit(lightning.LightningModule):
    def __init__(self, loop, path):
        super().__init__()
        self.model, self.loop, self.path = loop.model, loop, path

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return [self.loop.optimizer], [{"scheduler": self.loop.schedule, "interval": "step"}]

    def on_train_epoch_end(self):
        if self.trainer.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)


class ByLightning(Loop):
    def set_up(self):
        self.amp = AmpFuse(self.level, verbosity=0)

    def run(self, folder, resume=False):
        options = {"gradient_clip_val": MAX_NORM, "accumulate_grad_batches": PASSES}
        trainer = quiet_trainer(self.amp, max_epochs=EPOCHS, **options)
        path = folder / "all.ckpt"
        loaded = {"ckpt_path": path, "weights_only": True} if resume else {}
        trainer.fit(Lit(self, path), self.batches, **loaded)
        return self


class ByTransformers(Loop):
    def set_up(self, **options):
        self.options = options

    def run(self, folder, resume=False):
        where = {"output_dir": folder / "resumed" if resume else folder, "save_strategy": "epoch"}
        batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": PASSES}
        run = {"num_train_epochs": EPOCHS, "max_grad_norm": MAX_NORM, "use_cpu": True}
        data = {"train_sampling_strategy": "sequential", "report_to": []}
        arguments = TrainingArguments(**{**where, **batch, **run, **data, **self.options})
        kind, level = Trainer, {}
        if self.level:
            kind, level = AmpFuseTrainer, {"opt_level": self.level, "amp_options": {"verbosity": 0}}
        level["train_dataset"] = self.batches.dataset
        level["optimizer_cls_and_kwargs"] = (self.make, {"lr": 1e-2})
        trainer = kind(self.model, arguments, **level)
        trainer.train(str(folder / f"checkpoint-{STEPS}") if resume else None)
        self.optimizer, self.schedule = trainer.optimizer, trainer.lr_scheduler
        self.amp, self.logs = trainer.accelerator.scaler, trainer.state.log_history
        return self


@pytest.mark.parametrize("kind", [ByFabric, ByAccelerate, ByLightning, ByTransformers])
@pytest.mark.parametrize(("level", "make"), RUNS)
def test_trains_clips_accumulates_skips_and_resumes_as_a_loop_does(kind, level, make, tmp_path):
    own = Loop(level, make, kind.own_clip)
    batch = next(iter(DataLoader(rows("O0"), batch_size=48)))
    untrained = own.model(**batch)["loss"].item()
    expected = own.run().left()
    assert own.model(**batch)["loss"] < untrained
    assert_same(kind(level, make).run(tmp_path).left(), expected)
    assert_same(kind(level, make).run(tmp_path, resume=True).left(), expected)
    _, optimizer, scaler, rates = expected
    overflows = EPOCHS if level != "O0" else 0
    # A step sees no spike in gradients that torch has clipped.
    spikes = EPOCHS if make is Guarded and kind.own_clip is clip else 0
    steps = {int(state.get("step", rates)) for state in optimizer["state"].values()}
    assert steps == {rates} == {EPOCHS * STEPS - overflows - spikes}
    assert optimizer["step_history"][1:3].tolist() == [overflows, spikes]
    scale = 2.0 ** (16 - overflows) if level in ("O1", "O2") else 1.0
    assert scaler["loss_scaler0"]["loss_scale"] == scale


def test_logs_count_skipped_steps(tmp_path):
    """The logs of Lightning, Accelerate and the Trainer."""
    lit = ByLightning("O5", Guarded)
    trainer = quiet_trainer(lit.amp, max_epochs=1, log_every_n_steps=STEPS * PASSES)
    trainer.fit(Lit(lit, tmp_path / "lit.ckpt"), lit.batches)
    logged = [{key: int(value) for key, value in trainer.logged_metrics.items()}]
    by_accelerate = ByAccelerate("O5", Guarded)
    by_accelerate.accelerator.clip_grad_norm_ = lambda *_: None
    by_accelerate.epoch()
    tracker = unittest.mock.Mock()
    by_accelerate.accelerator.trackers = [tracker]
    by_accelerate.accelerator.log({"loss": 1.0}, step=3)
    (values,), options = tracker.log.call_args
    assert values.pop("loss") == 1.0
    assert options["step"] == 3
    logged.append(values)
    by_trainer = ByTransformers("O5", Guarded)
    by_trainer.options = {"logging_steps": STEPS, "num_train_epochs": 1}
    by_trainer.run(tmp_path)
    names = [f"skipped_steps/{reason}" for reason in ("nonfinite", "spike")]
    logged.append({name: by_trainer.logs[0][name] for name in names})
    assert logged == [dict(zip(names, (1, 1), strict=True))] * 3


@pytest.mark.parametrize("kind", [ByAccelerate, ByTransformers])
@pytest.mark.parametrize("make", [ADAMW, ampfuse.optim.SGD])
def test_fused_optimizers_need_nothing_where_no_level_is_wanted(kind, make, tmp_path):
    """In the place of torch's, on FP32 weights under the framework's own BF16."""

    class InBF16(kind):
        def set_up(self):
            bf16 = {"mixed_precision": "bf16"} if kind is ByAccelerate else {"bf16": True}
            super().set_up(**bf16)

    whole = InBF16(None, make).run(tmp_path)
    assert_same(InBF16(None, make).run(tmp_path, resume=True).left(), whole.left())


def test_a_level_beside_mixed_precision_is_refused():
    model = Net()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        initialize(accelerator, model, ADAMW(model.parameters()), "O5")


def two_networks(calls, level="O2"):
    """The states after steps of two networks, as of a GAN, initialized in one call or in two."""
    accelerator = Accelerator(cpu=True)
    models, optimizers = [Net(), Net()], []
    for model in models:
        optimizers.append(ADAMW(model.parameters(), lr=1e-2))
    if calls == 1:
        initialize(accelerator, models, optimizers, level, verbosity=0)
    else:
        for model, optimizer in zip(models, optimizers, strict=True):
            initialize(accelerator, model, optimizer, level, verbosity=0)
    models = [accelerator.prepare(model) for model in models]
    prepared = [accelerator.prepare(optimizer) for optimizer in optimizers]
    for i, row in enumerate(rows(level)[: 8 * STEPS]):
        batch = {"x": row["x"][None], "factor": row["factor"][None]}
        accelerator.backward(models[i % 2](**batch)["loss"])
        prepared[i % 2].step()
        prepared[i % 2].zero_grad()
    tracker = unittest.mock.Mock()
    accelerator.trackers = [tracker]
    accelerator.log({})
    return [o.state_dict() for o in optimizers], tracker.log.call_args.args, accelerator.scaler


def test_a_model_may_have_no_optimizer():
    accelerator, model = Accelerator(cpu=True), Net()
    assert initialize(accelerator, model, None, "O5", verbosity=0) is model
    assert model.layers[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_two_models_that_fabric_sets_up_both_train(level):
    """As a generator and a discriminator do; a frozen model makes neither forgotten."""
    plugin = fabric.AmpFuse(level, verbosity=0)
    made = lightning.Fabric(accelerator="cpu", plugins=plugin)
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    pairs = [plugin.setup(made, each, torch.optim.SGD(each.parameters(), 0.1)) for each in models]
    plugin.setup(made, torch.nn.Linear(4, 4).requires_grad_(False))
    x = torch.rand(2, 4)
    for model, optimizer in pairs:
        made.backward(model(x).mean())
        masters = list(amp.master_params(optimizer))
        (weight, bias), before = [p.grad for p in masters], [p.detach().clone() for p in masters]
        torch.testing.assert_close(weight, (x.mean(0) / 4).expand(4, 4), rtol=1e-2, atol=0)
        torch.testing.assert_close(bias, torch.full((4,), 0.25))
        optimizer.step()
        for param, was, grad in zip(masters, before, (weight, bias), strict=True):
            torch.testing.assert_close(param.detach(), was - 0.1 * grad)
    made.backward(model(x).mean() * float("inf"))
    assert plugin.state_dict() == amp.state_dict()  # one scale for all
    scale = 2.0**15 if level == "O2" else 1.0
    assert plugin.state_dict()["loss_scaler0"]["loss_scale"] == scale


def test_two_calls_for_one_accelerator_are_as_one():
    one, two = two_networks(1), two_networks(2)
    assert_same(two[:2], one[:2])
    assert sum(one[1][0].values()) > 0
    accelerator, model = two[2].accelerator, Net()
    with pytest.raises(ValueError, match="Give all models and optimizers to one call"):
        initialize(accelerator, model, ADAMW(model.parameters()), "O5", verbosity=0)
    assert not hasattr(model, "_amp_casts")
    log = accelerator.log
    accelerator.free_memory()  # the next training
    for kind in (torch.optim.RMSprop, ADAMW):  # the second takes over the weights of the first
        optimizer = kind(model.parameters())
        initialize(accelerator, model, optimizer, "O2", verbosity=0)
        assert accelerator.scaler.optimizers == [optimizer]
    assert accelerator.log is log


class OfGPT2(ByTransformers):
    def set_up(self):
        super().set_up()
        sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        words = torch.arange(8 * 4 * STEPS * PASSES).view(-1, 8) % 31
        self.batches = DataLoader([{"input_ids": row, "labels": row} for row in words])


@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_a_model_of_transformers_keeps_tied_weights(level, dtype, tmp_path):
    whole = OfGPT2(level).run(tmp_path)
    assert whole.model.transformer.wte.weight is whole.model.lm_head.weight
    assert whole.model.lm_head.weight.dtype == dtype
    assert_same(OfGPT2(level).run(tmp_path, resume=True).left(), whole.left())
