"""Many steps against the rules in float64: our error, next to that of torch.optim in FP32.

On the CPU kernels: every other backend gives the same bits (test_same_bits.py, test_gpu.py).
"""

import copy

import pytest
import torch

import cases
import reference
from ampfuse import optim
from cases import (
    DTYPES,
    OPTIMIZERS,
    bf16,
    f16,
    f32,
    f64,
    give_gradients,
    make,
    make_torch,
    parameters,
    set_grad,
)

STEPS = 200
# The shape of each group's parameters, and what multiplies the learning rate in it.
GROUPS = (((37,), 1.0), ((8, 125), 0.3), ((3, 5, 200), 2.0))


def largest_error(found, exact):
    return float((found.detach().cpu().to(f64) - exact.detach()).abs().max())


class Run:
    """The same gradients through ours, torch's in FP32 and the rule in float64.

    Each group has parameters of all `dtypes`, or the groups have them `in_turn`.
    """

    def __init__(self, name, dtypes, device="cpu", in_turn=False, **options):
        self.params, self.exact, self.torch_params, self.rules, self.states = [], [], [], [], []
        self.dtypes = []
        kind, settings = OPTIMIZERS[name]
        ours, theirs = [], []
        for i, (shape, factor) in enumerate(GROUPS):
            lr = settings["lr"] * factor
            first = len(self.params)
            for grad_dtype, dtype in dtypes[i :: len(GROUPS)] if in_turn else dtypes:
                start = torch.randn(shape).to(dtype)
                self.params.append(start.clone().to(device).requires_grad_())
                self.torch_params.append(start.to(f32).requires_grad_())
                self.exact.append(start.to(f64))
                self.rules.append(reference.RULES[kind](**{**settings, "lr": lr}))
                self.states.append({})
                self.dtypes.append(grad_dtype)
            ours.append({"params": self.params[first:], "lr": lr})
            theirs.append({"params": self.torch_params[first:], "lr": lr})
        self.ours = make(name, ours, **options)
        self.torch = make_torch(name, theirs, foreach=True)

    def steps(self, count):
        for _ in range(count):
            for i, param in enumerate(self.params):
                grad = torch.randn(param.shape).to(self.dtypes[i])
                set_grad(param, grad.to(param.device))
                self.torch_params[i].grad = grad.to(f32)
                self.exact[i] = self.rules[i].step(self.exact[i], grad, self.states[i])
            self.ours.step()
            self.torch.step()

    def stepped(self, i):
        """The tensor that the optimizer steps: the master where there is one."""
        param = self.params[i]
        return self.ours.state[param].get("master_param", param)

    def errors(self):
        """The largest errors of parameters and of each state: ours and torch's."""
        largest = {}
        for i, exact in enumerate(self.exact):
            theirs = self.torch_params[i]
            triples = {"param": (self.stepped(i), theirs, exact)}
            for key, value in self.states[i].items():
                if key != "step":
                    mine = self.ours.state[self.params[i]][key]
                    triples[key] = mine, self.torch.state[theirs][key], value
            for key, (mine, other, right) in triples.items():
                ours, torchs = largest.get(key, (0.0, 0.0))
                largest[key] = (
                    max(ours, largest_error(mine, right)),
                    max(torchs, largest_error(other, right)),
                )
        return largest

    def check(self):
        for key, (ours, torchs) in self.errors().items():
            assert ours <= 1.5 * torchs, f"{key}: error {ours:.3g}, torch's in FP32 {torchs:.3g}"
        for i, param in enumerate(self.params):
            assert torch.equal(param.detach(), self.stepped(i).detach().to(param.dtype))


