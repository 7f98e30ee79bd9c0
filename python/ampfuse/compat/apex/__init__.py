"""ampfuse under the names of NVIDIA's apex, for scripts written for it.

Three ways in, the last of which leaves a script as it is:

- ``import ampfuse.compat.apex as apex``;
- ``ampfuse.compat.apex.install()`` before the first ``import apex``;
- ``python -m ampfuse.compat.apex train.py ARGS...``.

The interface is apex's, the known defects are not: masters are saved, resuming is exact, models
copy and pickle, and CPU tensors and BF16 are welcome.
"""

from __future__ import annotations

import warnings

from ampfuse.compat.apex import (
    amp,
    amp_C,
    apex_C,
    contrib,
    fp16_utils,
    multi_tensor_apply,
    normalization,
    optimizers,
    parallel,
)
from ampfuse.compat.apex.installing import install, installed_apex, uninstall


class DeprecatedFeatureWarning(FutureWarning):
    """What apex warned with in its last years; kept for the filters that name it."""


def deprecated_warning(msg: str) -> None:
    """Warn with a :class:`DeprecatedFeatureWarning`. Nothing in here does."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)
