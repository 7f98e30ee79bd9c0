"""``python -m ampfuse.migrate``: what it finds, what it writes."""

import ast
import os
import stat
from pathlib import Path

import pytest

from ampfuse.migrate import find_uses, rewrite_imports
from ampfuse.migrate.__main__ import main

HERE = "ampfuse.compat.apex"
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))

OLD = '''\
# -*- coding: utf-8 -*-
"""é"""
try:
    import apex   # the package
    from apex.parallel import DistributedDataParallel as DDP  # comment
    from apex.fp16_utils import *
    from apex import (amp,
                      optimizers)
    import os, apex.amp as A, amp_C
    from apex.contrib.fmha import FMHA
    from amp_C import multi_tensor_l2norm
except ImportError:
    raise ImportError("Please install apex")
é = 1; from  apex.amp import _amp_state
import apexlike, apex.parallel
model, opt = amp.initialize(model, opt, opt_level="O2")
self.o = FP16_Optimizer(opt, static_loss_scale=128.)
self.o.backward(loss)
print(_amp_state.loss_scalers[0].loss_scale(), amp.state_dict()['apex'])
'''

NEW = '''\
# -*- coding: utf-8 -*-
"""é"""
try:
    import ampfuse.compat.apex as apex   # the package
    from ampfuse.compat.apex.parallel import DistributedDataParallel as DDP  # comment
    from ampfuse.compat.apex.fp16_utils import *
    from ampfuse.compat.apex import (amp,
                      optimizers)
    import os, ampfuse.compat.apex.amp as A, ampfuse.compat.apex.amp_C as amp_C
    from apex.contrib.fmha import FMHA
    from ampfuse.compat.apex.amp_C import multi_tensor_l2norm
except ImportError:
    raise ImportError("Please install apex")
é = 1; from  ampfuse.compat.apex.amp import _amp_state
import apexlike, ampfuse.compat.apex as apex
model, opt = amp.initialize(model, opt, opt_level="O2")
self.o = FP16_Optimizer(opt, static_loss_scale=128.)
self.o.backward(loss)
print(_amp_state.loss_scalers[0].loss_scale(), amp.state_dict()['apex'])
'''


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_imports_change_and_nothing_else(ends):
    assert rewrite_imports(OLD.replace("\n", ends)) == NEW.replace("\n", ends)
    assert rewrite_imports(NEW) == NEW


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_bind_the_same_names(path):
    def bound(source):
        nodes = [
            n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        return [(a.asname or a.name).removeprefix("apex.amp") for n in nodes for a in n.names]

    old = path.read_text()
    new = rewrite_imports(old)
    assert "ampfuse.compat.apex" in new
    assert [name or "apex" for name in bound(old)] == bound(new)
    assert not [use for use in find_uses(old) if not use.available]


def test_uses_are_found_line_by_line():
    found = [(use.line, use.name) for use in find_uses(OLD)]
    assert found == [
        (4, "apex"),
        (5, "apex.parallel.DistributedDataParallel"),
        (6, "apex.fp16_utils.*"),
        (7, "apex.amp"),
        (8, "apex.optimizers"),
        (9, "amp_C"),
        (9, "apex.amp"),
        (10, "apex.contrib.fmha.FMHA"),
        (11, "amp_C.multi_tensor_l2norm"),
        (14, "apex.amp._amp_state"),
        (15, "apex.parallel"),
        (16, "apex.amp.initialize"),
        (17, "apex.fp16_utils.FP16_Optimizer"),
        (19, "apex.amp._amp_state"),
        (19, "apex.amp.state_dict"),
    ]
    by_line = {use.line: use for use in find_uses(OLD)}
    assert [use.line for use in by_line.values() if not use.available] == [10]
    assert "ampfuse.amp.initialize" in by_line[16].ampfuse
    assert "autocast" in by_line[16].torch


# A statement, the module in it that moves, whether each use is here, and words of what is said of
# the last one. All names of a `from` stay where one of them is left out.
STATEMENTS = [
    ("from apex import contrib", None, [False], "torch's own"),
    ("from apex import amp, contrib as c", None, [True, False], ""),
    ("from apex import (amp,  # comment\n    RNN)", None, [True, False], ""),
    ("import apex.transformer", None, [False], ""),
    ("from apex.contrib import optimizers", "apex", [True], ""),
    ("from apex.contrib import optimizers as o, transducer", None, [True, False], ""),
    ("from apex.contrib.optimizers import FP16_Optimizer", "apex", [True], "initialize"),
    ("from apex.contrib.optimizers import FusedAdam", "apex", [True], "torch.optim"),
    ("from apex.contrib.groupbn import BatchNorm2d_NHWC", None, [False], "BatchNormAct2d"),
    ("from apex.mlp import MLP", "apex", [True], "torch.nn.Sequential"),
    (
        "from apex.fused_dense import FusedDense",
        None,
        [False],
        "torch.nn.Linear, with torch.compile",
    ),
    ("from fused_adam_cuda import adam", "fused_adam_cuda", [True], "AdamW"),
    ("from apex.parallel.distributed import flat_dist_call", "apex", [True], ""),
    ("from apex_C import flatten", "apex_C", [True], ""),
]


@pytest.mark.parametrize(("statement", "moves", "available", "said"), STATEMENTS)
def test_imports_move_where_all_of_it_is_here(statement, moves, available, said):
    other = "from apex import optimizers"
    found = rewrite_imports(f"{statement}\n{other}\n")
    to = HERE if moves == "apex" else f"{HERE}.{moves}"
    expected = statement.replace(f"from {moves}", f"from {to}", 1) if moves else statement
    assert found == f"{expected}\n{other.replace('apex', HERE)}\n"
    uses = find_uses(statement)
    assert [use.available for use in uses] == available
    assert said in f"{uses[-1].ampfuse} {uses[-1].torch}"
    assert (uses[-1].ampfuse == "not in ampfuse") == (not available[-1])


def test_odd_ways_to_write_an_import():
    source = (
        "from \\\n  apex \\\n  import amp\n"
        "import \\\n  apex\n"
        "import apex_C, amp_C as C\n"
        "\x0cif 1: import apex . amp as A; from apex . amp import init; import amp_C as C\n"
        "s = 'from apex import amp \x0b\x85'\r"
        "import apex\r"
    )
    assert rewrite_imports(source) == (
        f"from \\\n  {HERE} \\\n  import amp\n"
        f"import \\\n  {HERE} as apex\n"
        f"import {HERE}.apex_C as apex_C, {HERE}.amp_C as C\n"
        f"\x0cif 1: import {HERE}.amp as A; from {HERE} . amp import init; "
        f"import {HERE}.amp_C as C\n"
        "s = 'from apex import amp \x0b\x85'\r"
        f"import {HERE} as apex\r"
    )


def test_uses_behind_names_conditions_and_strings():
    source = (
        "import apex as a\n"
        "try:\n    from apex import amp as A\n"
        "except ImportError:\n    A = None\n"
        "if A is not None:\n    m, o = A.initialize(\n        m,\n        o)\n"
        "a.parallel.LARC.LARC(o)\n"
        "self.o: object = a.fp16_utils.FP16_Optimizer(o)\n"
        "self.o.clip_master_grads(1)\n"
        "importlib.import_module('apex.amp')\n"
        "__import__('apex.contrib')\n"
        "importlib.util.find_spec(name), find_spec('torch')\n"
    )
    found = [(use.line, use.name) for use in find_uses(source)]
    assert found == [
        (1, "apex"),
        (3, "apex.amp"),
        (6, "apex.amp"),
        (7, "apex.amp.initialize"),
        (10, "apex.parallel.LARC.LARC"),
        (11, "apex.fp16_utils.FP16_Optimizer"),
        (13, "apex.amp"),
        (14, "apex.contrib"),
    ]
    by_line = {use.line: use for use in find_uses(source)}
    assert "install()" in by_line[13].ampfuse
    assert [use.line for use in by_line.values() if not use.available] == [14]


def test_other_names_are_not_apexs():
    assert find_uses("import apexlike\nfrom . import apex\napex.amp.initialize()\n") == []
    assert find_uses("import torch as apex\napex.amp\n") == []


def test_the_program_reports(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from apex import amp\namp.initialize(1)\n")
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{path}:2: apex.amp.initialize\n    ampfuse: ampfuse.amp.initialize" in out
    assert "    torch:   " in out
    assert path.read_text() == "from apex import amp\namp.initialize(1)\n"
    plain = tmp_path / "plain.py"
    plain.write_text("import torch\n")
    assert main([str(plain)]) == 0
    assert "nothing" in capsys.readouterr().out


def test_the_program_writes(tmp_path):
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_bytes(OLD.replace("\n", "\r\n").replace("utf-8", "latin-1").encode("latin-1"))
    os.chmod(path, 0o750)
    link.symlink_to(path)
    assert main(["--write", str(link)]) == 1  # contrib has no counterpart
    expected = NEW.replace("\n", "\r\n").replace("utf-8", "latin-1").encode("latin-1")
    assert path.read_bytes() == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert link.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"train.py", "link.py"}
    assert main(["--write", str(link)]) == 1  # again: nothing changes
    assert path.read_bytes() == expected


def test_a_byte_order_mark_stays(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbffrom apex import amp\r\n")
    assert main(["--write", str(path)]) == 0
    assert path.read_bytes() == f"\ufefffrom {HERE} import amp\r\n".encode()


def test_the_program_on_what_it_cannot_write(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("from apex import amp\n")

    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["--write", str(path)]) == 2
    assert "train.py: cannot be written" in capsys.readouterr().err
    assert path.read_text() == "from apex import amp\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_program_on_what_it_cannot_read(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("from apex import amp\nprint 'old'\n")
    latin, null, notebook = (tmp_path / name for name in ("latin.py", "null.py", "a.ipynb"))
    latin.write_bytes(b"from apex import amp  # \xe9\n")
    null.write_bytes(b"from apex import amp\0\n")
    notebook.write_text('{"cells": [], "nbformat": 4}')
    good = tmp_path / "good.py"
    good.write_text("from apex import amp\n")
    files = [path, tmp_path / "missing.py", latin, null, notebook, good]
    assert main(["--write", *map(str, files)]) == 2
    err = capsys.readouterr().err
    assert "broken.py:2: cannot be read as Python" in err
    for name in ("missing.py", "latin.py", "null.py"):
        assert f"{name}: cannot be read" in err
    assert "nbconvert" in err
    assert good.read_text() == f"from {HERE} import amp\n"
    assert latin.read_bytes() == b"from apex import amp  # \xe9\n"
    assert path.read_text().endswith("print 'old'\n")
