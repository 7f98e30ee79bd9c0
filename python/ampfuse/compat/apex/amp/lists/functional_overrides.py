"""``torch.nn.functional`` at O1."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
""".split()

FP32_FUNCS = """
    interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm
    local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
    cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss
    multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss
    ctc_loss
""".split()

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy on half-precision probabilities is not safe: a sigmoid computed in "
        "half precision is exactly 1 from logits of about 8 on, and the gradient is lost. Leave "
        "the sigmoid out of the model and use binary_cross_entropy_with_logits "
        "(nn.BCEWithLogitsLoss); or have the sigmoid computed in FP32, with "
        "amp.register_float_function(torch, 'sigmoid') before amp.initialize.",
    )
]
