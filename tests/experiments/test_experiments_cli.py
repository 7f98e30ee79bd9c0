"""The trainers' command lines: what old and new flags mean, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from ampfuse.experiments import SCRIPTS, cifar, imagenet, mlp, mnist, results, schedule
from ampfuse.experiments.settings import ARMS, Settings, parse, runs_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODULES = {"cifar": cifar, "imagenet": imagenet, "mnist": mnist, "mlp": mlp}


def runs_and_note(name: str, line: str, device: torch.device) -> tuple[list[Settings], str]:
    script = MODULES[name].SCRIPT
    return runs_of(parse(script, line.split(), name), script, device)


def configs_of(name: str, line: str, device: torch.device = CUDA) -> list[Settings]:
    return runs_and_note(name, line, device)[0]


def config_of(name: str, line: str, device: torch.device = CUDA) -> Settings:
    configs = configs_of(name, line, device)
    assert len({config.arm for config in configs}) == 1
    return configs[0]


def test_scripts_are_those_of_the_command():
    assert tuple(MODULES) == SCRIPTS


class TestOldCommandLines:
    """Those of the published scripts, as they stood."""

    @pytest.mark.parametrize(
        ("flags", "arm", "method", "loss_scale"),
        [
            ("--mode FP32", "fp32", "FP32", None),
            ("--mode FP16", "O2", "FP16", 128.0),
            ("--mode amp", "O1", "amp", None),
            ("--mode amp --opt_level O2", "O2", "amp", None),
        ],
    )
    def test_e1(self, flags, arm, method, loss_scale):
        line = f"--GPU V100 {flags} --batch_size 256 --iteration 100"
        configs = configs_of("cifar", line)
        assert len(configs) == 5  # repeats
        config = configs[0]
        assert (config.arm, config.method, config.loss_scale) == (arm, method, loss_scale)
        assert (config.batch_size, config.iterations, config.epochs) == (256, 100, None)
        assert (config.optimizer, config.lr, config.momentum) == ("sgd", 0.01, 0.9)
        assert (config.shuffle, config.augment, config.mean) == (False, False, (0.5, 0.5, 0.5))
        assert (config.model, config.recipe, config.data) == ("vgg16", "e1", "data")

    def test_e4_of_2018(self):
        line = "-a resnet50 -j 4 -b 128 --static-loss-scale 256 {} /data/imagenet"
        half = config_of("imagenet", line.format("--fp16"))
        assert (half.arm, half.method, half.loss_scale) == ("O2", "fp16", 256.0)
        assert (half.model, half.batch_size, half.workers) == ("resnet50", 128, 4)
        assert (half.data, half.loader, half.iterations) == ("/data/imagenet", "workers", 360)
        full = config_of("imagenet", line.format(""))
        assert (full.arm, full.loss_scale) == ("fp32", None)  # there the scale was not used either

    @pytest.mark.parametrize(
        "line", ["DIR -a resnet50 {}", "-a resnet50 DIR {}", "{} -a resnet50 DIR"]
    )
    def test_e4_of_2019(self, line):
        flags = (
            "--opt-level O2 --keep-batchnorm-fp32 True --loss-scale 128.0 --channels-last True "
            "--epochs 90 --workers 4 --deterministic --local_rank 0"
        )
        config = config_of("imagenet", line.format(flags))
        assert (config.arm, config.keep_batchnorm_fp32, config.loss_scale) == ("O2", True, 128.0)
        assert (config.data, config.channels_last, config.deterministic) == ("DIR", True, True)
        assert (config.epochs, config.iterations, config.schedule) == (90, None, "steps")
        assert config.evaluate

    @pytest.mark.parametrize(
        ("flags", "name", "value"),
        [
            ("--channels-last True DIR", "channels_last", True),
            ("DIR --channels-last", "channels_last", True),
            ("DIR --channels-last False", "channels_last", False),
            ("DIR --no-channels-last", "channels_last", False),
            ("DIR", "channels_last", True),
            ("DIR --loss-scale dynamic", "loss_scale", "dynamic"),
            ("DIR --loss-scale None", "loss_scale", None),
            ("DIR --keep-batchnorm-fp32 None", "keep_batchnorm_fp32", None),
        ],
    )
    def test_flags_with_and_without_a_value(self, flags, name, value):
        config = config_of("imagenet", f"{flags} --opt-level O2")
        assert (getattr(config, name), config.data) == (value, "DIR")

    def test_prof_trains_so_many_steps(self):
        assert config_of("imagenet", "D --opt-level O1 --prof 10").iterations == 10
        assert config_of("imagenet", "D --fp16 --dynamic-loss-scale").loss_scale == "dynamic"


class TestRecipes:
    @pytest.mark.parametrize(
        ("recipe", "name", "line", "columns"),
        [
            ("e1", "cifar", "--recipe e1 --mode FP32", ("iterations",)),
            ("e2", "cifar", "--recipe e2 --arm O2", ("batch_size", "epochs")),
            ("e4", "imagenet", "DIR --recipe e4 --arm fp32", ("batch_size", "iterations")),
        ],
    )
    def test_published_sizes(self, recipe, name, line, columns):
        """The settings are those that the published tables state."""
        rows, config = results.published(recipe), config_of(name, line)
        for column in columns:
            assert {row[column] for row in rows} == {getattr(config, column)}

    def test_densenet_as_published_by_level(self):
        for arm, batch, epochs in (("O0", 512, 25), ("O2", 1024, 50)):
            config = config_of("cifar", f"--recipe e3 --model densenet161 --arm {arm}")
            assert (config.batch_size, config.epochs, config.optimizer) == (batch, epochs, "adam")
        assert config_of("cifar", "--recipe e3 --arm O3").optimizer == "sgd"
        assert config_of("cifar", "--recipe e3 --arm O2").clip == 1.0

    def test_a_recipe_chooses_the_model_and_a_model_its_recipe(self):
        assert config_of("cifar", "--recipe e2 --arm O0").model == "wrn28_10"
        assert config_of("cifar", "--model densenet161 --arm O0").recipe == "e3"
        # Settings of one, model of another: that is none of the published experiments.
        assert config_of("cifar", "--recipe e2 --model wrn16_4 --arm O0").recipe is None

    def test_flags_win_over_the_recipe(self):
        line = "--recipe e2 --arm O2 -b 64 --epochs 3 --lr 0.5 --optimizer adamw"
        config = config_of("cifar", line)
        assert (config.batch_size, config.epochs, config.lr) == (64, 3, 0.5)
        assert (config.optimizer, config.schedule, config.dropout) == ("adamw", "linear", 0.3)
        assert config_of("cifar", "--recipe e2 --arm O2 --iterations 7").epochs is None

    def test_every_recipe_resolves_for_every_model_and_arm(self):
        for name, module in MODULES.items():
            for recipe, arm in itertools.product(module.SCRIPT.recipes, ARMS):
                for model, device in itertools.product(recipe.models, (CPU, CUDA)):
                    if arm != "tf32":
                        line = f"--recipe {recipe.name} --model {model} --arm {arm} --data digits"
                        config = config_of(name, line, device)
                        assert config.iterations or config.epochs
                        assert config.recipe == recipe.name

    def test_cpu_sizes_unless_told_otherwise(self):
        configs, note = runs_and_note("cifar", "--data digits", CPU)
        assert (configs[0].batch_size, configs[0].iterations) == (64, 20)
        assert "batch size 64, iterations 20" in note
        configs, note = runs_and_note("cifar", "--data digits -b 128 --iterations 100", CPU)
        assert (configs[0].batch_size, configs[0].iterations, note) == (128, 100, "")
        assert config_of("cifar", "--data digits --arm O5 --epochs 2", CPU).iterations is None

    def test_original_loop(self):
        config = config_of("cifar", "--mode FP32 --loop original")
        assert (config.loader, config.workers, config.channels_last) == ("workers", 0, False)
        assert not config.cudnn_benchmark
        assert config_of("mnist", "--arm fp32 --loop original").workers == 2


class TestBatchSizes:
    @pytest.mark.parametrize(
        "line",
        [
            "DIR --batch-size 32 64 --arm fp32 O2",
            "--batch-size 32 64 --data DIR --arm fp32 O2",
            "--arm fp32 O2 -b 32 64 32 --data DIR",
        ],
    )
    def test_each_is_a_command_of_its_own(self, line):
        """One after the other, each with all arms and repeats."""
        configs = configs_of("cifar", f"{line} --repeats 2")
        ran = [(c.batch_size, c.repeat, c.arm) for c in configs]
        assert ran == list(itertools.product((32, 64), (0, 1), ("fp32", "O2")))
        alone = [configs_of("cifar", f"DIR -b {b} --arm fp32 O2 --repeats 2") for b in (32, 64)]
        assert configs == [*alone[0], *alone[1]]

    def test_synthetic_data_grow_with_the_batch(self):
        sizes = {c.synthetic_size for c in configs_of("cifar", "--data synthetic -b 128 2048")}
        assert sizes == {2048, 8192}


class TestArms:
    def test_order_and_repeats(self):
        configs = configs_of("mnist", "--arm O2 fp32 amp-bf16 --repeats 2 --seed 5")
        ran = [(c.repeat, c.arm) for c in configs]
        assert ran == list(itertools.product((0, 1), ("O2", "fp32", "amp-bf16")))

    def test_all(self):
        arms = [config.arm for config in configs_of("mnist", "--arm all", CPU)]
        assert arms == [arm for arm in ARMS if arm != "tf32"]

    def test_default(self):
        assert [c.arm for c in configs_of("mlp", "", CPU)] == ["fp32", "O5"]
        assert [c.arm for c in configs_of("mlp", "", CUDA)] == ["fp32", "O2"]

    def test_scale_goes_to_the_arms_that_have_one(self):
        configs = configs_of("mlp", "--arm fp32 amp-fp16 amp-bf16 O0 O2 --loss-scale 64")
        assert [c.loss_scale for c in configs] == [None, 64.0, None, None, 64.0]
        configs = configs_of("mlp", "--arm O1 O2 --keep-batchnorm-fp32")
        assert [c.keep_batchnorm_fp32 for c in configs] == [None, True]


def test_schedules():
    def factors(name, warmup=0.0):
        return [schedule.factor(name, step, 12, warmup) for step in range(12)]

    assert factors("constant") == [1.0] * 12
    assert factors("linear") == [1 - step / 12 for step in range(12)]
    assert factors("linear", 0.25)[:4] == [1 / 3, 2 / 3, 1.0, 1.0]
    assert factors("linear", 0.25)[-1] == pytest.approx(1 / 9)
    assert factors("steps") == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)
    cosine = factors("cosine")
    assert cosine[0] == 1.0
    assert cosine[6] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
