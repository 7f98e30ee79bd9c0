"""timm: importing this registers the fused optimizers as "ampfuse-adamw" and so on."""

from __future__ import annotations

from timm.optim._optim_factory import OptimInfo, default_registry

from ampfuse import optim

# With a dash: of a name with "_" timm takes the last part.
_EPS_AND_BETAS = (optim.Adam, optim.AdamW, optim.LAMB, optim.NovoGrad)

for _cls in (optim.SGD, *_EPS_AND_BETAS, optim.Adagrad, optim.Lion):
    default_registry.register(
        OptimInfo(
            name=f"ampfuse-{_cls.__name__.lower()}",
            opt_class=_cls,
            description=f"{_cls.__name__} of ampfuse: a fused step, with FP32 masters on request",
            has_eps=_cls not in (optim.SGD, optim.Lion),
            has_momentum=_cls is optim.SGD,
            has_betas=_cls in (*_EPS_AND_BETAS, optim.Lion),
            defaults={"nesterov": True} if _cls is optim.SGD else None,  # as timm's own
        )
    )
