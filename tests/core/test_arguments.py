"""Wrong calls of the extension are exceptions: it is private, what it would overwrite is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampfuse import _core
from cases import nn_ops

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STEP = {"found_inf": None, "max_norm": 0.0, "inspect": False, "skip_nonfinite": False}


@pytest.fixture
def table():
    """Two FP32 rows with gradients and Adam's states."""
    made = _core.C.ParamTable("adam", CPU)
    for name in ("a", "b"):
        param = torch.ones(5, requires_grad=True)
        param.grad = torch.ones(5)
        row = made.add_row(param, None, name)
        made.set_states(row, [[torch.zeros(5)], [torch.zeros(5)]])
    made.set_hyper(0, 2, None, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8})
    return made


def values(table):
    return [table.param(row).clone() for row in range(len(table))]


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (-1, 1), (2, 1), (3, 3), (0, 2**40)])
def test_hyper_parameters_of_rows_that_are_not_there(table, begin, end):
    with pytest.raises(IndexError, match=f"rows {begin} to {end} of 2"):
        table.set_hyper(begin, end, None, {"lr": 0.1})


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("param", "model", "whole", "said"),
    [
        (torch.ones(8), ONES.half(), None, "master and model weight differ"),
        (ONES, torch.ones(8).half(), None, "master and model weight differ"),
        (torch.ones(1, 4), torch.ones(4, 1).half(), None, "master and model weight differ"),
        (ONES.short(), ONES, None, "weight of float16 or bfloat16"),
        (ONES, ONES.half().to("meta"), None, "is on meta.*one optimizer per device"),
        (ONES, ONES.double(), None, "row is Double"),
        (torch.ones(1).expand(4), None, None, "gaps or overlaps"),
        (ONES.to_sparse(), None, None, "is sparse"),
        (ONES.int(), None, None, "row is Int"),
        (ONES, None, torch.ones(8), "not the local shard of the DTensor"),
    ],
)
def test_rows_that_do_not_fit(param, model, whole, said):
    table = _core.C.ParamTable("adam", CPU)
    with pytest.raises((RuntimeError, TypeError), match=said):
        table.add_row(param, model, "row", whole=whole)
    assert len(table) == 0


STATE, CODES = torch.zeros(5), torch.zeros(5, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("states", "storage", "average", "said"),
    [
        ([[STATE], [torch.zeros(4)]], "fp32", None, "state 1 of a must be on cpu and laid out"),
        ([[STATE.double()]], "fp32", None, "state 0 of a is Double; in fp32 it is Float"),
        ([[STATE], [STATE.int()]], "fp32", None, "state 1 of a is Int; in fp32 it is Float"),
        ([[STATE]], "bf16", None, "state 0 of a is Float; in bf16 it is BFloat16"),
        ([[CODES]], "fp32", None, "state 0 of a is Byte; in fp32 it is Float"),
        ([[CODES]], "8bit", None, "in 8bit it has elements and scales"),
        ([[CODES, torch.zeros(2)]], "8bit", None, "needs float32 scales"),
        ([[STATE, torch.zeros(1)]], "fp32", None, "has 2 tensors; in fp32 it has one"),
        ([[STATE]], "4bit", None, "it is one of fp32, bf16, .*8bit"),
        ([[STATE]] * 4, "fp32", None, "at most three"),
        ([[STATE]] * 2, "fp32", torch.zeros(5).half(), "the average of a is Half"),
        ([[STATE]] * 2, "fp32", torch.zeros(4), "the average of a"),
        ([[torch.zeros(10)[::2]]] * 2, "fp32", None, "laid out as the parameter"),
    ],
)
def test_states_that_do_not_fit_change_nothing(table, states, storage, average, said):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=said):
        table.set_states(0, states, storage, average)
    before = values(table)
    assert table.plan.collect(None, write_back=False) == []  # the row has still its states
    table.plan.update(**STEP)
    assert all((new < old).all() for new, old in zip(values(table), before, strict=True))


@pytest.mark.parametrize(
    ("place", "buffer", "said"),
    [
        (0, torch.zeros(1, dtype=torch.int32), "counts has 1 elements"),
        (0, torch.zeros(100), "counts is Float"),
        (1, torch.zeros(3), "norms has 3 elements; it needs 4"),
        (1, torch.zeros(8)[::2], "norms has gaps"),
        (1, torch.zeros(4, device="meta"), "norms is on meta"),
        (2, torch.zeros(8, dtype=torch.uint8), "changed has 8 elements"),
    ],
)
def test_buffers_that_are_no_meter(table, place, buffer, said):
    meter = table.plan.new_meter(True)
    meter[place] = buffer
    before = values(table)
    table.plan.collect(None, write_back=False)
    with pytest.raises((TypeError, ValueError), match=said):
        table.plan.update(**STEP, meter=meter)
    assert all(map(torch.equal, values(table), before))


def a_pass(table):
    table.gradients.begin_backward()
    table.gradients.end_backward(torch.ones(()), True)


