"""The trainers' command lines: what old and new flags mean; test_experiments_failures.py has what
is refused."""

import itertools

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from ampfuse.experiments import cifar, imagenet, mlp, mnist, results
from ampfuse.experiments.settings import VARIANTS, Settings, parse, runs_of
from ampfuse.experiments.training import lr_factor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SCRIPTS = {module.SCRIPT.name: module.SCRIPT for module in (cifar, imagenet, mnist, mlp)}


def runs(line: str, device: torch.device = CUDA) -> list[Settings]:
    name, *words = line.split()
    script = SCRIPTS[name]
    return runs_of(parse(script, words, name), script, device)


def run(line: str, device: torch.device = CUDA) -> Settings:
    """The first of the repeats of one variant."""
    first, *others = runs(line, device)
    assert {first.precision, *(other.precision for other in others)} == {first.precision}
    assert len(others) == first.repeats - 1
    return first


E1 = "cifar --GPU V100 --batch_size 256 --iteration 100"
AS_E1 = {
    "batch_size": 256,
    "iterations": 100,
    "epochs": None,
    "repeats": 5,
    "model": "vgg16",
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "recipe": "e1",
    "data": "data",
    "shuffle": False,
    "augment": False,
    "mean": (0.5, 0.5, 0.5),
}
OF_2018 = "imagenet -a resnet50 -j 4 -b 128 --static-loss-scale 256 /data/imagenet"
AS_2018 = {
    "model": "resnet50",
    "batch_size": 128,
    "workers": 4,
    "data": "/data/imagenet",
    "iterations": 360,
}
OF_2019 = "--opt-level O2 --keep-batchnorm-fp32 True --loss-scale 128.0 --channels-last True "
OF_2019 += "--epochs 90 --workers 4 --deterministic"
AS_2019 = {
    "precision": "O2",
    "keep_batchnorm_fp32": True,
    "loss_scale": 128.0,
    "data": "DIR",
    "channels_last": True,
    "deterministic": True,
    "epochs": 90,
    "iterations": None,
    "schedule": "steps",
    "evaluate": True,
}
FOLDERS = ("DIR -a resnet50 {}", "-a resnet50 DIR {}", "{} -a resnet50 DIR")
LINES = {
    # The published scripts', as they stood.
    f"{E1} --mode FP32": {**AS_E1, "precision": "fp32", "variant": "FP32", "loss_scale": None},
    f"{E1} --mode FP16": {**AS_E1, "precision": "O2", "variant": "FP16", "loss_scale": 128.0},
    f"{E1} --mode amp": {**AS_E1, "precision": "O1", "variant": "amp", "loss_scale": None},
    f"{E1} --mode amp --opt_level O2": {
        **AS_E1,
        "precision": "O2",
        "variant": "amp",
        "loss_scale": None,
    },
    OF_2018: {**AS_2018, "precision": "fp32", "loss_scale": 256.0},  # not used there either
    f"{OF_2018} --fp16": {**AS_2018, "precision": "O2", "variant": "fp16", "loss_scale": 256.0},
    **{f"imagenet {line.format(OF_2019)}": AS_2019 for line in FOLDERS},
    "imagenet D --opt-level O1 --prof 10": {"precision": "O1", "iterations": 10},
    # With and without a value.
    "imagenet --opt-level O2 --channels-last True DIR": {"channels_last": True, "data": "DIR"},
    "imagenet DIR --variant O2 --channels-last": {"channels_last": True, "data": "DIR"},
    "imagenet DIR --variant O2 --channels-last False": {"channels_last": False},
    "imagenet DIR --variant O2 --loss-scale dynamic": {"loss_scale": "dynamic"},
    # Published by model and level.
    "cifar --recipe e3 --model densenet161 --variant O0": {"batch_size": 512, "epochs": 25},
    "cifar --recipe e3 --model densenet161 --variant O2": {"batch_size": 1024, "epochs": 50},
    "cifar --recipe e3 --variant O2": {"optimizer": "adam", "clip": 1.0},
    "cifar --recipe e3 --variant O3": {"optimizer": "sgd"},
    # A recipe chooses the model, and a model its recipe; one of each is no published experiment.
    "cifar --recipe e2 --variant O0": {"model": "wrn28_10", "recipe": "e2"},
    "cifar --model densenet161 --variant O0": {"recipe": "e3"},
    "cifar --recipe e2 --model wrn16_4 --variant O0": {"recipe": None},
    # Flags win.
    "cifar --recipe e2 --variant O2 -b 64 --epochs 3": {"batch_size": 64, "epochs": 3},
    "cifar --recipe e2 --variant O2 --lr 0.5 --optimizer adamw": {
        "lr": 0.5,
        "optimizer": "adamw",
        "schedule": "linear",
        "dropout": 0.3,
    },
    "cifar --recipe e2 --variant O2 --iterations 7": {"iterations": 7, "epochs": None},
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:80])
def test_what_a_line_asks_for(line):
    found = run(line)
    assert {name: getattr(found, name) for name in LINES[line]} == LINES[line]


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        ("cifar --recipe e1 --mode FP32", ("iterations",)),
        ("cifar --recipe e2 --variant O2", ("batch_size", "epochs")),
        ("imagenet DIR --recipe e4 --variant fp32", ("batch_size", "iterations")),
    ],
)
def test_sizes_of_recipes_are_those_of_the_published_tables(line, columns):
    found = run(line)
    for column in columns:
        published = {getattr(row, column) for row in results.published(found.recipe)}
        assert published == {getattr(found, column)}


