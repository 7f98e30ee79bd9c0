"""Which parameters of a model are matrices for Muon, and which are AdamW's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

# Fused projections of attention, by the names that they have in models: how many they are.
_FUSED = {"qkv": 3, "in_proj": 3, "in_proj_weight": 3, "c_attn": 3, "Wqkv": 3}
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class MuonGroups(list[dict[str, Any]]):
    """Parameter groups; ``print`` shows what went where, and why."""

    def __init__(self, groups: list[dict[str, Any]], reasons: dict[str, str]) -> None:
        super().__init__(groups)
        self._reasons = reasons

    def __str__(self) -> str:
        lines = []
        for group in self:
            elements = sum(param.numel() for param in group["params"])
            count = len(group["params"])
            options = [
                f"{key}={group[key]}" for key in ("split", "transposed", "flatten") if key in group
            ]
            heading = ", ".join([group["algorithm"], *options])
            lines.append(f"{heading}: {count} tensor{'s' * (count > 1)}, {elements:,} elements")
            lines += [f"  {name}: {self._reasons[name]}" for name in group["param_names"]]
        return "\n".join(lines)


def muon_groups(
    model: nn.Module,
    *,
    heads: Collection[str] | None = None,
    split: Mapping[str, int | list[int]] | None = None,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> MuonGroups:
    """Parameter groups for :class:`ampfuse.optim.Muon`, of all parameters that are trained.

    Muon has the weights of linear layers and convolutions, and 3-D weights as batches (experts).
    AdamW has, as in the papers, embeddings and what is tied to them, the model's head, biases,
    norms, and what has a side of length 1, as positions or a convolution of each channel by itself.
    ``print(muon_groups(model))`` shows all of it. ::

        groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-4, "weight_decay": 0.01})
        optimizer = ampfuse.optim.Muon(groups)

    Arguments:
        heads: names of modules that are heads. By default it is the last linear layer.
        split: of a module by its last name, how many projections are fused in it, or the sizes of
            these. By default known names are 3 (``qkv``, ``in_proj``, ``c_attn``, ``Wqkv``) where
            the layer has three times as many outputs as inputs.
        muon, adamw: further options of their groups.

    Raises:
        ValueError: a name in `heads` or `split` is no module's.
    """
    modules = dict(model.named_modules())
    if heads is None:
        heads = [name for name, module in modules.items() if isinstance(module, nn.Linear)][-1:]
    splits = _FUSED | dict(split or {})
    last_names = {name.rpartition(".")[2] for name in [*modules, *dict(model.named_parameters())]}
    for what, names, known in (("heads", heads, modules), ("split", split or {}, last_names)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} names {name!r}, and the model has nothing of that name")
    tied = {module.weight for module in modules.values() if isinstance(module, _EMBEDDINGS)}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    reasons = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        owner, _, own_name = name.rpartition(".")
        module = modules[owner]
        reason = _why_adamw(module, param, own_name)
        if param in tied:
            reason = "an embedding"
        elif owner in heads and reason is None:
            reason = "the head"
        group: dict[str, Any] = {"algorithm": "adamw", **(adamw or {})}
        if reason is None:
            group = {"algorithm": "muon", **(muon or {}), **_seen_as(module, param)}
            transposed = group.get("transposed", False)
            inputs, outputs = param.shape[-2:] if transposed else param.shape[-2:][::-1]
            part = owner.rpartition(".")[2] if own_name == "weight" else own_name
            parts = splits.get(part)
            if parts is not None and (part in (split or {}) or outputs == 3 * inputs):
                group["split"] = parts
            reason = f"{tuple(param.shape)}"
        key = tuple(map(repr, group.items()))
        into = groups.setdefault(key, {"params": [], "param_names": [], **group})
        into["params"].append(param)
        into["param_names"].append(name)
        reasons[name] = reason
    # All of one algorithm side by side.
    ordered = sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")
    return MuonGroups(ordered, reasons)


def _why_adamw(module: nn.Module, param: Tensor, name: str) -> str | None:
    if param.ndim < 2:
        return "a vector"
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution of each channel by itself" if param.shape[1] == 1 else None
    if 1 in param.shape:
        return "a side of length 1"
    is_table = any(word in name for word in ("embed", "bias", "token", "pos"))
    return "a table, by its name" if is_table else None


def _seen_as(module: nn.Module, param: Tensor) -> dict[str, Any]:
    """How its matrices lie, where that is not what Muon takes it for."""
    if isinstance(module, _CONVOLUTIONS) and param.ndim == 3:
        return {"flatten": True}
    # transformers' layer of GPT-2, which it need not be here to know.
    return {"transposed": True} if type(module).__name__ == "Conv1D" else {}
