"""``apex.mlp``: linear layers, each followed by an activation, the last one too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# In the order of apex's numbers.
_NAMES = ("none", "relu", "sigmoid")
_FUNCTIONS = (nn.Identity(), torch.relu, torch.sigmoid)


def mlp_function(bias: bool, activation: int, *args: Tensor) -> Tensor:
    """The layers, on the first of `args`, (N, in). The others are the weights, then any biases."""
    x, *params = args
    count = len(params) // 2 if bias else len(params)
    for weight, offset in itertools.zip_longest(params[:count], params[count:]):
        x = _FUNCTIONS[activation](nn.functional.linear(x, weight, offset))
    return x


class MlpFunction:
    """Called by ``apply``, as the function that apex has."""

    apply = staticmethod(mlp_function)


class MLP(nn.Module):
    """``activation(x @ weight.T + bias)`` from each of `mlp_sizes` to the next, of (N, in)."""

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu"):
        super().__init__()
        if activation not in _NAMES:
            raise TypeError(f"activation must be none, relu or sigmoid, not {activation!r}.")
        self.mlp_sizes, self.num_layers, self.bias = mlp_sizes, len(mlp_sizes) - 1, bias
        self.activation = _NAMES.index(activation)
        for i, (size, out) in enumerate(itertools.pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(out, size)))
            self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(out)) if bias else None)
        self.reset_parameters()

    # Looked up each time: some exchange parameters.
    weights = property(lambda self: [p for n, p in self._parameters.items() if "weight" in n])
    biases = property(
        lambda self: [p for n, p in self._parameters.items() if "bias" in n and self.bias]
    )

    def reset_parameters(self) -> None:
        """Initialize weights Glorot-normal, biases normal with a deviation of 1 / sqrt(out)."""
        for param in self.parameters():
            is_weight = param.dim() == 2
            variance = 2 / sum(param.shape) if is_weight else 1 / len(param)
            nn.init.normal_(param, std=variance**0.5)

    def forward(self, input: Tensor) -> Tensor:
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        activation = _NAMES[self.activation]
        return f"MLP sizes: {list(self.mlp_sizes)}, Bias={self.bias}, activation={activation}"
