"""Features of Lightning alone: parts, evaluation, several optimizers."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import lightning

from ampfuse import amp
from ampfuse.integrations.lightning import AmpFuse
from cases import assert_same
from trainings import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
BATCHES = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))


class Parts(lightning.LightningModule):
    """Called one by one; one lies in a container, and one is a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.rest = nn.ModuleDict({"decoder": nn.Linear(16, 8)})
        self.mixed = nn.Parameter(torch.eye(8))

    def training_step(self, x, _):
        mixed = nn.functional.linear(x, self.mixed)
        return nn.functional.mse_loss(self.rest["decoder"](self.encoder(mixed)), x)

    def validation_step(self, x, _):
        self.log("loss", self.training_step(x, _))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(level, **options):
    return quiet_trainer(AmpFuse(level, verbosity=0), max_epochs=1, **options)


def by_a_loop(module, level, clip):
    """The weights after a training of `module` by ampfuse alone; every optimizer has a pass."""
    made = module.configure_optimizers()
    optimizers = made if isinstance(made, list) else [made]
    parts = [module.encoder, module.rest["decoder"]]
    amp.initialize(parts, optimizers, opt_level=level, verbosity=0)
    autocast = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    for x in BATCHES:
        for optimizer in optimizers:
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = Parts.training_step(module, x, 0)
            with amp.scale_loss(loss, optimizers) as scaled:
                scaled.backward()
            clip(optimizer)
            optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_parts_are_cast_one_by_one_values_clipped_and_evaluation_follows(level):
    model, data = Parts(), DataLoader(BATCHES, batch_size=None)
    runner = trainer(level, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    (before,) = runner.validate(model, data, verbose=False)
    assert model.encoder[0].weight.dtype == torch.float32  # without an optimizer: digits stay
    runner.fit(model, data, data)
    logged = runner.callback_metrics["loss"]
    (after,) = runner.validate(model, data, verbose=False)
    assert after["loss"] == logged < before["loss"]

    def clip(optimizer):
        torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 1e-3)

    assert_same(dict(model.state_dict()), by_a_loop(Parts(), level, clip))
    halves = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
    assert model.rest["decoder"].weight.dtype == halves.get(level, torch.float32)
    assert model.mixed.dtype == torch.float32


class Manual(Parts):
    automatic_optimization = False

    def configure_optimizers(self):
        parts = self.encoder, self.rest
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]

    def training_step(self, x, _):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(x, _))
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            assert optimizer.last_step.grad_norm == optimizer.optimizer.last_step.grad_norm > 0


def test_manual_optimization_trains_two_optimizers():
    model = Manual()
    trainer("O2").fit(model, DataLoader(BATCHES, batch_size=None))
    expected = by_a_loop(Manual(), "O2", lambda optimizer: amp.clip_grad_norm_(optimizer, 0.05))
    assert_same(dict(model.state_dict()), expected)
