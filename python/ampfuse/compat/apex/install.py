"""Put these modules where ``import apex`` and the names of its extensions look."""

from __future__ import annotations

import csv
import importlib.abc
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_HERE = "ampfuse.compat.apex"
EXTENSIONS = ("amp_C", "apex_C", "fused_adam_cuda")  # imported by scripts, like apex
# Modules of these names which lead here: on ``sys.path``, processes that are spawned find them.
ON_PATH = Path(__file__).parent / "on_path"

# apex's names, and what takes the place of those below them that ampfuse does not have.
with (Path(__file__).parent / "unsupported.csv").open(newline="", encoding="utf-8") as _file:
    _REPLACEMENTS = dict(csv.reader(_file))


class UnsupportedFinder(importlib.abc.MetaPathFinder):
    """Meta-path finder, placed last: raises an error that names the replacement for a module of
    apex that ampfuse lacks.

    ``from package import name`` also asks the finders if `name` is not an attribute.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        installed = getattr(sys.modules.get("apex"), "__name__", "") == _HERE
        prefixes = (f"{_HERE}.", "apex.") if installed else f"{_HERE}."
        if fullname.startswith(prefixes) and not _is_probe():
            name = fullname.replace(_HERE, "apex", 1)
            known = (start for start in _REPLACEMENTS if f"{name}.".startswith(f"{start}."))
            instead = _REPLACEMENTS.get(max(known, key=len, default=""), "torch's own modules")
            # With the requested name, `from apex import x` would swallow this error.
            raise ModuleNotFoundError(
                f"ampfuse does not provide {name}: use {instead}; docs/from_apex.md lists "
                "what replaces apex's names.",
                name=name,
            )


def _is_probe() -> bool:
    """Whether ``importlib.util.find_spec`` asks, and not an import: it returns None for what is
    missing, and the script takes another way."""
    asker = sys._getframe(2).f_back  # that of importlib's loop over the finders
    return asker is not None and asker.f_code is importlib.util.find_spec.__code__


_FINDER = UnsupportedFinder()


def installed_apex() -> str | None:
    """Find another package called apex, imported or importable; None if there is none."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # a module without one
        return "an unknown place"
    if spec is None or spec.name == _HERE or Path(spec.origin or "").parent == ON_PATH:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ["an unknown place"])


def install() -> ModuleType:
    """Have ``import apex``, ``apex.amp``, ..., and the extensions' names find ampfuse's; return it.

    Call it before anything imports apex. Old checkpoints that hold apex's pickled loss scalers then
    load too, also with ``torch.load(..., weights_only=True)``. If another apex is installed, a
    warning names it; if it was imported already, RuntimeError is raised: modules hold on to it.
    """
    other = installed_apex()
    if other is not None and "apex" in sys.modules:
        raise RuntimeError(
            f"The apex at {other} has already been imported. Call ampfuse.compat.apex.install() "
            "before anything imports apex, or do not call it and keep that one."
        )
    if other is not None:
        which = f"`import apex` finds ampfuse's ({_HERE}), although {other} is installed."
        warnings.warn(which, stacklevel=2)
    return register_modules()


def register_modules() -> ModuleType:
    """Do what :func:`install` does, without looking for another apex."""
    package = importlib.import_module(_HERE)
    sys.modules.update(_modules())
    torch.serialization.add_safe_globals(_pickled_classes())
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    return package


def uninstall() -> None:
    """Undo :func:`install`, except in code that has imported the modules. Old pickles are
    refused."""
    for name, module in _modules().items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    old = _pickled_classes()
    kept = [each for each in torch.serialization.get_safe_globals() if each not in old]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept)


def _modules() -> dict[str, ModuleType]:
    """All modules of this package, which imports them itself, by their names in apex."""
    modules = {
        name.replace(_HERE, "apex", 1): module
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(f"{_HERE}.") and not name.endswith(".__main__")
    }
    return modules | {name: modules[f"apex.{name}"] for name in EXTENSIONS}


def _pickled_classes() -> list[Any]:
    """The loss scalers that apex, or we, pickled into checkpoints, for ``weights_only=True``."""
    from ampfuse.compat.apex import amp, fp16_utils

    return [
        amp.scaler.LossScaler,
        (amp.scaler.LossScaler, "apex.amp.scaler.LossScaler"),
        fp16_utils.LossScaler,
        fp16_utils.DynamicLossScaler,
        (fp16_utils.LossScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
        (fp16_utils.DynamicLossScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
    ]
