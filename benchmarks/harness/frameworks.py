"""Each framework's documented example under its own BF16 and with ampfuse: final losses.

The examples are small, on digits (in place of MNIST, pets and ImageNet) and sentences:

    lightning     the autoencoder of Lightning's README, 28x28 pixels
    fabric        the convolutional network of Fabric's image classifier example
    accelerate    examples/cv_example.py, a ResNet of timm with OneCycleLR
    transformers  examples/pytorch/language-modeling/run_clm.py, GPT-2 from a config
    timm          train.py --amp, a vision transformer, with our optimizer: timm has no levels
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ampfuse.integrations.timm  # noqa: F401  registers its names
from ampfuse.integrations import accelerate, fabric
from ampfuse.integrations.lightning import AmpFuse
from ampfuse.integrations.transformers import AmpFuseTrainer

from .data import digits, sentences

NATIVE = "native BF16"


def loader_of(side: int) -> DataLoader[Any]:
    """Batches of 64 digits to train on."""
    data = TensorDataset(*digits(side)[:2])
    return DataLoader(data, 64, shuffle=True, drop_last=True)


def epochs(count: int, batches: Any) -> Iterator[Any]:
    """All batches of so many epochs."""
    for _ in range(count):
        yield from batches


@torch.no_grad()
def tested(model: Any, side: int, loss: Callable[..., Tensor]) -> float:
    """The loss on the digits that a model was not trained on."""
    images, classes = digits(side)[2:]
    return loss(model.eval()(images), classes).item()


class LitAutoEncoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 784))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = batch[0].flatten(1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train_lightning(variant: str) -> float:
    model = LitAutoEncoder()
    precision = {"precision": "bf16-mixed"} if variant == NATIVE else {"plugins": AmpFuse(variant)}
    no = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(no, False)
    trainer = lightning.Trainer(max_epochs=30, accelerator="cpu", **precision, **quiet)
    trainer.fit(model, loader_of(28))
    test = TensorDataset(digits(28)[2])
    (logged,) = trainer.validate(model, DataLoader(test, len(test)), verbose=False)
    return logged["loss"]


def train_fabric(variant: str) -> float:
    first, second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
    head = nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(2304, 128), nn.ReLU()
    last = nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)
    model: Any = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *head, *last)
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=0.5)
    if variant == NATIVE:
        runner = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
        model, optimizer = runner.setup(model, optimizer)
    else:
        precision = fabric.AmpFuse(variant)
        runner = lightning.Fabric(accelerator="cpu", plugins=precision)
        model, optimizer = precision.setup(runner, model, optimizer)
    for images, targets in epochs(3, runner.setup_dataloaders(loader_of(16))):
        optimizer.zero_grad()
        runner.backward(F.nll_loss(model(images), targets))
        optimizer.step()
    return tested(model, 16, F.nll_loss)


def train_accelerate(variant: str) -> float:
    batches: Any = loader_of(32)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 / 25)
    steps = 6 * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=steps)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if variant == NATIVE else "no")
    if variant != NATIVE:
        model, optimizer = accelerate.initialize(accelerator, model, optimizer, variant)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    for images, targets in epochs(6, batches):
        accelerator.backward(F.cross_entropy(model(images), targets))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    return tested(model, 32, F.cross_entropy)


def train_transformers(variant: str) -> float:
    tokens = [torch.cat([a, b[:, -1:]], 1) for a, b in zip(*[iter(sentences())] * 2, strict=True)]
    train, test = ([{"input_ids": row, "labels": row} for row in rows] for rows in tokens)
    sizes = {"n_positions": 33, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=364, **sizes))
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    options = {"max_steps": 300, "learning_rate": 2e-3, "per_device_train_batch_size": 16, **quiet}
    options |= {"bf16": variant == NATIVE, "use_cpu": True, "seed": torch.initial_seed() % 2**32}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **options)
        kind, level = (
            (Trainer, {}) if variant == NATIVE else (AmpFuseTrainer, {"opt_level": variant})
        )
        trainer = kind(model, arguments, train_dataset=train, eval_dataset=test[:400], **level)
        trainer.train()
        return trainer.evaluate()["eval_loss"]


def train_timm(variant: str) -> float:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.models.VisionTransformer(**sizes, in_chans=1, num_classes=10)
    name = "adamw" if variant == NATIVE else "ampfuse-adamw"
    optimizer = create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05)
    dtype = torch.float16 if "FP16" in variant else torch.bfloat16  # --amp-dtype
    scaler = NativeScaler(device="cpu") if "FP16" in variant else None
    for images, targets in epochs(12, loader_of(16)):
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return tested(model, 16, F.cross_entropy)


EXAMPLES: dict[str, Callable[[str], float]] = {
    "lightning": train_lightning,
    "fabric": train_fabric,
    "accelerate": train_accelerate,
    "transformers": train_transformers,
    "timm": train_timm,
}
