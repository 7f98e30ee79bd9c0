"""``apex.amp`` on ampfuse: what scripts reach into, and apex's defects, each with its test."""

import copy
import gc
import pickle
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampfuse.amp
from ampfuse.amp import policy as policies
from ampfuse.compat import apex
from ampfuse.compat.apex import amp
from ampfuse.compat.apex.amp import frontend
from ampfuse.compat.apex.amp.scaler import LossScaler
from cases import LEVELS, bf16, clean_apex_names, f16, f32, through_a_file

submodule = sys.modules["ampfuse.compat.apex.amp._amp_state"]

state = amp._amp_state


@pytest.fixture(autouse=True)
def clean():
    with clean_apex_names():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc2(self.bn(self.fc1(x)).relu())


def start(level="O2", kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options.pop("optimizer", {})})
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def backward(model, optimizer, factor=1.0, **options):
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(3))
    loss = model(x).float().pow(2).mean() * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def train(model, optimizer, *factors, **options):
    """A step for each of the factors that multiply the loss."""
    for factor in factors:
        optimizer.zero_grad()
        backward(model, optimizer, factor, **options)
        optimizer.step()


INF, NAN = float("inf"), float("nan")


# --- what is printed ----------------------------------------------------------------------------


def told(number, scale):
    return f"Gradient overflow.  Skipping step, loss scaler {number} reducing loss scale to {scale}"


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, [told(1, 512.0), told(1, 256.0), told(0, 512.0)]),
        ({"verbosity": 0}, []),
        ({"verbosity": 2}, [told(1, 512.0), told(1, 256.0), told(0, 512.0)]),
        ({"loss_scale": 128.0}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_overflow_is_printed_as_apex_did(level, options, printed, capsys, caplog):
    given = {"verbosity": 1, "num_losses": 2, "max_loss_scale": 1024.0, **options}
    model, optimizer = start(level, **given)
    for factor, loss_id in ((1.0, 0), (INF, 1), (NAN, 1), (1.0, 1), (1e30, 0)):
        train(model, optimizer, factor, loss_id=loss_id)
    assert capsys.readouterr().out.splitlines() == printed
    assert "skipped" not in caplog.text
    assert "Gradient overflow" not in caplog.text  # not twice


def test_overflows_are_not_printed_after_the_script_mutes_apex(capsys):
    model, optimizer = start("O2", verbosity=1)
    state.verbosity = 0
    train(model, optimizer, INF)
    state.verbosity = 1
    train(model, optimizer, INF)
    assert capsys.readouterr().out.splitlines() == [told(0, 16384.0)]


def test_an_overflow_of_several_optimizers_is_printed_once(capsys):
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2")
    losses = [model(torch.rand(4, 4)).float().sum() for model in models]
    with amp.scale_loss(1e-3 * losses[0] + INF * losses[1], optimizers) as scaled:
        scaled.backward()
    assert capsys.readouterr().out.splitlines() == [told(0, 32768.0)]


def test_what_a_device_has_not_told_yet_is_printed_later(monkeypatch, capsys):
    class Slow(amp.scaler.Sample):
        arrived = False

        def has_arrived(self):
            return Slow.arrived

    monkeypatch.setattr(amp.scaler, "Sample", Slow)
    model, optimizer = start(verbosity=1, max_loss_scale=1024.0)
    train(model, optimizer, INF, 1.0, INF)
    assert capsys.readouterr().out == ""
    Slow.arrived = True
    train(model, optimizer, 1.0)
    assert capsys.readouterr().out.splitlines() == [told(0, 512.0), told(0, 256.0)]


def test_optimizers_may_come_as_a_generator():
    model, optimizer = start()
    with amp.scale_loss(model(torch.rand(4, 4)).sum(), (o for o in [optimizer])) as scaled:
        scaled.backward()
    assert model.fc1.weight.grad is not None
    assert state.loss_scalers[0]._optimizers[0]() is optimizer


def test_a_warning_of_scale_loss_names_the_line_of_the_script():
    model, optimizer = start()
    loss = model(torch.rand(4, 4)).sum()
    warns = pytest.warns(UserWarning, match="did not come from the scaled loss")
    with warns as caught, amp.scale_loss(loss, optimizer):
        model.fc1.weight.sum().backward()
    assert [each.filename for each in caught] == [__file__]


# --- what is kept -------------------------------------------------------------------------------


def test_arguments_by_position():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(
        model, optimizer, True, "O2", bf16, False, "False", True, "128.0", f16, 3, 0, 2.0, 4.0
    )
    options = {"cast_model_type": bf16, "keep_batchnorm_fp32": False, "master_weights": True}
    options_set = state.opt_properties.options
    assert options_set == options_set | options | {"opt_level": "O2", "loss_scale": 128.0}
    assert len(state.loss_scalers) == 3
    assert (state.verbosity, state.min_loss_scale, state.max_loss_scale) == (0, 2.0, 4.0)
    assert model(torch.rand(2, 4)).dtype == f16


@pytest.mark.parametrize("level", LEVELS)
def test_properties_of_each_level(level):
    start(level)
    properties, policy = state.opt_properties, policies.LEVELS[level]
    assert properties.options == {
        name: True if name == "enabled" else getattr(policy, name) for name in properties.options
    }
    assert properties.opt_level == level
    filled = frontend.opt_levels[level](frontend.Properties())
    assert filled.options == properties.options
    assert getattr(frontend, level).brief.startswith(level)
    assert getattr(frontend, level).more
    assert frontend.Properties().enabled is False
    with pytest.raises(AttributeError, match="no property"):
        properties.nonsense = 1


def test_errors_of_scale_loss():
    _, optimizer = start("O2")
    loss = torch.zeros(())
    for *given, what in [(loss, None, "NoneType"), (loss, 3, "int"), (1.0, optimizer, "float")]:
        with pytest.raises(TypeError, match=what), amp.scale_loss(*given):
            pass


def test_disabled():
    start(enabled=False)
    with amp.scale_loss(1.0, None) as scaled:
        assert scaled == 1.0
    assert amp.state_dict() == {}  # AttributeError in apex
    amp.load_state_dict({})
    assert not state.handle.is_active()


def test_hard_override_warns_and_does_it(capsys):
    half = Net().half()
    with pytest.raises(RuntimeError, match=r"fc1\.weight"):
        amp.initialize(half, opt_level="O1", verbosity=0)
    state.allow_incoming_model_not_fp32 = True
    amp.initialize(half, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="bad"):
        submodule.warn_or_err("bad")
    state.allow_incoming_model_not_fp32, state.hard_override = False, True
    amp.initialize(Net().half(), opt_level="O1", verbosity=0)
    with pytest.warns(UserWarning, match="hard_override"):
        model, _ = start("O1", cast_model_type=f16)
    assert model.fc1.weight.dtype == f16
    with pytest.warns(UserWarning, match="hard_override"):
        start("O1", keep_batchnorm_fp32="False")
    assert state.opt_properties.keep_batchnorm_fp32 is False
    submodule.maybe_print("unseen")
    state.verbosity = 1
    submodule.maybe_print("seen", True)
    assert capsys.readouterr().out == "seen\n"


def test_overrides_are_checked_together():
    options = {"master_weights": "split", "cast_model_type": f32}
    with pytest.raises(RuntimeError, match="only half-precision weights are split"):
        start("O2", **options)
    state.hard_override = True
    with pytest.warns(UserWarning, match="only half-precision weights are split"):
        start("O2", **options)


def test_only_the_first_process_of_a_group_prints_for_rank0(monkeypatch, capsys):
    state.verbosity = 1
    for name, value in (("is_initialized", True), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    submodule.maybe_print("unseen", True)
    submodule.maybe_print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_state_before_initialize(monkeypatch):
    monkeypatch.setattr(ampfuse.amp.session, "_latest", None)
    assert not hasattr(state, "loss_scalers")
    fresh = type(state)()
    assert not hasattr(fresh, "opt_properties")
    assert not hasattr(fresh, "handle")
    assert (fresh.hard_override, fresh.allow_incoming_model_not_fp32) == (False, False)
    with pytest.raises(RuntimeError), amp.scale_loss(torch.zeros(()), []):
        pass


@pytest.mark.parametrize("level", ["O2", "O0"])
def test_frozen_parameters_are_in_no_list_of_the_stash(level):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    stash = optimizer._amp_stash
    found = stash.all_fp16_params if level == "O2" else stash.all_fp32_from_fp32_params
    assert [id(p) for p in found] == [id(model[1].weight)]


@pytest.mark.parametrize("level", ["O2", "O3", "O0"])
def test_stash(level):
    model, optimizer = start(level)
    stash = optimizer._amp_stash
    own = set(map(id, model.parameters()))  # as a key a master is its weight
    half = [p for p in model.parameters() if p.dtype == f16]
    masters = [p for p in optimizer.param_groups[0]["params"] if id(p) not in own]

    def same(found, expected):
        return list(map(id, found)) == list(map(id, expected))

    assert same(stash.all_fp16_params, half)
    assert same(stash.all_fp32_from_fp16_params, masters)
    if level == "O2":
        assert same(stash.fp16_groups[0], half)
        assert same(stash.fp32_from_fp16_groups[0], masters)
        assert same(stash.all_fp32_from_fp32_params, model.bn.parameters())
    assert stash.lazy_init_called
    assert stash.already_patched
    assert not stash.params_have_scaled_gradients
    backward(model, optimizer, delay_unscale=True)
    assert stash.params_have_scaled_gradients == (level != "O0")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    for p in amp.master_params(optimizer):
        p.data.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert model.fc1.weight.unique().tolist() == [0.5]


def test_deprecated_feature_warning():
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="old"):
        apex.deprecated_warning("old")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = start("O1")
        backward(model, optimizer)
        amp.half_function(len)


# --- the loss scaler class -----------------------------------------------------------------------


def test_loss_scaler_unscales_and_adapts():
    scaler = LossScaler("dynamic", init_scale=4.0, scale_window=2)
    grads, masters = [torch.tensor([8.0, -4.0], dtype=f16)], [torch.empty(2)]
    scaler.clear_overflow_state()
    scaler.unscale(grads, masters, None)
    assert masters[0].tolist() == [2.0, -1.0]
    scaler.unscale_with_stashed(grads, [torch.tensor([1.0, INF])], masters)
    assert masters[0][0] == 3.0
    assert scaler.update_scale() is False  # the stash is not looked at
    scaler.unscale(grads, masters, None, scale_override=8.0)
    assert masters[0].tolist() == [1.0, -0.5]
    assert scaler.update_scale() is False
    assert scaler.loss_scale() == 8.0
    scaler.unscale([torch.tensor([NAN])], [torch.empty(1)], None)
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 4.0
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False
    # apex's fallback looked at the sum, and its scale_factor had no effect.
    scaler = LossScaler("dynamic", init_scale=4.0, scale_factor=4.0, scale_window=1)
    scaler.unscale([torch.full((8,), 2e38)], [torch.empty(8)], None)
    assert scaler.update_scale() is False
    assert scaler.loss_scale() == 16.0
    static = LossScaler(1.0)
    static.unscale(masters, masters, None, models_are_masters=True)
    assert masters[0].tolist() == [1.0, -0.5]
    static.unscale(masters, masters, None, models_are_masters=True, scale_override=2.0)
    assert masters[0].tolist() == [0.5, -0.25]
    LossScaler(2.0).unscale(masters, masters, None, models_are_masters=True, scale_override=1.0)
    assert masters[0].tolist() == [0.5, -0.25]


def test_loss_scalers_load_with_weights_only_after_install():
    """Also where none was created yet."""
    scaler = LossScaler(4.0)
    by_hand = apex.fp16_utils.LossScaler(4.0), apex.fp16_utils.DynamicLossScaler(4.0)
    apex.uninstall()
    for each in (scaler, *by_hand):
        with pytest.raises(pickle.UnpicklingError, match="LossScaler"):
            through_a_file(each)
    apex.install()
    assert through_a_file(scaler).loss_scale() == 4.0
    assert [through_a_file(each).loss_scale for each in by_hand] == [4.0, 4.0]
    apex.uninstall()
    start("O2")
    assert through_a_file(scaler).loss_scale() == 4.0


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: through_a_file([x])[0]],
)
def test_copies_of_loss_scalers_go_on(copied):
    start()
    scaler = LossScaler("dynamic", scale_window=7, backoff_factor=0.25, hysteresis=3)
    scaler._loss_scale, scaler._unskipped = 512.0, 3

    def overflow(scaler):
        scaler.unscale([torch.tensor([INF])], [torch.empty(1)], None)
        scaler.update_scale()
        scaler.clear_overflow_state()

    overflow(scaler)
    overflow(scaler)
    assert scaler.state_dict()["hysteresis_left"] == 1
    again = copied(scaler)
    assert again.dynamic
    assert again.state_dict() == scaler.state_dict()
    overflow(again)
    assert (again.loss_scale(), again._scale_seq_len) == (128.0, 7)


