"""Train a perceptron of three 4096-wide layers (E5)."""

from __future__ import annotations

import sys

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    sys.exit(main("mlp"))
