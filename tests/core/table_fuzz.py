"""Random calls of the extension, wrong ones among them: `table_fuzz.py EXTENSION CALLS`.

Each call works or is an exception; whatever it does to memory, the address sanitizer sees. Run by
test_arguments.py with an extension that is built for that. One thing is not done at random: no call
replaces the tensors of a row between `collect` and the step, which has their addresses.
"""

import importlib.util
import sys
from operator import attrgetter
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

WIDTHS = (0, 1, 3, 15, 16, 17, 127, 128, 129, 4096, 65537)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int16, torch.int32, torch.uint8, torch.float64)
ALGORITHMS = ("sgd", "adam", "adagrad", "novograd", "lamb", "lion", "none")
FIELDS = ("sum_squares", "found_inf", "skip", "grad_norm", "clip_coef", "loss_scale", "no_such")
HYPER = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "ema_decay", "seed")
FLAGS = ("maximize", "nesterov", "decoupled", "layerwise", "clipped_ratio", "init_zero", "wrong")

spec = importlib.util.spec_from_file_location(Path(sys.argv[1]).name.split(".")[0], sys.argv[1])
C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(C)
counts = {"done": 0, "refused": 0}

small = st.integers(-2, 9)
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
shapes = st.sampled_from([(w,) for w in WIDTHS] + [(2, 3), (3, 2), (16, 1), (5, 13, 2)])
KINDS = st.sampled_from(["alone", "half", "master", "split"])
STORAGES = C.schema()["storages"]
STATES = st.sampled_from([*STORAGES])
ROWS = st.lists(st.tuples(shapes, KINDS, st.booleans(), STATES), min_size=1, max_size=4)


@st.composite
def tensors(draw, dtypes=DTYPES, shape=None):
    """Tensors of any size, type, layout and device that a caller may pass."""
    shape = draw(shapes) if shape is None else shape
    dtype = draw(st.sampled_from(dtypes))
    kind = draw(
        st.sampled_from(["plain"] * 12 + ["transposed", "gaps", "expanded", "meta", "sparse"])
    )
    if kind == "meta":
        return torch.zeros(shape, dtype=dtype, device="meta")
    if kind == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if kind == "gaps":
        return torch.ones((*shape, 2), dtype=dtype)[..., 0]
    tensor = torch.ones(shape, dtype=dtype)
    if kind == "sparse" and dtype.is_floating_point:
        return tensor.to_sparse()
    return tensor.t() if kind == "transposed" and tensor.dim() == 2 else tensor


vectors = st.one_of(
    st.none(),
    tensors(dtypes=(torch.float32,), shape=(1,)),
    tensors(dtypes=(torch.float32,), shape=()),
    tensors(),
)
lists = st.lists(tensors(), max_size=3)
storages = st.sampled_from((*STORAGES, "wrong"))
# Stand-ins for an optimizer's groups and states.
containers = st.sampled_from((None, [], {}, [{"params": []}], {1: {"a": 1}}, [3], "wrong"))


def attempt(call, *args, **kwargs):
    """The result, or None where the call refuses."""
    try:
        result = call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError):
        counts["refused"] += 1
        return None
    counts["done"] += 1
    return result