def test_every_recipe_resolves_for_every_model_and_variant():
    for name, script in SCRIPTS.items():
        for recipe, variant in itertools.product(script.recipes, {*VARIANTS} - {"tf32"}):
            for model, device in itertools.product(recipe.models, (CPU, CUDA)):
                line = f"--recipe {recipe.name} --model {model} --variant {variant} --data digits"
                found = run(f"{name} {line}", device)
                assert found.iterations or found.epochs
                assert found.recipe == recipe.name


def test_cpu_sizes_unless_told_otherwise():
    first, *_ = runs("cifar --data digits", CPU)
    assert (first.batch_size, first.iterations) == (64, 20)
    first, *_ = runs("cifar --data digits -b 128 --iterations 100", CPU)
    assert (first.batch_size, first.iterations) == (128, 100)
    assert run("cifar --data digits --variant O5 --epochs 2", CPU).iterations is None


@pytest.mark.parametrize(
    "line", ["DIR -b 32 64 --variant O2 fp32", "--variant O2 fp32 -b 32 64 32 --data DIR"]
)
def test_batch_sizes_repeats_and_variants_in_turn(line):
    """Each size is a command of its own."""
    found = runs(f"cifar {line} --repeats 2")
    ran = [(one.batch_size, one.repeat, one.precision) for one in found]
    assert ran == list(itertools.product((32, 64), (0, 1), ("O2", "fp32")))
    alone = [runs(f"cifar DIR -b {size} --variant O2 fp32 --repeats 2") for size in (32, 64)]
    assert found == [*alone[0], *alone[1]]


def test_variants():
    everything = [variant for variant in VARIANTS if variant != "tf32"]
    assert [one.precision for one in runs("mnist --variant all", CPU)] == everything
    assert [one.precision for one in runs("mlp", CPU)] == ["fp32", "O5"]
    assert [one.precision for one in runs("mlp", CUDA)] == ["fp32", "O2"]


def test_schedules():
    def factors(name, warmup=0.0):
        return [lr_factor(name, step, 12, warmup) for step in range(12)]

    assert factors("constant") == [1.0] * 12
    assert factors("linear") == [1 - step / 12 for step in range(12)]
    assert factors("linear", 0.25)[:4] == [1 / 3, 2 / 3, 1.0, 1.0]
    assert factors("linear", 0.25)[-1] == pytest.approx(1 / 9)
    assert factors("steps") == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)
    cosine = factors("cosine")
    assert cosine[0] == 1.0
    assert cosine[6] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
