"""The optimizers whose step is one kernel. (Muon, whose step is several, has a file of its own.)"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class SGD(FusedOptimizer, torch.optim.SGD, algorithm="sgd", replaces=torch.optim.SGD):
    """SGD with momentum and a fused step: a drop-in for :class:`torch.optim.SGD`.

    The formula and the state (``momentum_buffer``) are torch's, computed in FP32; state dicts load
    both ways. As in torch, a parameter's buffer starts as its first gradient.

    Arguments:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        wd_after_momentum (in a parameter group only): add the weight decay after the momentum
            instead of before it.
        foreach, fused: accepted and ignored; `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


_DOC = """{name} with a fused step: a drop-in for :class:`torch.optim.{name}`.

    {reference}. The formula and the state (``step``, ``exp_avg``, ``exp_avg_sq``,
    ``max_exp_avg_sq``) are torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, betas, eps, weight_decay, amsgrad, {own}maximize: as in torch.
            Parameters may be float32, float16 or bfloat16, in any mixture. A float32 tensor `lr` on
            the parameters' device is read there: on a GPU no step checks whether it is NaN.
        bias_correction (in a parameter group only): False uses the moments as they are.
        foreach, fused, capturable: accepted and ignored, as the step is always fused;
            `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.

    ``last_step`` has, on the device, whether the last step was skipped, its gradient norm and loss
    scale.
    """


class Adam(FusedOptimizer, torch.optim.Adam, algorithm="adam", replaces=torch.optim.Adam):
    __doc__ = _DOC.format(
        name="Adam", reference="Kingma and Ba, arXiv:1412.6980", own="decoupled_weight_decay, "
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class AdamW(FusedOptimizer, torch.optim.AdamW, algorithm="adam", replaces=torch.optim.AdamW):
    __doc__ = _DOC.format(name="AdamW", reference="Loshchilov and Hutter, arXiv:1711.05101", own="")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class Adagrad(
    FusedOptimizer, torch.optim.Adagrad, algorithm="adagrad", replaces=torch.optim.Adagrad
):
    """Adagrad with a fused step: a drop-in for :class:`torch.optim.Adagrad`.

    Duchi, Hazan and Singer, JMLR 12, 2011. The formula and the state (``step``, ``sum``) are
    torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        decoupled_weight_decay (in a parameter group only): the decay acts on the parameter, as in
            AdamW, instead of through the gradient.
        foreach, fused: accepted and ignored; `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class LAMB(FusedOptimizer, algorithm="lamb"):
    """LAMB with a fused step: Adam whose step of each tensor is as long as the tensor's weights.

    You et al., "Large batch optimization for deep learning", arXiv:1904.00962. With the gradient g
    of a step t, the moments m and v as in Adam, and c1 = 1 - beta1^t, c2 = 1 - beta2^t::

        u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * p
        p = p - lr * |p| / |u| * u

    The ratio of the norms is taken over each parameter; it is 1 where a norm is zero. State:
    ``step``, ``exp_avg``, ``exp_avg_sq``, in FP32.

    Arguments:
        params, lr, betas, eps, weight_decay: as in :class:`torch.optim.AdamW`.
        bias_correction: False leaves c1 and c2 at 1.
        grad_averaging: the gradient enters m times 1 - beta1; False: as it is.
        decoupled_weight_decay: False adds weight_decay * p to the gradient instead of to u.
        use_nvlamb: the ratio of norms also for groups without weight decay, which otherwise step
            as Adam (NVIDIA's variant).
        options: see :class:`ampfuse.optim.Options`. LAMB recipes mostly have max_grad_norm=1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        decoupled_weight_decay: bool = True,
        use_nvlamb: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class NovoGrad(FusedOptimizer, algorithm="novograd"):
    """NovoGrad with a fused step: momentum on gradients that each tensor's norm divides.

    Ginsburg et al., arXiv:1905.11286. With the gradient g of a step t and its norm `|g|` over the
    parameter::

        v = sqrt(beta2 * v^2 + (1 - beta2) * |g|^2)    (v = |g| at the first step)
        d = v + eps
        m = beta1 * m + (1 - beta1) * g,    p = p - lr * (m / (1 - beta1^t) / d + weight_decay * p)

    State: ``step``, ``exp_avg`` (m, in FP32) and ``exp_avg_norm`` (v, one number: a norm and not
    its square, which could overflow). Each parameter has its own, so that parameters may gain and
    lose their gradients.

    Arguments:
        params, lr, betas, eps, weight_decay: as in :class:`torch.optim.AdamW`.
        bias_correction: False leaves out 1 - beta1^t. (v needs no correction, as it starts at a
            norm; with `init_zero` it is divided by sqrt(1 - beta2^t).)
        grad_averaging: the gradient enters m times 1 - beta1; False: as it is.
        norm_type: 2, or ``inf`` (apex's 0) for the largest magnitude,
            `v = beta2 * v + (1 - beta2) * |g|`.
        init_zero: v starts at zero.
        reg_inside_moment: m = beta1 * m + (1 - beta1) * (g / d + weight_decay * p) and
            p = p - lr * m / (1 - beta1^t).
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        reg_inside_moment: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class Lion(FusedOptimizer, algorithm="lion"):
    """Lion with a fused step: every element moves by the rate, in the direction of a momentum.

    Chen et al., arXiv:2302.06675; the same steps as ``timm.optim.Lion``::

        u = sign(beta1 * m + (1 - beta1) * g)
        p = p - lr * (u + weight_decay * p),    m = beta2 * m + (1 - beta2) * g

    State: ``step`` and ``exp_avg`` (m, in FP32). The paper advises a third to a tenth of AdamW's
    rate, and as many times its weight decay. A NaN in the gradient makes NaN of the weight.

    Arguments:
        params, lr, betas, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with the
            defaults of the paper.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
