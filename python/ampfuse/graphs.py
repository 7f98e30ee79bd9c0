"""A training step as one CUDA graph: a single launch in place of hundreds::

    step = ampfuse.graphs.make_graphed_step(model, loss_fn, optimizer, (inputs, targets))
    for inputs, targets in loader:
        loss = step(inputs, targets)

PyTorch's whole-network capture, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
What changes between steps (batch, hyper-parameters, loss scale, step counts) is read from device
memory that stays in its place; what cannot change without a new capture is checked at every call.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from ampfuse.amp import scale_loss
from ampfuse.amp import session as sessions
from ampfuse.optim.captured import CapturedOptimizer
from ampfuse.optim.fused import FusedOptimizer, is_fused
from ampfuse.optim.options import RULES, check

__all__ = ["EAGER_CALLS", "GraphedCall", "GraphedStep", "make_graphed_step"]

#: Calls before a capture: lazy state (moments, workspaces, cuDNN's choices) has to exist then.
EAGER_CALLS = 3


class GraphedCall:
    """`call(*tensors)`, captured as one CUDA graph at its fourth call and replayed from then on.

    The first calls run as they are, one kernel at a time. All calls take tensors of one shape,
    dtype and device. Results are the captured call's own tensors: the next call overwrites them.

    Arguments:
        call: takes and returns tensors (a tuple of them). It must not wait for the device, and what
            it does on the host happens at the first four calls only.

    Raises:
        ValueError: a tensor of another shape or dtype than the captured one.
    """

    def __init__(self, call: Callable[..., tuple[Tensor, ...]]) -> None:
        self._call = call
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        if self._calls <= EAGER_CALLS:
            return self._eagerly(*tensors)
        if self._graph is None:
            self.capture(*tensors)
        for static, tensor in zip(self._tensors, tensors, strict=True):
            if tensor.shape != static.shape or tensor.dtype != static.dtype:  # copy_ would convert
                now, then = _describe(tensor), _describe(static)
                raise ValueError(f"a tensor is {now}, and the call was captured with {then}.")
        for static, tensor in zip(self._tensors, tensors, strict=True):
            static.copy_(tensor.detach(), non_blocking=True)
        self._graph.replay()  # type: ignore[union-attr] # capturing alone computes nothing
        return self._results

    def capture(self, *tensors: Tensor) -> None:
        """Capture now, over copies of `tensors`; computes nothing."""
        self._tensors = [tensor.detach().clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        with (
            _without_collections(),
            # Other threads, such as a DataLoader's that pins memory, may go on calling CUDA.
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._results = self._call(*self._tensors)
        self._graph = graph

    def _eagerly(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call on the stream of the capture: autograd remembers which stream it ran on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = self._call(*tensors)
        torch.cuda.current_stream().wait_stream(self._stream)
        return results


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """An earlier graph that is freed during a capture, which CUDA forbids, would end it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_graphed_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: FusedOptimizer,
    sample_batch: Sequence[Any],
    *,
    max_grad_norm: float | None = None,
) -> GraphedStep:
    """Capture forward, backward, scaling and step of `optimizer` into one CUDA graph.

    The returned object is called with a batch and does what this loop does, with the same bits and
    without the host's work::

        optimizer.zero_grad()
        loss = loss_fn(model(inputs), *targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, max_grad_norm)
        optimizer.step()

    Making it does not train: it runs a few times on `sample_batch` with steps that are skipped, and
    restores what that changed (buffers such as BatchNorm's, random number generators, loss scale
    and counters). Gradients are None afterwards, and the optimizer's states exist, as they are
    before a first step. Make it after everything that decides how to train: ``amp.initialize``,
    ``model.train()``, freezing, loading a checkpoint onto other devices. An autocast region around
    this call holds for the captured step.

    Changes of lr, weight decay, momentum and betas in ``param_groups``, edits of weights,
    ``load_state_dict`` of model, optimizer and amp, and eager steps in between take effect without
    a new capture. Overflows skip the step and adapt the scale on the device. Nothing waits for it.

    Arguments:
        model: on one CUDA device, in the mode (train) it is captured in. Not in
            DistributedDataParallel, FSDP or anything else that communicates: collectives are not
            captured.
        loss_fn: ``loss_fn(output, *targets)`` gives the loss, one element.
        optimizer: of ``ampfuse.optim``, or SGD, Adam, AdamW, Adagrad or Muon of torch
            under ``amp.initialize``. Under amp the loss is scaled with the first loss scaler.
        sample_batch: ``(inputs, *targets)`` as in the calls to come: tensors, or tuples, lists and
            dicts of them, on the device or (copied at each call) on the CPU. A tuple or list of
            inputs is passed as ``model(*inputs)``, a dict as ``model(**inputs)``. Numbers, strings,
            bools and None are captured as they are.
        max_grad_norm: clip the unscaled gradients to this L2 norm inside the step; None: as
            ``optimizer.max_grad_norm`` says.

    Raises:
        TypeError: an optimizer without a fused step; a model of several processes or devices; a
            batch of another kind.
        ValueError: parameters that are not on a CUDA device.
        RuntimeError: amp logs every overflow (``verbosity=2``), for which the host has to wait.
    """
    _check_alone(model)
    if not is_fused(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has no fused step, which a captured step needs: it reads "
            "nothing from the host. Use an optimizer of ampfuse.optim, or let amp.initialize "
            "convert torch's."
        )
    check("max_grad_norm", max_grad_norm, RULES["max_grad_norm"])
    session = sessions.enabled_of(optimizer)
    if session is not None and session.verbosity >= 2 and session.is_dynamic:
        raise RuntimeError(
            "amp.initialize(verbosity=2) reads the overflow flag on the host after every pass, "
            "which a captured step cannot do. Use verbosity=1; optimizer.last_step reports them."
        )
    _check_device(optimizer.param_table().param(0).device)
    return GraphedStep(model, loss_fn, optimizer, sample_batch, max_grad_norm)


