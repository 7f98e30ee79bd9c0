"""What this machine offers a build: the torch to compile against and the CUDA compiler.

Standard library only: the build backend imports it, CMake runs it
(``python buildtools/probe.py`` prints JSON), and so does the Makefile
(``--requirements`` prints what an unisolated build has to install first). Arguments such as
``2.15.0=folder`` stand for releases of torch of which there are headers alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The CUDA compiler and what it needs to build a kernel, as PyPI carries them from CUDA 13 on: parts
# of the package by which torch pins its own CUDA libraries. (Of CUDA 12 it has no nvcc but ptxas.)
PYPI_NVCC = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]"


class BuildError(Exception):
    """The build cannot go on; the message is one line that says what to do."""


@dataclass(frozen=True)
class Torch:
    """The torch found, as it describes itself."""

    version: str  # "2.14.1+cu130"
    cuda: str | None  # "13.0", or None for a CPU build
    include_dir: str
    python: list[str]  # the command that imports this torch

    @property
    def release(self) -> tuple[int, int]:
        return release_of(self.version)


@dataclass(frozen=True)
class Nvcc:
    path: str
    version: str  # "13.0"


def release_of(version: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


# --------------------------------------------------------------------------------------------------
# torch

_DESCRIBE_TORCH = """
import json, os, torch
root = os.path.dirname(torch.__file__)
print("ampfuse-torch:" + json.dumps(dict(
    version=torch.__version__,
    cuda=torch.version.cuda,
    include_dir=os.path.join(root, "include"),
)))
"""


def torch_commands(environ: Mapping[str, str] = os.environ) -> list[list[str]]:
    """Interpreter commands that may import the user's torch, best first.

    1. Plain: the answer when the build is not isolated.
    2. ``-I``: pip isolates a build by ``PYTHONPATH`` alone, so a child that ignores the
       environment sees the packages outside.
    3. ``-E``: the same, and the user's own site-packages, which ``-I`` hides.
    4. The active virtual environment: uv and build isolate by a real environment, where none of
       the above helps, but the user's may still be the active one.
    """
    commands = [[sys.executable], [sys.executable, "-I"], [sys.executable, "-E"]]
    if environ.get("VIRTUAL_ENV"):
        folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
        python = Path(environ["VIRTUAL_ENV"], folder, name)
        if python.exists() and _same_abi(python):
            commands.append([str(python), "-I"])
    return commands


def _same_abi(python: Path) -> bool:
    """Whether `python` loads the extension modules that this interpreter builds."""
    ask = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    run = subprocess.run([str(python), "-I", "-c", ask], capture_output=True, text=True)
    return run.stdout.strip() == str(sysconfig.get_config_var("SOABI"))


def find_torch(commands: Sequence[Sequence[str]] | None = None) -> Torch | None:
    """The first torch that one of `commands` imports, or None."""
    for command in torch_commands() if commands is None else commands:
        # From "/": a folder named torch in the working directory must not count as torch.
        run = subprocess.run(
            [*command, "-c", _DESCRIBE_TORCH], capture_output=True, text=True, cwd=os.sep
        )
        for line in run.stdout.splitlines():
            if line.startswith("ampfuse-torch:"):
                return Torch(python=list(command), **json.loads(line.partition(":")[2]))
    return None


# CUDA 13.0 kernels work with every supported torch; a driver for CUDA 13 also runs older builds.
WHEEL_CUDA = "13.0"


def of_headers(version: str = "", folder: str = "") -> Torch:
    """A release for which a wheel has a binding; its kernels are compiled by CUDA `WHEEL_CUDA`."""
    return Torch(version, WHEEL_CUDA, folder, [])


def torch_of(group: str, python: tuple[int, int] = sys.version_info[:2]) -> str:
    """``"2.15"``, the release of torch that a dependency group of pyproject.toml has for a Python.

    The groups are the one place that states what CI tests.
    """
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    line = re.search(rf"^{group} = .*", text, re.M)[0]
    for release, comparison, version in re.findall(
        r"torch==(\d+\.\d+)\.[*\d]+(?:; python_version (>=|<) '([\d.]+)')?", line
    ):
        if not comparison or (python >= release_of(version)) == (comparison == ">="):
            return release
    raise BuildError(f"pyproject.toml names no torch for Python {'.'.join(map(str, python))}.")


def torch_tested(python: tuple[int, int] = sys.version_info[:2]) -> tuple[str, str]:
    """``("2.11", "2.15")``, the oldest and the newest release that CI tests with a Python."""
    return torch_of("torch-oldest", python), torch_of("torch-newest", python)


def require_torch(torch: Torch | None) -> Torch:
    """`torch` if ampfuse can be built for it, as far as is known; otherwise BuildError."""
    oldest, newest = torch_tested()
    if torch is None:
        raise BuildError(
            f"ampfuse is compiled against the torch you have, and none was found: install torch "
            f"{oldest} or later first (uv, build and other tools that hide your environment: add "
            f"--no-build-isolation, with scikit-build-core and ninja installed)."
        )
    if torch.release < release_of(oldest):
        raise BuildError(
            f"ampfuse needs torch {oldest} or later, but torch {torch.version} is installed: "
            f'change it (pip install "torch=={newest}.*").'
        )
    return torch


def untested(torch: Torch) -> str | None:
    """One line about a torch newer than any that was tested; None for the others.

    No reason to refuse it: the compiler finds out whether it fits.
    """
    newest = torch_tested()[1]
    if torch.release <= release_of(newest):
        return None
    return (
        f"torch {torch.version} is newer than the newest that this ampfuse was tested with "
        f"({newest}); if it does not compile, look for a newer ampfuse."
    )


def require_gil(free_threaded: object = sysconfig.get_config_var("Py_GIL_DISABLED")) -> None:
    """BuildError under a free-threaded Python."""
    if free_threaded:
        raise BuildError(
            f"ampfuse does not run on a free-threaded Python (this is "
            f"{sys.version_info.major}.{sys.version_info.minor}t): its compiled module relies on "
            f"the GIL, so take the ordinary build of that Python."
        )


# --------------------------------------------------------------------------------------------------
# the core

_FIND_AMPFUSE = """
import importlib.util
spec = importlib.util.find_spec("ampfuse")
print("ampfuse-folder:" + spec.submodule_search_locations[0] if spec else "")
"""


def find_core(torch: Torch, root: Path = ROOT) -> str | None:
    """The core of an installed ampfuse of this version, for a source distribution to take as it is.

    So a torch that no wheel knows costs the time of one binding. None in a checkout, which changes;
    and where the environment says something of CUDA, which the core there may lack.
    """
    if not (root / "PKG-INFO").exists() or cuda_mode() != "AUTO":
        return None
    version = re.search(r'^version = "(.+)"', (root / "pyproject.toml").read_text("utf-8"), re.M)[1]
    run = subprocess.run(
        [*torch.python, "-c", _FIND_AMPFUSE], capture_output=True, text=True, cwd=os.sep
    )
    for line in run.stdout.splitlines():
        if line.startswith("ampfuse-folder:"):
            core = Path(line.partition(":")[2], f"libampfuse-{version}.so")
            return str(core) if core.exists() else None
    return None


# --------------------------------------------------------------------------------------------------
# nvcc


def nvcc_candidates(
    environ: Mapping[str, str] = os.environ, sys_path: Iterable[str] | None = None
) -> list[Path]:
    """Where a CUDA compiler may be, in the order in which it is taken.

    Explicit variables, then the search path, the usual folder, and PyPI's packages in this
    interpreter's environment.
    """
    found = []
    if environ.get("CUDACXX"):
        explicit = shutil.which(environ["CUDACXX"], path=environ.get("PATH", ""))
        found.append(Path(explicit or environ["CUDACXX"]))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            found.append(Path(environ[name], "bin", "nvcc"))
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        found.append(Path(on_path))
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    for entry in sys.path if sys_path is None else sys_path:
        found.append(Path(entry, "nvidia", "cu13", "bin", "nvcc"))
    return found


def find_nvcc(candidates: Iterable[Path] | None = None) -> Nvcc | None:
    """The first candidate that runs and is CUDA 12 or later, or None."""
    for path in nvcc_candidates() if candidates is None else candidates:
        try:
            run = subprocess.run([str(path), "--version"], capture_output=True, text=True)
        except OSError:
            continue
        release = re.search(r"release (\d+\.\d+)", run.stdout)
        if release and release_of(release[1]) >= (12, 0):
            return Nvcc(str(path), release[1])
    return None


def cuda_mode(settings: Mapping[str, object] | None = None) -> str:
    """AMPFUSE_CUDA as AUTO, ON or OFF: from pip's ``-C cmake.define.AMPFUSE_CUDA=``, else the
    environment, else AUTO."""
    value = (settings or {}).get("cmake.define.AMPFUSE_CUDA") or os.environ.get("AMPFUSE_CUDA")
    value = str(value or "AUTO").upper()
    mode = {"1": "ON", "TRUE": "ON", "YES": "ON", "0": "OFF", "FALSE": "OFF", "NO": "OFF"}
    mode = mode.get(value, value)
    if mode not in ("AUTO", "ON", "OFF"):
        raise BuildError(f"AMPFUSE_CUDA must be AUTO, ON or OFF, not {value!r}.")
    return mode


def nvcc_requirements(torch: Torch, mode: str, nvcc: Nvcc | None) -> list[str]:
    """Packages that bring the CUDA compiler, when one is wanted, missing and to be had."""
    if mode == "OFF" or nvcc is not None:
        return []
    if torch.cuda is not None and release_of(torch.cuda)[0] == 13 and sys.platform == "linux":
        major, minor = release_of(torch.cuda)
        return [f"{PYPI_NVCC}=={major}.{minor}.*"]
    if mode == "ON":
        raise BuildError(
            "AMPFUSE_CUDA=ON, but no nvcc of CUDA 12 or later was found (CUDACXX, CUDA_HOME, "
            "PATH, /usr/local/cuda), and PyPI has one for CUDA 13 builds of torch only, not for "
            f"torch {torch.version}: install the CUDA toolkit, or set CUDACXX to its nvcc, or "
            "leave AMPFUSE_CUDA unset to build for the CPU."
        )
    return []


# --------------------------------------------------------------------------------------------------


def build_requirements(torch: Torch) -> list[str]:
    """All that ``pip install --no-build-isolation`` needs to find installed."""
    nvcc = nvcc_requirements(torch, cuda_mode(), find_nvcc())
    system = re.search(r"requires = (\[.*\])", (ROOT / "pyproject.toml").read_text("utf-8"))
    return [*json.loads(system[1]), "cmake>=3.24", "ninja", *nvcc]


def main(arguments: Sequence[str]) -> str:
    require_gil()
    headers = [argument.split("=", 1) for argument in arguments if "=" in argument]
    torches = [of_headers(version, folder) for version, folder in headers]
    if not torches:
        torches = [require_torch(find_torch())]
        if told := untested(torches[0]):
            print(f"warning: {told}", file=sys.stderr)
    if list(arguments) == ["--requirements"]:
        return "\n".join(build_requirements(torches[0]))
    nvcc = find_nvcc()
    facts = {"torches": list(map(asdict, torches)), "tested": torch_tested()}
    facts |= {"nvcc": nvcc and asdict(nvcc), "core": None if headers else find_core(torches[0])}
    return json.dumps(facts)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except BuildError as error:
        sys.exit(str(error))
