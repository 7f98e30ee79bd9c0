"""Optimizers with a fused step: unscale, overflow check, clip, update and cast back at once.

They take ``torch.optim``'s arguments, keep its state keys and load its state dicts::

    optimizer = ampfuse.optim.AdamW(model.parameters(), lr=1e-3, master_weights=True)
"""

from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.larc import LARC
from ampfuse.optim.last_step import LastStep
from ampfuse.optim.masters import MasterParameter
from ampfuse.optim.muon import Muon
from ampfuse.optim.muon_groups import muon_groups
from ampfuse.optim.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion, NovoGrad
from ampfuse.optim.options import Options
from ampfuse.optim.upgrade import upgrade

__all__ = [
    "LAMB",
    "LARC",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AmpOptimizer",
    "LastStep",
    "Lion",
    "MasterParameter",
    "Muon",
    "NovoGrad",
    "Options",
    "muon_groups",
    "upgrade",
]
