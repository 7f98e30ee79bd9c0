"""ampfuse under the names of NVIDIA's apex, for scripts written for it.

Scripts have ``import ampfuse.compat.apex as apex``; or call ``ampfuse.compat.apex.install()``
before the first ``import apex``; or are run by ``python -m ampfuse.compat.apex train.py ARGS...``.
The interface is apex's, the known defects are not: masters are saved, resuming is exact, models
copy, and CPU tensors and BF16 are welcome.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from ampfuse.compat.apex.installing import install, installed_apex, uninstall


class DeprecatedFeatureWarning(FutureWarning):
    """The warning category of apex's last years; kept for the filters that name it."""


def deprecated_warning(msg: str) -> None:
    """Warn with a :class:`DeprecatedFeatureWarning`. Nothing in here does."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


_PARTS = (
    "amp amp_C apex_C contrib fp16_utils fused_adam_cuda mlp multi_tensor_apply normalization "
    "optimizers parallel reparameterization"
)
for _name in _PARTS.split():
    importlib.import_module(f"{__name__}.{_name}")

# Our module, a package, and the names of apex's modules in that package whose contents it has.
_ALIASES = {
    "amp": ("amp", "amp"),
    "amp.handle": ("amp", "legacy opt overflow_report"),
    "contrib.clip_grad": ("contrib.clip_grad", "clip_grad"),
    "contrib.optimizers": ("contrib.optimizers", "fp16_optimizer fused_adam fused_lamb fused_sgd"),
    "contrib.xentropy": ("contrib.xentropy", "softmax_xentropy"),
    "fp16_utils": ("fp16_utils", "fp16util loss_scaler"),
    "mlp": ("mlp", "mlp"),
    "multi_tensor_apply": ("multi_tensor_apply", "multi_tensor_apply"),
    "normalization": ("normalization", "fused_layer_norm"),
    "optimizers.fused": (
        "optimizers",
        "fused_adagrad fused_adam fused_lamb fused_mixed_precision_lamb fused_novograd fused_sgd",
    ),
    "optimizers.of_2019": ("optimizers", "fp16_optimizer"),
    "parallel": ("parallel", "distributed optimized_sync_batchnorm sync_batchnorm"),
    "reparameterization": ("reparameterization", "reparameterization weight_norm"),
}
for _ours, (_package, _names) in _ALIASES.items():
    _module, _parent = (sys.modules[f"{__name__}.{_name}"] for _name in (_ours, _package))
    vars(_parent).setdefault("__path__", [])  # a package's: Python asks for modules in it
    for _name in _names.split():
        vars(_parent).setdefault(_name, _module)
        sys.modules[f"{__name__}.{_package}.{_name}"] = _module
