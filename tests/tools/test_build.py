"""The build's choice of torch and compiler, and its messages when it cannot go on.

The decisions are functions of what was found, so no test here needs a network, a compiler or
another torch. Those marked slow install for real.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from ampfuse import _core

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "buildtools")
    monkeypatch.delenv("AMPFUSE_CUDA", raising=False)
    return importlib.import_module("probe")


@pytest.fixture
def backend(probe, monkeypatch):
    """The build backend around a scikit-build-core that returns what it was asked for."""
    inner = types.ModuleType("scikit_build_core.build")
    for kind in ("sdist", "wheel", "editable"):
        for hook in ("get_requires_for_build", "prepare_metadata_for_build", "build"):
            answer = ["ninja"] if hook.startswith("get_requires") else f"{hook}_{kind}"
            setattr(inner, f"{hook}_{kind}", lambda *args, answer=answer: answer)
    outer = types.ModuleType("scikit_build_core")
    outer.build = inner
    monkeypatch.setitem(sys.modules, "scikit_build_core", outer)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", inner)
    monkeypatch.delitem(sys.modules, "ampfuse_build", raising=False)
    module = importlib.import_module("ampfuse_build")
    yield module
    sys.modules.pop("ampfuse_build", None)


@pytest.fixture
def refused(probe):
    """refused(words, function, *arguments): a BuildError of one line with these words."""

    def check(words, function, *arguments):
        with pytest.raises(probe.BuildError, match=words) as error:
            function(*arguments)
        assert "\n" not in str(error.value)

    return check


def a_torch(probe, version="2.14.1+cu130", cuda="13.0"):
    return probe.Torch(version, cuda, "include", ["python"])


def a_shell_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_finds_the_torch_that_runs_these_tests_through_the_isolation_of_pip(
    probe, monkeypatch, tmp_path
):
    # pip hides the user's packages by a sitecustomize on PYTHONPATH; -I ignores both.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path = [p for p in sys.path if not p.endswith('-packages')]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert probe.find_torch([[sys.executable]]) is None
    installed = probe.find_torch()
    assert installed.python == [sys.executable, "-I"]
    assert installed.version == torch.__version__
    assert installed.cuda == torch.version.cuda
    assert Path(installed.include_dir, "ATen", "ATen.h").exists()


def test_a_folder_named_torch_is_no_torch(probe, monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    monkeypatch.chdir(tmp_path)
    assert probe.find_torch([[sys.executable, "-S"]]) is None


def test_looks_in_the_active_environment_last(probe, tmp_path):
    here = Path(sys.executable)
    a_shell_script(tmp_path / "bin" / "python", f'exec {here} "$@"')
    commands = probe.torch_commands({"VIRTUAL_ENV": str(tmp_path)})
    assert commands[0] == [sys.executable]
    assert commands[-1] == [str(tmp_path / "bin" / "python"), "-I"]
    # Another Python version is left out: it could not load what is built here.
    a_shell_script(tmp_path / "bin" / "python", "echo cpython-27")
    assert len(probe.torch_commands({"VIRTUAL_ENV": str(tmp_path)})) == len(commands) - 1


@pytest.mark.parametrize("version", ["2.11.0+cu128", "2.12.1", "2.13.0+cpu", "2.15.0a0+git1234567"])
def test_supported_releases_of_torch_are_taken(probe, version):
    installed = a_torch(probe, version)
    assert probe.require_torch(installed) is installed
    assert probe.untested(installed) is None


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1", "2.1.2", "2.2.0a0+nv24.1", None])
def test_an_older_torch_or_none_is_refused(probe, refused, version):
    said = f"needs torch 2.11 or later, but torch {re.escape(version or '')} is installed"
    said = said if version else "install torch 2.11 or later first.*--no-build-isolation"
    refused(said, probe.require_torch, version and a_torch(probe, version))


@pytest.mark.parametrize("version", ["2.16.0.dev20261120+cu132", "2.100.0", "3.0.0a0+nv27.1"])
@pytest.mark.parametrize("asked_by", ["CMake", "Makefile"])
def test_a_newer_torch_builds_with_one_line_of_warning(
    probe, monkeypatch, capsys, version, asked_by
):
    monkeypatch.setattr(probe, "find_torch", lambda: a_torch(probe, version))
    answer = probe.main([] if asked_by == "CMake" else ["--requirements"])
    assert version in answer if asked_by == "CMake" else "scikit-build-core" in answer
    told = capsys.readouterr().err
    assert re.fullmatch(rf"warning: torch {re.escape(version)} is newer than the newest .*\n", told)


def test_the_dependency_lets_pip_keep_what_the_build_accepts(probe):
    specifiers = pytest.importorskip("packaging.specifiers")
    line = re.search(r'^ +"torch(>=[^"]+)",$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    accepted = specifiers.SpecifierSet(line)
    oldest, newest = probe.torch_tested()
    known = (f"{oldest}.0a0+nv26.2", f"{oldest}.0+cu128", f"{newest}.1")
    for version in (*known, "2.99.0.dev1", "3.1"):
        assert accepted.contains(version, prereleases=True)
        probe.require_torch(a_torch(probe, version))
    assert not accepted.contains("2.10.1", prereleases=True)


def test_what_is_imported_is_declared(probe):
    """At import, beside the standard library; of frameworks and experiments the extras have it."""
    package = probe.ROOT / "python" / "ampfuse"
    imported = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("integrations", "experiments"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module)
    tops = {name.split(".")[0] for name in imported} - {"ampfuse", *sys.stdlib_module_names}
    project = (probe.ROOT / "pyproject.toml").read_text().split("[project.optional-")[0]
    declared = re.findall(r'^    "([\w-]+)>=', project, re.MULTILINE)
    assert tops == {name.replace("-", "_") for name in declared}


@pytest.mark.parametrize(
    ("python", "oldest", "newest"),
    [((3, 10), "2.11", "2.14"), ((3, 11), "2.11", "2.15"), ((3, 15), "2.15", "2.15")],
)
def test_a_wheel_has_the_releases_that_torch_has_for_its_python(probe, python, oldest, newest):
    assert probe.torch_tested(python) == (oldest, newest)
    assert probe.torch_of("torch-cpu", python) == "2.13"  # for every Python
    first, last = (probe.release_of(release)[1] for release in (oldest, newest))
    releases = importlib.import_module("wheel").releases(python)
    assert releases == [f"2.{minor}" for minor in range(first, last + 1)]


def test_pythons_are_the_same_everywhere(probe):
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT.read_text())
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert re.findall(r"^ +(3\.\d+)$", release, re.M) == classifiers
    assert re.findall(r"python(3\.\d+)", release.split("make release")[1]) == classifiers
    page = (ROOT / "docs" / "building.md").read_text()
    assert f"Python {classifiers[0]} to {classifiers[-1]}" in page


def test_all_name_the_torch_that_was_tested(probe):
    oldest, newest = probe.torch_tested()
    assert (oldest, newest) == _core.build_info.TORCH_TESTED
    readme = (ROOT / "README.md").read_text()
    assert f"torch {oldest} to {newest}" in readme
    assert f'`pip install "torch=={newest}.*"`' in (ROOT / "docs" / "building.md").read_text()


def test_a_free_threaded_python_is_refused(probe, backend, refused, monkeypatch):
    said = r"free-threaded Python \(this is 3\.\d+t\)"
    require_gil = probe.require_gil
    require_gil(0)
    refused(said, require_gil, 1)
    monkeypatch.setattr(probe, "require_gil", lambda: require_gil(1))
    monkeypatch.setattr(probe, "find_torch", lambda: pytest.fail("looked for torch"))
    with pytest.raises(SystemExit, match="error: ampfuse does not run on a free-threaded Python"):
        backend.build_wheel("wheels")
    for arguments in ([], ["--requirements"]):  # CMake alone, and the Makefile
        refused(said, probe.main, arguments)


@pytest.mark.parametrize("cuda", ["13.0", "13.2"])
@pytest.mark.parametrize("mode", ["AUTO", "ON", "OFF"])
def test_cuda_13_without_nvcc_takes_the_compiler_from_pypi(probe, cuda, mode):
    installed, here = a_torch(probe, cuda=cuda), probe.Nvcc("/usr/local/cuda/bin/nvcc", "12.8")
    needed = [f"cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=={cuda}.*"] if mode != "OFF" else []
    assert probe.nvcc_requirements(installed, mode, None) == needed
    assert probe.nvcc_requirements(installed, mode, here) == []


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", None), ("2.11.0+cu128", "12.8")])
def test_without_nvcc_on_is_refused_and_auto_builds_for_the_cpu(probe, refused, version, cuda):
    installed = a_torch(probe, version, cuda)
    assert probe.nvcc_requirements(installed, "AUTO", None) == []  # builds for the CPU
    said = "AMPFUSE_CUDA=ON, but no nvcc.*install the CUDA toolkit"
    refused(said, probe.nvcc_requirements, installed, "ON", None)


def test_nvcc_is_taken_by_name_before_by_place(probe, tmp_path):
    named = a_shell_script(tmp_path / "named" / "nvcc", "echo release 13.0,")
    home = a_shell_script(tmp_path / "home" / "bin" / "nvcc", "echo release 12.8,")
    path = a_shell_script(tmp_path / "path" / "nvcc", "echo release 12.6,")
    pypi = a_shell_script(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc", "echo")
    environment = {"CUDACXX": str(named), "CUDA_HOME": str(tmp_path / "home")}
    environment["PATH"] = str(path.parent)
    candidates = probe.nvcc_candidates(environment, [str(tmp_path / "site")])
    assert candidates == [named, home, path, Path("/usr/local/cuda/bin/nvcc"), pypi]


def test_an_nvcc_that_is_broken_or_too_old_is_passed_over(probe, tmp_path):
    said = "echo 'Cuda compilation tools, release {}, V'"
    broken = a_shell_script(tmp_path / "a" / "nvcc", "exit 127")
    old = a_shell_script(tmp_path / "b" / "nvcc", said.format("11.5"))
    good = a_shell_script(tmp_path / "c" / "nvcc", said.format("12.8"))
    useless = [tmp_path / "absent", broken, old]
    assert probe.find_nvcc(useless) is None
    assert probe.find_nvcc([*useless, good]) == probe.Nvcc(str(good), "12.8")


def test_the_cuda_mode_is_read_and_checked(probe, monkeypatch):
    assert probe.cuda_mode() == "AUTO"
    monkeypatch.setenv("AMPFUSE_CUDA", "off")
    assert probe.cuda_mode() == "OFF"
    assert probe.cuda_mode({"cmake.define.AMPFUSE_CUDA": "ON"}) == "ON"  # pip's -C wins
    monkeypatch.setenv("AMPFUSE_CUDA", "maybe")
    with pytest.raises(probe.BuildError, match="AUTO, ON or OFF, not 'MAYBE'"):
        probe.cuda_mode()


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_hooks_add_the_compiler(backend, monkeypatch, kind):
    monkeypatch.setattr(backend.probe, "find_torch", lambda: a_torch(backend.probe))
    monkeypatch.setattr(backend.probe, "find_nvcc", lambda: None)
    requires = getattr(backend, f"get_requires_for_build_{kind}")
    assert requires()[-1] == "ninja"
    assert re.fullmatch(r"cuda-toolkit\[.*nvcc.*\]==13\.0\.\*", requires()[0])
    assert requires({"cmake.define.AMPFUSE_CUDA": "OFF"}) == ["ninja"]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("version", [None, "2.10.0"])
def test_every_hook_stops_with_one_line(backend, monkeypatch, kind, version):
    installed = version and a_torch(backend.probe, version)
    monkeypatch.setattr(backend.probe, "find_torch", lambda: installed)
    for call in (
        getattr(backend, f"get_requires_for_build_{kind}"),
        lambda: getattr(backend, f"prepare_metadata_for_build_{kind}")("metadata"),
        lambda: getattr(backend, f"build_{kind}")("wheels"),
    ):
        with pytest.raises(SystemExit) as stop:
            call()
        assert re.fullmatch(r"error: ampfuse .*torch.*", stop.value.code)


def test_a_source_distribution_needs_no_torch(backend, monkeypatch):
    monkeypatch.setattr(backend.probe, "find_torch", lambda: pytest.fail("looked for torch"))
    assert backend.get_requires_for_build_sdist() == ["ninja"]
    assert backend.build_sdist("wheels") == "build_sdist"


def test_one_place_states_the_version():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert version == _core.build_info.VERSION
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_another_release_is_refused_at_import():
    _core.check_torch(["2.13.0", "2.14.1+cu130"], "2.14.0+cpu")  # CPU and CUDA builds are the same
    with pytest.raises(ImportError) as error:
        _core.check_torch(["2.12.1", "2.13.0+cpu"], "2.14.1+cu130")
    message = str(error.value)
    assert "compiled for torch 2.12, 2.13, but torch 2.14.1+cu130 is installed" in message
    assert "pip install --no-cache-dir --force-reinstall --no-deps" in message


@pytest.mark.parametrize(
    ("built", "driver", "warns"),
    [
        (13000, 12040, True),
        (13000, 13000, False),
        (13020, 13000, False),
        (12080, 13010, False),
        (13000, 0, False),
        (0, 12040, False),
    ],
)
def test_an_older_driver_is_told(built, driver, warns):
    problem = _core.driver_problem(built, driver)
    assert (problem is not None) is warns
    if problem is not None:
        assert problem.startswith("ampfuse's CUDA kernels were compiled with CUDA 13, but this")
        assert "driver is for CUDA 12.4" in problem


def symbols(library: Path) -> set[str]:
    """The names that a library exports, with versions, without torch's inline functions."""
    run = subprocess.run(
        ["nm", "-D", "-C", "--defined-only", library], check=True, capture_output=True, text=True
    )
    return {line.split(maxsplit=2)[2] for line in run.stdout.splitlines()}


