"""Lightning Fabric: ``Fabric(plugins=AmpFuse("O2"))``, and ``setup`` by the plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.amp.policy import make_policy
from ampfuse.integrations import beside, join

# What Lightning calls them: loggers and the summary of a model show it.
_NAMES = {"O0": "32-true", "O1": "16-mixed", "O2": "16-true", "O3": "16-true"}
_NAMES |= {"O4": "bf16-mixed", "O5": "bf16-true"}


class Levels:
    """Base of both plugins, which take the arguments of :func:`ampfuse.amp.initialize`.

    Raises RuntimeError for an unknown level; what is wrong with another argument, ``initialize``
    says when the training is set up.
    """

    def __init__(self, opt_level: str = "O1", **options: Any) -> None:
        self._autocast = make_policy(opt_level).autocast_type
        self.precision: Any = _NAMES[opt_level]
        self._options = {"opt_level": opt_level, **options}
        self._optimizers: list[Optimizer] = []

    def _initialize(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        earlier: Sequence[Optimizer] = (),
    ) -> None:
        others = beside(optimizers, earlier)
        amp.initialize(list(models), list(optimizers), **self._options)
        # A session where amp is off has no policy.
        self._autocast = getattr(sessions.latest().policy, "autocast_type", None)
        self._optimizers = join(optimizers, others)

    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        return amp.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scaler's state. Empty before there are optimizers."""
        return amp.state_dict(optimizer=self._optimizers[0]) if self._optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._optimizers:
            amp.load_state_dict(state_dict, optimizer=self._optimizers[0])


class AmpFuse(Levels, Precision):
    """Precision plugin for Fabric, which tells its plugins of models but not of optimizers.

    So ``model, optimizer = plugin.setup(fabric, model, optimizer)`` comes in the place of
    ``fabric.setup``; a model without optimizers stays as it is. To save the loss scaler:
    ``fabric.save(path, {"model": model, "optimizer": optimizer, "amp": plugin})``.
    """

    def setup(self, fabric: Fabric, model: nn.Module, *optimizers: Optimizer) -> Any:
        """``fabric.setup(model, *optimizers)``, after :func:`ampfuse.amp.initialize`.

        Under ModelParallelStrategy, which makes the shards, `model` is what ``setup_module`` gave
        and `optimizers` are made after it; ValueError if it is not.
        """
        if isinstance(fabric.strategy, ModelParallelStrategy):
            if not isinstance(model, _FabricModule):
                raise ValueError(
                    "ModelParallelStrategy replaces the parameters, so these optimizers have the "
                    "old ones. Call model = fabric.setup_module(model), create the optimizer from "
                    "model.parameters(), then call plugin.setup(fabric, model, optimizer)."
                )
            self._initialize([model.module], optimizers, self._optimizers)
            ready = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
            return (model, *ready)
        # Moved first, since masters stay where they are made.
        self._initialize([fabric.to_device(model)], optimizers, self._optimizers)
        return fabric.setup(model, *optimizers)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """A backward pass of all optimizers that were set up."""
        with amp.scale_loss(tensor, self._optimizers) as scaled:
            super().backward(scaled, model, *args, **kwargs)
