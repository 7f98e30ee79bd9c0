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


# apex module names that another module serves here.
_ALIASES = {
    "amp.opt": amp.handle,
    "contrib.clip_grad.clip_grad": contrib.clip_grad,
    "contrib.optimizers.fp16_optimizer": contrib.optimizers,
    "contrib.optimizers.fused_adam": contrib.optimizers,
    "contrib.optimizers.fused_lamb": contrib.optimizers,
    "contrib.optimizers.fused_sgd": contrib.optimizers,
    "contrib.xentropy.softmax_xentropy": contrib.xentropy,
    "fp16_utils.fp16util": fp16_utils,
    "fp16_utils.loss_scaler": fp16_utils,
    "mlp.mlp": mlp,
    "multi_tensor_apply.multi_tensor_apply": multi_tensor_apply,
    "optimizers.fp16_optimizer": optimizers,
    "optimizers.fused_adagrad": optimizers,
    "optimizers.fused_adam": optimizers,
    "optimizers.fused_lamb": optimizers,
    "optimizers.fused_mixed_precision_lamb": optimizers,
    "optimizers.fused_novograd": optimizers,
    "optimizers.fused_sgd": optimizers,
    "parallel.distributed": parallel,
    "parallel.optimized_sync_batchnorm": parallel,
    "parallel.sync_batchnorm": parallel,
    "reparameterization.reparameterization": reparameterization,
    "reparameterization.weight_norm": reparameterization,
}
for _alias, _module in _ALIASES.items():
    _package, _, _name = f"{__name__}.{_alias}".rpartition(".")
    _parent = sys.modules[_package]
    assert not hasattr(_parent, _name), _alias
    setattr(_parent, _name, _module)
    vars(_parent).setdefault("__path__", [])  # a package's: Python asks for modules in it
    sys.modules[f"{__name__}.{_alias}"] = _module
