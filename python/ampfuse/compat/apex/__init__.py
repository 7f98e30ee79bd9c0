"""ampfuse under the names of NVIDIA's apex, for scripts written for it.

Scripts have ``import ampfuse.compat.apex as apex``; or call ``ampfuse.compat.apex.install()``
before the first ``import apex``; or are run by ``python -m ampfuse.compat.apex train.py ARGS...``.
The interface is apex's, the known defects are not: masters are saved, resuming is exact, models
copy, and CPU tensors and BF16 are welcome.
"""

from __future__ import annotations

import sys
import warnings

from ampfuse.compat.apex.install import install, installed_apex, uninstall

# isort: off
from ampfuse.compat.apex import amp, amp_C, apex_C, contrib, fp16_utils, fused_adam_cuda, mlp
from ampfuse.compat.apex import multi_tensor_apply, normalization, optimizers, parallel
from ampfuse.compat.apex import reparameterization


class DeprecatedFeatureWarning(FutureWarning):
    """The warning category of apex's last years; kept for the filters that name it."""


def deprecated_warning(msg: str) -> None:
    """Warn with a :class:`DeprecatedFeatureWarning`. Nothing in here does."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


# Modules of apex below these that the module itself serves.
_SERVED = {
    contrib.clip_grad: "clip_grad",
    contrib.optimizers: "fp16_optimizer fused_adam fused_lamb fused_sgd",
    contrib.xentropy: "softmax_xentropy",
    fp16_utils: "fp16util loss_scaler",
    mlp: "mlp",
    multi_tensor_apply: "multi_tensor_apply",
    optimizers: (
        "fp16_optimizer fused_adagrad fused_adam fused_lamb fused_mixed_precision_lamb "
        "fused_novograd fused_sgd"
    ),
    parallel: "distributed optimized_sync_batchnorm",
    reparameterization: "reparameterization weight_norm",
}
_aliases = [(each, name, each) for each, names in _SERVED.items() for name in names.split()]
for _package, _name, _module in [*_aliases, (amp, "opt", amp.handle)]:
    assert not hasattr(_package, _name), _name
    setattr(_package, _name, _module)
    sys.modules[f"{_package.__name__}.{_name}"] = _module
for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{__name__}.") and _module not in (amp_C, apex_C, fused_adam_cuda):
        # As of a package: Python asks ``UnsupportedFinder`` for names that the module lacks.
        vars(_module).setdefault("__path__", [])
