"""The compiled extension, as ``C``, after a check that it fits the torch that is running.

Python code reaches every compiled function as ``_core.C.<name>`` at the time of the call, so that
tests can put another build of the extension in its place.
"""

from __future__ import annotations

import torch

_REBUILD = "pip install --no-cache-dir --force-reinstall --no-deps <where ampfuse came from>"


def _release(version: str) -> str:
    """``"2.14.1+cu130"`` -> ``"2.14"``: within a release torch keeps its binary interface."""
    return ".".join(version.split(".")[:2])


def check_torch(built_for: str, running: str) -> None:
    """Raise ImportError if an extension built for torch `built_for` cannot serve `running`.

    CPU and CUDA builds of one release are interchangeable: the extension links to neither.
    """
    if _release(built_for) != _release(running):
        raise ImportError(
            f"ampfuse was compiled for torch {built_for}, but torch {running} is running. "
            f"Compile it again for this torch: {_REBUILD}"
        )


# Checked before the extension is loaded: loading it into another torch may fail with an undefined
# symbol, or worse, not fail.
try:
    from ampfuse import _build_info as build_info
except ImportError as error:
    raise ImportError(
        "ampfuse's compiled extension is not here: this is a source tree that was not installed. "
        "Install it with: pip install <the folder that holds pyproject.toml>"
    ) from error
check_torch(build_info.TORCH_VERSION, str(torch.__version__))

try:
    from ampfuse import _C as C
except ImportError as error:
    raise ImportError(
        f"ampfuse's compiled extension does not load ({error}). "
        f"It was built as: {build_info.BUILD_INFO}. Compile it again: {_REBUILD}"
    ) from error

__all__ = ["C", "build_info", "check_torch"]
