"""``apex.parallel.LARC``, a module; the class in it is ampfuse's own, with apex's arguments."""

from ampfuse.optim import LARC as LARC