@pytest.mark.parametrize(("minimum", "expected"), [(None, 2.0**-24), (0.5, 0.5)])
def test_a_scale_that_reached_zero_in_apex_loads_as_the_minimum(minimum, expected):
    pickled = {"dynamic": True, "_loss_scale": 0.0, "_min_loss_scale": minimum, "_unskipped": 2}
    scaler = LossScaler.__new__(LossScaler)
    scaler.__setstate__(pickled)
    assert scaler.state_dict() == {"loss_scale": expected, "unskipped": 2}


# An overflow in the first of two passes is seen when the second one adds to it.
@pytest.mark.parametrize("factors", [[INF], [NAN, 1.0], [1.0, INF]])
@pytest.mark.parametrize(
    ("level", "kind"),
    [
        *((level, torch.optim.SGD) for level in ("O0", "O1", "O2")),
        *(("O2", kind) for kind in (torch.optim.RMSprop, apex.optimizers.FusedLAMB)),
    ],
)
def test_the_caller_decides_on_overflow(level, kind, factors):
    model, optimizer = start(level, kind, loss_scale="dynamic")
    (scaler,) = state.loss_scalers
    scaler._loss_scale = 2.0**20

    *_, bias = amp.master_params(optimizer)
    before = bias.clone()
    for halved in (2.0**19, 2.0**18, 2.0**17):
        for factor in factors:
            backward(model, optimizer, factor, delay_overflow_check=True)
        assert scaler.loss_scale() == 2 * halved
        assert scaler._has_overflow
        assert scaler.update_scale() is True
        assert scaler.loss_scale() == halved
        for param in [*amp.master_params(optimizer), *model.parameters()]:
            param.grad = None  # instead of a step
    for _ in factors:
        backward(model, optimizer, 1e-3, delay_overflow_check=True)
    assert scaler._overflow_buf.tolist() == [0]
    assert scaler.update_scale() is False
    optimizer.step()
    assert bool((bias != before).all() and bias.isfinite().all())
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 1)


