"""Computation at each level: weights, inputs, outputs, and the loss on them."""

import collections
import copy
import dataclasses
import functools
import io
import math
import pickle
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import register_pytree_node

from ampfuse import amp, pytree
from cases import HALF_TYPES, LEVELS, bf16, f16, f32, f64, through_a_file
from trainings import backward

levels = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    """Convolution, batch norm and a linear layer; at module level, so that it pickles."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.seen = None

    def forward(self, x, *, scale=1.0):
        """Classify."""
        self.seen = x.dtype
        return self.fc(self.bn(self.conv(x)).relu().mean((2, 3))) * scale + self.shift


class Echo(nn.Module):
    """Returns its arguments, and keeps what it got."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args[0] if len(args) == 1 and not kwargs else (args, kwargs)


def net(level, **overrides):
    torch.manual_seed(0)
    return started(Net(), level, **overrides)


def started(model, level, optimizer=None, **options):
    """`model` at a level; with the optimizer, if there is one."""
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def images(dtype=f32):
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [(str(warning.message), warning.filename) for warning in caught]


# --- weights --------------------------------------------------------------------------------


# A weight's value, and whether O2 and O3 make inf of it.
@pytest.mark.parametrize(
    ("value", "lost"), [(65504.0, False), (65520.0, True), (-1e5, True), (-math.inf, False)]
)
@pytest.mark.parametrize(("level", "can_lose"), [("O2", 1), ("O3", 2), ("O1", 0), ("O5", 0)])
def test_weights_beyond_the_range_are_told(level, can_lose, value, lost):
    model = Net()
    with torch.no_grad():
        for parameter in (model.fc.weight, model.bn.weight):
            parameter.view(-1)[1] = value
    warned = warnings_of(lambda: started(model, level))
    assert model.fc.weight.isinf().any() == (value == -math.inf or (lost and can_lose > 0))
    if not (lost and can_lose):
        assert not warned
        return
    ((message, file),) = warned
    names = ["bn.weight", "fc.weight"][-can_lose:]
    assert ", ".join(f"{name!r} ({abs(value):g})" for name in names) + ". Use O5" in message
    assert file == __file__


@levels
def test_each_level_casts_weights_to_its_type(level):
    model = net(level)
    weights = HALF_TYPES[level] if level in ("O2", "O3", "O5") else f32
    assert model.conv.weight.dtype == model.fc.bias.dtype == model.shift.dtype == weights
    batch_norm = weights if level == "O3" else f32
    assert {t.dtype for t in model.bn.state_dict().values() if t.is_floating_point()} == {f32}
    assert model.bn.weight.dtype == model.bn.running_var.dtype == batch_norm
    assert model.steps.dtype == torch.int64


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_batch_norm_is_half_on_request_or_without_weights(level):
    assert net(level, keep_batchnorm_fp32="False").bn.weight.dtype == HALF_TYPES[level]
    plain = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.LayerNorm(3), nn.SyncBatchNorm(3))
    started(plain, level)
    assert plain[0].running_mean.dtype == plain[1].weight.dtype == HALF_TYPES[level]
    assert plain[2].weight.dtype == f32


def test_parameters_stay_the_same_objects_and_gradients_are_cast_along():
    model = Net()
    model.tied, model.c = model.fc, nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_buffer("b", torch.ones(2, dtype=torch.complex64))
    before = list(model.named_parameters(remove_duplicate=False))
    model(images()).sum().backward()
    gradient = model.fc.weight.grad.clone()
    started(model, "O3")
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(old is new for (_, old), (_, new) in zip(before, after, strict=True))
    assert torch.equal(model.fc.weight.grad, gradient.half())
    assert model.c.dtype == model.b.dtype == torch.complex64


# --- inputs and outputs ---------------------------------------------------------------------


