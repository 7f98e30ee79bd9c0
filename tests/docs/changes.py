"""What differs in a process, and in a model and its optimizer, after calls of ampfuse.

Run as a program it makes the calls of docs/what_it_changes.md and prints, as JSON, the names of
what each has changed. The names are those of the page.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import re
import signal
import sys
import types
import warnings

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn

# torch's modules, except for its compilers, and Python's that a library could change.
_MODULES = re.compile(
    r"torch(?!\._(dynamo|inductor|functorch|refs|prims|decomp|export|higher_order|numpy))(\..*)?|"
    r"builtins|copyreg|functools|gc|logging|os|pickle|signal|sys|threading|warnings|weakref"
)
# Names that Python and torch change by themselves: counters and caches.
_OWN = re.compile(
    r".*\.__(warningregistry|builtins|loader|spec)__|sys\.(modules|path_importer_cache)(\[\])?|"
    r"warnings\.filters(\[\])?|"
    r"torch\.utils\.hooks\.RemovableHandle\.next_id|"
    r"torch\._weights_only_unpickler\._marked_safe_globals_set(\[\])?"
)
_calls = []  # recorded, because Python has no list of them


def record_calls(module, name):
    original = getattr(module, name)

    def recorded(*args, **kwargs):
        if sys._getframe(1).f_globals["__name__"].startswith("ampfuse"):
            _calls.append(f"{module.__name__}.{name}()")
        return original(*args, **kwargs)

    setattr(module, name, recorded)


def process():
    """{name: object, or a list of such} of the process's global state."""
    contents = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names that are looked at
        for name, module in list(sys.modules.items()):
            if _MODULES.fullmatch(name) and isinstance(module, types.ModuleType):
                _look(contents, name, module)
    contents["os.environ"] = sorted(os.environ.items())
    contents["signal.getsignal()"] = [signal.getsignal(n) for n in signal.valid_signals()]
    contents["warnings.filters"] = list(warnings.filters)
    contents["gc"] = [gc.isenabled(), gc.get_threshold()]
    for call in _calls:
        contents[call] = [_calls.count(call)]
    contents["sys.modules"] = sorted(
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__name__", "").startswith("ampfuse") and not name.startswith("ampfuse")
    )
    contents["torch.serialization.get_safe_globals()"] = sorted(
        map(str, torch.serialization.get_safe_globals())
    )
    contents["torch.compiler.config.cache_key_tag"] = torch.compiler.config.cache_key_tag
    contents["torch's flags"] = [
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.is_grad_enabled(),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(),
    ]
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("ampfuse"):
            for line in torch._C._dispatch_dump(name).splitlines():
                is_rule = line.startswith("AutocastCPU")
                place = "torch.autocast's rules for the CPU" if is_rule else name.partition(".")[0]
                contents[place] = contents.get(place, "") + name + line
    return contents


def _look(contents, name, module):
    for key, value in list(vars(module).items()):
        if not isinstance(value, types.ModuleType):
            _note(contents, f"{name}.{key}", value)
        if isinstance(value, type) and value.__module__ == name:
            for attribute, inner in list(vars(value).items()):
                _note(contents, f"{name}.{key}.{attribute}", inner)


def _note(contents, name, value):
    if _OWN.fullmatch(name):
        return
    contents[name] = value
    if isinstance(value, dict):
        contents[name + "[]"] = [(id(k), id(v)) for k, v in value.items()]
    elif isinstance(value, (list, set)):
        contents[name + "[]"] = [id(each) for each in value]


