"""Published mixed-precision benchmarks, re-run at every level and plotted.

    python -m ampfuse.experiments.cifar       VGG16, Wide-ResNet, SE-ResNeXt50, DenseNet161 (E1-E3)
    python -m ampfuse.experiments.imagenet    ResNet-18 and 50 (E4), also under torchrun
    python -m ampfuse.experiments.mnist       a small CNN (E5)
    python -m ampfuse.experiments.mlp         a three-layer MLP (E5)
    python -m ampfuse.experiments.demo        handwritten digits at O0 to O5
    python -m ampfuse.experiments.make_plot   figures of their results
    python -m ampfuse.experiments.make_table  the published tables, with measured rows

Or ``ampfuse train cifar ...``, ``ampfuse demo`` and so on.
"""

SCRIPTS = ("cifar", "imagenet", "mnist", "mlp")  # of ``ampfuse train``