def test_update_scale_reads_the_buffer_that_the_script_gave():
    model, optimizer = start("O2")
    (scaler,) = state.loss_scalers
    ours, overflow = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for _ in range(2):
        backward(model, optimizer, delay_overflow_check=True)
        former = scaler._overflow_buf
        scaler._overflow_buf = ours if former is overflow else overflow
        assert scaler.update_scale() is (former is not overflow)
    assert former is overflow
    assert overflow.tolist() == [0]  # cleared for the next pass
    assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 1)
    backward(model, optimizer, INF, delay_overflow_check=True)
    scaler._overflow_buf = ours  # the gradients were mended, or will be
    assert scaler.update_scale() is False
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    assert ours.tolist() == [1]
    scaler._has_overflow = False
    assert scaler.update_scale() is False


def test_the_buffer_may_be_asked_for_in_a_pass():
    model, optimizer = start("O2")
    (scaler,) = state.loss_scalers
    backward(model, optimizer, 1e-3, delay_overflow_check=True)
    loss = model(torch.rand(4, 4)).float().mean() * 1e-3
    with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
        assert not scaler._has_overflow
        scaled.backward()
    assert scaler.update_scale() is False
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))


def test_what_a_checked_pass_found_is_in_the_buffer():
    model, optimizer = start("O2", loss_scale="dynamic")
    (scaler,) = state.loss_scalers
    assert not scaler._has_overflow
    for factor, overflows in ((INF, True), (1e-3, False)):
        train(model, optimizer, factor)
        assert scaler._has_overflow is overflows
    assert scaler.loss_scale() == 32768.0
    model, optimizer = start("O2", num_losses=2)
    for loss_id, factor in enumerate((1e-3, INF)):
        backward(model, optimizer, factor, loss_id=loss_id)
    assert [each._has_overflow for each in state.loss_scalers] == [False, True]
    static, optimizer = start("O2", loss_scale=4.0)
    backward(static, optimizer, INF, delay_overflow_check=True)
    assert state.loss_scalers[0]._has_overflow
    assert state.loss_scalers[0].update_scale() is False


