"""Scripts written for apex run unchanged, in three ways, and reach their loss without amp."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import ampfuse.compat.apex
import ampfuse.compat.apex.__main__ as runner
import apex_names
from cases import LEVELS
from programs import python, ranks

SCRIPTS = Path(__file__).parent / "scripts"

# script: (arguments without amp, {arguments with amp: tolerance}). The tolerance is absolute, on
# losses that start at 1.4 to 2.6; those of a GAN move apart faster.
CASES = {
    "imagenet": (
        "--no-amp",
        {f"--sync_bn --opt-level {level}": 0.005 for level in LEVELS}
        | {
            "--opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0": 0.005,
            "--opt-level O3 --keep-batchnorm-fp32 True": 0.005,
            "--opt-level O1 --loss-scale dynamic": 0.005,
        },
    ),
    "dcgan": ("--no-amp", {f"--opt-level {level}": 0.1 for level in LEVELS}),
    "bert_pretraining": (
        "--no-amp",
        {f"--opt-level {level}": 0.002 for level in LEVELS}
        | {"--allreduce_post_accumulation_fp16": 0.002},
    ),
}


def with_imports_changed(path, tmp_path):
    """A copy that imports ``ampfuse.compat.apex``."""
    text = path.read_text()
    for old, new in (
        (r"from apex\b", "from ampfuse.compat.apex"),
        (r"import apex\b[.\w]*$", "import ampfuse.compat.apex as apex"),
        (r"import (?=(amp_C|apex_C)$)", "from ampfuse.compat.apex import "),
    ):
        text = re.sub(rf"^(\s*){old}", rf"\1{new}", text, flags=re.MULTILINE)
    copy = tmp_path / path.name
    copy.write_text(text)
    return copy


def migrated(path, tmp_path):
    runpy.run_path(str(with_imports_changed(path, tmp_path)), run_name="__main__")


def installed(path, tmp_path):
    ampfuse.compat.apex.install()
    runpy.run_path(str(path), run_name="__main__")


def run_by_module(path, tmp_path):
    runner.main([str(path), *sys.argv[1:]])


WAYS = {"import": migrated, "install": installed, "python -m": run_by_module}
# The ways take turns: every script runs in each of them, and so does every level, with one script
# or another. Every other run is marked slow; this remains true of the quick ones.
RUNS = [
    pytest.param(
        script,
        args,
        tuple(WAYS)[(first + number) % len(WAYS)],
        marks=pytest.mark.slow if (first + number) % 2 else (),
    )
    for first, (script, (_, runs)) in enumerate(CASES.items())
    for number, args in enumerate(runs)
]


def final_loss(text):
    (found,) = re.findall(r"^final loss: (\S+)$", text, re.MULTILINE)
    return float(found)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The final loss of a script with arguments, in one of the ways."""

    def final(script, args, way="install"):
        path = SCRIPTS / f"{script}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *args.split()])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with apex_names.clean():
            WAYS[way](path, tmp_path)
            assert way == "import" or "apex" in sys.modules
        return final_loss(capsys.readouterr().out)

    return final


_without_amp = {}


@pytest.mark.parametrize(("script", "args", "way"), RUNS)
def test_script(script, args, way, run):
    plain, tolerances = CASES[script]
    if script not in _without_amp:
        _without_amp[script] = run(script, plain)
    assert run(script, args, way) == pytest.approx(_without_amp[script], abs=tolerances[args])


@pytest.mark.parametrize("way", WAYS)
def test_as_a_program(way, tmp_path):
    """Each way once as a user types it, in a process of its own."""
    script = SCRIPTS / "imagenet.py"
    command = {
        "import": [str(tmp_path / "imagenet.py")],
        "install": [
            "-c",
            "import runpy, sys, ampfuse.compat.apex as c; c.install(); sys.argv.pop(0); "
            "runpy.run_path(sys.argv[0], run_name='__main__')",
            str(script),
        ],
        "python -m": ["-m", "ampfuse.compat.apex", str(script)],
    }[way]
    with_imports_changed(script, tmp_path)
    arguments = ["--opt-level", "O2", "--epochs", "1", "--save", str(tmp_path / "c.pt")]
    result = python(*command, *arguments)
    assert result.returncode == 0, result.stderr
    assert final_loss(result.stdout) < 1.4
    assert (tmp_path / "c.pt").exists()


@pytest.mark.slow
def test_two_processes_end_like_one(run):
    """Synchronized batch norm and averaged gradients: two halves are one batch."""
    args = "--sync_bn --opt-level O2"
    out, _ = ranks(2, "-m", "ampfuse.compat.apex", SCRIPTS / "imagenet.py", *args.split())
    assert final_loss(out) == pytest.approx(run("imagenet", args, "python -m"), abs=2e-4)


def test_a_checkpoint_of_a_script_continues_where_it_was(tmp_path, run):
    """The masters are saved."""
    saved, args = tmp_path / "c.pt", "--opt-level O2"
    through = run("imagenet", args)
    run("imagenet", f"{args} --epochs 2 --save {saved}")
    assert run("imagenet", f"{args} --resume {saved}") == through
