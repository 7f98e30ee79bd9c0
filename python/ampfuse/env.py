"""The environment report: what a bug report needs to be understood.

    ampfuse env            text, to paste
    ampfuse env --json     the same as data

It has to run where the rest does not. So it uses the standard library alone, every probe may fail
without stopping the others, and torch and the extension are looked at from a child process: the
report survives their crash, and says which of them it was.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

# One section of the report: what is asked -> what was found.
Facts = dict[str, Any]

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "rich", "triton")
# What ampfuse or torch picks code by, in Linux's names.
_X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
_ARM_FLAGS = ("asimd", "fphp", "asimdhp", "bf16", "sve")
_VARIABLES = re.compile(
    r"AMPFUSE_\w+|CUDA_(HOME|PATH|VISIBLE_DEVICES)|CUDACXX|CUDAARCHS|TORCH_CUDA_ARCH_LIST"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|(OMP|MKL)_NUM_THREADS|ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA"
    r"|PYTORCH_\w*ALLOC_CONF"
)


def report() -> dict[str, Facts]:
    """The whole report, by section. Takes a few seconds, most of them to import torch."""
    facts = {
        "ampfuse": _guarded(_installation),
        "system": _guarded(_system),
        "python": _guarded(_python),
        "compilers": _guarded(_compilers),
        "driver": _guarded(_driver),
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


def covering_arch(archs: Iterable[str], capability: tuple[int, int]) -> str | None:
    """Which of `archs` (``"sm_80"``, ``"compute_90"``) a GPU of `capability` runs; None if none.

    Machine code (sm) runs on GPUs of the same major version from its minor version on; PTX
    (compute) is compiled by the driver for any GPU from its version on; a letter at the end
    (``sm_90a``) ties code to that one architecture. Machine code is preferred, and the newest.
    """
    gpu = capability[0] * 10 + capability[1]
    best: tuple[bool, int, str] | None = None
    for arch in archs:
        matched = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
        if not matched:
            continue
        kind, number, letter = matched[1], int(matched[2]), matched[3]
        if letter == "a":
            runs = number == gpu
        elif kind == "sm" or letter == "f":
            runs = number // 10 == capability[0] and number <= gpu
        else:
            runs = number <= gpu
        if runs:
            candidate = (kind == "sm", number, arch)
            best = candidate if best is None else max(best, candidate)
    return best[2] if best else None


def tested_with(oldest: str, newest: str, installed: str) -> str:
    """The releases of torch tested (``"2.11"``, ``"2.15"``), and whether `installed` is newer."""
    numbers = [re.findall(r"\d+", version)[:2] for version in (newest, installed)]
    tested, release = (tuple(map(int, found)) for found in numbers)
    newer = len(release) == 2 and release > tested
    return f"{oldest} to {newest}" + (f"; torch {installed} is newer than these" if newer else "")


# AMD's generation by family and model: in a virtual machine the name is "AMD EPYC" for all of them.
_ZEN: dict[int, Callable[[int], str]] = {
    25: lambda model: "Zen 4" if model >> 4 in (1, 6, 7, 10) else "Zen 3",
    26: lambda model: "Zen 5",
}


def cpu_model() -> str:
    """The name of the CPU, as ``"Intel(R) Xeon(R) Platinum 8480+"`` or ``"AMD EPYC (Zen 5)"``."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    family, model = int(info.get("cpu family", 0)), int(info.get("model", 0))
    if info.get("vendor_id") == "AuthenticAMD" and family in _ZEN:
        name += f" ({_ZEN[family](model)})"
    return name


