"""Train VGG16, Wide-ResNet, SE-ResNeXt50 or DenseNet161 on CIFAR-10 (E1 to E3)."""

from ampfuse.experiments.trainers import main

if __name__ == "__main__":
    raise SystemExit(main("cifar"))
