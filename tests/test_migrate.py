"""``python -m ampfuse.migrate``: what it finds, what it writes."""

import ast
import os
import stat
from pathlib import Path

import pytest

from ampfuse.migrate import find_uses, rewrite_imports
from ampfuse.migrate.__main__ import main

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
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
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
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
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
        (10, "apex.contrib.xentropy.SoftmaxCrossEntropyLoss"),
        (11, "amp_C.multi_tensor_l2norm"),
        (14, "apex.amp._amp_state"),
        (15, "apex.parallel"),
        (16, "apex.amp.initialize"),
        (17, "apex.fp16_utils.FP16_Optimizer"),
        (18, "apex.fp16_utils.FP16_Optimizer.backward"),
        (19, "apex.amp._amp_state"),
        (19, "apex.amp.state_dict"),
    ]
    by_line = {use.line: use for use in find_uses(OLD)}
    assert [use.line for use in by_line.values() if not use.available] == [10]
    assert "ampfuse.amp.initialize" in by_line[16].ampfuse
    assert "autocast" in by_line[16].torch
    assert "scale_loss" in by_line[18].ampfuse
    assert "scaler.scale(loss)" in by_line[18].torch


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


def test_the_program_on_what_it_cannot_read(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("from apex import amp\nprint 'old'\n")
    assert main(["--write", str(path), str(tmp_path / "missing.py")]) == 2
    err = capsys.readouterr().err
    assert "broken.py" in err
    assert "missing.py" in err
    assert path.read_text().endswith("print 'old'\n")
