"""Train a small CNN on MNIST (E5)."""

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    raise SystemExit(main("mnist"))
