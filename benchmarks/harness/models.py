"""Networks for images, for texts and for next to nothing, FP32 on the CPU, with random weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .without_ampfuse import load

_models = load("experiments/models.py")


def image_model(name: str, image_size: int = 32, channels: int = 3, **options: Any) -> nn.Module:
    """One of the experiments, or of timm. `options`: classes, and dropout."""
    try:
        return _models.build(name, image_size=image_size, channels=channels, **options)
    except ValueError:
        import timm

        return timm.create_model(name, num_classes=options["classes"])


class Tagger(nn.Module):
    """A label for each token, by an LSTM in both directions."""

    def __init__(self, vocab_size: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class _Logits(nn.Module):
    """The logits alone of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits

    def use_no_masks(self) -> None:
        """Attention by ``is_causal`` alone. For compiled and captured models transformers builds a
        mask, with which no flash kernel runs, unless the attention function has no mask function
        registered, https://huggingface.co/docs/transformers/attention_interface."""
        import transformers as hf
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        hf.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        self.model.set_attn_implementation("sdpa_without_mask")


# Layers, width, heads and vocabulary size.
TEXTS = {
    "gpt": (6, 384, 6, 16384),
    "gpt2": (12, 768, 12, 50304),  # 124 M parameters; a multiple of 64 tokens
    "llama": (14, 768, 12, 32000),  # 148 M
    "bert_small": (4, 512, 8, 16384),  # Turc et al. 2019
    "bert_base": (12, 768, 12, 30522),
    "lstm_tagger": (2, 256, 1, 16384),
}


def text_model(name: str, tokens: int, small: bool = False) -> tuple[nn.Module, int, int]:
    """One of `TEXTS`, its vocabulary size and number of classes; `small` ones have two layers
    and 512 tokens."""
    layers, width, heads, vocab_size = TEXTS[name]
    if small:
        layers, vocab_size = 2, 512
    if name == "lstm_tagger":
        return Tagger(vocab_size, width, 32), vocab_size, 32
    import transformers as hf

    if name.startswith("gpt"):
        sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": tokens}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        tokens_of = dict.fromkeys(("bos_token_id", "eos_token_id"))
        config = hf.GPT2Config(vocab_size=vocab_size, use_cache=False, **sizes, **drop, **tokens_of)
        return _Logits(hf.GPT2LMHeadModel(config)), vocab_size, vocab_size
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "llama":
        sizes |= {"intermediate_size": 8 * width // 3, "max_position_embeddings": tokens}
        config = hf.LlamaConfig(vocab_size=vocab_size, use_cache=False, **sizes)
        return _Logits(hf.LlamaForCausalLM(config)), vocab_size, vocab_size
    config = hf.BertConfig(
        vocab_size=vocab_size, intermediate_size=4 * width, num_labels=2, **sizes
    )
    return _Logits(hf.BertForSequenceClassification(config)), vocab_size, 2


def tiny_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """``mlp``, 37 linear layers, or ``transformer``, 6 encoder layers, and the inputs' shape."""
    if name == "mlp":
        layers = [layer for _ in range(37) for layer in (nn.Linear(8, 8), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), (8, 8)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (4, 8, 16)
