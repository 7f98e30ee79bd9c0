"""Random calls of the extension, wrong ones among them: `table_fuzz.py EXTENSION CALLS`.

Each call works or is an exception; whatever it does to memory, the address sanitizer sees. Run by
test_arguments.py with an extension that is built for that. One thing is not done at random: nobody
replaces the tensors of a row between `collect` and the step, which has their addresses.
"""

import ast
import importlib.util
import random
import sys
from operator import attrgetter
from pathlib import Path

import torch

STUB = Path(__file__).parents[2] / "python" / "ampfuse" / "_C.pyi"
WIDTHS = (0, 1, 3, 15, 16, 17, 127, 128, 129, 4096, 65537)
SHAPES = [(w,) for w in WIDTHS] + [(2, 3), (3, 2), (16, 1), (5, 13, 2)]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int16, torch.int32, torch.uint8, torch.float64)
LAYOUTS = ["plain"] * 12 + ["transposed", "gaps", "expanded", "meta", "sparse"]
HYPER = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "ema_decay", "seed")
FLAGS = ("maximize", "nesterov", "decoupled", "layerwise", "clipped_ratio", "init_zero", "wrong")
# What stands in for an optimizer's groups and states.
CONTAINERS = (None, [], {}, [{"params": []}], {1: {"a": 1}}, [3], "wrong")

spec = importlib.util.spec_from_file_location(Path(sys.argv[1]).name.split(".")[0], sys.argv[1])
C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(C)
STORAGES = C.schema()["storages"]
NAMES = {
    "algorithm": ("sgd", "adam", "adagrad", "novograd", "lamb", "lion", "none", "wrong"),
    "storage": (*STORAGES, "wrong"),
    "name": ("sum_squares", "found_inf", "skip", "grad_norm", "clip_coef", "loss_scale", "wrong"),
}
choose = random.Random(0)  # the same calls in each run
counts = {"done": 0, "refused": 0}


def attempt(call, *args, **kwargs):
    """The result, or None where the call refuses."""
    try:
        result = call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError):
        counts["refused"] += 1
        return None
    counts["done"] += 1
    return result


# ---- arguments -----------------------------------------------------------------------------------


def flag():
    return choose.random() < 0.5


def small():
    return choose.randint(-2, 9)


def number():
    some = (0.0, 1.0, 0.1, -1.0, 1e-30, 3e38, float("inf"), -float("inf"), float("nan"))
    return choose.choice([*some, choose.gauss(0, 1)])


def tensor(dtypes=DTYPES):
    """Of any size, type, layout and device that a caller may come with."""
    shape, dtype, kind = map(choose.choice, (SHAPES, dtypes, LAYOUTS))
    if kind == "meta":
        return torch.zeros(shape, dtype=dtype, device="meta")
    if kind == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if kind == "gaps":
        return torch.ones((*shape, 2), dtype=dtype)[..., 0]
    made = torch.ones(shape, dtype=dtype)
    if kind == "sparse" and dtype.is_floating_point:
        return made.to_sparse()
    return made.t() if kind == "transposed" and made.dim() == 2 else made


def value():
    """A number on the device, or what is none."""
    return choose.choice([*[torch.ones(1), torch.ones(())] * 3, tensor()])


def table_of(keys, make, count):
    return {choose.choice(keys): make() for _ in range(choose.randint(0, count))}


def argument(name, kind, like):
    """What a parameter may be given; lists of tensors have shapes and types as `like`, if any."""

    def lists():
        if like is None:
            return [tensor() for _ in range(choose.randint(0, 3))]
        shapes, dtypes = like
        return [torch.ones(shape, dtype=choose.choice(dtypes)) for shape in shapes]

    if name == "steps" and like is not None:
        return torch.zeros(choose.choice([1, len(like[0])]))
    if name in ("models", "updates", "shared") and flag():
        return []
    if kind.endswith(" | None"):
        if flag():
            return None
        kind = kind.removesuffix(" | None")
        if kind == "Tensor":
            return value()
    return {
        "Tensor": lambda: tensor() if flag() else value(),
        "Sequence[Tensor]": lists,
        "Sequence[Sequence[Tensor]]": lambda: [lists() for _ in range(choose.randint(0, 4))],
        "Sequence[tuple[int, Tensor]]": lambda: [(small(), tensor()) for _ in range(2)],
        "Mapping[str, float]": lambda: table_of((*HYPER, *FLAGS), number, 4),
        "Mapping[str, Tensor]": lambda: table_of(("lr", "beta1", "wrong"), value, 2),
        "Callable[..., Any]": lambda: lambda mine: mine.new_zeros(choose.randint(0, 99)),
        "Callable[[list[int]], Callable[[], None]]": lambda: lambda rows: lambda: None,
        "Any": lambda: choose.choice(CONTAINERS),
        "torch.dtype": lambda: choose.choice(DTYPES),
        "str": lambda: choose.choice(NAMES[name]),
        "float": number,
        "int": small,
        "bool": flag,
    }[kind]()


def signatures(body):
    """{name: {parameter: type}} of the functions that the stub has there."""
    return {
        function.name: {
            parameter.arg: ast.unparse(parameter.annotation)
            for parameter in (*function.args.args, *function.args.kwonlyargs)
            if parameter.arg != "self"
        }
        for function in body
        if isinstance(function, ast.FunctionDef) and not function.decorator_list
    }


