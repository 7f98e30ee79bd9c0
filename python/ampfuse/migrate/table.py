"""What each name of apex becomes, in ampfuse and in plain torch."""

from __future__ import annotations

EXTENSIONS = ("amp_C", "apex_C")
TOP = ("apex", *EXTENSIONS)  # the modules that scripts written for apex import

_AUTOCAST = "torch.autocast around the forward pass and the loss"
_NO_MASTERS = "nothing: torch.amp has no half-precision model with FP32 masters"
_SAME = "the same name in ampfuse.amp"
_UNKNOWN = "torch's own modules"
_LAYER_NORM = "apex.normalization.FusedLayerNorm"

# The longest entry that a name starts with is its own. None: left out on purpose.
_TABLE: dict[str, tuple[str | None, str]] = {
    "apex": ("ampfuse.compat.apex", "torch.amp, and a loop of its own"),
    "apex.amp": ("ampfuse.amp", "torch.autocast and torch.amp.GradScaler"),
    "apex.amp.initialize": (
        "ampfuse.amp.initialize, with the same arguments",
        f"O1, O4: {_AUTOCAST}; O2, O5: {_NO_MASTERS}; O3: model.half()",
    ),
    "apex.amp.scale_loss": (
        "ampfuse.amp.scale_loss, with the same arguments",
        "scaler.scale(loss).backward(), then scaler.step(optimizer) and scaler.update()",
    ),
    "apex.amp.master_params": (
        "ampfuse.amp.master_params; to clip inside the step, ampfuse.amp.clip_grad_norm_",
        "scaler.unscale_(optimizer), then model.parameters()",
    ),
    "apex.amp.state_dict": (
        "ampfuse.amp.state_dict; the masters are in optimizer.state_dict()",
        "scaler.state_dict()",
    ),
    "apex.amp.load_state_dict": ("ampfuse.amp.load_state_dict", "scaler.load_state_dict"),
    "apex.amp.half_function": (_SAME, "torch.amp.custom_fwd(cast_inputs=torch.float16)"),
    "apex.amp.float_function": (_SAME, "torch.amp.custom_fwd(cast_inputs=torch.float32)"),
    "apex.amp.promote_function": (_SAME, "casts written by hand"),
    "apex.amp.register_half_function": (_SAME, "torch.autocast around the calls"),
    "apex.amp.register_float_function": (
        _SAME,
        "torch.autocast(enabled=False) around the calls, with .float() on their inputs",
    ),
    "apex.amp.register_promote_function": (_SAME, "casts written by hand"),
    "apex.amp.disable_casts": (_SAME, "torch.autocast(enabled=False)"),
    "apex.amp.init": (
        "ampfuse.amp.initialize and scale_loss; ampfuse.compat.apex.amp.init as it was",
        _AUTOCAST,
    ),
    "apex.amp._amp_state": (
        "the same in ampfuse.compat.apex.amp; for a scale, ampfuse.amp.state_dict()",
        "scaler.get_scale()",
    ),
    "apex.amp.scaler": ("ampfuse.amp.LossScaler", "torch.amp.GradScaler"),
    "apex.amp.lists": ("ampfuse.compat.apex.amp.lists", "nothing: autocast's lists are fixed"),
    "apex.fp16_utils": ("ampfuse.compat.apex.fp16_utils", "torch.amp"),
    "apex.fp16_utils.FP16_Optimizer": (
        "ampfuse.amp.initialize(opt_level='O2') and scale_loss, "
        "or ampfuse.compat.apex.fp16_utils.FP16_Optimizer as it was",
        f"torch.amp.GradScaler on an FP32 model; {_NO_MASTERS}",
    ),
    "apex.fp16_utils.network_to_half": (
        "ampfuse.amp.initialize(opt_level='O2')",
        "model.half(), with batch norms back to float()",
    ),
    "apex.fp16_utils.FP16Model": ("ampfuse.amp.initialize(opt_level='O2')", "model.half()"),
    "apex.fp16_utils.prep_param_lists": (
        "master_weights=True of the optimizers in ampfuse.optim",
        "copies made by hand",
    ),
    "apex.fp16_utils.clip_grad_norm": (
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.utils.clip_grad_norm_",
    ),
    "apex.fp16_utils.LossScaler": ("ampfuse.GradScaler", "torch.amp.GradScaler"),
    "apex.fp16_utils.DynamicLossScaler": ("ampfuse.GradScaler", "torch.amp.GradScaler"),
    "apex.optimizers": ("ampfuse.optim", "torch.optim"),
    "apex.optimizers.FusedSGD": ("ampfuse.optim.SGD", "torch.optim.SGD(fused=True)"),
    "apex.optimizers.FusedAdam": (
        "ampfuse.optim.AdamW; with adam_w_mode=False, ampfuse.optim.Adam",
        "torch.optim.AdamW(fused=True); with adam_w_mode=False, Adam",
    ),
    "apex.optimizers.FusedLAMB": ("ampfuse.optim.LAMB", "nothing"),
    "apex.optimizers.FusedMixedPrecisionLamb": (
        "ampfuse.optim.LAMB(master_weights=True)",
        "nothing",
    ),
    "apex.optimizers.FusedNovoGrad": ("ampfuse.optim.NovoGrad", "nothing"),
    "apex.optimizers.FusedAdagrad": ("ampfuse.optim.Adagrad", "torch.optim.Adagrad"),
    "apex.parallel": ("ampfuse.compat.apex.parallel", "torch.nn.parallel"),
    "apex.parallel.DistributedDataParallel": (
        "torch.nn.parallel.DistributedDataParallel, after initialize",
        "torch.nn.parallel.DistributedDataParallel",
    ),
    "apex.parallel.SyncBatchNorm": (
        "torch.nn.SyncBatchNorm; with fuse_relu or z, "
        "ampfuse.compat.apex.parallel.SyncBatchNorm as it was",
        "torch.nn.SyncBatchNorm",
    ),
    "apex.parallel.distributed.flat_dist_call": (
        "ampfuse.compat.apex.parallel.distributed.flat_dist_call",
        "the collective on each tensor, or on torch.cat of them",
    ),
    "apex.parallel.convert_syncbn_model": (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, before initialize",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    ),
    "apex.parallel.LARC": ("ampfuse.optim.LARC", "nothing"),
    "apex.contrib.groupbn": (
        "ampfuse.nn.BatchNormAct2d on channels_last images; "
        "ampfuse.compat.apex.contrib.groupbn as it was",
        "torch.nn.BatchNorm2d, torch.nn.SyncBatchNorm; add and ReLU by themselves",
    ),
    "apex.contrib.optimizers": (
        "ampfuse.amp.initialize(opt_level='O2') and scale_loss, "
        "or ampfuse.compat.apex.contrib.optimizers.FP16_Optimizer as it was",
        f"torch.amp.GradScaler on an FP32 model; {_NO_MASTERS}",
    ),
    "apex.normalization.FusedLayerNorm": ("torch.nn.LayerNorm", "torch.nn.LayerNorm"),
    "apex.normalization.FusedRMSNorm": ("torch.nn.RMSNorm", "torch.nn.RMSNorm"),
    "apex.normalization": ("ampfuse.compat.apex.normalization", "torch.nn"),
    "apex.multi_tensor_apply": (
        "functions of ampfuse.ops",
        "torch._foreach_*",
    ),
    "amp_C": ("ampfuse.ops; ampfuse.compat.apex.amp_C as it was", "torch._foreach_*"),
    "amp_C.multi_tensor_scale": ("ampfuse.ops.scale", "torch._foreach_mul"),
    "amp_C.multi_tensor_axpby": ("ampfuse.ops.axpby", "torch._foreach_mul, torch._foreach_add"),
    "amp_C.multi_tensor_l2norm": ("ampfuse.ops.l2norm", "torch.nn.utils.get_total_norm"),
    "apex_C": ("ampfuse.compat.apex.apex_C", "torch.cat, and split with view_as"),
    "apex.RNN": (None, "torch.nn.RNN, GRU or LSTM"),
    "apex.contrib": (None, _UNKNOWN),
    "apex.contrib.clip_grad": (None, "torch.nn.utils.clip_grad_norm_"),
    "apex.contrib.fmha": (None, "torch.nn.functional.scaled_dot_product_attention"),
    "apex.contrib.multihead_attn": (None, "torch.nn.MultiheadAttention"),
    "apex.contrib.optimizers.FusedAdam": (None, "apex.optimizers.FusedAdam"),
    "apex.contrib.optimizers.FusedLAMB": (None, "apex.optimizers.FusedLAMB"),
    "apex.contrib.optimizers.FusedSGD": (None, "apex.optimizers.FusedSGD"),
    "apex.contrib.xentropy": (None, "torch.nn.functional.cross_entropy"),
    "apex.fused_dense": (None, "torch.nn.Linear, with torch.compile"),
    "apex.mlp": (None, "torch.nn.Sequential, with torch.compile"),
    "apex.normalization.FusedLayerNormAffineFunction": (None, _LAYER_NORM),
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": (None, _LAYER_NORM),
    "apex.parallel.multiproc": (None, "torchrun"),
    "apex.pyprof": (None, "torch.profiler or nsys"),
    "apex.reparameterization": (None, "torch.nn.utils.parametrizations"),
    "apex.transformer": (None, "torch.distributed.tensor.parallel"),
}

FP16_OPTIMIZER = {
    "backward": (
        "with ampfuse.amp.scale_loss(loss, optimizer) as scaled: scaled.backward()",
        "scaler.scale(loss).backward()",
    ),
    "update_master_grads": (
        "nothing: scale_loss does it",
        "scaler.unscale_(optimizer)",
    ),
    "clip_master_grads": (
        "ampfuse.amp.clip_grad_norm_(optimizer, max_norm)",
        "scaler.unscale_(optimizer), then torch.nn.utils.clip_grad_norm_",
    ),
    "inspect_master_grad_data": ("p.grad of ampfuse.amp.master_params(optimizer)", "p.grad"),
    "overflow": ("optimizer.last_step.skipped, after the step", "scaler.get_scale() went down"),
    "loss_scale": ("ampfuse.amp.state_dict()['loss_scaler0']['loss_scale']", "scaler.get_scale()"),
}


def counterparts(name: str) -> tuple[str, str]:
    """What `name` (``"apex.amp.initialize"``) becomes in ampfuse and in plain torch."""
    ampfuse, torch = _entry(name)
    return ampfuse or "not in ampfuse", torch


def is_left_out(name: str) -> bool:
    """Whether ampfuse leaves out `name`, or what it is in, on purpose."""
    return _entry(name)[0] is None


def instead_of(name: str) -> str:
    """What takes the place of `name`, which is not in ampfuse."""
    return _entry(name)[1] if is_left_out(name) else _UNKNOWN


def _entry(name: str) -> tuple[str | None, str]:
    parts = name.split(".")
    starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(_TABLE[start] for start in starts if start in _TABLE)