class Table(RuleBasedStateMachine):
    """One table, its leaves, and the buffers that earlier calls made."""

    def __init__(self):
        super().__init__()
        self.leaves = []
        self.buffers = None
        self.collected = False
        self.table = C.ParamTable("adam", torch.device("cpu"))

    @initialize(algorithm=st.sampled_from(ALGORITHMS), rows=ROWS)
    def first_table(self, algorithm, rows):
        self.new_table(algorithm, rows)

    @rule(algorithm=st.sampled_from((*ALGORITHMS, "wrong")), rows=ROWS)
    def new_table(self, algorithm, rows):
        table = attempt(C.ParamTable, algorithm, torch.device("cpu"))
        if table is None:
            return
        self.__dict__.update(leaves=[], buffers=None, collected=False, table=table)
        for row, (shape, kind, bf16, states) in enumerate(rows):
            self.add_row(shape, kind, bf16)
            self.set_states(row, states, 2, bf16)
        self.set_plain_hyper()

    def _add(self, param, model, **options):
        row = attempt(self.table.add_row, param, model, f"row {len(self.leaves)}", **options)
        if row is not None:
            self.leaves.append(param if model is None else model)
            self.collected = False

    @rule(shape=shapes, kind=KINDS, bf16=st.booleans())
    def add_row(self, shape, kind, bf16):
        half = torch.bfloat16 if bf16 else torch.float16
        leaf = torch.ones(shape, dtype=torch.float32 if kind == "alone" else half)
        master = {"master": leaf.float, "split": lambda: torch.zeros(shape, dtype=torch.int16)}
        with_master = kind in master
        param = master[kind]() if with_master else leaf
        leaf.requires_grad_()
        self._add(param, leaf if with_master else None, at_random=bf16)

    @rule(
        param=tensors(),
        model=st.one_of(st.none(), tensors()),
        at_random=st.booleans(),
        whole=st.one_of(st.none(), tensors()),
        origin=small,
    )
    def add_any_row(self, param, model, at_random, whole, origin):
        self._add(param, model, at_random=at_random, whole=whole, origin=origin)

    @rule(row=st.integers(0, 9), kind=STATES, count=st.integers(0, 3), average=st.booleans())
    def set_states(self, row, kind, count, average):
        if not self.leaves:
            return
        row %= len(self.leaves)
        like = self.table.param(row)
        storage = STORAGES[kind]
        dtype = {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[storage["bits"]]
        with torch.no_grad():
            states = [[torch.zeros_like(like, dtype=dtype)] for _ in range(count)]
        for state in states if storage["block"] else ():
            state.append(torch.zeros(-(-like.numel() // storage["block"])))
        mean = torch.zeros_like(like, dtype=torch.float32) if average else None
        attempt(self.table.set_states, row, states, kind, mean)

    @rule()
    def set_plain_hyper(self):
        values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        attempt(self.table.set_hyper, 0, len(self.leaves), None, values)

    # --- gradients: as autograd leaves them, or anything that torch lets a user put there ---------

    @rule(value=numbers)
    def gradients(self, value):
        for leaf in self.leaves:
            if leaf.dtype.is_floating_point and leaf.layout is torch.strided:
                leaf.grad = torch.zeros_like(leaf, requires_grad=False).add_(torch.tensor(value))
        self.collected = False

    @rule(row=small, grad=st.one_of(st.none(), tensors()), by_data=st.booleans())
    def any_gradient(self, row, grad, by_data):
        if not 0 <= row < len(self.leaves):
            return
        leaf = self.leaves[row]
        self.collected = False
        if by_data and leaf.grad is not None and grad is not None:
            attempt(setattr, leaf.grad, "data", grad)
        else:
            attempt(setattr, leaf, "grad", grad)

    @rule(row=small, other=tensors())
    def other_data(self, row, other):
        if 0 <= row < len(self.leaves):
            self.collected = False
            attempt(setattr, self.leaves[row], "data", other)

    # --- a backward pass --------------------------------------------------------------------------

    @rule(
        scale=tensors(dtypes=(torch.float32,), shape=()),
        value=numbers,
        check=st.booleans(),
        delayed=st.booleans(),
    )
    def whole_pass(self, scale, value, check, delayed):
        attempt(self.table.gradients.begin_backward)
        self.gradients(value)
        attempt(self.table.gradients.end_backward, scale, check, delayed)

    @rule()
    def measure(self):
        if self.collected:
            attempt(self.table.plan.measure)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        attempt(self.table.gradients.zero_grad, set_to_none)
        self.collected = False

    # --- the step ---------------------------------------------------------------------------------

    @rule(
        scale=vectors,
        write_back=st.booleans(),
        half=st.booleans(),
        groups=containers,
        states=containers,
    )
    def collect(self, scale, unscales, half, groups, states):
        collected = attempt(self.table.plan.collect, scale, unscales, half, groups, states)
        self.collected = collected is not None

    @rule(changed=st.booleans())
    def new_meter(self, changed):
        self.buffers = attempt(self.table.plan.new_meter, changed) or self.buffers

    def _step(self, call, found_inf, max_norm, inspect, skip, **meter):
        # A step without collect is refused; one after tensors were replaced may be undefined.
        options = {"found_inf": found_inf, "max_norm": max_norm, "inspect": inspect}
        attempt(call, skip_nonfinite=skip, **options, **meter)

    @rule(
        found_inf=vectors,
        max_norm=numbers,
        inspect=st.booleans(),
        skip=st.booleans(),
        again=st.booleans(),
        wrong=st.one_of(st.none(), lists),
        meters=st.booleans(),
    )
    def update(self, found_inf, max_norm, inspect, skip, again, wrong, meters):
        if again or not self.collected:
            attempt(self.table.plan.collect, None, write_back=False)
        meter = (wrong if wrong is not None else self.buffers) if meters else None
        self._step(self.table.plan.update, found_inf, max_norm, inspect, skip, meter=meter)
        self.collected = False

    @rule(found_inf=vectors, max_norm=numbers, inspect=st.booleans(), skip=st.booleans())
    def decide(self, found_inf, max_norm, inspect, skip):
        if self.collected:
            self._step(self.table.plan.decide, found_inf, max_norm, inspect, skip)

    @rule(result=tensors(), elsewhere=st.one_of(st.none(), tensors()))
    def set_gather(self, result, elsewhere):
        attempt(self.table.inspector.set_gather, lambda mine: result, elsewhere)
        self.collected = False

    # --- functions on lists -----------------------------------------------------------------------

    @rule(x=lists, y=lists, found_inf=vectors, factor=numbers, check=small, same=st.booleans())
    def on_lists(self, x, y, found_inf, factor, check, same):
        if same:
            y = [tensor.clone() for tensor in x]
        attempt(C.scale, x, y, factor, found_inf)
        attempt(C.axpby, x, y, y, factor, factor, found_inf, check)
        attempt(C.unscale, x, y, found_inf, found_inf)
        attempt(C.l2norm, x, same, found_inf, found_inf)
        values = {"lr": 0.1, "layerwise": 1, "trust_coefficient": factor, "clipped_ratio": same}
        steps = torch.zeros(len(x))
        attempt(C.step, "layerwise", x, y, [], [], x, steps, None, found_inf, values, None, None)

    @rule(
        algorithm=st.sampled_from(ALGORITHMS),
        shape=shapes,
        rows=st.integers(0, 3),
        data=st.data(),
        states=st.integers(0, 4),
        column=vectors,
        lr=vectors,
        found_inf=vectors,
    )
    def step(self, algorithm, shape, rows, data, states, column, lr, found_inf):
        some = [torch.ones(shape) for _ in range(rows)]
        steps = data.draw(st.sampled_from([torch.zeros(rows), torch.zeros(1)]))
        args = (some, [some] * states, [], steps, column, lr, {"lr": 0.1})
        attempt(C.step, algorithm, some, some, args[0], *args[1:], found_inf, found_inf)


algorithms, flags = st.sampled_from(ALGORITHMS), st.booleans()
some = st.one_of(st.none(), tensors())
values = st.dictionaries(st.sampled_from((*HYPER, *FLAGS)), numbers, max_size=4)
doubles = tensors(dtypes=(torch.float64, torch.float64, torch.float32))
on_device = st.dictionaries(st.sampled_from(("lr", "beta1", "wrong")), doubles, max_size=2)
rule_of_scales = (2.0, 0.5, small, 1.0, 2.0**24, small)  # numbers are given as they are
# Calls that need nothing but arguments: of a table, and of the extension.
OF_A_TABLE = {
    **dict.fromkeys(("gradients.begin_backward", "gradients.cancel_backward"), ()),
    "gradients.check": (),
    **dict.fromkeys(("gradients.materialize", "plan.finish_step", "plan.mark_stepped"), ()),
    **dict.fromkeys(("masters.accept_model_weights", "masters.publish", "masters.refresh"), ()),
    **dict.fromkeys(("masters.exist", "steps", "norm_averages", "fingerprint", "__len__"), ()),
    **dict.fromkeys(("param", "model", "name"), (small,)),
    **dict.fromkeys(("remember", "matches"), (containers, containers)),
    "gradients.end_backward": (tensors(), flags, flags),
    "gradients.look": (tensors(),),
    "gradients.assign": (tensors(), some),
    "gradients.accumulated": (small, flags),
    "inspector.state_field": (st.sampled_from(FIELDS),),
    "set_states": (small, st.one_of(st.none(), st.lists(lists, max_size=4)), storages, some),
    "set_hyper": (small, small, vectors, values, on_device),
}
OF_THE_EXTENSION = {
    "update_scale": (vectors, tensors(), tensors(), lists, *rule_of_scales, lists, flags),
    "decode_state": (algorithms, small, storages, lists, tensors()),
    "encode_state": (algorithms, small, tensors(), storages, lists),
    **dict.fromkeys(("join_master", "split_master"), (tensors(),) * 3),
}


def calls(table, owner):
    """A rule that makes one of these calls, on `owner` of the machine."""

    @rule(name=st.sampled_from([*table]), data=st.data())
    def call(self, name, data):
        drawn = [data.draw(x) if isinstance(x, st.SearchStrategy) else x for x in table[name]]
        attempt(attrgetter(name)(owner(self)), *drawn)

    return call


for i in range(4):  # of many calls some are to be made in each run
    setattr(Table, f"of_a_table_{i}", calls(OF_A_TABLE, lambda machine: machine.table))
Table.of_the_extension = calls(OF_THE_EXTENSION, lambda machine: C)

if __name__ == "__main__":
    STEPS = 100
    calls = int(sys.argv[2])
    # The same calls in each run, and none of them again to make an example smaller.
    profile = settings(
        max_examples=-(-calls // STEPS),
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Table, settings=profile)
    print(counts["done"], counts["refused"])
