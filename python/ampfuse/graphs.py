"""A training step as one CUDA graph: a single launch in place of hundreds.

    step = ampfuse.graphs.make_graphed_step(model, loss_fn, optimizer, (inputs, targets))
    for inputs, targets in loader:
        loss = step(inputs, targets)

PyTorch's whole-network capture, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
What changes between steps (batch, hyper-parameters, loss scale, step counts) is read from device
memory that stays in its place; what cannot change without a new capture is checked at every call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ampfuse.amp import scale_loss, trees, weight_cache
from ampfuse.optim.fused import FusedOptimizer, refuse_unread
from ampfuse.optim.masters import MasterParameter
from ampfuse.optim.schedule import GroupValues

__all__ = ["EAGER_CALLS", "GraphedCall", "GraphedStep", "make_graphed_step"]

# Lazy state (moments, workspaces, cuDNN's choices) has to exist before a capture.
EAGER_CALLS = 3

# Of a parameter group: a rate that the kernel reads from a tensor, and the hyper-parameters.
_Group = tuple[Tensor | None, dict[str, Any]]


class GraphedCall:
    """`call(*tensors)`, captured as one CUDA graph at its fourth call and replayed from then on.

    The first calls run as they are, one kernel at a time. All calls take tensors of one shape,
    dtype and device. Results are the captured call's own tensors: the next call overwrites them.

    Args:
        call: takes and returns tensors (a tuple of them). It must not wait for the device, and what
            it does on the host happens at the first four calls only.
    """

    def __init__(self, call: Callable[..., tuple[Tensor, ...]]) -> None:
        self._call = call
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        if self._calls <= EAGER_CALLS:
            return self._aside(lambda: self._call(*tensors))
        if self._graph is None:
            self.capture(*tensors)
        for static, tensor in zip(self._tensors, tensors, strict=True):
            static.copy_(tensor.detach(), non_blocking=True)
        self._graph.replay()  # type: ignore[union-attr] # capturing alone computes nothing
        return self._results

    def capture(self, *tensors: Tensor) -> None:
        """Capture now, over copies of `tensors`; computes nothing."""
        self._tensors = [tensor.detach().clone() for tensor in tensors]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as a DataLoader's that pins memory, may go on calling CUDA.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._results = self._call(*self._tensors)

    def _aside(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """On the stream of the capture: autograd remembers which stream it ran on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = call()
        torch.cuda.current_stream().wait_stream(self._stream)
        return results


def make_graphed_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: FusedOptimizer,
    sample_batch: Sequence[Any],
    *,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
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
    puts back what that touched (buffers such as BatchNorm's, the states of the random number
    generators of the CPU and the device, loss scale and counters). Gradients are None afterwards,
    and the optimizer's states exist, as they are before a first step. Make it after everything that
    decides how to train: ``amp.initialize``, ``model.train()``, freezing, ``optimizer.follow``,
    loading a checkpoint onto other devices. An autocast region around this call holds for the
    captured step.

    Learning rates are followed without a new capture: those of ``optimizer.follow``, a table on the
    device indexed by the applied steps, and the numbers in ``param_groups`` (lr, weight decay,
    momentum, betas), whoever changes them. Overflows skip the step and adapt the scale on the
    device. Weights that are edited in between, ``load_state_dict`` of model, optimizer, amp and
    scaler, and eager steps in between are all seen. Nothing waits for the device.

    Args:
        model: on one CUDA device, in the mode (train) it is captured in. Not in
            DistributedDataParallel or anything else that communicates: collectives are not handled.
        loss_fn: ``loss_fn(output, *targets)`` gives the loss, one element.
        optimizer: of ``ampfuse.optim``, or SGD, Adam, AdamW or Adagrad of torch under
            ``amp.initialize``. Under amp the loss is scaled with the first loss scaler.
        sample_batch: ``(inputs, *targets)`` as in the calls to come: tensors, or tuples, lists and
            dicts of them, on the device or (copied at each call) on the CPU. A tuple or list of
            inputs is passed as ``model(*inputs)``, a dict as ``model(**inputs)``. Numbers, strings,
            bools and None are captured as they are.
        max_grad_norm: clip the unscaled gradients to this L2 norm inside the step; None: as
            ``optimizer.max_grad_norm`` says.
        scaler: ``ampfuse.GradScaler`` (or torch's) that scales the loss and steps, for an optimizer
            that is not under ``amp.initialize``.

    Raises:
        TypeError: an optimizer without a fused step; a model, scaler or batch of another kind.
        ValueError: parameters that are not on a CUDA device; a `scaler` beside amp.
        RuntimeError: amp logs every overflow (``verbosity=2``), for which the host has to wait.

    Source: the semantics of ``torch.cuda.make_graphed_callables``'s whole-network alternative in
    PyTorch's notes on CUDA graphs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it has to be a torch.nn.Module")
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has no fused step, and only that reads everything it "
            "needs on the device. Use SGD, Adam, AdamW, Adagrad, LAMB or NovoGrad of "
            "ampfuse.optim, or let amp.initialize change torch's."
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}; it has to be positive, or None")
    _check_scaling(optimizer, scaler)
    _check_device(optimizer._sync_rows().param(0).device)
    return GraphedStep(model, loss_fn, optimizer, sample_batch, max_grad_norm, scaler)


