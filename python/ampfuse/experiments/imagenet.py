"""ImageNet: ResNet-18 and 50 (E4 of docs/experiments.md), also under torchrun."""

import functools
import sys

from ampfuse.experiments.recipes import IMAGENET
from ampfuse.experiments.training import sweep

main = functools.partial(sweep, IMAGENET)

if __name__ == "__main__":
    sys.exit(main())
