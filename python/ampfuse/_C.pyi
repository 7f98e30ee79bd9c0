# Written by buildtools/stub.py; see csrc/torch/bind*.cpp.
"""ampfuse's compiled core (csrc/torch). Python code reaches it as ``ampfuse._core.C``.

Lists of tensors: strided and dense, on one device, float32, float16 or bfloat16 in any mixture;
``ampfuse.ops`` has the public functions and says more. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

def axpby(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    out: Sequence[Tensor],
    a: float,
    b: float,
    found_inf: Tensor | None = None,
    check: int = -1,
) -> None:
    """out = a * x + b * y. Sets found_inf where x (0), y (1) or either (-1) is not finite."""

def copy(src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
    """dst = src, cast."""

def cpu_isa() -> str:
    """The instruction set the CPU kernels run on: scalar, avx2 or avx512.

    ``AMPFUSE_CPU_ISA`` forces one, in the environment before the first use.
    """

def cuda_archs() -> list[str]:
    """The architectures they were built for."""

def cuda_built() -> bool:
    """Whether the CUDA kernels were built."""

def cuda_versions() -> tuple[int, int]:
    """Of the CUDA runtime in them and of this machine's driver, as 13020 for 13.2; 0: none."""

def decode_state(
    algorithm: str, state: int, storage: str, lists: Sequence[Tensor], out: Tensor
) -> None:
    """out (float32) = the state, by its place, that codes and scales of `storage` hold."""

def empty_laid_out_as(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized tensor laid out in memory as `like`, to live long.

    On a CPU a large one is on huge pages, where the system has them.
    """

def encode_state(
    algorithm: str, state: int, value: Tensor, storage: str, lists: Sequence[Tensor]
) -> None:
    """The other way; rounds."""

def half_ops() -> bool:
    """Whether kernels for half types on the CPU stand in for torch's; see ``cpu_half_ops``."""

def join_master(model: Tensor, remainder: Tensor, out: Tensor) -> None:
    """out (float32) = the split master of the weight `model` with its `remainder`, int16."""

def l2norm(
    tensors: Sequence[Tensor],
    per_tensor: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm over all, norm of each or an empty tensor), float32, of tensors * inv_scale.

    Sets found_inf where one of these values is not finite.
    """

def layerwise(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    clip: bool,
) -> None:
    """grads = ratio * (grads + weight_decay * params), with LARC's ratio of each tensor.

    ratio = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps), with `clip` at most lr
    and divided by lr. Where a norm is zero the gradient stays. `lr_tensor` (float32, device)
    replaces `lr`.
    """

def scale(
    src: Sequence[Tensor], dst: Sequence[Tensor], scale: float, found_inf: Tensor | None = None
) -> None:
    """dst = src * scale, one rounding. Sets found_inf where src is not finite."""

def schema() -> dict[str, Any]:
    """Algorithms, their states and hyper-parameters, and storage types; see _schema.py."""

def set_half_ops(on: bool, every: bool = False) -> None:
    """Register them with torch, for the process, or take them back.

    `every`: even for half types for which this CPU has instructions, so that tests reach every
    kernel.
    """

def split_master(master: Tensor, model: Tensor, remainder: Tensor) -> None:
    """The other way: `model` is written too. Tensors of one master are laid out alike."""

def step(
    algorithm: str,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    models: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    updates: Sequence[Tensor],
    steps: Tensor,
    norm_averages: Tensor | None,
    lr_tensor: Tensor | None,
    values: Mapping[str, float],
    loss_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step of an algorithm of `ParamTable` on lists of tensors, states of any type included.

    `models` (may be empty) receive the parameters, rounded. `states` are lists in the kernel's
    order. `steps` (float32, one for each tensor) counts the steps before this one and is
    advanced, but for tensors without elements. `norm_averages` (likewise) is NovoGrad's second
    moment. `lr_tensor` (float32, one element or one for each tensor) replaces ``values["lr"]``;
    for `values` see `ParamTable.set_hyper`. Gradients are divided by `loss_scale`. Where
    `found_inf` (float32) is set, nothing happens.

    "lamb_update" advances LAMB's moments and writes the update u into `updates` (which may be
    `grads`); ``"sgd"`` on u with the rate of each tensor is then its second half.
    """

