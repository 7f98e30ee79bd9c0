"""The loss-scale rule of the core against the rule in Python: any sequence, any settings."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reference
from ampfuse import _core
from cases import f32

DEFAULTS = {"growth": 2.0, "backoff": 0.5, "interval": 3, "low": 0.0, "high": 3e38, "hysteresis": 1}


class Scaler:
    """update_scale with the tensors it works on."""

    def __init__(self, scale, device="cpu", **rule):
        self.rule = {**DEFAULTS, **rule}
        self.scale = torch.tensor(float(scale), device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        self.tolerated = self.clean + self.rule["hysteresis"]

    def update(self, *flags, share=False, dynamic=True):
        flags = [torch.tensor(float(flag), device=self.scale.device) for flag in flags]
        shared = flags if share else []
        state = (self.scale, self.clean, self.tolerated)
        _core.C.update_scale(*state, flags, *self.rule.values(), shared, dynamic)
        return [float(flag) for flag in flags]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    overflows=st.lists(st.booleans(), max_size=60),
    scale=st.sampled_from([1.0, 2.0**16, 2.0**24]),
    rule=st.fixed_dictionaries(
        {
            "growth": st.sampled_from([2.0, 1.5]),
            "backoff": st.sampled_from([0.5, 0.25]),
            "interval": st.integers(1, 5),
            "low": st.sampled_from([0.0, 1.0]),
            "high": st.sampled_from([2.0**24, 3e38]),
            "hysteresis": st.integers(1, 3),
        }
    ),
)
def test_the_scale_follows_its_rule(overflows, scale, rule, device):
    ours, expected = Scaler(scale, device, **rule), reference.LossScale(scale, **rule)
    for overflow in overflows:
        ours.update(False, overflow)
        expected.update(overflow)
        assert float(ours.scale) == pytest.approx(expected.scale, rel=1e-6)
        assert int(ours.clean) == expected.clean
        assert int(ours.tolerated) == expected.tolerated


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("flags", [(0, 0, 0), (0, 1, 0), (1, 1, 1), (0,), (1,)])
def test_several_optimizers_may_share_one_verdict(flags, share, device):
    scaler = Scaler(1024.0, device)
    verdicts = scaler.update(*flags, share=share)
    assert verdicts == ([float(any(flags))] * len(flags) if share else [float(f) for f in flags])
    assert scaler.scale == (512.0 if any(flags) else 1024.0)
    assert scaler.scale.dtype == f32


def test_a_static_scale_stays(device):
    scaler = Scaler(128.0, device, interval=1)
    for flag in (1, 0, 1, 0, 0):
        assert scaler.update(flag, 0, share=True, dynamic=False) == [float(flag)] * 2
    assert (scaler.scale, scaler.clean, scaler.tolerated) == (128.0, 0, 1)


def test_flags_on_another_device_are_refused():
    scaler, far = Scaler(4.0), torch.zeros((), device="meta")
    state = (scaler.scale, scaler.clean, scaler.tolerated)
    with pytest.raises(ValueError, match="found_inf is on meta"):
        _core.C.update_scale(*state, [far], *DEFAULTS.values())
    assert scaler.scale == 4.0


@pytest.mark.parametrize("interval", [2**31, 2**32, 2**40])
def test_an_interval_beyond_32_bits_never_ends(interval, device):
    scaler = Scaler(1024.0, device, interval=interval, hysteresis=1)
    for _ in range(3):
        scaler.update(False)
    assert float(scaler.scale) == 1024.0