def cpu_flags() -> frozenset[str]:
    """The instruction sets the CPU announces, in Linux's names; empty where that is not known."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def core_count() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_has_bf16() -> bool:
    """True if the CPU multiplies BF16 numbers itself (AMX, AVX512-BF16, ARM's BF16)."""
    return not cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16", "bf16"))


# Probes of this process: nothing here imports torch or the extension.


def _installation() -> Facts:
    found: Facts = {"path": os.path.dirname(os.path.abspath(__file__))}
    try:
        from ampfuse import _build_info
    except ImportError:
        found["built"] = "no: a source tree that was not installed"
        return found
    found["version"] = _build_info.VERSION
    found["built for torch"] = _build_info.TORCH_VERSION
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


# Probes of the child: each may raise, and may crash.


def _torch() -> Facts:
    import torch

    found: Facts = {
        "running": str(torch.__version__),
        "CUDA build": torch.version.cuda or "no",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "CUDA available": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        found["cuDNN"] = torch.backends.cudnn.version()
    return found


def _extension() -> Facts:
    from ampfuse import _core

    C = _core.C
    archs = C.cuda_archs()
    forced = os.environ.get("AMPFUSE_CPU_ISA")
    return {
        "CUDA backend": f"yes: {' '.join(archs)}" if C.cuda_built() else "no",
        "CPU ISA": C.cpu_isa() + (f" (AMPFUSE_CPU_ISA={forced})" if forced else " (picked)"),
    }


def _gpus() -> Facts:
    import torch

    try:
        from ampfuse import _core

        archs = _core.C.cuda_archs()
    except ImportError:  # told in the section of the extension; the GPUs are there all the same
        archs = []
    found: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        capability = (properties.major, properties.minor)
        arch = covering_arch(archs, capability)
        found[f"GPU {i}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.1f} GiB: "
            + (f"runs ampfuse's {arch}" if arch else "NOT COVERED by what was built")
            + ("" if capability >= (8, 0) else "; BF16 is emulated")
        )
    return found or {"GPUs": "none that torch can use"}


def _steps() -> Facts:
    """One small AdamW step on each device: being loaded is not yet working."""
    import torch

    from ampfuse import _core, optim

    devices = ["cpu"]
    if _core.C.cuda_built() and torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found: Facts = {}
    for device in devices:
        try:
            weight = torch.ones(1000, device=device, requires_grad=True)
            weight.grad = torch.ones_like(weight)
            optim.AdamW([weight], lr=0.5, weight_decay=0.0).step()
            right = torch.allclose(weight.detach().cpu(), torch.full((1000,), 0.5))
            found[f"step on {device}"] = "works" if right else "runs, but gives a WRONG RESULT"
        except Exception as error:
            found[f"step on {device}"] = _failure(error)
    return found


# Section of the report -> what the child runs for it, in this order.
_CHILD_PROBES: tuple[tuple[str, Callable[[], Facts]], ...] = (
    ("torch", _torch),
    ("extension", _extension),
    ("GPUs", _gpus),
    ("extension", _steps),
)


def _probe_in_child(timeout_s: float = 120.0) -> dict[str, Facts]:
    """Run _CHILD_PROBES in another interpreter and collect what it says before it ends."""
    # By path, under a name of its own: `-m ampfuse.env` would import the package first.
    code = f"import runpy; runpy.run_path({os.path.abspath(__file__)!r}, run_name='__probe__')"
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
        return {"torch": {"probe": _failure(error)}}
    facts: dict[str, Facts] = {name: {} for name, _ in _CHILD_PROBES}
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"probed":')]
    for answer in answers:
        facts[answer["probed"]].update(answer["facts"])
    if len(answers) < len(_CHILD_PROBES):
        name = _CHILD_PROBES[len(answers)][0]
        last_words = errors.strip().splitlines()[-1:]
        facts[name]["probe"] = " ".join(["DIED:", _exit_reason(status), *last_words])
    return facts


def _answer_probes() -> None:
    """The child's side: one line of JSON for each probe, out at once, in case the next crashes."""
    for name, probe in _CHILD_PROBES:
        print(json.dumps({"probed": name, "facts": _guarded(probe)}, default=str), flush=True)


# Helpers that do not raise.


def _guarded(probe: Callable[[], Facts]) -> Facts:
    try:
        return probe()
    except Exception as error:  # whatever it is, the report goes on
        return {"probe": _failure(error)}


def _failure(error: BaseException) -> str:
    return f"FAILED: {type(error).__name__}: {error}"


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


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _as_line(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value).replace("\n", " ")


if __name__ == "__probe__":
    _answer_probes()