def _check_scaling(optimizer: FusedOptimizer, scaler: Any) -> None:
    session = getattr(optimizer, "_amp_session", None)
    enabled = session is not None and session.enabled
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__name__}; it has to be an ampfuse.GradScaler")
    if scaler is not None and enabled:
        raise ValueError(
            "the optimizer is under amp.initialize, which scales the loss already; leave scaler out"
        )
    if enabled and session.verbosity >= 2 and session.policy.is_dynamic:
        raise RuntimeError(
            "amp.initialize(verbosity=2) reads the overflow flag on the host after every pass, "
            "which a captured step cannot. Use verbosity=1; optimizer.last_step tells of overflows."
        )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"the optimizer's parameters are on {device}, and CUDA graphs need a CUDA device. Move "
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
            Nothing has changed then; make the step anew.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: FusedOptimizer,
        sample_batch: Sequence[Any],
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._max_grad_norm, self._scaler = max_grad_norm, scaler
        self._table = optimizer._sync_rows()
        device = self._table.param(0).device
        self._batch = _Batch(sample_batch)
        self._params = list(optimizer._amp_params())
        # What autograd gives gradients to.
        self._leaves = [
            p.model_param if isinstance(p, MasterParameter) else p for p in self._params
        ]
        both = nn.ModuleDict({"model": model})
        if isinstance(loss_fn, nn.Module):
            both["loss_fn"] = loss_fn
        stepped = set(map(id, self._leaves))
        self._others = [param for param in both.parameters() if id(param) not in stepped]
        self._buffers = dict(both.named_buffers())

        self._schedule = optimizer._schedule
        self._groups = self._current_groups()
        # Without a schedule to follow, the numbers of the groups go to the device when they change.
        self._values = GroupValues(self._groups, device) if self._schedule is None else None
        self._place_scaling(device)
        self._scaling = self._scaling_tensors()

        self._call = GraphedCall(self._train)
        sample = self._batch.tensors_of(tuple(sample_batch))
        self._make([tensor.detach().to(device) for tensor in sample], device)

        self._state_names = optimizer._state_names_by_group()
        self._options = self._current_options()
        self._fingerprint = self._table.fingerprint()
        self._addresses = list(map(Tensor.data_ptr, self._buffers.values()))

    def __call__(self, *batch: Any) -> Tensor:
        tensors = self._batch.tensors_of(batch)
        self._refuse_changes()
        groups = self._current_groups()
        self._refuse_hyper(groups)
        self._follow_host(groups)
        (loss,) = self._call(*tensors)
        # The host has not seen the step. Autograd and caches of cast weights tell by the version
        # of a tensor that it was written.
        self._table.mark_stepped()
        torch.autograd.graph.increment_version(list(self._buffers.values()))
        torch.clear_autocast_cache()
        weight_cache.clear()
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # torch's schedulers ask
        return loss

    # --- the captured part ----------------------------------------------------------------------

    def _train(self, *tensors: Tensor) -> tuple[Tensor]:
        inputs, *targets = self._batch.filled_with(tensors)
        optimizer, scaler = self._optimizer, self._scaler
        # An autocast region around all of this may hold casts from outside the graph.
        torch.clear_autocast_cache()
        weight_cache.clear()
        self._drop_gradients()
        with torch.enable_grad():
            loss = self._loss_fn(_apply(self._model, inputs), *targets)
            if scaler is not None:
                scaler.scale(loss).backward()
            elif self._session() is not None:
                with scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        optimizer._clip_once = self._max_grad_norm
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        # Left in place they would look like gradients of whichever step came last, and the next
        # backward pass would add to memory that a replay overwrites.
        self._drop_gradients()
        return (loss.detach(),)

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for param in self._others:
            param.grad = None

    def _make(self, tensors: list[Tensor], device: torch.device) -> None:
        optimizer = self._optimizer
        try:
            with torch.cuda.device(device), self._unchanged(device):
                if self._values is not None:
                    optimizer._schedule = self._values
                optimizer._rehearsal = torch.ones((), device=device)
                for _ in range(EAGER_CALLS):
                    self._call(*tensors)
                optimizer._rehearsal = None
                optimizer._pin_states()
                self._call.capture(*tensors)
        finally:
            optimizer._rehearsal, optimizer._schedule = None, self._schedule
            optimizer._clip_once = None
            self._drop_gradients()

    @contextlib.contextmanager
    def _unchanged(self, device: torch.device) -> Iterator[None]:
        """What skipped steps change is put back: buffers, random numbers, scalers, step state."""
        tensors = [*self._buffers.values(), *self._scaling_tensors()]
        saved = [tensor.detach().clone() for tensor in tensors]
        # All fields of the step state lie in one storage.
        step_state = self._table.state_field("found_inf").untyped_storage()
        saved_state = step_state.clone()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, saved, strict=True):
                        tensor.copy_(value)
                step_state.copy_(saved_state)

    def _place_scaling(self, device: torch.device) -> None:
        """Scale and counters are made, or moved to the device, at their first use: now."""
        session = self._session()
        if session is not None:
            session.loss_scalers[0].snapshot(device)
        elif self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=device))

    def _scaling_tensors(self) -> list[Tensor]:
        session = self._session()
        owner = self._scaler if session is None else session.loss_scalers[0]
        names = ("_scale", "_growth_tracker", "_hysteresis_tracker")
        tensors = [getattr(owner, name, None) for name in names]
        return [tensor for tensor in tensors if tensor is not None]

    def _session(self) -> Any:
        """amp's, if that scales this optimizer's loss."""
        session = getattr(self._optimizer, "_amp_session", None)
        return session if session is not None and session.enabled else None

    # --- what the host may change between replays -----------------------------------------------

    def _follow_host(self, groups: list[_Group]) -> None:
        """Bring to the device what was changed on the host since the last call."""
        optimizer = self._optimizer
        with torch.no_grad():
            optimizer._keep_bound()
            if self._values is not None:
                for i, (_, hyper) in enumerate(groups):
                    self._values.write(i, hyper)
            self._table.refresh_masters()
        optimizer.zero_grad(set_to_none=True)

    def _refuse_changes(self) -> None:
        """Raise RuntimeError for what needs a new capture."""
        optimizer = self._optimizer
        if optimizer._schedule is not self._schedule:
            raise _stale("optimizer.follow was called")
        if not optimizer._has_params(self._params) or optimizer._table is not self._table:
            raise _stale("the optimizer's parameters are others")
        fingerprint = self._table.fingerprint()
        if fingerprint != self._fingerprint:
            raise _stale(self._what_changed(fingerprint))
        for (name, buffer), address in zip(self._buffers.items(), self._addresses, strict=True):
            if buffer.data_ptr() != address:
                raise _stale(f"the memory of buffer {name} was changed (model.to)")
        if not all(map(operator.is_, self._scaling_tensors(), self._scaling)):
            raise _stale("the loss scale has other memory")
        options = self._current_options()
        for name, value in self._options.items():
            if options[name] != value:
                raise _stale(f"{name} was changed")
        if optimizer._state_names_by_group() != self._state_names:
            raise _stale("momentum or amsgrad was switched on or off")

    def _refuse_hyper(self, groups: list[_Group]) -> None:
        """Raise RuntimeError for a changed hyper-parameter that the graph does not read."""
        for i, (now, then) in enumerate(zip(groups, self._groups, strict=True)):
            if now[0] is not then[0]:
                raise _stale(f"lr of parameter group {i} is another tensor")
            if now[1] == then[1]:
                continue
            if self._schedule is not None:
                refuse_unread(i, then[1], now[1], self._schedule.of_group(i))
            followed = self._values.of_group(i) if self._values is not None else {}
            for name, value in then[1].items():
                if now[1][name] != value and name not in followed:
                    what = f"{name} of parameter group {i}"
                    raise _stale(f"{what} was changed from {value} to {now[1][name]}")

    def _current_groups(self) -> list[_Group]:
        return [self._optimizer._lr_and_hyper(group) for group in self._optimizer.param_groups]

    def _what_changed(self, fingerprint: bytes) -> str:
        now, then = memoryview(fingerprint).cast("q"), memoryview(self._fingerprint).cast("q")
        i = next(i for i in range(len(then)) if now[i] != then[i])
        row, field = divmod(i, 3)
        what = "requires_grad" if field == 2 else "the memory (p.data = ..., model.to)"
        return f"{what} of {self._table.name(row)} was changed"

    def _current_options(self) -> dict[str, Any]:
        """Settings that kernels got as numbers, or that decided which kernels there are."""
        optimizer, scaler = self._optimizer, self._scaler
        options = {
            "the model's train or eval mode": self._model.training,
            "optimizer.max_grad_norm": optimizer.max_grad_norm,
            "optimizer.skip_nonfinite": optimizer.skip_nonfinite,
        }
        if scaler is not None and scaler.is_enabled():
            options["the scaler's growth factor"] = scaler.get_growth_factor()
            options["the scaler's backoff factor"] = scaler.get_backoff_factor()
            options["the scaler's growth interval"] = scaler.get_growth_interval()
        return options


