"""Save a fused batch norm's input alone, and compute its output again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ampfuse import _core


@contextlib.contextmanager
def recompute_norms() -> Iterator[None]:
    """Forward passes in this block keep fewer activations; results have the same bits.

    Between a batch norm and the convolution that follows it, autograd keeps two tensors of one
    size: the input of each. With this it keeps the first and makes the second from it where the
    backward pass asks for it, by one more pass over memory each time. That holds for the outputs of
    fused batch norms (:func:`ampfuse.nn.fuse`, :class:`BatchNormAct2d`, ``batch_norm_act``)
    to which no residual is added, whoever saves them.

    A block around the forward pass and the loss is enough::

        with ampfuse.nn.recompute_norms():
            loss = loss_function(model(x), y)
        loss.backward()

    Under ``torch.compile`` it does nothing: the compiler decides what is kept.

    Source: the memory-efficient DenseNets of Pleiss et al. (arXiv:1707.06990), which share the
    outputs of batch norms and recompute them; ``torch.autograd.graph.saved_tensors_hooks``.
    """
    if torch.compiler.is_compiling():
        yield
        return
    saved = _core.C.SavedTensor
    with torch.autograd.graph.saved_tensors_hooks(saved, saved.unpack):
        yield