def objects(model, optimizer):
    """The same of a model and its optimizer, each name under its module, parameter or buffer."""
    parts = {}

    def look(key, kind, thing):
        attributes = {f"{kind}.__class__": type(thing)}
        for name, value in vars(thing).items():
            if name not in ("_parameters", "_buffers"):
                _note(attributes, f"{kind}.{name}", value)
        parts.update({(key, name): value for name, value in attributes.items()})

    for key, module in model.named_modules():
        look(key, "model" if not key else "loss" if key == "loss" else "module", module)
        for name, buffer in module._buffers.items():
            parts[f"{key}.{name}", "buffer"] = buffer
    for key, parameter in model.named_parameters():
        look(key, "parameter", parameter)
        parts[key, "parameter"] = parameter
        parts[key, "parameter.data"] = [parameter.dtype, parameter.data_ptr()]
    look("", "optimizer", optimizer)
    parts["params", "optimizer.param_groups"] = list(map(id, optimizer.param_groups[0]["params"]))
    return parts


def changed(before, after):
    """The names whose object or content differs, and those that are new in a known place."""
    known = {_place(name) for name in before}
    names = set()
    for name in before.keys() | after.keys():
        if name in before and name in after:
            same = before[name] is after[name]
            if not same and isinstance(after[name], (list, str)):
                same = before[name] == after[name]
        else:
            # An imported module brings names of its own, also to the package that it is in.
            same = name in after and _place(name) not in known
        if not same:
            names.add((name[1] if isinstance(name, tuple) else name).removesuffix("[]"))
    return sorted(names)


def _place(name):
    """The owner of the attribute."""
    if isinstance(name, tuple):
        return name[0], name[1].partition(".")[0]
    return name.removesuffix("[]").rpartition(".")[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(16, 3)
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x, target):
        x = F.relu(self.norm(self.first(x)))
        return self.loss(self.last(x.flatten(1)) + self.offset, target)


def training():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


BATCH = torch.randn(2, 2, 4, 4), torch.tensor([0, 1])


def torchs_own():
    """Makes torch load and count here what it does at first use."""
    model, optimizer = training()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(*BATCH)
        loss.backward()
        optimizer.step()


def import_all(skipped=re.compile(r"on_path|__main__|experiments\.(mnist|cifar|imagenet|mlp)")):
    import ampfuse

    for module in pkgutil.walk_packages(ampfuse.__path__, "ampfuse."):
        if not skipped.search(module.name) and ".integrations." not in module.name:
            importlib.import_module(module.name)


def main():
    torchs_own()
    record_calls(os, "register_at_fork")
    record_calls(atexit, "register")
    changes = {}
    start = process()
    torchs_own()
    changes["nothing"] = changed(start, process())
    import_all()
    changes["import"] = changed(start, process())

    import ampfuse
    from ampfuse import amp
    from ampfuse._core import EXTENSION as _C
    from ampfuse.compat import apex

    model, optimizer = training()
    optimizer.param_groups[0]["params"].pop()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = process()
    with amp.scale_loss(model(*BATCH), optimizer) as scaled:
        scaled.backward()
    changes["amp.scale_loss"] = changed(before, process())
    amp.restore_torch()
    for level in ("O0", "O2", "O3", "O5", "O1", "O4"):
        model, optimizer = training()
        before = objects(model, optimizer)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        changes[f"objects {level}"] = changed(before, objects(model, optimizer))
        with amp.scale_loss(model(*BATCH), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        changes[f"amp.initialize {level}"] = changed(start, process())
        amp.restore_torch()
    amp.cast_everywhere()
    changes["amp.cast_everywhere"] = changed(start, process())
    amp.restore_torch()
    amp.register_float_function(torch.fft, "fft")
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    changes["amp.register_float_function"] = changed(start, process())
    amp.restore_torch()
    ampfuse.cpu_half_ops()
    _C.set_half_ops(True, every=True)
    changes["ampfuse.cpu_half_ops"] = changed(start, process())
    amp.restore_torch()
    apex.install()
    changes["apex.install"] = changed(start, process())
    apex.uninstall()
    apex.amp.init()
    changes["apex.amp.init"] = changed(start, process())
    amp.restore_torch()
    changes["undone"] = changed(start, process())
    json.dump(changes, sys.stdout)


if __name__ == "__main__":
    main()
