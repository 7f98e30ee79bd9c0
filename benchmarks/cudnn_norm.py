"""cuDNN's batch norm with add and ReLU, forward and backward, called without PyTorch between.

These are the functions that ``apex.contrib.groupbn`` and MXNet's fused batch norm stood on. They
take FP16 in channels-last memory, and keep a mask of the ReLU as ours do. cuDNN is that of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of cudnn_graph.h and cudnn_ops.h.
_HALF, _NHWC, _RELU, _NO_NAN = 2, 1, 1, 0
_PERSISTENT, _NORM_ACT, _NORM_ADD_ACT = 2, 1, 2
_EPS = 1e-5


class CudnnNorm:
    """Layers of one shape.

    Arguments:
        x: shape (N, C, H, W), FP16 in channels-last memory, on a GPU.
        residual: whether one is added.

    Raises:
        RuntimeError: cuDNN refuses the shape, or returns something else than torch does.
    """

    def __init__(self, x: Tensor, residual: bool) -> None:
        self.lib = ctypes.CDLL(f"libcudnn.so.{torch.backends.cudnn.version() // 10000}")
        self.lib.cudnnGetErrorString.restype = ctypes.c_char_p
        self.handle = self.made("cudnnCreate")
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self.call("cudnnSetStream", self.handle, ctypes.c_void_p(stream))
        self.image = self.made("cudnnCreateTensorDescriptor")
        self.call("cudnnSetTensor4dDescriptor", self.image, _NHWC, _HALF, *x.shape)
        self.channels = self.made("cudnnCreateTensorDescriptor")
        self.call("cudnnDeriveBNTensorDescriptor", self.channels, self.image, _PERSISTENT)
        self.relu = self.made("cudnnCreateActivationDescriptor")
        self.call("cudnnSetActivationDescriptor", self.relu, _RELU, _NO_NAN, 1.0)
        self.z = self.image if residual else None

        zeros = torch.zeros(6, x.shape[1], device=x.device)
        self.bias, self.running_mean, self.mean, self.invstd, *self.grads = zeros
        self.weight, self.running_var = torch.ones(2, x.shape[1], device=x.device)

        self.kind = self.handle, _PERSISTENT, _NORM_ADD_ACT if residual else _NORM_ACT
        prefix, suffix = "cudnnGetBatchNormalization", "WorkspaceSize"
        image, z, rest = self.image, self.z, (self.channels, self.relu)
        sizes = (
            self.size(f"{prefix}ForwardTrainingEx{suffix}", image, z, image, *rest),
            self.size(f"{prefix}BackwardEx{suffix}", image, image, image, z, image, *rest),
        )
        reserve = self.size(f"{prefix}TrainingExReserveSpaceSize", self.relu, self.image)
        self.workspace = torch.empty(max(sizes), dtype=torch.uint8, device=x.device)
        self.reserve = torch.empty(reserve, dtype=torch.uint8, device=x.device)
        self.check(x, torch.randn_like(x) if residual else None)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """``relu(batch_norm(x) + residual)``, like `x`."""
        y = torch.empty_like(x)
        images = self.image, x, self.z, residual, self.image, y
        affine = self.channels, self.weight, self.bias
        running = 0.1, self.running_mean, self.running_var, _EPS
        arguments = *images, *affine, *running, self.mean, self.invstd
        self.run("cudnnBatchNormalizationForwardTrainingEx", (1.0, 0.0), *arguments)
        return y

    def backward(
        self, x: Tensor, y: Tensor, dy: Tensor, residual: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of `x` and of the residual; those of the parameters are in `grads`."""
        dx, dz = torch.empty_like(x), torch.empty_like(x) if residual else None
        images = self.image, x, self.image, y, self.image, dy, self.z, dz, self.image, dx
        affine = self.channels, self.weight, self.bias, *self.grads
        arguments = *images, *affine, _EPS, self.mean, self.invstd
        self.run("cudnnBatchNormalizationBackwardEx", (1.0, 0.0, 1.0, 0.0), *arguments)
        return dx, dz

    def check(self, x: Tensor, residual: Tensor | None) -> None:
        inputs = [t.detach().float().requires_grad_() for t in (x, residual) if t is not None]
        total = torch.nn.functional.batch_norm(inputs[0], None, None, training=True, eps=_EPS)
        expected = torch.relu(sum(inputs[1:], total))
        dy = torch.randn_like(x)
        expected.backward(dy.float())
        y = self.forward(x, residual)
        found = [y, *self.backward(x, y, dy, residual is not None)][: 1 + len(inputs)]
        for found_one, tensor in zip(found, [expected, *(t.grad for t in inputs)], strict=True):
            # At a ReLU's corner either side is right; elsewhere, FP16's precision.
            far = (found_one.float() - tensor).abs() > 0.02 * tensor.abs() + 0.02
            if far.float().mean() > 1e-3:
                raise RuntimeError(f"cuDNN differs from torch in {int(far.sum())} elements")

    def run(self, name: str, blend: Sequence[float], *arguments: Any) -> None:
        factors = [ctypes.byref(ctypes.c_float(factor)) for factor in blend]
        spaces = []
        for space in (self.workspace, self.reserve):
            spaces += [space, ctypes.c_size_t(space.numel())]
        self.call(name, *self.kind, *factors, *arguments, self.relu, *spaces)

    def size(self, name: str, *arguments: Any) -> int:
        size = ctypes.c_size_t()
        self.call(name, *self.kind, *arguments, ctypes.byref(size))
        return size.value

    def made(self, name: str) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made))
        return made

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.lib, name)(*map(_converted, arguments))
        if status:
            raise RuntimeError(f"{name}: {self.lib.cudnnGetErrorString(status).decode()}")


def _converted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else value
