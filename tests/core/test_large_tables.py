"""Large tables store model weights past the caches; the bits are those of small tables."""

import pytest
import torch

import ampfuse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bits_as_in_pieces(dtype):
    size = 16 * 2**20 + 5  # 512 whole chunks and a rest
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))

    def stepped(pieces):
        """The weight after two steps, as `pieces` parameters with an optimizer each."""
        params = [torch.nn.Parameter(piece.clone()) for piece in weight.chunk(pieces)]
        optimizers = [ampfuse.optim.AdamW([p], lr=1e-2, master_weights=True) for p in params]
        for param, piece in zip(params, gradient.chunk(pieces), strict=True):
            param.grad = piece
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
        return torch.cat([p.detach() for p in params])

    assert torch.equal(stepped(1).view(torch.int16), stepped(3).view(torch.int16))