def test_the_rule_of_a_scale_can_be_assigned():
    model, optimizer = start("O2")
    (scaler,) = state.loss_scalers
    scaler._loss_scale, scaler._scale_seq_len, scaler._max_loss_scale = 2.0**13, 4, 2.0**14
    scales = []
    for _ in range(12):
        train(model, optimizer, 1e-3)
        scales.append(scaler.loss_scale())
    assert scales == [2.0**13] * 3 + [2.0**14] * 9
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 0}}
    assert pickle.loads(pickle.dumps(scaler))._scale_seq_len == 4
    scaler._min_loss_scale = 2.0**13
    for _ in range(3):
        backward(model, optimizer, INF)
    assert scaler.loss_scale() == 2.0**13
    scaler._min_loss_scale = None
    backward(model, optimizer, INF)
    assert scaler.loss_scale() == 2.0**12
    with pytest.raises(
        ValueError, match="growth_interval is 0; it must be a whole number of at least 1"
    ):
        scaler._scale_seq_len = 0
    assert (scaler._scale_seq_len, scaler._max_loss_scale) == (4, 2.0**14)
    scaler._loss_scale, scaler._scale_seq_len, scaler._max_loss_scale = 2.0**126, 1, INF
    train(model, optimizer, 0.0, 0.0)
    assert scaler.loss_scale() == 2.0**127


