"""Train a perceptron of three 4096-wide layers (E5)."""

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    raise SystemExit(main("mlp"))
