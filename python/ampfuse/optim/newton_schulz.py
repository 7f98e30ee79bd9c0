"""Orthogonalization of matrices by Newton-Schulz iterations, for Muon.

X = U S V^T is divided by its norm. Then each step computes ``a X + (b A + c A A) X``, where A is
the Gram matrix of the smaller side, which maps each singular value s to ``a s + b s^3 + c s^5``.
Matrices of one shape are one batch of products. Five steps of an m x n matrix, m <= n, take
20 m^2 n + 10 m^3 operations. If n is large enough, the steps work on the Gram matrix alone: its
polynomials, P for a step and Q for all of them, commute, so ``A' = P A P``, and ``Q X`` is the
result. This takes 34 m^3 + 4 m^2 n operations (1:1: 38 for 30; 1:3: 46 for 70; 1:4: 50 for 90). It
amplifies rounding errors of A, so it is done in FP32, or in FP16 with A computed from X again after
three steps (28 m^3 + 8 m^2 n). The idea is Dao-AILab's "Gram Newton-Schulz".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ampfuse.hardware import cpu_flags, cpu_has_bf16

# The coefficients a, b, c of a step.
Polynomial = tuple[float, float, float]

JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
# Amsel et al., arXiv:2505.16932: for each step the polynomial that brings singular values of at
# least 0.001 of the norm closest to 1. As there, all but the last are safe for values up to 1.01.
_POLAR_EXPRESS: list[Polynomial] = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
_SAFETY = 1.01

# After more steps in FP16 the rounding errors of a Gram matrix are too large.
_RESTART = 3

# Elements of a batch that are computed at a time, with three times as much temporary memory. A CPU
# needs fewer to use its cores, and its caches hold those.
SLICE = {"cpu": 1 << 20, "cuda": 1 << 25}


def polynomials_of(coefficients: Sequence[float] | str, steps: int) -> list[Polynomial]:
    """The polynomial of each step: always the same, or those of ``"polar_express"``."""
    if coefficients != "polar_express":
        a, b, c = map(float, coefficients)
        return [(a, b, c)] * steps
    known = [*_POLAR_EXPRESS, *_POLAR_EXPRESS[-1:] * steps][:steps]
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in known[:-1]]
    return [*safe, *known[-1:]]


def product_dtype(device: torch.device) -> torch.dtype:
    """The type that `device` multiplies fastest with the precision that the steps need."""
    if device.type == "cuda":
        return torch.float16
    return torch.bfloat16 if _float32_cost() > 1 else torch.float32


def matrix_dtype(device: torch.device) -> torch.dtype:
    """The type of the matrices before and after, whose range holds every gradient."""
    return torch.float32 if product_dtype(device) == torch.float32 else torch.bfloat16


@functools.cache  # each step calls it for every matrix
def _float32_cost() -> float:
    """The time of a product in FP32 on this CPU, relative to BF16."""
    if "amx_bf16" in cpu_flags():
        return 12.0
    return 2.5 if cpu_has_bf16() else 1.0


def operations(m: int, n: int, steps: int, dtype: torch.dtype) -> tuple[float, float]:
    """The operations of `steps` on an m x n matrix, m <= n: directly, and on the Gram matrix.

    With products in BF16, those in FP32 count as many as BF16 would do in their time.
    """
    cost = _float32_cost() if dtype == torch.bfloat16 else 1.0
    grams = 2 if dtype == torch.float16 and steps > _RESTART else 1
    square, wide = 2.0 * m**3, 2.0 * m**2 * n
    by_gram = cost * ((4 * steps - 3 * grams) * square + grams * wide) + grams * wide
    return steps * (square + 2 * wide), by_gram


def orthogonalized(
    matrices: Tensor,
    polynomials: Sequence[Polynomial],
    eps: float,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``factor * U S' V^T`` of each matrix U S V^T, with S' near 1, in the type of products.

    Arguments:
        matrices: (batch, m, n), FP32 or BF16; overwritten.
        eps: the smallest norm. Norms are rounded to the type of `matrices`, as in torch.
        dtype: of the products: FP32, FP16 or BF16; by default :func:`product_dtype`.
    """
    batch, rows, columns = matrices.shape
    m, n = min(rows, columns), max(rows, columns)
    if 0 in matrices.shape:
        return matrices
    dtype = dtype or product_dtype(matrices.device)
    at_once = max(1, SLICE[matrices.device.type] // (rows * columns))
    if batch > at_once:
        parts = matrices.split(at_once)
        return torch.cat([orthogonalized(part, polynomials, eps, factor, dtype) for part in parts])
    # Gram matrices of long sides would be too small for FP16, so they are multiplied by `scale`.
    is_half = dtype == torch.float16
    scale = 4.0 ** int(math.log(m, 4)) if is_half else 1.0
    # Squares of large gradients overflow FP32.
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float64)
    norm = norm.clamp(min=eps).to(matrices.dtype) / math.sqrt(scale)
    x = matrices.div_(norm).to(dtype)
    scaled = [(a, b / scale, c / scale**2) for a, b, c in polynomials]
    factor /= math.sqrt(scale)
    if not polynomials:
        return x.mul_(factor)
    directly, by_gram = operations(m, n, len(scaled), dtype)
    if directly <= by_gram:
        return _directly(x, scaled, factor)
    if is_half and len(scaled) > _RESTART:
        x, scaled = _by_gram(x, scaled[:_RESTART], 1.0), scaled[_RESTART:]
    return _by_gram(x, scaled, factor)


def _gram(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The products of the rows with each other, or of the columns if there are fewer."""
    first, second = (x, x.mT) if x.shape[1] <= x.shape[2] else (x.mT, x)
    return torch.bmm(first, second, out=out)


def _applied(polynomial: Tensor, x: Tensor, factor: float, own: float, out: Tensor) -> Tensor:
    """``own * x + factor * polynomial(x)``, from the smaller side."""
    first, second = (polynomial, x) if x.shape[1] <= x.shape[2] else (x, polynomial)
    return torch.baddbmm(x, first, second, beta=own, alpha=factor, out=out)


def _directly(x: Tensor, polynomials: Sequence[Polynomial], factor: float) -> Tensor:
    spare = torch.empty_like(x)
    gram = _gram(x)
    step = torch.empty_like(gram)
    for i, (a, b, c) in enumerate(polynomials):
        if i > 0:
            gram = _gram(x, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=step)
        last = factor if i == len(polynomials) - 1 else 1.0
        x, spare = _applied(step, x, last, a * last, out=spare), x
    return x


def _by_gram(x: Tensor, polynomials: Sequence[Polynomial], factor: float) -> Tensor:
    gram = _gram(x if x.dtype == torch.float16 else x.float())
    step, spare = torch.empty_like(gram), torch.empty_like(gram)
    total: Tensor | None = None
    for i, (a, b, c) in enumerate(polynomials):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=step)
        step.diagonal(dim1=1, dim2=2).add_(a)
        total = step.clone() if total is None else torch.bmm(step, total)
        if i < len(polynomials) - 1:
            torch.bmm(torch.bmm(step, gram, out=spare), step, out=gram)
    assert total is not None
    return _applied(total.to(x.dtype), x, factor, 0.0, out=torch.empty_like(x))
