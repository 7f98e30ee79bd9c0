"""Build what a release consists of and try it: a source distribution and wheels, in dist/.

    python buildtools/release.py python3.10 python3.11 ...

Each is installed into a fresh environment, with an empty search path but for its Python in the case
of a wheel, where the demo has to train. dist/SHA256SUMS is written when all of that worked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import probe

DIST = probe.ROOT / "dist"


def run(*command: object, **options: object) -> None:
    print("$", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **options)


def version_tag(python: str) -> str:
    """``"cp312"`` of an interpreter, as in the name of its wheel."""
    ask = [python, "-c", "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}')"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def try_out(python: str, distribution: Path, compiles: bool) -> None:
    """Install `distribution` beside the newest torch that this Python has, and train the demo."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        tools = f"{folder}/bin"
        found = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}" if compiles else tools}
        pip = (f"{tools}/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        run(*pip, "--upgrade", "pip", env=found)
        run(*pip, "--group", "torch-newest", cwd=probe.ROOT, env=found)
        run(*pip, f"{distribution}[demo]", env=found)
        run(f"{tools}/ampfuse", "demo", "--epochs", 1, "--output", folder, cwd=folder, env=found)


def main(pythons: list[str]) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, probe.ROOT)
    run(sys.executable, Path(__file__).with_name("wheel.py"), *pythons)
    distributions = sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])
    run(sys.executable, "-m", "twine", "check", "--strict", *distributions)
    for distribution in distributions:
        compiles = distribution.suffix == ".gz"
        tried = [p for p in pythons if compiles or f"-{version_tag(p)}-" in distribution.name]
        try_out(tried[-1], distribution, compiles)
    sums = [f"{hashlib.sha256(d.read_bytes()).hexdigest()}  {d.name}\n" for d in distributions]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print(*sums, sep="", end="")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
