"""Build the wheel: one core, and a binding for each release of torch.

    python buildtools/wheel.py               for this Python, into dist/
    python buildtools/wheel.py python3.12    for others
    python buildtools/wheel.py --arch aarch64    for another processor, by a cross-compiler

Of each torch the headers are fetched once, into build/torch/. The core is compiled once: later
Pythons take the first one's. Needs no torch; nvcc comes from PyPI where there is none.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import probe

ROOT = probe.ROOT
CACHE = ROOT / "build" / "torch"
# What torch's own wheels ask of a machine, before the name of its processor.
PLATFORM = "manylinux_2_28"
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


def releases(python: tuple[int, int]) -> list[str]:
    """``["2.11", ..., "2.15"]``: all from the oldest to the newest that has this Python."""
    (major, first), (_, last) = (probe.release_of(end) for end in probe.torch_tested(python))
    return [f"{major}.{minor}" for minor in range(first, last + 1)]


def headers(release: str, arch: str, python: str) -> str:
    """``"2.15.0=folder"``: a release's headers for a processor, fetched if need be.

    `python`, such as ``"3.12"``, is one that this release has wheels for.
    """
    native = arch == platform.machine()
    folder = CACHE / (release if native else f"{release}-{arch}")
    if not (folder / "torch" / "version.py").exists():
        print(f"headers of torch {release} ...", flush=True)
        with tempfile.TemporaryDirectory() as fetched:
            command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", fetched]
            command += [f"--python-version={python}"]
            command += [] if native else [f"--platform={PLATFORM}_{arch}"]
            pip(*command, f"torch=={release}.*")
            (wheel,) = Path(fetched).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("torch/include/")]
                archive.extractall(folder, [*names, "torch/version.py"])
    version = re.search(
        r"^__version__ = '([^'+]+)", (folder / "torch/version.py").read_text(), re.M
    )
    assert version is not None
    return f"{version[1]}={folder / 'torch' / 'include'}"


def cudart(arch: str) -> Path:
    """The CUDA runtime for a processor that is not this one, fetched if need be."""
    folder = CACHE / f"cuda-{arch}"
    if not folder.exists():
        platforms = [f"--platform=manylinux{version}_{arch}" for version in ("2014", "_2_17")]
        command = ["install", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
        pip(*command, *platforms, f"nvidia-cuda-runtime=={probe.WHEEL_CUDA}.*")
    (library,) = folder.rglob("libcudart_static.a")
    return library


def pip(*arguments: str, python: str = sys.executable, **environment: str) -> None:
    subprocess.run([python, "-m", "pip", *arguments], check=True, env={**os.environ, **environment})


def build(python: str, arch: str, torches: list[str], out: Path, core: Path | None) -> Path:
    """A wheel for the interpreter `python`, checked, in `out`; returns the core it has."""
    native = arch == platform.machine()
    ask = "import sys; print(*sys.version_info[:2])"
    answer = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    major, minor = map(int, answer.stdout.split())
    folder = ROOT / "build" / (f"wheel-{major}.{minor}" + ("" if native else f"-{arch}"))
    settings = {
        "build-dir": folder,
        "cmake.define.AMPFUSE_CORE": core or "",
        "cmake.define.AMPFUSE_TORCH_INCLUDES": ";".join(
            headers(torch, arch, f"{major}.{minor}")
            for torch in torches or releases((major, minor))
        ),
    }
    environment = {}
    if not native:
        settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = ROOT / "cmake" / f"{arch}.cmake"
        if core is None and probe.cuda_mode() != "OFF":
            settings["cmake.define.AMPFUSE_CUDART_STATIC"] = cudart(arch)
        environment["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{major}{minor}-{arch}-linux-gnu.so"
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as built:
        pip("wheel", "--no-deps", "-w", built, *options, str(ROOT), python=python, **environment)
        (wheel,) = Path(built).glob("*.whl")
        run = [sys.executable, "-m"]
        if not native:  # the name is of the machine that built it
            tag = f"--platform-tag=linux_{arch}"
            subprocess.run([*run, "wheel", "tags", "--remove", tag, str(wheel)], check=True)
            (wheel,) = Path(built).glob("*.whl")
        # For another processor auditwheel takes no name: it finds the oldest platform itself.
        plat = f"{PLATFORM}_{arch}" if native else "auto"
        command = [*run, "auditwheel", "repair", f"--plat={plat}"]
        command += [f"--exclude={library}" for library in TORCH_LIBRARIES]
        repaired = Path(built) / "repaired"
        subprocess.run([*command, "-w", str(repaired), str(wheel)], check=True)
        (wheel,) = repaired.glob("*.whl")
        oldest = min(int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name))
        assert oldest <= int(PLATFORM.rpartition("_")[2]), f"{wheel.name} is not for {PLATFORM}"
        out.mkdir(exist_ok=True)
        shutil.move(wheel, out / wheel.name)
    return core or next(folder.glob("libampfuse-*.so"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters")
    parser.add_argument(
        "--arch",
        default=platform.machine(),
        help="x86_64 or aarch64 (default: this machine)",
    )
    parser.add_argument(
        "--torch", action="append", default=[], help="a release (default: all supported)"
    )
    parser.add_argument("--core", type=Path, help="one that was compiled before (default: compile)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    core = options.core and options.core.resolve()
    for python in options.pythons:
        core = build(python, options.arch, options.torch, options.out, core)
    for wheel in sorted(options.out.glob("*.whl")):
        built = zipfile.ZipFile(wheel).read("ampfuse/_build_info.py").decode()
        (what,) = re.findall('^BUILD_INFO = "(.*)"', built, re.M)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {what}")


if __name__ == "__main__":
    main()