def a_refusal(table):
    table.param(1).grad.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="has shape"):
        table.plan.collect(None, write_back=False)


OUTDATED = {
    "a row": lambda table: table.add_row(torch.ones(3), None, "c"),
    "zeros": lambda table: table.gradients.zero_grad(True),
    "a pass": a_pass,
    "a step": lambda table: table.plan.update(**STEP),
    "a refusal": a_refusal,
}


@pytest.mark.parametrize("outdate", OUTDATED.values(), ids=OUTDATED)
@pytest.mark.parametrize("call", ["update", "decide", "measure"])
def test_a_step_of_gradients_that_are_no_longer_there(table, outdate, call):
    table.plan.collect(None, write_back=False)
    outdate(table)
    before = values(table)
    with pytest.raises(RuntimeError, match=r"after collect\(\); call it again"):
        getattr(table.plan, call)(**({} if call == "measure" else STEP))
    assert all(map(torch.equal, values(table), before))


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.ones(0), "scale has 0 elements"),
        (torch.ones(1).half(), "scale is Half"),
        (torch.ones(1, device="meta"), "scale is on meta"),
    ],
)
def test_scales_that_are_no_number(table, scale, said):
    table.plan.collect(scale, write_back=True)
    with pytest.raises((TypeError, ValueError), match=said):
        table.plan.update(**{**STEP, "inspect": True})
    table.gradients.begin_backward()
    with pytest.raises((TypeError, ValueError), match=said):
        table.gradients.end_backward(scale, True)


@pytest.mark.parametrize("grad", [torch.ones(1).expand(5, 1), torch.ones(2), torch.ones(50)])
def test_a_gradient_of_another_shape_is_refused(table, grad):
    """Its setter looks, but not that of its data."""
    table.param(0).grad.data = grad
    with pytest.raises(RuntimeError, match="the gradient of a has shape"):
        table.plan.collect(None, write_back=False)


def test_earlier_gradients_in_another_layout_add_up():
    """A pass sets earlier gradients aside until it ends, in their own order of elements."""
    table = _core.C.ParamTable("sgd", CPU)
    param = torch.zeros(2, 3, requires_grad=True)
    earlier = torch.arange(6.0).view(3, 2).t()
    param.grad = earlier
    table.add_row(param, None, "row")
    table.gradients.begin_backward()
    param.grad = torch.ones(2, 3)
    table.gradients.end_backward(torch.ones(()), True)
    assert torch.equal(param.grad, earlier + 1)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda tensor: tensor.new_zeros(0), ValueError, "has 0 elements; it needs 1"),
        (lambda tensor: tensor.double(), TypeError, "is Double; it must be"),
        (lambda tensor: tensor.to("meta"), (RuntimeError, ValueError), "not allocated|is on meta"),
    ],
)
def test_trackers_that_are_none_are_refused(place, wrong, error, message):
    given = [torch.ones(()), torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int32)]
    given[place] = wrong(given[place])
    with pytest.raises(error, match=message):
        _core.C.update_scale(*given, [], 2.0, 0.5, 1, 1.0, 2.0**24, 1)


@pytest.mark.parametrize("state", [-1, 3, 64])
def test_states_that_no_algorithm_has_are_refused(state):
    lists = [torch.zeros(4, dtype=torch.uint8), torch.zeros(1)]
    with pytest.raises(IndexError, match=f"state {state} of 3"):
        _core.C.decode_state("adam", state, "8bit", lists, torch.zeros(4))


def freed(*shape, dtype=torch.float32):
    """A view of memory that is gone, as FSDP frees that of its parameters."""
    view = torch.ones(4, *shape, dtype=dtype)[1]
    view.untyped_storage().resize_(0)
    return view


def freed_weight(table):
    weight = torch.ones(5).bfloat16()
    table.add_row(torch.ones(5), weight, "c")
    weight.untyped_storage().resize_(0)
    table.masters.publish()


FREED_IN = {
    "a list": lambda _: _core.C.scale([freed(5)], [torch.ones(5)], 1.0, None),
    "a norm": lambda _: _core.C.l2norm([freed(5)]),
    "a remainder": lambda _: _core.C.join_master(
        torch.ones(5).bfloat16(), freed(5, dtype=torch.int16), torch.ones(5)
    ),
    "a weight": freed_weight,
    "scratch": lambda table: table.set_scratch(
        [(table.add_row(torch.ones(5, 5), None, "c", algorithm="muon"), freed(5, 5))]
    ),
    "a gradient": lambda table: (
        setattr(table.param(0).grad, "data", freed(5)),
        table.plan.collect(None, write_back=False),
    ),
    "a layer's input": lambda _: nn_ops().norm_forward(freed(2, 5), None, None, None, 5, 0.1, True),
    "a layer's weight": lambda _: nn_ops().norm_forward(
        torch.ones(2, 5), None, freed(5), None, 5, 0.1, True
    ),
}


