"""The environment report: what it says, and that nothing broken can keep it from saying it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from ampfuse import _core, hardware
from ampfuse.cli import env, env_probes


def report(path: Path | str = "") -> dict[str, env.Facts]:
    """The sections of ``python -m ampfuse env``, with modules in the folder `path` found first.

    A word that a probe does not say for a fact is under ``""``.
    """
    paths = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "ampfuse", "env"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, env.Facts] = {}
    for line in done.stdout.splitlines():
        assert line == line.rstrip()
        if not line.startswith("  "):
            section = found[line] = {}
        else:
            key, _, value = line[2:].partition("  ")
            section[key if value else ""] = value.strip() or key
    return found


@pytest.fixture(scope="module")
def facts() -> dict[str, env.Facts]:
    return report()


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
    said = env_probes._extension()["CPU ISA"]
    assert said == f"{_core.C.cpu_isa()} (AMPFUSE_CPU_ISA=scalar)"


@pytest.mark.parametrize(
    ("torch_module", "said"),
    [
        ("raise ImportError('libfoo.so: cannot open')", "FAILED: ImportError: libfoo.so"),
        ("raise RuntimeError('broken')", "FAILED: RuntimeError: broken"),
        ("import os; os.abort()", "DIED: killed by SIGABRT"),
        ("import sys; sys.exit('no torch today')", "DIED: exit status 1. no torch today"),
    ],
    ids=["import-error", "other-error", "crash", "exit"],
)
def test_runs_when_torch_is_broken(tmp_path, torch_module, said):
    (tmp_path / "torch.py").write_text(torch_module)
    facts = report(tmp_path)
    (told,) = facts["torch"].values()
    assert told.startswith(said)
    assert facts["ampfuse"]["version"] == _core.build_info.VERSION
    assert facts["system"]["CPU"]


@pytest.mark.parametrize("way", [["-m", "another"], ["-manother"], ["-X", "dev", "-m", "another"]])
def test_env_of_another_program_imports_as_ever(tmp_path, way):
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "__init__.py").write_text("import ampfuse, sys\nprint(sys.argv)\n")
    (tmp_path / "another" / "__main__.py").write_text(
        "import ampfuse\nprint(ampfuse.__version__, hasattr(ampfuse, '_core'))\n"
    )
    command = [sys.executable, *way, "env"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["['-m', 'env']", f"{_core.build_info.VERSION} True"]


def test_runs_when_the_extension_is_for_another_torch(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '1.0'")
    releases = ", ".join(map(_core.release_of, _core.build_info.TORCH_VERSIONS))
    said = f"this ampfuse was compiled for torch {releases}, but torch 1.0 is"
    assert any(said in fact for fact in report(tmp_path)["extension"].values())


BUILT = ["sm_75", "sm_80", "compute_90"]


@pytest.mark.parametrize(
    ("archs", "capability", "covering"),
    [
        (BUILT, (7, 5), "sm_75"),
        (BUILT, (8, 0), "sm_80"),
        (BUILT, (8, 9), "sm_80"),  # same major version, later minor
        (BUILT, (9, 0), "compute_90"),
        (BUILT, (12, 0), "compute_90"),
        (BUILT, (7, 0), None),  # V100
        (["sm_86", "sm_80"], (8, 6), "sm_86"),
        (["sm_86"], (8, 0), None),
        (["sm_90a"], (9, 0), "sm_90a"),
        (["sm_90a", "compute_90a"], (10, 0), None),
        (["sm_100f"], (10, 3), "sm_100f"),
        (["compute_100f"], (12, 0), None),
        ([], (8, 0), None),
        (["nonsense"], (8, 0), None),
    ],
)
def test_covering_arch(archs, capability, covering):
    assert env_probes.covering_arch(archs, capability) == covering
    assert env_probes.covering_arch(archs[::-1], capability) == covering


@pytest.mark.parametrize(("flags", "said"), [({"avx512_bf16"}, "are fast"), ((), "not time")])
def test_levels_for_the_cpu_are_named(flags, said, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    level = env._system()["CPU levels"]
    assert level.startswith("O4 and O5 ")
    assert level.endswith(said)


# By what torch and the extension say of a GPU, or of none that can be used: the report's line.
GPU, NONE = True, False
GPUS = {
    "ROCm": (GPU, {"hip": "7.2.0"}, "NOT USED: .* ROCm 7.2.0, and .* or train on the CPU"),
    "too old": (GPU, {"capability": (6, 0)}, "NOT USED: it is sm_60, .*sm_75.* compile ampfuse"),
    "an old driver": (GPU, {"driver": 12040}, "NOT USED: .* CUDA 12.4.*Update the driver .*580"),
    "built without": (GPU, {"archs": []}, "NOT USED: .* was built for CPUs; .*AMPFUSE_CUDA=ON"),
    "before Ampere": (GPU, {"capability": (7, 5)}, "runs .*sm_75; BF16 is emulated: use O1 or O2"),
    "Blackwell": (GPU, {"capability": (12, 0)}, "runs ampfuse's compute_90; use O4 or O5$"),
    "no MPS": (NONE, {"other": "mps"}, "torch is built for MPS, and .* or train on the CPU"),
    "no XPU": (NONE, {"other": "xpu"}, "torch is built for XPU, and .* or train on the CPU"),
    "no ROCm": (NONE, {"hip": "7.2.0"}, "torch is built for ROCm 7.2.0, and .* train on the CPU"),
    "a CPU build": (NONE, {"cuda": None}, "built for CPUs, and .*: install a CUDA build"),
    "torch's words": (NONE, {"error": "The driver is too old"}, "The driver is too old$"),
    "hidden": (NONE, {}, "CUDA_VISIBLE_DEVICES"),
}


def pretend(monkeypatch, *, available, hip=None, cuda="13.0", error=None, other=None, **said):
    """Have torch report this of itself, with one GPU if `available`."""
    capability = said.get("capability", (9, 0))

    def init():
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip or other else cuda)
    card = types.SimpleNamespace(name="A card", total_memory=2**34, major=capability[0])
    for name, value in (
        ("is_available", available),
        ("device_count", 1),
        ("get_device_properties", card),
        ("get_device_capability", capability),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "init", init)
    accelerator = torch.device(other) if other else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    binding = types.SimpleNamespace(
        cuda_archs=lambda: said.get("archs", ["sm_75", "sm_90", "compute_90"]),
        cuda_versions=lambda: (13000, said.get("driver", 13000)),
    )
    monkeypatch.setattr(_core, "C", binding)


@pytest.mark.parametrize("case", GPUS)
def test_report_says_whether_a_gpu_is_used_or_why_not_and_what_to_do(case, monkeypatch):
    available, said, line = GPUS[case]
    pretend(monkeypatch, available=available, **said)
    start = "A card, 16.0 GiB: " if available else "none that torch can use: .*"
    assert re.search(f"^{start}{line}", env_probes._gpus()["GPU 0" if available else "GPUs"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_are_listed_with_their_coverage(facts):
    gpu = facts["GPUs"]["GPU 0"]
    assert torch.cuda.get_device_name(0) in gpu
    assert ("runs ampfuse's" in gpu) or ("NOT USED" in gpu)
