"""Layers in one pass forward and one backward: norms and activations with the operations next to
them, and the loss.

``fuse`` changes an existing model; the functions and modules are for models written with them.
Images are fast in ``torch.channels_last``.
"""

from ampfuse.nn import functional
from ampfuse.nn.functional import (
    add_layer_norm,
    add_rms_norm,
    bias_act,
    cross_entropy,
    gated_act,
    layer_norm,
    linear_cross_entropy,
    patch_conv2d,
    rms_norm,
    split_qkv,
)
from ampfuse.nn.fuse import FusionReport, fuse, unfuse
from ampfuse.nn.modules import BatchNormAct2d, LinearCrossEntropy, recompute_norms

__all__ = [
    "BatchNormAct2d",
    "FusionReport",
    "LinearCrossEntropy",
    "add_layer_norm",
    "add_rms_norm",
    "bias_act",
    "cross_entropy",
    "functional",
    "fuse",
    "gated_act",
    "layer_norm",
    "linear_cross_entropy",
    "patch_conv2d",
    "recompute_norms",
    "rms_norm",
    "split_qkv",
    "unfuse",
]