# The next test has each option's formula, in FP32 too, in fewer steps.
ONE_OF_EACH = [
    name if name in cases.KINDS else pytest.param(name, marks=pytest.mark.slow)
    for name in OPTIMIZERS
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_fp32_steps_are_as_accurate_as_torchs(name):
    run = Run(name, [(f32, f32)])
    run.steps(STEPS)
    run.check()


MIXTURES = DTYPES if cases.can_mix_dtypes() else [(dtype, dtype) for dtype in (f32, f16, bf16)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_dtype_mixture_is_as_accurate_as_torch_in_fp32(name):
    """Half gradients and weights with masters: the error of FP32 arithmetic, not of half."""
    run = Run(name, MIXTURES, in_turn=True, master_weights=True)
    # In more steps FP32's own error adds up, which the test before measures.
    run.steps(STEPS // 4)
    run.check()


@pytest.mark.covers(1)
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_without_masters_rounds_once_a_step(name, dtype, device):
    """Without a master the weight itself is stepped: computed in FP32, then rounded."""
    run = Run(name, [(dtype, dtype)], device)
    for _ in range(10):
        run.exact = [param.detach().cpu().to(f64) for param in run.params]
        run.steps(1)
        for param, exact in zip(run.params, run.exact, strict=True):
            # Half an ulp of the half type, and a little for the FP32 arithmetic before.
            ulp = exact.abs().clamp(min=1e-3) * torch.finfo(dtype).eps
            assert bool(((param.detach().cpu().to(f64) - exact).abs() <= 0.51 * ulp).all())


def one_pass(optimizer, params, grads, scale):
    """Do what a block of scale_loss does. (`params`: the model's.)"""
    optimizer.param_table().gradients.begin_backward()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * scale
    optimizer.end_backward(torch.tensor(scale, device=params[0].device), True)


def master_of(optimizer):
    return optimizer.param_groups[0]["params"][0].detach().cpu().to(f64)


def test_64_accumulated_bf16_passes_give_the_fp32_sum(device):
    """Under scale_loss, gradients of several passes add up in FP32, not in autograd's half."""
    param = torch.zeros(1000, dtype=bf16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1.0)
    optim.upgrade(optimizer, master_weights=True)
    grads = [torch.rand(1000).to(bf16) for _ in range(64)]
    for grad in grads:
        one_pass(optimizer, [param], [grad.to(device)], 1.0)
    optimizer.step()
    total = sum(grad.to(f64) for grad in grads)
    error = (master_of(optimizer) + total).abs().max() / total.abs().max()
    assert float(error) <= 1e-6


@pytest.mark.parametrize("how", ["clipped", "to maximize", "LARC"])
def test_what_multiplies_gradients_multiplies_those_of_earlier_passes(how, device):
    start = torch.randn(1000).to(bf16)
    param = start.clone().to(device).requires_grad_()
    options = {"clipped": {"max_grad_norm": 0.5}, "to maximize": {"maximize": True}, "LARC": {}}
    optimizer = optim.SGD([param], lr=0.1, **options[how])
    optim.upgrade(optimizer, master_weights=True)
    grads = [torch.randn(1000).to(bf16) for _ in range(2)]
    for grad, scale in zip(grads, (4.0, 2.0), strict=True):
        one_pass(optimizer, [param], [grad.to(device)], scale)
    (optim.LARC(optimizer) if how == "LARC" else optimizer).step()
    total = sum(grad.to(f64) for grad in grads)
    exact = {
        "clipped": total * reference.clip_coefficient(reference.norm([total]), 0.5),
        "to maximize": -total,
        "LARC": reference.layerwise(start.to(f64), total, 0.1, 0.0),
    }[how]
    expected = start.to(f64) - 0.1 * exact
    torch.testing.assert_close(master_of(optimizer), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["NovoGrad", "LAMB", "Adagrad", "LARC"])
def test_norms_of_rows_are_those_of_unscaled_gradients(kind, device):
    """Inspected at the end of a scaled pass, or in the step itself: the same bits."""

    def make_one(params, **options):
        if kind == "LARC":
            return optim.LARC(optim.SGD(params, lr=0.1, weight_decay=0.1, **options))
        return getattr(optim, kind)(params, lr=0.1, weight_decay=0.1, **options)

    params = parameters([(50,), (40000,)], bf16, device=device)
    twins = copy.deepcopy(params)
    scaled, plain = make_one(params), make_one(twins, master_weights=True)
    optim.upgrade(scaled, master_weights=True)
    for step in range(3):
        one_pass(scaled, params, give_gradients(twins, step), 4.0)
        scaled.step()
        plain.step()
    for master, b in zip(scaled.param_groups[0]["params"], twins, strict=True):
        assert torch.equal(master.detach(), plain.state[b]["master_param"])


OF_GROUPS = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.2, "wd_after_momentum": True}, 1e-6),
    ("Adagrad", {"weight_decay": 0.2, "decoupled_weight_decay": True}, 1e-6),
    ("Adam", {"bias_correction": False}, 1e-5),
]


@pytest.mark.parametrize(("kind", "options", "rtol"), OF_GROUPS)
def test_options_that_only_groups_have_follow_the_rule(kind, options, rtol):
    """They are options of apex's optimizers that torch's constructors do not have."""
    (param,) = parameters([(100,)])
    exact, state = param.detach().to(f64), {}
    optimizer = getattr(optim, kind)([{"params": [param], **options}], lr=0.1)
    rule = reference.RULES[kind](lr=0.1, **options)
    for _ in range(4):
        (grad,) = give_gradients([param])
        optimizer.step()
        exact = rule.step(exact, grad, state)
    torch.testing.assert_close(param.detach().to(f64), exact, rtol=rtol, atol=1e-6)
