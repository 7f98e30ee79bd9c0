"""Mixed-precision training for PyTorch with a C++/CUDA core.

========================  =========================================================================
``ampfuse.amp``           ``initialize``, ``scale_loss`` and the levels O0 to O5
``ampfuse.optim``         SGD, Adam, AdamW, Adagrad, LAMB, NovoGrad, Lion and Muon, fused, with FP32
                          masters; LARC
``ampfuse.GradScaler``    ``torch.amp.GradScaler`` without the wait
``ampfuse.graphs``        a training step as one CUDA graph
``ampfuse.insight``       what half precision does to each tensor, where an overflow originated,
                          what a training holds in memory
``ampfuse.plan``          whether a training fits, before anything is allocated
``ampfuse.doctor``        where the time goes, and which level to train at
``ampfuse.nn``            batch norm, add and ReLU in one pass; ``fuse`` for models as they are
``ampfuse.ops``           operations on lists of tensors
``ampfuse.cpu_half_ops``  faster kernels for half types on the CPU
``ampfuse.compat.apex``   all of it under the names that scripts for apex import
========================  =========================================================================
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampfuse import amp, doctor, graphs, insight, nn, ops, optim
    from ampfuse.amp import GradScaler
    from ampfuse.half_ops import cpu_half_ops
    from ampfuse.insight import plan


def _needs_no_torch() -> bool:
    """True in ``ampfuse env`` and ``python -m ampfuse env``, which explain broken installations;
    and for ``--help`` and ``--version``, which must not wait for torch."""
    if (sys.argv[1:2] or ["--help"])[0] not in ("env", "-h", "--help", "--version"):
        return False
    # While Python looks for the module that -m names, that is "-m" here, and named there.
    program = sys.argv[0] if sys.argv[0] != "-m" else sys.orig_argv[-len(sys.argv)]
    return os.path.basename(program) in ("ampfuse", "-mampfuse")


# An extension that does not fit the running torch says so here and now, not at its first use.
if _needs_no_torch():
    try:
        from ampfuse._build_info import VERSION as __version__
    except ImportError:
        __version__ = "unknown"
else:
    from ampfuse import _core

    __version__ = _core.build_info.VERSION

__all__ = [
    "GradScaler",
    "__version__",
    "amp",
    "cpu_half_ops",
    "doctor",
    "graphs",
    "insight",
    "nn",
    "ops",
    "optim",
    "plan",
]

# Imported at first use: `import ampfuse` stays cheap next to `import torch`, and a layer reaches
# one above it as an attribute of `ampfuse`.
_MODULES = frozenset({"amp", "doctor", "graphs", "insight", "nn", "ops", "optim"})

# By name, the module that has it.
_NAMES = {"GradScaler": "amp", "cpu_half_ops": "half_ops", "plan": "insight"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"ampfuse.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"ampfuse.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'ampfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
