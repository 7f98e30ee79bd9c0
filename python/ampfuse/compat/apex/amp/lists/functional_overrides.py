"""``torch.nn.functional`` at O1."""

import torch.nn.functional

from ampfuse.compat.apex.amp.lists.names import names

MODULE = torch.nn.functional
FP16_FUNCS = names("torch.nn.functional", "FP16_FUNCS")
FP32_FUNCS = names("torch.nn.functional", "FP32_FUNCS")
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
