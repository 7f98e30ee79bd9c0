"""Data of the small trainings: handwritten digits, and sentences of a fixed grammar."""

from __future__ import annotations

import random
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.experiments import data as sets


@cache
def digits(side: int) -> tuple[Tensor, ...]:
    """scikit-learn's digits as standardised [n, 1, side, side], and their classes; 360 to test.

    Pixels are repeated, as those of the published losses were.
    """
    both = sets.digits(8)
    (mean,), (std,) = both.mean, both.std

    def images(part: sets.Split) -> Tensor:
        return F.interpolate((part.images / 255 - mean) / std, side)

    return images(both.train), both.train.labels, images(both.test), both.test.labels


_ADJECTIVES, _NOUNS, _VERBS = 40, 120, 80
VOCAB_SIZE = 4 + _ADJECTIVES + _NOUNS + 2 * _VERBS  # "." and three determiners first
CONTEXT = 32
_TEXT = 1_000_000  # tokens


@cache
def sentences() -> tuple[Tensor, ...]:
    """Tokens int64 [n, 32] of "det adj+ noun verb det adj+ noun ." on and on; the next tokens.

    To learn by heart: each of the 4,800 pairs of adjective and noun (in Zipf's frequencies) admits
    two verbs, the first determiner one form of them, and each verb eight objects.
    """
    draw = random.Random(0)
    zipf = {n: [1 / (1 + i) for i in range(n)] for n in (_ADJECTIVES, _NOUNS)}
    pairs = [[draw.sample(range(_VERBS), 2) for _ in range(_NOUNS)] for _ in range(_ADJECTIVES)]
    objects = [draw.sample(range(_NOUNS), 8) for _ in range(_VERBS)]
    text: list[int] = []
    while len(text) < _TEXT:
        determiners = draw.choices(range(1, 4), k=2)
        counts = [2 if draw.random() < 0.3 else 1 for _ in range(2)]
        first, second = (draw.choices(range(_ADJECTIVES), zipf[_ADJECTIVES], k=k) for k in counts)
        noun = draw.choices(range(_NOUNS), zipf[_NOUNS])[0]
        verb = draw.choice(pairs[first[0]][noun])
        text += [determiners[0], *(4 + a for a in first), 4 + _ADJECTIVES + noun]
        form = 1 if determiners[0] == 1 else 0
        text += [4 + _ADJECTIVES + _NOUNS + 2 * verb + form, determiners[1]]
        text += [*(4 + a for a in second), 4 + _ADJECTIVES + draw.choice(objects[verb]), 0]
    rows = torch.tensor(text).unfold(0, CONTEXT + 1, CONTEXT)
    return rows[:-1000, :-1], rows[:-1000, 1:], rows[-1000:, :-1], rows[-1000:, 1:]


class SmallTransformer(nn.Module):
    """Tokens [n, 32] to scores [n, 32, vocabulary]; pre-norm, learned positions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=hidden.dtype)
        return self.head(self.blocks(hidden, mask, is_causal=True))