@levels
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_each_level_casts_inputs_to_its_type_and_outputs_to_float32(level, dtype):
    out = net(level, cast_model_outputs=dtype)(images())
    assert (type(out), out.dtype) == (torch.Tensor, dtype)
    if level in ("O1", "O4") and dtype == f64:
        return  # autocast leaves float64 alone, and the layer refuses it: as in torch
    model = net(level)
    assert model(images(dtype)).dtype == f32  # at O1 and O4 the FP32 buffer added last promotes
    assert model.seen == (dtype if level in ("O1", "O4") else HALF_TYPES.get(level, f32))


def test_nothing_is_cast_where_the_overrides_turn_casts_off():
    model = net("O2", cast_model_type=False, master_weights=False)
    assert model.fc.weight.dtype == f32
    assert model(images()).dtype == f32
    assert net("O1", patch_torch_functions=False)(images()).dtype == f32


def test_casts_reach_direct_forward_keyword_arguments_and_hooks():
    model = net("O2")
    calls = []
    model.register_forward_hook(lambda module, args, out: calls.append(out.dtype))
    x = images()
    torch.testing.assert_close(model.forward(x, scale=2.0), model(x, scale=2.0))
    assert model.seen == f16
    assert calls == [f32]


Point = collections.namedtuple("Point", ["x", "label"])


class Batch(types.SimpleNamespace):
    def to(self, dtype):
        return Batch(x=self.x.to(dtype))


class DeviceBatch(Batch):
    def to(self, device):
        raise AssertionError("a dtype was passed as a device")


class KeywordBatch(Batch):
    def to(self, device=None, *, dtype=None):
        assert device is None
        return KeywordBatch(x=self.x.to(dtype))


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    rest: object = None
    name: str = dataclasses.field(init=False, default="frozen")


class Registered(types.SimpleNamespace):
    pass


register_pytree_node(Registered, lambda r: ([r.x], None), lambda items, _: Registered(x=items[0]))


class Output(collections.OrderedDict):
    """Like Hugging Face's ModelOutput: entries are attributes, too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


x = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "look"),
    [
        (x, lambda v: v),
        ([x, 1], lambda v: v[0]),
        ((x, None), lambda v: v[0]),
        (Point(x, "a"), lambda v: v.x),
        ({"a": [(x,)]}, lambda v: v["a"][0][0]),
        (collections.OrderedDict(a=x), lambda v: v["a"]),
        (collections.defaultdict(list, a=x), lambda v: v["a"]),
        (collections.UserDict(a=x), lambda v: v["a"]),
        (Output(a=x), lambda v: v.a),
        (Batch(x=x), lambda v: v.x),
        (KeywordBatch(x=x), lambda v: v.x),
        (dataclasses.make_dataclass("Data", ["x"])(x), lambda v: v.x),
        (Frozen(x), lambda v: v.x),
        (Frozen(1, {"y": [x]}), lambda v: v.rest["y"][0]),
        (Registered(x=x), lambda v: v.x),
        (torch.max(x.reshape(1, 2), 1), lambda v: v.values),
        (pack_sequence([x, x[:1]]), lambda v: v.data),
    ],
    ids=lambda v: type(v).__name__ if not callable(v) else "",
)
def test_containers_are_cast_and_keep_their_type(value, look):
    cast = pytree.cast(value, f16)
    assert look(cast).dtype == f16
    assert type(cast) is type(value)
    assert look(value).dtype == f32, "the caller's own object must not change"
    assert not pytree.walks(value) or any(t is look(value) for t in pytree.tensors(value))
    # Through a model, inputs and outputs.
    model = started(Echo(), "O2")
    model(key=value)
    assert look(model.kwargs["key"]).dtype == f16
    out = model(value)
    assert look(model.args[0]).dtype == f16
    assert look(out).dtype == f32
    assert type(out) is type(value)
    if not isinstance(value, (types.SimpleNamespace, PackedSequence)) or type(value) is Registered:
        assert look(started(Echo(), "O1")(cast)).dtype == f32  # a half output


def test_functions_are_cast_by_tensors_in_a_registered_node():
    half = amp.half_function(lambda held: held.x.dtype)
    promote = amp.promote_function(lambda held, other: other.dtype)
    model = Echo()
    model.forward = lambda: (half(Registered(x=x)), promote(Registered(x=x.double()), x))
    assert started(model, "O1")() == (f16, f64)


def test_what_is_not_cast_is_the_same_object():
    tensors = [x.to(dtype) for dtype in (torch.int64, torch.bool, torch.complex64, f16)]
    values = [x.numpy(), "text", None, 3.5, range(3), {1, 2}, (i for i in range(3)), x.shape]
    objects = [DeviceBatch(x=x), Batch, nn.Linear(2, 2)]
    holding_integers = [{"a": [1, x.int()]}, pack_sequence([x.long(), x[:1].long()])]
    for value in tensors + values + objects + holding_integers:
        assert pytree.cast(value, f16) is value, type(value)


# --- outputs of models at O1 and O4 ---------------------------------------------------------


def test_inside_a_region_of_autocast_outputs_are_plain():
    model = started(nn.Linear(2, 2), "O4")
    with torch.autocast("cpu", dtype=bf16):
        out = model(torch.ones(1, 2))
        assert (type(out), out.dtype) == (torch.Tensor, bf16)
        assert F.mse_loss(out, torch.zeros(1, 2)).dtype == f32
    outer = started(nn.Sequential(model), "O4")
    assert outer(torch.ones(1, 2)).dtype == f32


# --- outside forward ------------------------------------------------------------------------


class Lightning(nn.Module):
    """A module whose own forward is never called in training."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, x):
        out = self.net(x)
        self.seen = out.dtype
        return out.pow(2).mean()


