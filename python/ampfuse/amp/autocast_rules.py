"""Autocast's choice of types by names of functions, the same on every device.

For functions called where autocast is off: on what a model returned, and outside all models.
"""

from __future__ import annotations

from ampfuse.amp.op_rules import OpRules

RNN_CELLS = frozenset({"gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"})

_PRODUCTS = """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d einsum linear matmul mm multi_dot mv
    prelu scaled_dot_product_attention vecdot
"""
# By name, so that the function, the Tensor method and the operator are one entry. These are the
# operations that apex's O1 ran in FP32, with `mean` and the losses that torch has got since. CPU
# autocast has a shorter list of its own; this one holds on every device.
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
    ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    triplet_margin_with_distance_loss
"""
_REDUCTIONS_AND_DISTANCES = """
    cdist cosine_similarity cumprod cumsum dist group_norm layer_norm logcumsumexp logsumexp mean
    nansum norm normalize matrix_norm nuclear_norm pairwise_distance pdist prod renorm rms_norm std
    std_mean sum trace var var_mean vector_norm
"""
_LEAVE_THE_RANGE_OF_HALF = """
    __pow__ __rpow__ acos asin cosh erfinv exp expm1 log log10 log1p log2 log_softmax logsigmoid
    pow reciprocal rsqrt sinh softmax softmin softplus square tan
"""
# torch promotes in most others itself; these would refuse mixed types.
_PROMOTE = """
    bilinear cross dot index_add index_copy index_put lerp scatter scatter_add tensordot vdot
"""

AUTOCAST = OpRules(
    low=RNN_CELLS | frozenset(_PRODUCTS.split()),
    float32=frozenset((_LOSSES + _REDUCTIONS_AND_DISTANCES + _LEAVE_THE_RANGE_OF_HALF).split()),
    promote=frozenset(_PROMOTE.split()),
)