def test_libraries_show_nothing_but_their_interface():
    """So two versions of ampfuse, or ampfuse beside other extensions, cannot mix."""
    binding = Path(_core.EXTENSION.__file__)
    assert symbols(binding) == {f"PyInit_{_core.EXTENSION.__name__.rpartition('.')[2]}"}
    version = _core.build_info.VERSION
    core = binding.with_name(f"libampfuse-{version}.so")
    functions = "algorithms storages cpu_backend cpu_isa cuda_archs cuda_backend cuda_versions"
    functions += " attention_kernels set_device_allocator set_parallel_for"
    exported = symbols(core) - {f"AMPFUSE_{version}"}
    assert all(name.endswith(f"@@AMPFUSE_{version}") for name in exported)
    assert {re.search(r"(\w+)\(", name)[1] for name in exported} == set(functions.split())


@pytest.mark.benchmark
def test_import_is_cheap():
    code = "import time, torch; start = time.perf_counter(); import ampfuse;"
    command = [sys.executable, "-c", code + "print(time.perf_counter() - start)"]
    runs = (subprocess.run(command, capture_output=True, text=True) for _ in range(3))
    assert any(float(run.stdout) < 0.1 for run in runs)


def pip(python: object, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Output and errors are both in ``stdout``."""
    inherited = {name: os.environ[name] for name in os.environ if name != "VIRTUAL_ENV"}
    return subprocess.run(
        [python, "-m", "pip", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited | environment,
    )


@pytest.mark.slow
def test_pip_builds_without_flags_and_without_another_torch(tmp_path):
    words = ("wheel", "-v", "--no-deps", "-w", str(tmp_path), str(ROOT))
    run = pip(sys.executable, *words, AMPFUSE_CUDA="OFF")
    assert run.returncode == 0, run.stdout[-4000:]
    assert f"torch          {torch.__version__}" in run.stdout
    assert "CUDA backend   NO: switched off" in run.stdout
    assert not re.search(r"(Collecting|Downloading|Processing) \S*\btorch[-=> ]", run.stdout)
    assert len(list(tmp_path.glob("ampfuse-*.whl"))) == 1


@pytest.mark.slow
def test_pip_without_torch_stops_with_one_line(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    run = pip(tmp_path / "empty" / "bin" / "python", "install", str(ROOT))
    assert run.returncode != 0
    assert "error: ampfuse is compiled against the torch you have" in run.stdout
    assert "Traceback" not in run.stdout
