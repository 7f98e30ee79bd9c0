"""Scripts written for apex run unchanged, and reach their loss without amp."""

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
        "--opt-level O3 --keep-batchnorm-fp32 True --loss-scale dynamic": 0.005,
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


# O3 and O4 of the second script are as O2 and O1 in what it adds to the first.
SLOW = ("bert_pretraining", "--opt-level O3"), ("bert_pretraining", "--opt-level O4")


@pytest.mark.parametrize(
    ("script", "args"),
    [
        pytest.param(script, args, marks=pytest.mark.slow if (script, args) in SLOW else ())
        for script, runs in CASES.items()
        for args in runs
    ],
)
def test_script(script, args, run):
    if script not in _without_amp:
        _without_amp[script] = run(script, "--no-amp")
    tolerance = CASES[script][args]
    assert run(script, args) == pytest.approx(_without_amp[script], abs=tolerance)


@pytest.mark.parametrize("way", ["python -m", pytest.param("install", marks=pytest.mark.slow)])
def test_as_a_program(way, tmp_path):
    """In a new interpreter, as a user starts it."""
    install = "import runpy, sys, ampfuse.compat.apex as c; c.install(); sys.argv.pop(0)\n"
    install += "runpy.run_path(sys.argv[0], run_name='__main__')"
    start = {"python -m": ["-m", "ampfuse.compat.apex"], "install": ["-c", install]}[way]
    arguments = ["--opt-level", "O2", "--epochs", "1", "--save", str(tmp_path / "c.pt")]
    result = python(*start, SCRIPTS / "imagenet.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert final_loss(result.stdout) < 1.4
    assert (tmp_path / "c.pt").exists()


def test_with_other_imports(tmp_path, monkeypatch, capsys):
    """The script's own line is all that changes: no module has apex's name."""
    text = (SCRIPTS / "imagenet.py").read_text()
    text = re.sub(r"^from apex\b", "from ampfuse.compat.apex", text, flags=re.M)
    text = re.sub(r"^import apex\b[.\w]*$", "import ampfuse.compat.apex as apex", text, flags=re.M)
    (tmp_path / "script.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["script.py", "--opt-level", "O2", "--epochs", "1"])
    with clean_apex_names():
        runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
        assert "apex" not in sys.modules
    assert final_loss(capsys.readouterr().out) < 1.4


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
