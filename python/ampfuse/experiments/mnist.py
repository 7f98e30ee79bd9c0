"""MNIST: a small CNN (E5 of docs/experiments.md)."""

import functools
import sys

from ampfuse.experiments.recipes import MNIST
from ampfuse.experiments.training import sweep

main = functools.partial(sweep, MNIST)

if __name__ == "__main__":
    sys.exit(main())
