"""The table of commands."""

import sys

import pytest

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


def test_the_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert "ampfuse" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"], ["train"]], ids=str)
def test_wrong_use_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert capsys.readouterr().err.count("\n") == 1
