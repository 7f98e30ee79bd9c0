"""Layers in one pass forward and one backward: norms and activations with the operations next to
them, and the loss.

``fuse`` changes an existing model; the functions and modules are for models written with them.
Images are fast in ``torch.channels_last``.
"""

from ampfuse.nn import functional
from ampfuse.nn.functional import *  # noqa: F403 (a new function is named there alone)
from ampfuse.nn.fuse import FusionReport, fuse, unfuse
from ampfuse.nn.modules import BatchNormAct2d, LinearCrossEntropy, recompute_norms

__all__ = [
    "BatchNormAct2d",
    "FusionReport",
    "LinearCrossEntropy",
    "fuse",
    "recompute_norms",
    "unfuse",
]
__all__ += functional.__all__
