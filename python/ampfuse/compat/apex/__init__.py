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


for _name in (
    "amp",
    "amp_C",
    "apex_C",
    "contrib",
    "fp16_utils",
    "fused_adam_cuda",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
):
    importlib.import_module(f"{__name__}.{_name}")

# Our modules that have the contents of apex's with these names.
_NAMES = {
    "amp": ["amp.amp"],
    "amp.handle": ["amp.legacy", "amp.opt", "amp.overflow_report"],
    "contrib.clip_grad": ["contrib.clip_grad.clip_grad"],
    "contrib.optimizers": [
        "contrib.optimizers.fp16_optimizer",
        "contrib.optimizers.fused_adam",
        "contrib.optimizers.fused_lamb",
        "contrib.optimizers.fused_sgd",
    ],
    "contrib.xentropy": ["contrib.xentropy.softmax_xentropy"],
    "fp16_utils": ["fp16_utils.fp16util", "fp16_utils.loss_scaler"],
    "mlp": ["mlp.mlp"],
    "multi_tensor_apply": ["multi_tensor_apply.multi_tensor_apply"],
    "normalization": ["normalization.fused_layer_norm"],
    "optimizers.fused": [
        "optimizers.fused_adagrad",
        "optimizers.fused_adam",
        "optimizers.fused_lamb",
        "optimizers.fused_mixed_precision_lamb",
        "optimizers.fused_novograd",
        "optimizers.fused_sgd",
    ],
    "parallel": [
        "parallel.distributed",
        "parallel.optimized_sync_batchnorm",
        "parallel.sync_batchnorm",
    ],
    "reparameterization": [
        "reparameterization.reparameterization",
        "reparameterization.weight_norm",
    ],
}
for _here, _names in _NAMES.items():
    _module = sys.modules[f"{__name__}.{_here}"]
    for _name in _names:
        _package, _, _last = f"{__name__}.{_name}".rpartition(".")
        _parent = sys.modules[_package]
        vars(_parent).setdefault("__path__", [])  # a package's: Python asks for modules in it
        vars(_parent).setdefault(_last, _module)
        sys.modules[f"{_package}.{_last}"] = _module
