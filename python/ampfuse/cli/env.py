"""Print what a bug report needs: versions, what was built, and whether it fits this machine.

It has to run where the rest does not. So it uses the standard library alone, every probe may fail
without stopping the others, and torch and the extension are looked at from a child process: the
report survives their crash, and says which of them it was."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata

import ampfuse
from ampfuse.cli import env_probes
from ampfuse.cli.env_probes import PROBES, Facts, failure, guarded
from ampfuse.hardware import core_count, cpu_flags, cpu_model

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "rich", "triton")
# What ampfuse or torch picks code by, in Linux's names.
_X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
_ARM_FLAGS = ("asimd", "fphp", "asimdhp", "bf16", "sve")
_VARIABLES = re.compile(
    r"AMPFUSE_\w+|CUDA_(HOME|PATH|VISIBLE_DEVICES)|CUDACXX|CUDAARCHS|TORCH_CUDA_ARCH_LIST"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|(OMP|MKL)_NUM_THREADS|ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA"
    r"|PYTORCH_\w*ALLOC_CONF"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status."""
    facts = report()
    print(json.dumps(facts, indent=2, default=str) if args.json else as_text(facts))
    return 0


def report() -> dict[str, Facts]:
    """The whole report, by section. Takes a few seconds, most of them to import torch."""
    facts = {
        "ampfuse": guarded(_installation),
        "system": guarded(_system),
        "python": guarded(_python),
        "compilers": guarded(_compilers),
        "driver": guarded(_driver),
        "variables": _variables(),
    }
    for name, found in _probe_in_child().items():
        facts.setdefault(name, {}).update(found)
    return facts


def as_text(facts: dict[str, Facts]) -> str:
    """`facts` of :func:`report` as aligned lines, one section after the other."""
    width = max(len(key) for section in facts.values() for key in section)
    lines = []
    for name, section in facts.items():
        lines.append(name)
        lines += [f"  {key:<{width}}  {_as_line(value)}" for key, value in section.items()]
    return "\n".join(lines)


def tested_with(oldest: str, newest: str, installed: str) -> str:
    """The releases of torch tested (``"2.11"``, ``"2.15"``), and whether `installed` is newer."""
    numbers = [re.findall(r"\d+", version)[:2] for version in (newest, installed)]
    tested, release = (tuple(map(int, found)) for found in numbers)
    newer = len(release) == 2 and release > tested
    return f"{oldest} to {newest}" + (f"; torch {installed} is newer than these" if newer else "")


# Probes of this process: nothing here imports torch or the extension.


def _installation() -> Facts:
    found: Facts = {"path": os.path.dirname(os.path.abspath(ampfuse.__file__))}
    try:
        from ampfuse import _build_info
    except ImportError:
        found["built"] = "no: a source tree that was not installed"
        return found
    found["version"] = _build_info.VERSION
    found["built for torch"] = ", ".join(_build_info.TORCH_VERSIONS)
    found["tested with torch"] = tested_with(*_build_info.TORCH_TESTED, _version("torch"))
    found["built as"] = _build_info.BUILD_INFO
    found["CUDA at build time"] = _build_info.CUDA_NOTE
    return found


def _system() -> Facts:
    flags = cpu_flags()
    return {
        "OS": _os_name(),
        "kernel": platform.platform(),
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "CPU": cpu_model(),
        "CPU cores": f"{core_count()} usable of {os.cpu_count()}",
        "CPU features": [flag for flag in _X86_FLAGS + _ARM_FLAGS if flag in flags] or "unknown",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }


def _python() -> Facts:
    found: Facts = {"python": platform.python_version(), "executable": sys.executable}
    for package in _PACKAGES:
        found[package] = _version(package)
    # The CUDA libraries that torch's wheels bring; a mixture of major versions explains a lot.
    nvidia = [
        f"{name} {dist.version}"
        for dist in metadata.distributions()
        if (name := dist.metadata["Name"] or "").startswith("nvidia-")
    ]
    found["CUDA libraries"] = sorted(nvidia) or "none from PyPI"
    return found


def _compilers() -> Facts:
    found: Facts = {}
    for tool in ("g++", "clang++", "cmake", "ninja"):
        found[tool] = (_run(tool, "--version") or "not found").splitlines()[0]
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    release = re.search(r"release [\d.]+, V[\d.]+", _run(nvcc, "--version") or "")
    found["CUDA toolkit"] = f"{release[0]} ({nvcc})" if release else "not found (nvcc)"
    return found


def _driver() -> Facts:
    asked = "name,compute_cap,memory.total,driver_version"
    listing = _run("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")
    if listing is None:
        return {"nvidia-smi": "not found, or no driver"}
    found: Facts = {f"GPU {i}": line for i, line in enumerate(listing.splitlines())}
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", _run("nvidia-smi") or "")
    found["newest CUDA of the driver"] = cuda[1] if cuda else "unknown"
    return found


def _variables() -> Facts:
    set_here = sorted(name for name in os.environ if _VARIABLES.fullmatch(name))
    return {name: os.environ[name] for name in set_here} or {"of those that matter": "none set"}


def _probe_in_child(timeout_s: float = 120.0) -> dict[str, Facts]:
    """Run PROBES in another interpreter and collect what it says before it ends."""
    # By path, under a name of its own: as a module it would import the package first.
    path = os.path.abspath(env_probes.__file__)
    code = f"import runpy; runpy.run_path({path!r}, run_name='__probe__')"
    status: int | str
    try:
        # Warnings of the libraries go to stderr, which is shown only if the child crashes.
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s
        )
        output, errors, status = child.stdout, child.stderr, child.returncode
    except subprocess.TimeoutExpired as expired:
        output, errors, status = _decoded(expired.stdout), "", f"no answer in {timeout_s:.0f} s"
    except OSError as error:
        return {"torch": {"probe": failure(error)}}
    facts: dict[str, Facts] = {name: {} for name, _ in PROBES}
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"probed":')]
    for answer in answers:
        facts[answer["probed"]].update(answer["facts"])
    if len(answers) < len(PROBES):
        name = PROBES[len(answers)][0]
        last_words = errors.strip().splitlines()[-1:]
        facts[name]["probe"] = " ".join(["DIED:", _exit_reason(status), *last_words])
    return facts


# Helpers that do not raise.


def _exit_reason(status: int | str) -> str:
    if isinstance(status, int) and status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}."
        except ValueError:
            return f"killed by signal {-status}."
    return f"exit status {status}." if isinstance(status, int) else f"{status}."


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except Exception:  # a damaged metadata folder raises all sorts of things
        return "not installed"


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _decoded(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _as_line(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value).replace("\n", " ")
