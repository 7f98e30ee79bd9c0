"""Each framework's documented example under its own BF16 and with ampfuse's lines: final losses.

    python benchmarks/frameworks.py [--frameworks fabric ...]

Runs replace their rows in results/frameworks_epyc.csv. The examples are made small, their data are
scikit-learn's digits (for MNIST, pets, ImageNet) and the sentences of quality.py, which says also
what "within the spread" is:

    lightning     the autoencoder of Lightning's README, 28x28 pixels
    fabric        the convolutional net of Fabric's image classifier example
    accelerate    examples/cv_example.py, a ResNet of timm with OneCycleLR
    transformers  examples/pytorch/language-modeling/run_clm.py, GPT-2 from a config
    timm          train.py --amp, a vision transformer
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning
import quality
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from harness.results import RESULTS, conditions, parser_of, read
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ampfuse.integrations.timm  # noqa: F401  registers its names
from ampfuse.integrations import accelerate, fabric
from ampfuse.integrations.lightning import AmpFuse
from ampfuse.integrations.transformers import AmpFuseTrainer

_CSV = RESULTS / "frameworks_epyc.csv"
NATIVE = "native BF16"
ARMS = (NATIVE, "O5", "O2")


def digits(side: int) -> tuple[DataLoader[Any], Tensor, Tensor]:
    """Batches of 64 to train on; images [n, 1, side, side] and classes to test on."""
    train, classes, test, test_classes = quality.digits(side)
    batches = DataLoader(TensorDataset(train, classes), 64, shuffle=True, drop_last=True)
    return batches, test, test_classes


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


def train_lightning(arm: str) -> float:
    batches, test, _ = digits(28)
    model = LitAutoEncoder()
    precision = {"precision": "bf16-mixed"} if arm == NATIVE else {"plugins": AmpFuse(arm)}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet["enable_model_summary"] = False
    trainer = lightning.Trainer(max_epochs=30, accelerator="cpu", **precision, **quiet)
    trainer.fit(model, batches)
    (logged,) = trainer.validate(model, DataLoader(TensorDataset(test), len(test)), verbose=False)
    return logged["loss"]


class Net(nn.Sequential):
    def __init__(self) -> None:
        first, second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        head = nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(2304, 128), nn.ReLU()
        last = nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), *head, *last)


def train_fabric(arm: str) -> float:
    batches, test, classes = digits(16)
    model: Any = Net()
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=0.5)
    if arm == NATIVE:
        runner = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
        model, optimizer = runner.setup(model, optimizer)
    else:
        precision = fabric.AmpFuse(arm)
        runner = lightning.Fabric(accelerator="cpu", plugins=precision)
        model, optimizer = precision.setup(runner, model, optimizer)
    for _ in range(3):
        for images, targets in runner.setup_dataloaders(batches):
            optimizer.zero_grad()
            runner.backward(F.nll_loss(model(images), targets))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return F.nll_loss(model(test), classes).item()


def train_accelerate(arm: str) -> float:
    batches, test, classes = digits(32)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 / 25)
    steps = 6 * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=steps)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if arm == NATIVE else "no")
    if arm != NATIVE:
        model, optimizer = accelerate.initialize(accelerator, model, optimizer, arm)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    for _ in range(6):
        model.train()
        for images, targets in batches:
            accelerator.backward(F.cross_entropy(model(images), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    with torch.no_grad():
        return F.cross_entropy(model(test), classes).item()


def train_transformers(arm: str) -> float:
    words = [
        torch.cat([a, b[:, -1:]], 1) for a, b in zip(*[iter(quality.sentences())] * 2, strict=True)
    ]
    train, test = ([{"input_ids": row, "labels": row} for row in rows] for rows in words)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=364, n_positions=33, n_embd=64, n_layer=2, n_head=4)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=300,
            learning_rate=2e-3,
            per_device_train_batch_size=16,
            bf16=arm == NATIVE,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            seed=torch.initial_seed() % 2**32,
        )
        kind, level = (Trainer, {}) if arm == NATIVE else (AmpFuseTrainer, {"opt_level": arm})
        trainer = kind(model, arguments, train_dataset=train, eval_dataset=test[:400], **level)
        trainer.train()
        return trainer.evaluate()["eval_loss"]


def train_timm(arm: str) -> float:
    batches, test, classes = digits(16)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.models.VisionTransformer(**sizes, in_chans=1, num_classes=10)
    name = "adamw" if arm == NATIVE else "ampfuse-adamw"
    optimizer = create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05)
    dtype = torch.float16 if arm == "O2" else torch.bfloat16  # --amp-dtype
    scaler = NativeScaler(device="cpu") if arm == "O2" else None
    for _ in range(12):
        for images, targets in batches:
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            if scaler is not None:
                scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(test), classes).item()


EXAMPLES: dict[str, Callable[[str], float]] = {
    "lightning": train_lightning,
    "fabric": train_fabric,
    "accelerate": train_accelerate,
    "transformers": train_transformers,
    "timm": train_timm,
}
# timm's script has no levels: there the arms are our optimizer under its --amp.
_TIMM = {"O5": "ampfuse-adamw, BF16", "O2": "ampfuse-adamw, FP16"}


def shown(framework: str, arm: str) -> str:
    """What the arm is called in the rows."""
    return _TIMM.get(arm, arm) if framework == "timm" else arm


def main() -> None:
    """Trains, and after each run writes its row; then the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--frameworks", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    order = [(name, shown(name, arm)) for name, arm in product(EXAMPLES, ARMS)]
    for name, arm, seed in product(options.frameworks, ARMS, quality.SEEDS):
        torch.manual_seed(seed)
        loss = float(f"{EXAMPLES[name](arm):.5g}")
        print(name, shown(name, arm), seed, loss, flush=True)
        what = {"task": name, "arm": shown(name, arm), "seed": seed, "test_loss": loss}
        quality.save(_CSV, [quality.Row(**what, **conditions(quality.CPU))], order)
    print("\n".join(quality.table(read(_CSV, quality.Row))))


if __name__ == "__main__":
    main()
