"""``apex.normalization``: torch's norms, and results of either type."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse.compat.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
)
from cases import bf16, f16, f32


@pytest.mark.parametrize("shape", [6, (6,), [2, 6]])
def test_norms_are_torchs(shape):
    x = torch.rand(3, 2, 6)
    for ours, theirs in ((FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)):
        for affine in (True, False):
            module = ours(shape, elementwise_affine=affine, memory_efficient=True)
            reference = theirs(shape, eps=1e-5, elementwise_affine=affine)
            torch.testing.assert_close(module(x), reference(x))
            assert module.state_dict().keys() == reference.state_dict().keys()
    torch.testing.assert_close(fused_layer_norm(x, 6), F.layer_norm(x, (6,), eps=1e-6))
    torch.testing.assert_close(fused_rms_norm(x, 6), F.rms_norm(x, (6,), eps=1e-6))


@pytest.mark.parametrize("x", [f16, bf16, f32])
@pytest.mark.parametrize("weights", [f16, bf16, f32])
def test_types_of_norms(x, weights):
    data = torch.rand(3, 6).to(x)
    for plain, mixed in ((FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)):
        exact = plain(6)(data.float())
        for kind, out in ((plain, x), (mixed, weights)):
            result = kind(6).to(weights)(data)
            assert result.dtype == out
            torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.02)
    weight, bias = torch.rand(6).to(weights), torch.rand(6).to(weights)
    assert fused_layer_norm_affine(data, weight, bias, 6).dtype == x
    assert fused_rms_norm_affine(data, weight, 6).dtype == x
    with pytest.raises(RuntimeError, match="weights"):
        MixedFusedLayerNorm(6, elementwise_affine=False)