def torch_version() -> str:
    """The torch this was built for."""

def unscale(
    grads: Sequence[Tensor],
    out: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """out = grads * inv_scale; out may be grads. Sets found_inf where a result is not finite."""

def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    shared: Sequence[Tensor] = [],
    dynamic: bool = True,
) -> None:
    """Applies the loss-scale rule to the OR of found_infs, and sets the shared flags if it is 1.

    `scale` and the flags are float32, the trackers int32, each one element. An overflow resets
    `growth_tracker` and, when it is the `hysteresis`-th, multiplies the scale by
    `backoff_factor`; `growth_interval` clean calls in a row multiply it by `growth_factor`,
    within the limits. With ``dynamic=False`` the scale stays.
    """

class GradientLedger:
    """The passes between two steps of a table; see gradient_ledger.h."""
    def begin_backward(self) -> None:
        """Put earlier gradients away, so that a backward pass brings new ones only."""

    def end_backward(self, scale: Tensor, check: bool) -> bool:
        """Take in a pass whose gradients carry `scale`; with `check`, inspect it.

        Returns whether it left a gradient, or the delayed one before it did.
        """

    def mark_backward(self, scale: Tensor) -> None:
        """Take in a pass, but leave its gradients scaled."""

    def accumulated(self, row: int, make: bool = False) -> Tensor | None:
        """In a backward pass: what earlier ones left, float32 and unscaled, to be edited in place.

        Who edits it says by ``found_inf`` whether it is finite. None where they left nothing;
        zeros then with `make`.
        """

    def cancel_backward(self) -> None:
        """Drop what a failed pass left."""

    def materialize(self) -> None:
        """Put FP32 unscaled gradients into the masters' ``.grad``."""

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients, or fill them with zeros."""

class Inspector:
    """Of a table; see inspector.h."""
    def state_field(self, name: str) -> Tensor:
        """A 0-dim view of a field of the step's state on the device; ValueError: no such field."""

    def set_gather(self, gather: Callable[..., Any], counted_elsewhere: Tensor | None) -> None:
        """Have steps be decided with other ranks: `gather` returns what all call it with.

        It is called with bytes, uint8 on the device, after each inspection that counts, and
        before an update that needs norms of rows. `counted_elsewhere`, bool [rows]: rows that
        another rank has alike, and adds the norms of.
        """

class Masters:
    """A table's masters; see masters.h."""
    def exist(self) -> bool:
        """Whether some row has one."""

    def accept_model_weights(self) -> None:
        """The model weights are what the masters round to, now."""

    def refresh(self, all: bool = False) -> None:
        """Masters take the elements that somebody edited in the model since our last write.

        An edit is seen by the weight's version and memory; `all` looks for it in every weight.
        """

    def publish(self) -> None:
        """Model weights = masters, rounded."""