# --- apex's defects ------------------------------------------------------------------------------


CLASSES = torch.tensor([1.0, 2.0, 1 / 3])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(weight=CLASSES), [torch.arange(8) % 3]),
        (nn.BCEWithLogitsLoss(pos_weight=CLASSES), [torch.rand(8, 3)]),
        (nn.GaussianNLLLoss(), [torch.rand(8, 3), torch.ones(8, 3)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_losses_that_are_parts_of_a_model(loss, targets, level):
    """Loss weights became half with the model, and met FP32 outputs."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.loss = nn.Linear(4, 3), copy.deepcopy(loss)

        def forward(self, x, *targets):
            return self.loss(self.fc(x), *targets) if targets else self.fc(x)

    model, x = Classifier(), torch.rand(8, 4)
    expected = model(x, *targets).item()
    amp.initialize(model, opt_level=level, verbosity=0)
    for copied in (model, copy.deepcopy(model)):
        for computed in (copied.loss(copied(x), *targets), copied(x, *targets)):
            assert computed.dtype == f32
            assert computed.item() == pytest.approx(expected, rel=5e-3)
    weights = [t for t in model.loss.state_dict().values() if t.is_floating_point()]
    assert all(t.dtype == f32 and torch.equal(t, CLASSES) for t in weights)


def test_a_loss_that_holds_a_network_is_cast_like_one():
    class Perceptual(nn.modules.loss._Loss):
        def __init__(self):
            super().__init__()
            self.features = nn.Linear(4, 3)

        def forward(self, x):
            return F.mse_loss(self.features(x), self.features(2 * x))

    model = nn.Sequential(nn.Linear(4, 4), Perceptual())
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[1].features.weight.dtype == f16
    assert model(torch.rand(2, 4)).isfinite()


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_before_any_backward_pass(level):
    """In apex it failed: masters were made by the first scale_loss. They are there at once."""
    model, optimizer = start(level, optimizer={"lr": 0.1, "momentum": 0.9})
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_bfloat16_model_by_override(level):
    """apex accepted the option and raised TypeError at the first use of the optimizer."""
    model, optimizer = start(level, cast_model_type=bf16)
    before = model.fc1.weight.detach().clone()
    assert before.dtype == bf16
    train(model, optimizer, 1.0)
    assert not torch.equal(model.fc1.weight, before)


def test_o1_with_a_cast_to_float32():
    """Inputs and outputs are cast as at O0; operations in between are in half, as at O1."""
    seen = []
    model, _ = start("O1", cast_model_type=f32)
    model.fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.fc1.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert model(torch.rand(2, 4, dtype=torch.float64)).dtype == f32
    assert seen == [f32, f16]


@pytest.mark.parametrize("level", LEVELS)
def test_a_training_that_is_over_is_freed(level):
    """apex's patches held the first model for good."""
    model, optimizer = start(level)
    train(model, optimizer, 1.0)
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.fc1.weight)]
    del model, optimizer
    start(level)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
