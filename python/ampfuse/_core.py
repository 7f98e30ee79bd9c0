"""The compiled extension, as ``C``: the binding that fits the torch that is running.

A binding is compiled for one release of torch, within which torch keeps its binary interface, for
CPU and CUDA builds alike. A wheel has several, over one core.

Python code reaches every compiled function as ``_core.C.<name>`` at the time of the call, so that
tests can put another build of the extension in its place.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ampfuse import _C as C

COMPILE = "pip install --no-cache-dir --force-reinstall --no-deps <ampfuse's source folder>"


def release_of(version: str) -> str:
    """``"2.14.1+cu130"`` -> ``"2.14"``."""
    return ".".join(version.split(".")[:2])


def check_torch(built_for: Sequence[str], running: str) -> None:
    """Raise ImportError if no binding for the torch versions `built_for` serves `running`."""
    releases = list(map(release_of, built_for))
    if release_of(running) not in releases:
        raise ImportError(
            f"this ampfuse was compiled for torch {', '.join(releases)}, but torch {running} is "
            f"installed. Install one of these, or compile ampfuse for this torch: {COMPILE}"
        )


def driver_problem(built: int, driver: int) -> str | None:
    """Why kernels with the CUDA runtime `built` do not run on a GPU's driver for `driver`, or None.

    Both as 13020 for 13.2; 0: there are none. A driver runs what was built for its major version or
    an earlier one.
    """
    if not 0 < driver // 1000 < built // 1000:
        return None
    return (
        f"ampfuse's CUDA kernels were compiled with CUDA {built // 1000}, but this GPU's driver "
        f"is for CUDA {driver // 1000}.{driver % 1000 // 10}: optimizers on the GPU will fail. "
        "Update the driver (CUDA 13: 580 or later), or compile ampfuse with an older nvcc: "
        f"CUDACXX=<nvcc> {COMPILE}"
    )


# Checked before the extension is loaded: loading it into another torch may fail with an undefined
# symbol, or worse, not fail.
try:
    from ampfuse import _build_info as build_info
except ImportError as error:
    raise ImportError(
        "ampfuse's compiled extension was not found: this source tree has not been installed. "
        "Install it with: pip install <the folder that holds pyproject.toml>"
    ) from error
check_torch(build_info.TORCH_VERSIONS, str(torch.__version__))

_name = "_C_" + release_of(str(torch.__version__)).replace(".", "_")
try:
    C = importlib.import_module(f"ampfuse.{_name}")
except ImportError as error:
    raise ImportError(
        f"ampfuse's compiled extension {_name} failed to load ({error}). "
        f"It was built as: {build_info.BUILD_INFO}. Compile it again: {COMPILE}"
    ) from error

if torch.version.cuda is not None and (_problem := driver_problem(*C.cuda_versions())):
    warnings.warn(_problem, stacklevel=2)

EXTENSION = C  # itself, also where tests have put another in its place

__all__ = [
    "COMPILE",
    "EXTENSION",
    "C",
    "build_info",
    "check_torch",
    "driver_problem",
    "release_of",
]