def call(function, parameters):
    shapes = [choose.choice(SHAPES) for _ in range(choose.randint(0, 3))]
    like = choose.choice([None, (shapes, FLOATS), (shapes, FLOATS[:1])])
    given = {name: argument(name, kind, like) for name, kind in parameters.items()}
    return attempt(function, **given)


STATED = ast.parse(STUB.read_text()).body
OF_THE_EXTENSION = {name: p for name, p in signatures(STATED).items() if p}
del OF_THE_EXTENSION["set_half_ops"]  # changes torch, not memory
PLACES = {"ParamTable": "", "Masters": "masters.", "GradientLedger": "gradients."}
PLACES |= {"Inspector": "inspector.", "StepPlan": "plan."}
OF_A_TABLE = {
    PLACES[each.name] + name: parameters
    for each in STATED
    if isinstance(each, ast.ClassDef) and each.name in PLACES
    for name, parameters in signatures(each.body).items()
    if name not in ("__init__", "__len__")
}


# ---- a table -------------------------------------------------------------------------------------


class Table:
    """One table, its leaves, and what may happen to them."""

    def __init__(self):
        algorithm = choose.choice(NAMES["algorithm"][:-1])
        self.table = C.ParamTable(algorithm, torch.device("cpu"))
        self.leaves = []
        self.meter = None
        self.collected = False
        for _ in range(choose.randint(1, 4)):
            self.add_row()
            self.set_states(len(self.leaves) - 1, 2)
        values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        attempt(self.table.set_hyper, 0, len(self.leaves), None, values)

    def add(self, param, model, **options):
        row = attempt(self.table.add_row, param, model, f"row {len(self.leaves)}", **options)
        if row is not None:
            self.leaves.append(param if model is None else model)
            self.collected = False

    def add_row(self):
        shape, kind, half = map(
            choose.choice, (SHAPES, ["alone", "half", "float", "split"], FLOATS)
        )
        leaf = torch.ones(shape, dtype=torch.float32 if kind == "alone" else half)
        masters = {"float": leaf.float(), "split": torch.zeros(shape, dtype=torch.int16)}
        param = masters.get(kind, leaf)
        leaf.requires_grad_()
        self.add(param, leaf if kind in masters else None, at_random=flag())

    def add_any_row(self):
        model, whole = (choose.choice([None, tensor()]) for _ in range(2))
        self.add(tensor(), model, at_random=flag(), whole=whole, origin=small())

    def set_states(self, row=None, count=None):
        if not self.leaves:
            return
        row = choose.randrange(len(self.leaves)) if row is None else row
        count = choose.randint(0, 3) if count is None else count
        like = self.table.param(row)
        kind, storage = choose.choice([*STORAGES.items()])
        dtype = {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[storage["bits"]]
        with torch.no_grad():
            states = [[torch.zeros_like(like, dtype=dtype)] for _ in range(count)]
        for state in states if storage["block"] else ():
            state.append(torch.zeros(-(-like.numel() // storage["block"])))
        mean = torch.zeros_like(like, dtype=torch.float32) if flag() else None
        attempt(self.table.set_states, row, states, kind, mean)

    def gradients(self):
        """As autograd leaves them."""
        self.collected = False
        for leaf in self.leaves:
            if leaf.dtype.is_floating_point and leaf.layout is torch.strided:
                value = torch.tensor(number())
                leaf.grad = torch.zeros_like(leaf, requires_grad=False).add_(value)

    def replace(self):
        """A gradient or data, by anything that torch lets a user put there."""
        if not self.leaves:
            return
        self.collected = False
        leaf, other = choose.choice(self.leaves), choose.choice([None, tensor(), tensor()])
        if flag():
            attempt(setattr, leaf, "grad", other)
        elif other is not None:
            attempt(setattr, leaf if leaf.grad is None or flag() else leaf.grad, "data", other)

    def whole_pass(self):
        attempt(self.table.gradients.begin_backward)
        self.gradients()
        call(self.table.gradients.end_backward, {"scale": "Tensor", "check": "bool"})

    def step(self):
        """With addresses of tensors that are still there."""
        if not self.collected:
            attempt(self.table.plan.collect, None, unscales=False)
        options = {"max_norm": number(), "inspect": flag(), "skip_nonfinite": flag()}
        self.meter = attempt(self.table.plan.new_meter, flag()) if flag() else self.meter
        options["found_inf"] = choose.choice([None, value()])
        attempt(self.table.plan.update, **options, meter=self.meter)
        self.collected = False

    def any_call(self):
        name = choose.choice([*OF_A_TABLE])
        function = name.rpartition(".")[2]
        if function in ("update", "decide", "measure") and not self.collected:
            attempt(self.table.plan.collect, None, unscales=False)
        result = call(attrgetter(name)(self.table), OF_A_TABLE[name])
        if name == "plan.collect":
            self.collected = result is not None
        elif function in ("add_row", "update", "zero_grad", "set_gather", "end_backward"):
            self.collected = False

    def any_function(self):
        name = choose.choice([*OF_THE_EXTENSION])
        call(getattr(C, name), OF_THE_EXTENSION[name])


if __name__ == "__main__":
    rules = (Table.add_row, Table.add_any_row, Table.set_states, Table.gradients, Table.replace)
    rules += (Table.whole_pass, Table.step, *[Table.any_call] * 6, *[Table.any_function] * 3)
    while sum(counts.values()) < int(sys.argv[2]):
        machine = Table()
        for _ in range(100):
            choose.choice(rules)(machine)
    print(counts["done"], counts["refused"])
