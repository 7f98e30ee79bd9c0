"""``apex.fp16_utils``: half models, master weights and loss scaling by hand."""

from ampfuse.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from ampfuse.compat.apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from ampfuse.compat.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
