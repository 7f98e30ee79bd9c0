"""The table of commands."""

import os
import subprocess
import sys

import pytest

from ampfuse._build_info import VERSION
from ampfuse.cli import COMMANDS, main
from programs import python

IMPORTS_NONE = """
import sys
from ampfuse.cli import COMMANDS, main
try:
    main(["--help"])
finally:
    assert not {module for module, _ in COMMANDS.values()} & {*sys.modules}
"""


def test_help_names_every_command_and_imports_none():
    result = python("-c", IMPORTS_NONE)
    assert result.returncode == 0, result.stderr
    assert all(f"\n    {name}" in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    said, module = capsys.readouterr().out, sys.modules[COMMANDS[name][0]]
    assert said.startswith(f"usage: ampfuse {name} ")
    assert module.__doc__.split("\n")[0] in said


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"], []], ids=str)
def test_help_and_version_do_not_import_torch(argv, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "ampfuse", *argv]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == (0 if argv else 2), done.stderr
    assert "no torch here" not in done.stderr
    if argv == ["--version"]:
        assert done.stdout == f"ampfuse {VERSION}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"], ["train"]], ids=str)
def test_wrong_use_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert capsys.readouterr().err.count("\n") == 1
