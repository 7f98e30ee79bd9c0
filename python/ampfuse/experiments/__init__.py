"""The experiments: published mixed-precision benchmarks, re-run at every level and plotted.

    python -m ampfuse.experiments.cifar      VGG16, Wide-ResNet, SE-ResNeXt50, DenseNet161 (E1-E3)
    python -m ampfuse.experiments.imagenet   ResNet-18, 34 and 50 (E4)
    python -m ampfuse.experiments.mnist      a small CNN (E5)
    python -m ampfuse.experiments.mlp        a three-layer perceptron (E5)
    python -m ampfuse.experiments.make_plot  figures of their results
    python -m ampfuse.experiments.make_table the published tables, own rows beside them

Also ``ampfuse train cifar ...``, ``ampfuse make_plot`` and ``ampfuse make_table``. They need the
extra ``ampfuse[experiments]``.

A trainer reads its command line (:mod:`cli`), which becomes a list of runs (:mod:`config`, with the
published settings of :mod:`recipes`); each run is trained in an arm (:mod:`arms`: FP32, TF32,
torch.amp, O0 to O5) by one loop (:mod:`training`) and leaves a result file (:mod:`record`).
"""