@pytest.mark.parametrize("call", FREED_IN.values(), ids=FREED_IN)
def test_memory_that_was_freed_is_an_error(table, call):
    with pytest.raises(RuntimeError, match="lost its memory"):
        call(table)


@pytest.mark.parametrize(
    ("remainder", "out", "said"),
    [
        (ONES.half(), ONES, "a tensor of a state is Half"),
        (ONES.short(), ONES.int(), "a tensor of a state is Int"),
        (ONES.short().to_sparse(), ONES, "sparse|a tensor of a state"),
    ],
)
def test_a_split_master_in_other_types_is_refused(remainder, out, said):
    with pytest.raises((TypeError, ValueError), match=said):
        _core.C.join_master(ONES.bfloat16(), remainder, out)


def test_a_weight_of_another_type_is_refused_before_the_parameter_moves():
    param = torch.ones(2, 3, 4, 5)
    table = _core.C.ParamTable("adam", CPU)
    with pytest.raises(TypeError, match="row is Double"):
        table.add_row(param, param.double().to(memory_format=torch.channels_last), "row")
    assert param.is_contiguous()


def test_a_step_whose_middle_fails_leaves_lambs_moments_as_they_are():
    table = _core.C.ParamTable("lamb", CPU)
    moments = [[torch.zeros(4, 4)], [torch.zeros(4, 4)]]
    for algorithm, states in {"lamb": moments, "muon": [[torch.zeros(4, 4)]]}.items():
        param = torch.ones(4, 4, requires_grad=True)
        param.grad = torch.ones(4, 4)
        row = table.add_row(param, None, algorithm, algorithm=algorithm)
        table.set_states(row, states)
    for row in range(2):
        table.set_hyper(row, row + 1, None, {"lr": 0.1})
    table.set_scratch([(1, torch.zeros(4, 4))])

    def fail(rows):
        assert rows == [1]
        raise KeyError

    assert table.plan.collect(None, write_back=False) == []
    with pytest.raises(KeyError):
        table.plan.update(**STEP, between=fail)
    assert not any(moment.any() for (moment,) in moments)


def test_all_that_is_written_gets_a_new_version(table):
    """A backward pass through it tells then that it was changed."""
    ones, flag, shared = torch.ones(5), torch.zeros(1), torch.zeros(1)
    _core.C.scale([ones], [ones.clone()], 1.0, flag)
    _core.C.unscale([ones], [ones.clone()], torch.ones(1), flag)
    _core.C.l2norm([ones], False, None, flag)
    counts = (torch.zeros((), dtype=torch.int32) for _ in range(2))
    _core.C.update_scale(torch.ones(()), *counts, [flag], 2.0, 0.5, 1, 1.0, 2.0, 1, [shared])
    steps, averages = torch.zeros(1), torch.zeros(1)
    lists = [ones], [ones.clone()], [], [[ones.clone()]], []
    _core.C.step("novograd", *lists, steps, averages, None, {"lr": 0.1}, None, None)
    average = torch.ones(5)
    table.set_states(0, [[torch.zeros(5)], [torch.zeros(5)]], average=average)
    table.plan.collect(None, write_back=False)
    table.plan.update(**STEP)
    written = (flag, shared, steps, averages, average)
    assert [tensor._version for tensor in written] == [3, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="loads the sanitizer by LD_PRELOAD")
def test_random_calls_under_the_address_sanitizer(tmp_path):
    options = {
        "AMPFUSE_CUDA": "OFF",
        "AMPFUSE_CPU_ISAS": "scalar",
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1 -g1 -fsanitize=address",
        "Python_EXECUTABLE": sys.executable,
    }
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (configure, ["cmake", "--build", tmp_path]):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    (extension,) = tmp_path.glob("_C_*.so")
    # The sanitizer looks for the function that throws before torch has loaded it.
    runtime = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # At its end Python frees little.
    environment |= {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
    fuzz = [sys.executable, Path(__file__).with_name("table_fuzz.py"), extension, "30000"]
    result = subprocess.run(fuzz, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    done, refused = map(int, result.stdout.split())
    assert done + refused >= 30_000
    assert done > refused / 2


@pytest.mark.parametrize(
    ("algorithm", "states", "steps", "said"),
    [
        ("muon", [1], 1, "scratch memory"),
        ("adam", [1], 1, "has 3 lists of states, got 1"),
        ("sgd", [1, 1], 1, "got 2"),
        ("sgd", [2], 1, r"states\[0\] holds 2"),
        ("sgd", [], 3, "steps has 3 elements for 1 tensors"),
        ("novograd", [1], 1, "novograd needs norm_averages"),
    ],
)
def test_a_step_on_lists_that_do_not_fit_is_refused(algorithm, states, steps, said):
    """`states`: the lengths of its lists. apex's amp_C calls `step`; its tests have other cases."""
    x, counts = [torch.ones(4)], torch.zeros(steps)
    lists = [[torch.zeros(4)] * length for length in states]
    with pytest.raises(ValueError, match=said):
        _core.C.step(algorithm, x, x, [], lists, [], counts, None, None, {}, None, None)
