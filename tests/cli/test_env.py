"""The environment report: what it says, and that nothing broken can keep it from saying it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ampfuse
from ampfuse import _core, hardware
from ampfuse.cli import env, main


def facts_of(output: str) -> dict[str, env.Facts]:
    """The sections of a report. A word that a probe does not say for a fact is under ``""``."""
    sections: dict[str, env.Facts] = {}
    for line in output.splitlines():
        assert line == line.rstrip()
        if not line.startswith("  "):
            section = sections[line] = {}
        else:
            key, _, value = line[2:].partition("  ")
            section[key if value else ""] = value.strip() or key
    return sections


def report() -> dict[str, env.Facts]:
    """The sections of ``python -m ampfuse env``."""
    command = [sys.executable, "-m", "ampfuse", "env"]
    return facts_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def facts() -> dict[str, env.Facts]:
    return report()


@pytest.fixture
def torch_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the module that Python processes import as torch."""
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", paths)
    return tmp_path / "torch.py"


def test_says_what_runs_and_was_built(facts):
    built, extension = _core.build_info, facts["extension"]
    assert facts["python"]["python"] == sys.version.split()[0]
    assert facts["torch"]["running"] == torch.__version__
    assert facts["ampfuse"]["version"] == built.VERSION
    assert facts["ampfuse"]["built for torch"] == ", ".join(built.TORCH_VERSIONS)
    assert facts["ampfuse"]["tested with torch"].startswith(" to ".join(built.TORCH_TESTED))
    assert facts["ampfuse"]["CUDA at build time"] == built.CUDA_NOTE
    assert extension["CPU ISA"].startswith(_core.C.cpu_isa())
    assert extension["CUDA backend"].startswith("yes" if _core.C.cuda_built() else "no")
    assert all(arch in extension["CUDA backend"] for arch in _core.C.cuda_archs())
    assert not {name: section["probe"] for name, section in facts.items() if "probe" in section}


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name"),
    [
        ("AuthenticAMD", 25, 1, "CPU (Zen 3)"),
        ("AuthenticAMD", 25, 17, "CPU (Zen 4)"),
        ("AuthenticAMD", 25, 97, "CPU (Zen 4)"),
        ("AuthenticAMD", 26, 2, "CPU (Zen 5)"),
        ("AuthenticAMD", 27, 0, "CPU"),
        ("GenuineIntel", 26, 2, "CPU"),
    ],
)
def test_names_amds_generations(monkeypatch, vendor, family, model, name):
    info = {"vendor_id": vendor, "cpu family": str(family), "model": str(model)}
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: {**info, "model name": "CPU"})
    assert hardware.cpu_model() == name


def test_forced_isa_is_named(monkeypatch):
    monkeypatch.setenv("AMPFUSE_CPU_ISA", "scalar")  # what it does: test_same_bits.py
    said = env._extension()["CPU ISA"]
    assert said == f"{_core.C.cpu_isa()} (AMPFUSE_CPU_ISA=scalar)"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libfoo.so: cannot open')", "FAILED: ImportError: libfoo.so"),
        ("raise RuntimeError('broken')", "FAILED: RuntimeError: broken"),
        ("import os; os.abort()", "DIED: killed by SIGABRT"),
        ("import sys; sys.exit('no torch today')", "DIED: exit status 1. no torch today"),
    ],
    ids=["import-error", "other-error", "crash", "exit"],
)
def test_runs_when_torch_is_broken(code, said, torch_module, capfd):
    torch_module.write_text(code)
    assert main(["env"]) == 0
    facts = facts_of(capfd.readouterr().out)
    (told,) = facts["torch"].values()
    assert told.startswith(said)
    assert facts["ampfuse"]["version"] == _core.build_info.VERSION
    assert facts["system"]["CPU"]


# By the beginning of the command line, and what is sys.argv[0] while a package is imported.
PROGRAMS = {
    ("-m ampfuse", "-m"): True,
    ("-mampfuse", "-m"): True,
    ("bin/ampfuse", "bin/ampfuse"): True,
    ("-m another", "-m"): False,
    ("-manother", "-m"): False,
    ("-X dev -m another", "-m"): False,
    ("bin/another", "bin/another"): False,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[0])
def test_env_of_another_program_imports_as_ever(program, monkeypatch):
    line, first = program
    for arguments in (["env"], ["--version"], ["env", "more"], ["train"]):
        monkeypatch.setattr(sys, "argv", [first, *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", *line.split(), *arguments])
        assert ampfuse._needs_no_torch() is (PROGRAMS[program] and arguments != ["train"])


def test_runs_when_the_extension_is_for_another_torch(torch_module):
    """As a process: that of the command imports no torch itself."""
    torch_module.write_text("__version__ = '1.0'")
    releases = ", ".join(map(_core.release_of, _core.build_info.TORCH_VERSIONS))
    said = f"this ampfuse was compiled for torch {releases}, but torch 1.0 is"
    assert any(said in fact for fact in report()["extension"].values())


@pytest.mark.parametrize(("flags", "said"), [({"avx512_bf16"}, "are fast"), ((), "not time")])
def test_levels_for_the_cpu_are_named(flags, said, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    level = env._system()["CPU levels"]
    assert level.startswith("O4 and O5 ")
    assert level.endswith(said)


@pytest.mark.parametrize(
    ("script", "driver"),
    [("echo 580.82.07; echo 580.82.07", "580.82.07"), ("echo failed; exit 9", None), (None, None)],
)
def test_the_driver_is_named(script, driver, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert hardware.nvidia_driver() == driver
    assert env._system()["NVIDIA driver"] == (driver or "none found")


@pytest.mark.gpu
def test_gpus_are_listed_with_their_coverage(facts):
    gpu = facts["GPUs"]["GPU 0"]
    assert torch.cuda.get_device_name(0) in gpu
    assert ("runs ampfuse's" in gpu) or ("NOT USED" in gpu)
