"""Layers in one pass forward and one backward: norms and activations with what is beside them,
and the loss.

``fuse`` does it to a model as it is; the modules are for models that are written for it. Images in
``torch.channels_last`` are fast.
"""

from ampfuse.nn import functional
from ampfuse.nn.activation import bias_act, gated_act
from ampfuse.nn.batch_norm import BatchNormAct2d
from ampfuse.nn.cross_entropy import cross_entropy
from ampfuse.nn.fuse import FusionReport, fuse, unfuse
from ampfuse.nn.fuse.attention import split_qkv
from ampfuse.nn.fuse.patches import patch_conv2d
from ampfuse.nn.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from ampfuse.nn.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ampfuse.nn.recompute import recompute_norms

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
