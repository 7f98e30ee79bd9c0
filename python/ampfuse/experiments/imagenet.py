"""Train ResNet-18, 34 or 50 on ImageNet (E4)."""

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    raise SystemExit(main("imagenet"))
