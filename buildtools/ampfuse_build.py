"""The build backend (PEP 517 and 660): scikit-build-core's, and one question asked before it.

Every hook first looks for the torch in the user's environment and stops with one line if ampfuse
cannot be built for it. The hooks that name build requirements add a CUDA compiler from PyPI when
torch is a CUDA 13 build and the machine has none. Everything else is scikit-build-core's work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from scikit_build_core import build as _scikit

import probe
from probe import BuildError

# torch is not asked for: a source distribution holds files and needs no compiler.
build_sdist = _scikit.build_sdist
get_requires_for_build_sdist = _scikit.get_requires_for_build_sdist


def _check(settings: Mapping[str, object] | None) -> list[str]:
    """Extra build requirements; leaves with one line, not a traceback, when the build cannot be."""
    try:
        probe.require_gil()
        if settings and settings.get("cmake.define.AMPFUSE_TORCH_INCLUDES"):
            torch = probe.of_headers()
        else:
            torch = probe.require_torch(probe.find_torch())
        if (settings or {}).get("cmake.define.AMPFUSE_CORE") or probe.find_core(torch):
            return []
        return probe.nvcc_requirements(torch, probe.cuda_mode(settings), probe.find_nvcc())
    except BuildError as error:
        sys.exit(f"error: {error}")


def get_requires_for_build_wheel(config_settings=None):
    return [*_check(config_settings), *_scikit.get_requires_for_build_wheel(config_settings)]


def get_requires_for_build_editable(config_settings=None):
    return [*_check(config_settings), *_scikit.get_requires_for_build_editable(config_settings)]


# Without isolation no hook above is called, and the metadata below would let pip fetch a torch.
def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _check(config_settings)
    return _scikit.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _check(config_settings)
    return _scikit.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _check(config_settings)
    return _scikit.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _check(config_settings)
    return _scikit.build_editable(wheel_directory, config_settings, metadata_directory)
