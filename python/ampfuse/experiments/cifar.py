"""CIFAR-10: VGG16, Wide-ResNet, SE-ResNeXt50 and DenseNet161 (E1 to E3 of docs/experiments.md)."""

import functools
import sys

from ampfuse.experiments.recipes import CIFAR
from ampfuse.experiments.training import sweep

main = functools.partial(sweep, CIFAR)

if __name__ == "__main__":
    sys.exit(main())
