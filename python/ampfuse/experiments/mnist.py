"""Train a small CNN on MNIST (E5)."""

from __future__ import annotations

import sys

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    sys.exit(main("mnist"))