def _stale(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} after the step was captured, and the graph does not see that. Make the step anew "
        "with ampfuse.graphs.make_graphed_step, or undo the change."
    )


def _apply(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


class _Batch:
    """The structure of a batch ``(inputs, *targets)`` with tensors as leaves."""

    _CONSTANTS = (type(None), bool, int, float, str)

    def __init__(self, sample: Sequence[Any]) -> None:
        if not isinstance(sample, (tuple, list)) or not sample:
            raise TypeError(
                f"sample_batch is a {type(sample).__name__}; it has to be (inputs, *targets)"
            )
        self._structure = trees.replace(
            tuple(sample), lambda item: item.to("meta") if isinstance(item, Tensor) else item
        )
        self._leaves = _leaves_of(self._structure)
        for name, leaf in self._leaves.items():
            if not isinstance(leaf, (Tensor, *self._CONSTANTS)):
                raise TypeError(f"{name} is a {type(leaf).__name__}; pass tensors")

    def tensors_of(self, batch: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of `batch` in order. Raises ValueError unless it is like the sample."""
        found = _leaves_of(batch)
        if found.keys() != self._leaves.keys():
            names = sorted(found.keys() ^ self._leaves.keys())
            where = "missing" if names[0] in self._leaves else "new"
            raise ValueError(
                f"{names[0]} is {where}: the batch has another structure than captured"
            )
        tensors = []
        for name, expected in self._leaves.items():
            leaf = found[name]
            if isinstance(expected, Tensor):
                _check_like(name, leaf, expected)
                tensors.append(leaf)
            elif leaf != expected:
                raise ValueError(
                    f"{name} is {leaf!r}, and the step was captured with {expected!r}; pass a "
                    "tensor if it changes"
                )
        return tensors

    def filled_with(self, tensors: Sequence[Tensor]) -> Any:
        """The sample with `tensors` in place of its own."""
        rest = iter(tensors)
        return trees.replace(
            self._structure, lambda item: next(rest) if isinstance(item, Tensor) else item
        )


def _check_like(name: str, leaf: Any, expected: Tensor) -> None:
    if not isinstance(leaf, Tensor):
        raise ValueError(f"{name} is a {type(leaf).__name__}; a tensor was captured")
    if leaf.shape != expected.shape:
        raise ValueError(
            f"{name} has shape {tuple(leaf.shape)}, and the step was captured for "
            f"{tuple(expected.shape)}. A graph has one shape: use DataLoader(drop_last=True) or "
            "pad, or run such a batch through an eager step."
        )
    if leaf.dtype != expected.dtype:
        raise ValueError(
            f"{name} is {leaf.dtype}, and the step was captured for {expected.dtype}; convert it"
        )


def _leaves_of(batch: tuple[Any, ...]) -> dict[str, Any]:
    """What is in a batch that is no container, by a name such as ``inputs['mask']``."""
    leaves: dict[str, Any] = {}
    for i, value in enumerate(batch):
        _add_leaves(leaves, "inputs" if i == 0 else f"targets[{i - 1}]", value)
    return leaves


def _add_leaves(leaves: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for i, item in enumerate(value):
            _add_leaves(leaves, f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_leaves(leaves, f"{name}[{key!r}]", item)
    else:
        leaves[name] = value
