"""The error of 8-bit states in AdamW's update, ours and bitsandbytes', against a float64 step.

Every route starts from FP32 moments of 100 steps, quantizes them, and takes 1 or 100 more steps.
`error` is the RMS error of the last update over the RMS of the update, `largest` its largest
element over float64's. bitsandbytes' quantization is applied around a float64 step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .results import RESULTS, conditions, write

_BEFORE, _STEPS = 100, (1, 100)
STEPS = _BEFORE + max(_STEPS)
_HYPER: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_BETAS = torch.tensor(_HYPER["betas"], dtype=torch.float64)[:, None]


def normal(sigma: float) -> Tensor:
    """Normal gradients whose scales are log-normal, as float32 [200, 131072]: step, element."""
    torch.manual_seed(0)
    return 1e-3 * (sigma * torch.randn(1 << 17)).exp() * torch.randn(STEPS, 1 << 17)


def moments_after(start: Tensor, gradients: Tensor, kept: Any = Tensor.double) -> Tensor:
    """Both moments [2, n] in float64; `kept` is applied to them before each step."""
    for g in gradients.double():
        start = _BETAS * kept(start) + (1 - _BETAS) * torch.stack([g, g * g])
    return start


def update(moments: Tensor, step: int) -> Tensor:
    """AdamW's change of the weights at a rate of 1, less the sign."""
    m, v = moments / (1 - _BETAS**step)
    return m / (v.sqrt() + _HYPER["eps"])


def theirs(moments: Tensor, block: int) -> Tensor:
    """The moments, quantized by bitsandbytes and read back."""
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    maps = map(create_dynamic_map, (True, False))  # signed or not
    quantized = map(partial(quantize_blockwise, blocksize=block), moments.float(), maps)
    return torch.stack([dequantize_blockwise(*values).double() for values in quantized])


def ours(start: Tensor, gradients: Tensor, **options: Any) -> Tensor:
    from ampfuse.optim import AdamW

    weight = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = AdamW([weight], **_HYPER, **options)
    state = dict(zip(("exp_avg", "exp_avg_sq"), start.clone(), strict=True))
    state["step"] = torch.tensor(float(_BEFORE))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    for weight.grad in gradients:
        weight.detach().zero_()  # and so it becomes the update, less the sign
        optimizer.step()
    return -weight.detach().double()


def measure_quantization(cases: Mapping[str, Tensor]) -> None:
    """Writes results/quantization_error.csv, of gradients [200, n] by name."""
    rows: list[dict[str, Any]] = []
    for (name, gradients), steps in product(cases.items(), _STEPS):
        before, after = gradients[: _BEFORE + steps].split(_BEFORE)
        given = moments_after(torch.zeros(2, 1), before).float(), after
        exact = update(moments_after(*given), _BEFORE + steps)
        updates = {("ampfuse, FP32 states", 0): ours(*given)}
        updates["ampfuse, 8bit", 128] = ours(*given, state_dtype="8bit")
        for block in (128, 256):
            moments = moments_after(*given, partial(theirs, block=block))
            updates["bitsandbytes", block] = update(moments, _BEFORE + steps)
        for (route, block), some in updates.items():
            row = {"gradients": name, "steps": steps, "route": route, "block": block}
            row["error"] = f"{(some - exact).norm() / exact.norm():.4g}"
            row["largest"] = f"{some.abs().max() / exact.abs().max():.4g}"
            print(*row.values(), sep=", ", flush=True)
            row |= conditions(torch.device("cpu"))
            rows.append(row | {"bitsandbytes": version("bitsandbytes")})
    write(RESULTS / "quantization_error.csv", rows)
