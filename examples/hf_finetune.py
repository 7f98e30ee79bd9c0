"""BERT pre-trained and fine-tuned by Hugging Face's Trainer, to be read from top to bottom.

    python examples/hf_finetune.py                       BF16 weights, FP32 masters (level O5)
    python examples/hf_finetune.py --precision native    the Trainer's bf16=True, without ampfuse
    python examples/hf_finetune.py --model NAME          fine-tunes another, of a folder or the hub

A small BERT that reads bytes guesses masked ones in Python's manual, is saved, loaded again, and
learns to tell the manual's prose from the library's code. Without downloads, a minute on two cores.
"""

import argparse
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

LENGTH = 64  # bytes of a text, or tokens of another model's


def texts() -> list[tuple[str, int]]:
    """Prose, 0, and code, 1, by turns, each of 40 characters or more."""
    pages = "\n\n".join(topics.values()).split("\n\n")
    prose = [" ".join(part.split()) for part in pages if part[:1].isalpha() and len(part) >= 40]
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    lines = [line.strip() for file in files for line in file.read_text("utf-8").split("\n")]
    code = [line for line in lines if len(line) >= 40]
    both = zip(prose, code[:: len(code) // len(prose)], strict=False)
    return [(text, label) for pair in both for label, text in enumerate(pair)]


def train(args: argparse.Namespace, steps: int, rate: float, **rest: Any) -> transformers.Trainer:
    """A Trainer that has trained: in its own BF16, or at a level."""
    options = transformers.TrainingArguments(
        max_steps=steps,
        learning_rate=rate,
        warmup_steps=steps // 10,
        per_device_train_batch_size=32,
        dataloader_drop_last=True,
        bf16=args.precision == "native",
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        **{"logging_steps": 1, "disable_tqdm": True, "report_to": [], "save_strategy": "no"},
    )
    if args.precision == "native":
        trainer = transformers.Trainer(args=options, **rest)
    else:
        from ampfuse.integrations.transformers import AmpFuseTrainer

        trainer = AmpFuseTrainer(args=options, opt_level=args.precision, **rest)
    trainer.remove_callback(transformers.PrinterCallback)  # a line for each step
    trainer.train()
    return trainer


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def pretrain(folder: str, args: argparse.Namespace) -> None:
    """A masked language model and its tokenizer, saved in `folder`."""
    tokenizer = transformers.ByT5Tokenizer(mask_token="<mask>")  # a byte is a token: no file
    ids = tokenizer("\n".join(topics.values()), add_special_tokens=False)["input_ids"]
    rows = [{"input_ids": ids[start : start + LENGTH]} for start in range(0, len(ids), LENGTH)]
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": LENGTH}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(tokenizer)}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **depth))
    masks = transformers.DataCollatorForLanguageModeling(tokenizer)
    data = {"train_dataset": rows, "data_collator": masks}
    trainer = train(args, args.pretrain_steps, 2e-3, model=model, **data)
    print(f"pre-training: loss {losses(trainer)[0]:.3f} to {losses(trainer)[-1]:.3f}")
    trainer.save_model(folder)
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> float:
    """Train, print losses and accuracy, and return the accuracy on held-out texts (0 to 1)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="O5", help="native, or a level: O0 to O5")
    parser.add_argument("--model", help="what to fine-tune, in place of pre-training one")
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100, help="of fine-tuning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file for the loss of each step of fine-tuning")
    args = parser.parse_args(argv)

    transformers.set_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            pretrain(folder, args)
        name = args.model or folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # A model saved at O5 names BF16 in its config.json: dtype keeps all digits for the masters.
        bert = transformers.AutoModelForSequenceClassification
        model = bert.from_pretrained(name, dtype=torch.float32)

    cut = {"truncation": True, "max_length": LENGTH}
    rows = [{**tokenizer(text, **cut), "label": label} for text, label in texts()]
    trainer = train(
        args,
        args.steps,
        1e-3 if args.model is None else 5e-5,
        model=model,
        train_dataset=rows[400:],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    found = trainer.predict(rows[:400])
    accuracy = float((found.predictions.argmax(1) == found.label_ids).mean())
    print(f"held-out loss {found.metrics['test_loss']:.4f}, accuracy {accuracy:.1%}")
    if args.csv:
        rows = [f"{step},{loss:.5f}\n" for step, loss in enumerate(losses(trainer), 1)]
        args.csv.write_text("".join(["step,loss\n", *rows]))
    return accuracy


if __name__ == "__main__":
    main()
