"""docs/what_it_changes.md lists what calls of ampfuse change, and importing it changes nothing."""

import json
import re
from pathlib import Path

import pytest

from cases import LEVELS
from programs import python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "what_it_changes.md").read_text()
ON_SOME_CPUS = {f"aten::{name}" for name in ("mm", "addmm", "addmv", "bmm", "baddbmm")}


def rows(section):
    """The names in the first cell of each row, and the second cell."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        what, when, *_ = row.split(" | ")
        yield re.findall(r"`([^`]+)`", what), when


def listed(section, call, level=""):
    """What the page says that `call` changes, at a level."""
    return {
        name
        for names, when in rows(section)
        for clause in when.split("; ")
        if f"`{call}`" in clause and (level in clause or not re.search(r"\bO\d", clause))
        for name in names
    }


@pytest.fixture(scope="module")
def changes():
    """By call, the names of what it changed, as lists."""
    result = python(ROOT / "tests" / "docs" / "changes.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("call", ["nothing", "import", "amp.scale_loss"])
def test_what_changes_nothing(call, changes):
    """Looking twice, importing, and a pass."""
    assert changes[call] == []


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_changes_what_the_page_lists(changes, level):
    assert set(changes[f"objects {level}"]) == listed("In what you pass", "amp.initialize", level)
    expected = listed("In the process", "amp.initialize", level)
    assert set(changes[f"amp.initialize {level}"]) - ON_SOME_CPUS == expected


def test_registered_functions_are_replaced_as_listed(changes):
    expected = listed("In the process", "amp.register_float_function")
    assert expected == {"torch.fft.fft"}
    others = listed("In the process", "amp.initialize", "O1")
    found = set(changes["amp.register_float_function"]) - {"os.register_at_fork()"}
    assert found - ON_SOME_CPUS == expected | others


def test_kernels_of_the_cpu_are_replaced_as_listed(changes):
    expected = listed("In the process", "ampfuse.cpu_half_ops") | ON_SOME_CPUS
    assert ON_SOME_CPUS in [set(names) for names, _ in rows("In the process")]
    assert set(changes["ampfuse.cpu_half_ops"]) - {"os.register_at_fork()"} == expected


@pytest.mark.parametrize(
    ("call", "imported"),
    [
        ("amp.cast_everywhere", set()),
        ("apex.install", {"os.register_at_fork()"}),
        ("apex.amp.init", {"os.register_at_fork()"}),
    ],
)
def test_other_calls_change_what_the_page_lists(call, imported, changes):
    of_the_cpu = listed("In the process", "ampfuse.cpu_half_ops") | ON_SOME_CPUS  # where no GPU is
    assert set(changes[call]) - of_the_cpu == listed("In the process", call) - of_the_cpu | imported


def test_what_the_page_says_undoes_all_but_what_cannot_be(changes):
    assert changes["undone"] == ["os.register_at_fork()"]