# By name: apex's too, and nothing is imported for it.
_SPREAD = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _check_alone(model: nn.Module) -> None:
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _SPREAD:
                raise TypeError(
                    f"the model is in {kind.__name__}, which communicates, but a captured step "
                    "cannot. Run its steps eagerly, or train the bare model in one process."
                )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"the optimizer's parameters are on {device}, but CUDA graphs need a CUDA device. Move "
            "the model there before building the optimizer, or run the step eagerly."
        )


class GraphedStep:
    """A captured training step; :func:`make_graphed_step` makes it.

    ``loss = step(inputs, *targets)`` trains on a batch of the captured shapes. The loss is detached
    and the graph's own tensor: the next call overwrites it. Gradients live in the graph alone;
    ``.grad`` is None after a call, and ``optimizer.last_step`` has their norm. Host code in the
    model (hooks, prints, branches) ran when the step was made and does not run again.

    Raises:
        ValueError: a batch of another structure, shape or dtype.
        RuntimeError: what the graph was captured with is no longer so: parameters or buffers with
            other memory, parameter groups or options changed, another schedule, train or eval mode.
            Nothing has changed then; capture the step again.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: FusedOptimizer,
        sample_batch: Sequence[Any],
        max_grad_norm: float | None,
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._max_grad_norm = max_grad_norm
        self._session = sessions.enabled_of(optimizer)
        self._captured = CapturedOptimizer(optimizer)
        device = self._captured.device
        self._batch = _Batch(sample_batch)
        both = nn.ModuleDict({"model": model})
        if isinstance(loss_fn, nn.Module):
            both["loss_fn"] = loss_fn
        stepped = set(map(id, self._captured.leaves))
        self._others = [param for param in both.parameters() if id(param) not in stepped]
        self._buffers = dict(both.named_buffers())
        self._modules = list(both.modules())
        # Scale and counters are made, or moved to the device, at their first use: now.
        if self._session is not None:
            self._session.loss_scalers[0].snapshot(device)

        self._call = GraphedCall(self._train)
        tensors = self._batch.tensors_of(tuple(sample_batch))
        tensors = [tensor.detach().to(device) for tensor in tensors]
        try:
            with torch.cuda.device(device), self._unchanged(), self._captured.reading_values():
                with self._captured.rehearsal():
                    for _ in range(EAGER_CALLS):
                        self._call(*tensors)
                eager = self._attentions
                self._call.capture(*tensors)
                if self._attentions != eager:
                    warnings.warn(
                        f"The captured step computes attention with {_counted(self._attentions)}, "
                        f"eager steps with {_counted(eager)}. Models of transformers that build a "
                        "mask during capture cause this; ampfuse.nn.fuse(model) avoids it.",
                        stacklevel=3,
                    )
        finally:
            self._drop_gradients()
        self._fixed = self._as_captured()

    def __call__(self, *batch: Any) -> Tensor:
        tensors = self._batch.tensors_of(batch)
        now = self._as_captured()
        if changed := [name for name, then in self._fixed.items() if now.get(name) != then]:
            what = changed[0]
            what = self._captured.named(what, self._fixed[what], now.get(what))
            raise RuntimeError(
                f"{what} was changed after the step was captured, which the graph does not see. "
                "Capture it again with ampfuse.graphs.make_graphed_step, or undo the change."
            )
        self._captured.follow_host()
        (loss,) = self._call(*tensors)
        # The host has not seen the step. Autograd and caches of cast weights tell by the version
        # of a tensor that it was written.
        self._captured.note_replay()
        torch.autograd.graph.increment_version(list(self._buffers.values()))
        torch.clear_autocast_cache()
        return loss

    # --- the captured part ----------------------------------------------------------------------

    def _train(self, *tensors: Tensor) -> tuple[Tensor]:
        inputs, *targets = self._batch.filled_with(tensors)
        optimizer = self._optimizer
        # An autocast region around all of this may hold casts from outside the graph.
        torch.clear_autocast_cache()
        self._drop_gradients()
        with torch.enable_grad():
            loss = self._loss_fn(_apply(self._model, inputs), *targets)
            self._attentions = _attentions(loss)
            if self._session is not None:
                with scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        optimizer.clip_once = self._max_grad_norm
        optimizer.step()
        # The next backward pass would add to memory that a replay overwrites.
        self._drop_gradients()
        return (loss.detach(),)

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for param in self._others:
            param.grad = None

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore buffers, random numbers, scalers and step state at the end of the block."""
        device = self._captured.device
        tensors = [*self._buffers.values(), *self._scaling_tensors(), self._captured.step_state()]
        saved = [tensor.detach().clone() for tensor in tensors]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, saved, strict=True):
                        tensor.copy_(value)

    def _scaling_tensors(self) -> list[Tensor]:
        if self._session is None:
            return []
        scaler = self._session.loss_scalers[0]
        return [scaler._scale, scaler._growth_tracker, scaler._hysteresis_tracker]

    def _as_captured(self) -> dict[str, Any]:
        """Everything that needs a new capture if it changes: memory, and settings that kernels got
        as numbers or that chose the kernels."""
        fixed = self._captured.fixed()
        for name, buffer in self._buffers.items():
            fixed[f"the memory of buffer {name}"] = buffer.data_ptr()
        fixed["the memory of the loss scale"] = list(map(Tensor.data_ptr, self._scaling_tensors()))
        fixed["a module's train or eval mode"] = [module.training for module in self._modules]
        fixed |= {f"optimizer.{name}": getattr(self._optimizer, name) for name in RULES}
        return fixed


