"""A classifier of handwritten digits trained by Lightning, to be read from top to bottom.

    python examples/lightning_digits.py                       BF16 weights, FP32 masters (O5)
    python examples/lightning_digits.py --precision native    Lightning's "bf16-mixed"

One argument of the Trainer says the level; the LightningModule knows nothing of it. The digits are
scikit-learn's, 8x8 pixels each. Half a minute on two CPU cores.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.losses = steps, []
        # One part, which is at the level; what training_step does with its output is FP32.
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("held_out_loss", F.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main(argv: list[str] | None = None) -> float:
    """Train, print loss and accuracy on held-out digits, and return that accuracy (0 to 1)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="O5", help="native, or a level: O0 to O5")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file for the loss of each step")
    args = parser.parse_args(argv)

    lightning.seed_everything(args.seed, verbose=False)
    pixels, numbers = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(numbers, dtype=torch.int64)
    train = DataLoader(TensorDataset(images[:1437], labels[:1437]), 32, shuffle=True)
    held_out = DataLoader(TensorDataset(images[1437:], labels[1437:]), 360)

    if args.precision == "native":
        precision = {"precision": "bf16-mixed"}
    else:
        from ampfuse.integrations.lightning import AmpFuse

        precision = {"plugins": AmpFuse(args.precision)}

    model = Digits(args.epochs * len(train))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision,
    )
    trainer.fit(model, train, held_out)
    (found,) = trainer.validate(model, held_out, verbose=False)
    print(f"held-out loss {found['held_out_loss']:.4f}, accuracy {found['accuracy']:.1%}")
    if args.csv:
        rows = [f"{step},{loss:.5f}" for step, loss in enumerate(model.losses, 1)]
        args.csv.write_text("\n".join(["step,loss", *rows]) + "\n")
    return found["accuracy"]


if __name__ == "__main__":
    main()
