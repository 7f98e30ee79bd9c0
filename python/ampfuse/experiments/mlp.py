"""A three-layer MLP, 4096 wide, as in torch's AMP recipe (E5 of docs/experiments.md)."""

import functools
import sys

from ampfuse.experiments.recipes import MLP
from ampfuse.experiments.training import sweep

main = functools.partial(sweep, MLP)

if __name__ == "__main__":
    sys.exit(main())