class ParamTable:
    """The rows of one optimizer; see param_table.h.

    A row is a parameter with its half model weight, if it is a master, its gradients, states and
    step count.
    """
    def __init__(self, algorithm: str, device: torch.device) -> None:
        """`algorithm`: one of `schema`, such as "adam" (also AdamW), or "none".

        With "none" the table keeps gradients only, for an optimizer that steps by itself.
        """

    def add_row(
        self,
        param: Tensor,
        model: Tensor | None,
        name: str,
        model_version: int = 0,
        at_random: bool = False,
        whole: Tensor | None = None,
        origin: int = 0,
    ) -> int:
        """Appends a row and returns its index.

        `model` is the half weight beside the FP32 master `param`, or beside the remainder of a
        split one, int16; `model_version` the version of it that the master has followed;
        `at_random`: a BF16 parameter is rounded stochastically; `whole`: the DTensor whose local
        tensor `model` is, or without it `param`, from its element `origin` on. RuntimeError or
        TypeError, naming the row, for tensors that the kernels cannot walk.
        """

    def remember(self, groups: Any = None, states: Any = None) -> None:
        """Rows are what an optimizer's ``param_groups`` hold, now; and `set_states` was called with
        what its ``state`` holds."""

    def holds(self, groups: Any = None, states: Any = None) -> bool:
        """Whether they hold the same still, and each DTensor its local tensor."""

    def __len__(self) -> int: ...
    def param(self, row: int) -> Tensor:
        """What the row's step works on."""

    def model(self, row: int) -> Tensor | None:
        """The half weight beside a master."""

    def name(self, row: int) -> str:
        """What messages call it."""

    def set_states(
        self,
        row: int,
        states: Sequence[Sequence[Tensor]] | None,
        storage: str = "fp32",
        average: Tensor | None = None,
    ) -> None:
        """The row's states in the kernel's order, at most three, in a storage type of `schema`.

        Of each the tensors of that type: elements laid out as the parameter and, where the type
        has blocks, their float32 scales. None: the row has no states yet, and `collect` says so
        when it has a gradient. `average` (float32): the moving average of the parameter.
        """

    def steps(self) -> Tensor:
        """The step counts: float32, shape (rows,), on the device; rows' counts are views of it."""

    def norm_averages(self) -> Tensor:
        """NovoGrad's averages of gradient norms: float32, shape (rows,), on the device."""

    def set_hyper(
        self,
        begin: int,
        end: int,
        lr_tensor: Tensor | None,
        values: Mapping[str, float],
        on_device: Mapping[str, Tensor] = {},
    ) -> None:
        """Hyper-parameters of rows begin..end, by the names of `schema`; others are zero and off.

        `lr_tensor` (float32) replaces lr. `on_device` (float64, one element each) replaces both:
        a step reads what these hold when it runs. ValueError: another name.
        """

    def fingerprint(self) -> bytes:
        """Three int64 a row, to be compared with earlier ones.

        The addresses of parameter and model weight (0 for none), and whether the weight, or else
        the parameter, requires a gradient.
        """

    @property
    def masters(self) -> Masters:
        """FP32 masters and the half weights beside them."""

    @property
    def inspector(self) -> Inspector:
        """What inspections found."""

    @property
    def gradients(self) -> GradientLedger:
        """Gradients between two steps."""

    @property
    def plan(self) -> StepPlan:
        """One step."""

class SavedTensor:
    """What autograd keeps of a tensor."""
    def __init__(self, tensor: Tensor) -> None:
        """Of what batch_norm_act returned nothing is kept but how to make it again."""

    def unpack(self) -> Tensor:
        """The tensor, or one with the same bits. RuntimeError: it was changed since."""

class StepPlan:
    """A table's step; see step_plan.h."""
    def collect(
        self,
        scale: Tensor | None,
        unscales: bool,
        unscales_half: bool = False,
        groups: Any = None,
        states: Any = None,
    ) -> list[int] | None:
        """Find and check the gradients of a step; the rows that have one but no state yet.

        None where `groups` or `states`, if given, are not what the table remembers. `scale` is
        what gradients outside scale_loss carry; with `unscales` the update writes those in FP32
        back without it, with `unscales_half` the others too. Nothing has changed when this
        raises.
        """

    def measure(self) -> None:
        """Inspect the collected gradients, unless that was done already."""

    def new_meter(self, changed: bool) -> list[Tensor]:
        """Buffers for `update` to meter into; `changed`: with bits of the changed weights."""

    def update(
        self,
        *,
        found_inf: Tensor | None,
        max_norm: float,
        inspect: bool,
        skip_nonfinite: bool,
        meter: Sequence[Tensor] | None = None,
    ) -> None:
        """The step over what `collect` found: decide, and unless that says skip, update."""

    def decide(
        self, *, found_inf: Tensor | None, max_norm: float, inspect: bool, skip_nonfinite: bool
    ) -> None:
        """Decide without an update, for an optimizer that steps by itself."""

    def finish_step(self) -> None:
        """The gradients are spent."""

    def mark_stepped(self) -> None:
        """A captured graph has stepped the rows.

        The versions of their tensors move, and masters and model weights count as agreeing.
        """
