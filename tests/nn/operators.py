"""What is asked of every operator of a fused layer."""

import torch


def assert_rounded(name, found, right, error, size):
    """`found` is `right`, which is float64, rounded once; beside it `error`, of FP32's arithmetic.

    Arguments:
        size: that of the terms, which may cancel.
    """
    type_of = torch.finfo(found.dtype)
    half = type_of.eps / 2 if found.dtype != torch.float32 else 0.0
    torch.testing.assert_close(
        found.detach().double(),
        right.detach(),
        rtol=half + error,
        atol=error * size + type_of.smallest_normal,
        msg=lambda text: f"{name}: {text}",
    )


def assert_same_second_derivative(penalty, tensors):
    """`penalty` of `tensors`, which has a gradient in it, next to that in float64."""
    tensors = [t.requires_grad_() for t in tensors]
    exactly = [t.detach().double().requires_grad_() for t in tensors]
    eps = 16 * torch.finfo(tensors[0].dtype).eps
    for found, right in zip(
        *(torch.autograd.grad(penalty(*of), of) for of in (tensors, exactly)), strict=True
    ):
        atol = eps * right.abs().amax().item()
        torch.testing.assert_close(found.double(), right, rtol=eps, atol=atol)


def assert_same_bits_with_any_threads(run):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def assert_compiles(step, inputs, backend, tolerance):
    """In one graph, to the same gradients of `inputs`."""
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found, expected = (torch.autograd.grad(run(*inputs), inputs) for run in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
