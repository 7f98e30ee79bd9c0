"""Train ResNet-18, 34 or 50 on ImageNet (E4)."""

from __future__ import annotations

import sys

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    sys.exit(main("imagenet"))
