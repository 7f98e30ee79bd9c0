"""Scripts written for apex run unchanged, in three ways, and reach their loss without amp."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import ampfuse.compat.apex
from cases import LEVELS, clean_apex_names
from programs import python, ranks

SCRIPTS = Path(__file__).parent / "scripts"

# script: {arguments with amp: tolerance}. The tolerance is absolute, on losses that start at 1.4 to
# 2.6.
CASES = {
    "imagenet": {f"--sync_bn --opt-level {level}": 0.005 for level in LEVELS}
    | {
        "--opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0": 0.005,
        "--opt-level O3 --keep-batchnorm-fp32 True": 0.005,
        "--opt-level O1 --loss-scale dynamic": 0.005,
    },
    "bert_pretraining": {f"--opt-level {level}": 0.002 for level in LEVELS}
    | {"--allreduce_post_accumulation_fp16": 0.002},
}


def final_loss(text):
    (loss,) = re.findall(r"^final loss: (\S+)$", text, re.MULTILINE)
    return float(loss)


@pytest.fixture
def run(monkeypatch, capsys):
    """The final loss of a script with arguments."""

    def final(script, args):
        path = str(SCRIPTS / f"{script}.py")
        monkeypatch.setattr(sys, "argv", [path, *args.split()])
        with clean_apex_names():
            ampfuse.compat.apex.install()
            runpy.run_path(path, run_name="__main__")
        return final_loss(capsys.readouterr().out)

    return final


_without_amp = {}


@pytest.mark.parametrize(
    ("script", "args"), [(script, args) for script, runs in CASES.items() for args in runs]
)
def test_script(script, args, run):
    if script not in _without_amp:
        _without_amp[script] = run(script, "--no-amp")
    tolerance = CASES[script][args]
    assert run(script, args) == pytest.approx(_without_amp[script], abs=tolerance)


INSTALL = """
import runpy, sys, ampfuse.compat.apex as c; c.install(); sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""
WAYS = {"install": ["-c", INSTALL], "python -m": ["-m", "ampfuse.compat.apex"], "import": []}


@pytest.mark.parametrize("way", WAYS)
def test_as_a_program(way, tmp_path):
    """Each way as a user types it."""
    script = SCRIPTS / "imagenet.py"
    if way == "import":
        text = re.sub(r"^from apex\b", "from ampfuse.compat.apex", script.read_text(), flags=re.M)
        script = tmp_path / script.name
        changed = "import ampfuse.compat.apex as apex"
        script.write_text(re.sub(r"^import apex\b[.\w]*$", changed, text, flags=re.M))
    arguments = ["--opt-level", "O2", "--epochs", "1", "--save", str(tmp_path / "c.pt")]
    result = python(*WAYS[way], str(script), *arguments)
    assert result.returncode == 0, result.stderr
    assert final_loss(result.stdout) < 1.4
    assert (tmp_path / "c.pt").exists()


@pytest.mark.slow
def test_two_processes_end_like_one(run):
    """Synchronized batch norm and averaged gradients: two halves are one batch."""
    args = "--sync_bn --opt-level O2"
    first, _ = ranks(2, "-m", "ampfuse.compat.apex", SCRIPTS / "imagenet.py", *args.split())
    assert final_loss(first.stdout) == pytest.approx(run("imagenet", args), abs=2e-4)


def test_a_checkpoint_of_a_script_continues_where_it_was(tmp_path, run):
    """The masters are saved."""
    saved, args = tmp_path / "c.pt", "--opt-level O2"
    through = run("imagenet", args)
    run("imagenet", f"{args} --epochs 2 --save {saved}")
    assert run("imagenet", f"{args} --resume {saved}") == through