@pytest.mark.parametrize(
    ("level", "call"),
    [
        *((level, call) for level in ("O1", "O4") for call in ("step", "everywhere")),
        *(("O1", call) for call in ("forward", "compiled")),
        ("O0", "everywhere"),
    ],
)
def test_a_loss_without_any_forward_warns_once(level, call):
    """Until when cast_everywhere casts, and what else: test_function_casts.py."""
    torch._dynamo.reset()
    module, x = Lightning(), torch.ones(2, 4)
    _, optimizer = started(module, level, torch.optim.SGD(module.parameters(), lr=0.1))
    run = module.training_step if call in ("step", "everywhere") else module
    if call == "compiled":
        run = torch.compile(module, backend="eager", fullgraph=True)
    if call == "everywhere":
        amp.cast_everywhere()

    def train():
        for _ in range(3):
            with amp.scale_loss(run(x).mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    told = warnings_of(train)
    if call == "step":
        ((message, file),) = told
        assert "cast_everywhere()" in message
        assert file == __file__
        assert module.seen == f32
        return
    assert not told
    if call == "everywhere":
        assert module.seen == HALF_TYPES.get(level, f32)
        assert module(x).dtype == f32
        assert type(F.linear(x, x)) is torch.Tensor
        assert F.mse_loss(F.linear(x, x), F.linear(x, x).float()).dtype == f32


# --- disable_casts --------------------------------------------------------------------------


class Precise(nn.Linear):
    def forward(self, x):
        with amp.disable_casts():
            y = super().forward(x)
        self.seen = [y.dtype, super().forward(y).dtype]


def test_disable_casts_blocks_nest_and_end_when_they_raise():
    model, x = started(Precise(3, 3), "O4"), torch.ones(1, 3)
    model(x)
    assert model.seen == [f32, bf16]
    with amp.disable_casts():
        with pytest.raises(KeyError), amp.disable_casts():
            raise KeyError
        model(x)
    assert model.seen == [f32, f32]
    model(x)
    assert model.seen == [f32, bf16]


# --- proxies: objects that pass for a module and are none ----------------------------------------


class Proxy:
    """Hands on everything, what is assigned too."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name, value):
        if name == "module":
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @property
    def __class__(self):
        return self.module.__class__


class WithoutForward(Proxy):
    forward = None


class Slotted:
    """Takes no attributes."""

    __slots__ = ("module",)
    __init__, __getattr__, __setattr__ = Proxy.__init__, Proxy.__getattr__, Proxy.__setattr__
    __class__ = property(lambda self: self.module.__class__)

    def forward(self, x):
        return self.module(x)

    __call__ = forward


def of_an_attribute(module):
    """The module's ``forward`` is an attribute, not a method."""
    module.forward = functools.partial(Net.forward, module)
    return Proxy(module)


class Module(nn.Module):
    """A module that passes for another one."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __setattr__(self, name, value):
        if name == "module":
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    __class__ = property(lambda self: type(self._modules["module"]))

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("outputs", [None, bf16])
@levels
@pytest.mark.parametrize("kind", [Proxy, WithoutForward, Slotted, of_an_attribute, Module])
def test_a_proxy_computes_as_the_module_would(kind, level, outputs):
    torch.manual_seed(0)
    proxy, x = kind(Net()), torch.rand(4, 1, 5, 5)
    module, own_type = proxy.module, type(proxy)
    twin = kind(copy.deepcopy(module))
    expected = twin(x)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    options = {"opt_level": level, "cast_model_outputs": outputs, "verbosity": 0}
    assert amp.initialize(proxy, optimizer, init_scale=1.0, **options)[0] is proxy
    assert proxy.module is module
    if kind is Module:  # is itself the one that casts
        assert type(module) is Net
    else:
        assert type(proxy) is own_type
    for model in (proxy, copy.deepcopy(proxy)):
        out = model(x)
        assert out.dtype == (outputs or f32)
        assert model.module.seen == (f32 if level in ("O0", "O1", "O4") else HALF_TYPES[level])
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
    backward(proxy(x).float().sum(), optimizer)
    optimizer.step()
    saved, before = proxy.state_dict(), twin.state_dict()
    assert saved.keys() == before.keys()
    assert {t.dtype for t in saved.values() if t.is_floating_point()} == {f32}
    (weight,) = (name for name in saved if name.endswith("fc.weight"))
    assert not torch.equal(saved[weight], before[weight])
    again = torch.optim.SGD(proxy.parameters(), lr=0.1)
    amp.initialize(proxy, again, **options)  # replaces, and wraps nothing twice
    assert proxy(x).dtype == (outputs or f32)


def test_a_proxy_of_nothing_is_refused_before_anything_changes():
    class Opaque(Proxy):
        def modules(self):
            yield self

    proxy = Opaque(Net())
    with pytest.raises(TypeError, match="Opaque is a proxy"):
        started(proxy, "O2")
    assert proxy.module.fc.weight.dtype == f32
    assert type(proxy.module) is Net


# --- the model stays the user's object ------------------------------------------------------


@levels
def test_an_initialized_model_looks_as_before(level):
    model = Net()
    text = repr(model)
    assert started(model, level) is model
    assert isinstance(model, Net)
    assert repr(model) == text
    assert type(model).__name__ == "Net"
    assert model.forward.__doc__ == "Classify."


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average.module


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model)))),
    "save": lambda model: through_a_file(model, weights_only=False),
    "average": averaged,
}


@levels
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_models_of_their_own(level, how):
    """apex's copies ran the original's weights, and pickling failed."""
    model, inputs = Net().eval(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(model(inputs).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    clone = COPIES[how](model)
    assert torch.equal(clone(inputs), model(inputs))
    clone(inputs).sum().backward()
    assert all(p.grad is not None for p in clone.parameters())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for tensor in (*clone.parameters(), *clone.buffers()):
            tensor.zero_()
    assert not clone(inputs).any()
    assert model(inputs).any()
    assert {t.dtype for t in clone.state_dict().values()} == {f32, torch.int64}
    assert clone(inputs).dtype == model(inputs).dtype


class WithReduce(nn.Linear):
    def __reduce__(self):
        return WithReduce, (self.in_features, self.out_features)


def test_a_model_with_its_own_reduce_pickles():
    model = started(WithReduce(2, 3), "O1")
    clone = pickle.loads(pickle.dumps(model))
    assert isinstance(clone, WithReduce)
    assert clone(torch.ones(1, 2)).dtype == f32


def test_a_new_instance_of_the_models_class_is_not_under_amp():
    model = started(nn.Linear(2, 2), "O1")
    assert type(model)(2, 3)(torch.ones(1, 2)).dtype == f32


def test_data_parallel_replicas_run_their_own_weights():
    model = net("O2").eval()
    replica = model._replicate_for_data_parallel()
    assert replica.__dict__ is not model.__dict__
    assert replica._amp_casts == model._amp_casts
    assert replica.forward.__self__ is replica


def test_classes_of_models_do_not_share_the_compilers_limit():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):  # timm sets one of a million
        for i in range(3):
            cls = type(f"Linear{i}", (nn.Linear,), {})
            model = started(cls(i + 1, 2), "O2")
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, i + 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "level", [*("O1", "O2", "O5"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("O0", "O3"))]
)
def test_scripted_parts_are_cast_trained_and_saved(level):
    """apex's state-dict hook failed on them."""
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Sequential(inner, nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    weights = {"O2": f16, "O3": f16, "O5": bf16}.get(level, f32)
    assert dict(inner.named_parameters())["0.weight"].dtype == weights
    assert dict(inner.named_buffers())["1.running_mean"].dtype == (f16 if level == "O3" else f32)
    assert model.state_dict(keep_vars=True)["0.0.weight"].dtype == weights
    before = copy.deepcopy(model.state_dict())
    backward(model(torch.rand(8, 4)).square().mean(), optimizer)
    optimizer.step()
    after = model.state_dict()
    assert {t.dtype for t in after.values()} == {f32, torch.int64}
    assert not torch.equal(after["0.0.weight"], before["0.0.weight"])
    model.load_state_dict(before)
    assert torch.equal(model.state_dict()["0.0.weight"], before["0.0.weight"])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@levels
def test_tracing_keeps_the_casts_and_scripting_is_refused(level):
    model, x = started(nn.Linear(2, 2), level), torch.ones(1, 2)
    with pytest.raises(TypeError, match=r"torch\.jit\.trace"):
        torch.jit.script(nn.Sequential(model))
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert traced(x).dtype == model(x).dtype


# --- state dicts ----------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        assert state == {"calls": 3}


@levels
def test_state_dict_is_fp32_and_loads_back_with_the_same_bits(level):
    torch.manual_seed(0)
    model = started(nn.Sequential(Extra(3, 3), Net()), level)
    state = copy.deepcopy(model.state_dict())
    assert state["0._extra_state"] == {"calls": 3}
    floats = [t for t in state.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    assert {t.dtype for t in floats} == {f32}
    assert {t.dtype for t in model[1].state_dict().values()} == {f32, torch.int64}
    before = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert all(map(torch.equal, before.parameters(), model.parameters()))
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_written_into_a_state_dict_and_lost_is_told(level):
    """An average of a copy does so; a dict that is loaded, or copied first, gives no warning."""
    model = net(level)
    average = copy.deepcopy(model)

    def write(into, of):
        for mine, other in zip(into.values(), of.values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(other, 0.001)

    def load():
        state = average.state_dict()
        write(state, model.state_dict())
        average.load_state_dict(state)

    def write_copies():
        write(copy.deepcopy(average.state_dict()), model.state_dict())
        torch.save(average.state_dict(), io.BytesIO())

    for usual in (load, write_copies):
        assert not warnings_of(lambda usual=usual: [usual(), usual()])
    ((message, _), *_) = warnings_of(
        lambda: [write(average.state_dict(), model.state_dict()) for _ in range(2)]
    )
    assert "state_dict() of this Conv2d has no effect" in message
    assert "ema_decay" in message


def test_initializing_a_model_again_replaces_the_casts():
    model = net("O2")
    before = type(model), len(model._state_dict_hooks)
    with pytest.warns(UserWarning, match="already has 4 half-precision"):
        started(model, "O5")
    assert (type(model), len(model._state_dict_hooks)) == before
    assert model.fc.weight.dtype == bf16
    model(images())
    assert model.seen == bf16