def _attentions(loss: Tensor) -> Counter[str]:
    """The number of fused attentions in the graph of `loss`, by the names of their nodes."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [after for after, _ in node.next_functions]
    return Counter(node.name() for node in seen if "Attention" in node.name())


def _counted(attentions: Counter[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in attentions.items()) or "no fused kernel"


def _apply(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


class _Batch:
    """The structure of a batch ``(inputs, *targets)`` with tensors as leaves."""

    def __init__(self, sample: Sequence[Any]) -> None:
        if not isinstance(sample, (tuple, list)) or not sample:
            raise TypeError(f"sample_batch must be (inputs, *targets), got {type(sample).__name__}")
        self._leaves, self._structure = _flat(tuple(sample))
        for name, leaf in self._leaves.items():
            if isinstance(leaf, Tensor):
                self._leaves[name] = leaf.to("meta")
            elif not isinstance(leaf, (type(None), bool, int, float, str)):
                raise TypeError(f"{name} is a {type(leaf).__name__}; pass tensors")

    def tensors_of(self, batch: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of `batch` in order. Raises ValueError unless it is like the sample."""
        leaves, structure = _flat(batch)
        if structure != self._structure:
            others = sorted(leaves.keys() ^ self._leaves.keys())
            raise ValueError(f"batch structure differs from the captured one in {others}")
        for name, expected in self._leaves.items():
            now, then = _describe(leaves[name]), _describe(expected)
            if now != then:
                raise ValueError(
                    f"{name} is {now}, and the step was captured with {then}. A graph has one "
                    "shape: use DataLoader(drop_last=True) or pad, or run such a batch through an "
                    "eager step. Python numbers are constants of the graph: pass tensors for "
                    "values that change."
                )
        return [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]

    def filled_with(self, tensors: Sequence[Tensor]) -> Any:
        """The sample with `tensors` in place of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._leaves.values()]
        return tree_unflatten(leaves, self._structure)


def _flat(batch: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """The leaves of a batch, by names such as ``inputs['mask']``, and its structure."""
    leaves, structure = tree_flatten_with_path(batch)
    named = {}
    for path, leaf in leaves:
        first: Any = path[0]
        argument = f"targets[{first.idx - 1}]" if first.idx else "inputs"
        named[argument + keystr(path[1:])] = leaf
    return named, structure


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
