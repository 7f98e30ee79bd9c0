"""Data of the experiments: files in the true formats, both loaders, order, augmentation, errors."""

import functools
import itertools
import pickle
import random
import shutil
import traceback

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("torchvision")
pytest.importorskip("sklearn")

from PIL import Image
from sklearn.datasets import load_digits

import experiment_files
from ampfuse.experiments.data import DataError, open_data
from ampfuse.experiments.settings import Settings
from cases import never_waiting
from experiment_files import no_checksums as no_checksums

CPU = torch.device("cpu")
# Normalisation that leaves bytes as they are.
BYTES = {"mean": (0.0,), "std": (1 / 255,)}
LOADERS = [
    pytest.param({"loader": "resident"}, id="resident"),
    pytest.param({"loader": "workers", "workers": 0}, id="in-process"),
    pytest.param({"loader": "workers", "workers": 2}, id="two-workers"),
]


def open_(kind="cifar10", source="synthetic", *, device=CPU, rank=0, world_size=1, **settings):
    """The data of a run with these settings."""
    settings = {"batch_size": 4, "channels_last": False, **settings}
    of = Settings(experiment=kind.removesuffix("10"), model="any", data=str(source), **settings)
    return open_data(of, device, rank, world_size)


def joined(batches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def same(one, other) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def write_mnist(folder, zipped=False):
    """Where torchvision puts it."""
    return experiment_files.write_mnist(folder / "MNIST/raw", zipped=zipped)


FILES = {
    "mnist": write_mnist,
    "mnist, zipped": functools.partial(write_mnist, zipped=True),
    "cifar10": experiment_files.write_cifar,
    "cifar10, archived": functools.partial(experiment_files.write_cifar, archived=True),
    "imagenet": experiment_files.write_imagenet,
}
OF_A_KIND = {"mnist": (10, 1, 28), "cifar10": (10, 3, 32), "imagenet": (3, 3, 28)}


@pytest.mark.covers(1)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("files", FILES)
def test_files_in_the_true_format(files, loader, tmp_path):
    kind, written = files.partition(",")[0], FILES[files](tmp_path)
    options = {"image_size": OF_A_KIND[kind][-1], "shuffle": False, **BYTES, **loader}
    if kind == "imagenet" and loader["loader"] == "resident":
        refused("--loader resident does not read", kind=kind, source=tmp_path, **options)
        options |= {"loader": "workers", "workers": 0}
    data = open_(kind, tmp_path, **options)
    # ImageNet's 28 pixels are the middle of 32, as 224 of 256.
    middle = slice(2, 30) if kind == "imagenet" else slice(None)
    for batches, split in ((data.train_batches(0), "train"), (data.test_batches(), "test")):
        images, labels = joined(batches)
        expected, of = (torch.from_numpy(array) for array in written[split])
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert torch.equal(images, expected[:, :, middle, middle].float())
        assert torch.equal(labels, of.long())
    assert [data.train_size, data.test_size] == [len(labels) for _, labels in written.values()]
    assert (data.classes, data.channels, data.image_size) == OF_A_KIND[kind]
    assert data.batches_per_epoch == data.train_size // 4


IN_PROCESS = {"image_size": 28, "loader": "workers", "workers": 0, **BYTES}


@pytest.mark.parametrize("size", [(90, 60), (40, 71), (20, 16)])
def test_imagenet_of_other_sizes(size, tmp_path):
    """JPEGs: the shorter edge to 32, the middle 28 of that."""
    experiment_files.write_imagenet(tmp_path, size=size, kind="jpg")
    expected = []
    for path in sorted((tmp_path / "val").glob("*/*.jpg")):
        height, width = (edge * 32 // min(size) for edge in size)
        image = Image.open(path).resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - 28) / 2), round((height - 28) / 2)
        expected.append(np.asarray(image.crop((left, top, left + 28, top + 28))))
    images, _ = joined(open_("imagenet", tmp_path, **IN_PROCESS).test_batches())
    assert torch.equal(images, torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2).float())


def test_imagenet_takes_grey_and_transparent_images(tmp_path):
    experiment_files.write_imagenet(tmp_path)
    grey = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    Image.fromarray(grey).save(tmp_path / "val" / "n02" / "002.png")
    Image.new("RGBA", (32, 32), (1, 2, 3, 4)).save(tmp_path / "val" / "n02" / "003.png")
    images, labels = joined(open_("imagenet", tmp_path, **IN_PROCESS).test_batches())
    assert torch.equal(images[2], torch.from_numpy(grey[2:30, 2:30]).float().expand(3, 28, 28))
    assert images[3].amax(dim=(1, 2)).tolist() == [1, 2, 3]
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_other_image_sizes_are_resized(tmp_path):
    written = write_mnist(tmp_path)
    images, _ = joined(open_("mnist", tmp_path, image_size=64, **BYTES).test_batches())
    pixels = torch.from_numpy(written["test"][0]).float()
    expected = functional.interpolate(pixels, (64, 64), mode="bilinear")
    assert images.shape == (13, 1, 64, 64)
    assert (images - expected).abs().max() <= 1  # in whole numbers


def test_digits_are_those_of_scikit_learn():
    data = open_("cifar10", "digits", image_size=8, shuffle=False, batch_size=1437, **BYTES)
    images, labels = joined(itertools.chain(data.train_batches(0), data.test_batches()))
    pixels, numbers = (array.tolist() for array in load_digits(return_X_y=True))
    found = (images.flatten(1) * 16 / 255).round().tolist()
    assert sorted(zip(found, labels.tolist(), strict=True)) == sorted(
        zip(pixels, numbers, strict=True)
    )
    assert (data.train_size, data.test_size) == (1437, 360)
    assert (data.classes, data.channels) == (10, 1)
    images, _ = joined(open_("cifar10", "digits", image_size=56).test_batches())
    assert images.shape == (360, 1, 56, 56)
    assert functional.avg_pool2d(images, 7).std() > 0.7  # still figures, not mush
    assert abs(images.mean()) < 0.05


@pytest.mark.parametrize(
    ("kind", "channels", "classes"), [("mnist", 1, 10), ("cifar10", 3, 10), ("imagenet", 3, 1000)]
)
def test_synthetic_images_come_from_the_seed(kind, channels, classes):
    def batches_of(seed, repeat=0):
        options = {"synthetic_size": 40, "batch_size": 40, "image_size": 24, "shuffle": False}
        data = open_(kind, seed=seed, repeat=repeat, **options)
        assert (data.classes, data.train_size, data.test_size) == (classes, 40, 10)
        return [*data.train_batches(0), *data.test_batches()]

    first = batches_of(1)
    (images, _), (test_images, _) = first
    assert images.shape == (40, channels, 24, 24)
    assert abs(images.mean()) < 0.5
    assert 0.7 < images.std() < 1.5
    assert same(first, batches_of(1, repeat=5))
    assert not same(first, batches_of(2))
    assert not torch.equal(images[:10], test_images)


def test_synthetic_sizes_follow_the_batch():
    data = open_(synthetic_size=10, batch_size=16, world_size=3, rank=1, workers=3)
    assert data.batches_per_epoch == 1
    sizes = {"train_size": 48, "test_size": 12}
    expected = {"data": "synthetic", "kind": "cifar10", "loader": "resident", "workers": None}
    expected |= sizes
    assert data.describe() == expected  # resident data have no workers
    data = open_(synthetic_size=1000, batch_size=8, world_size=2)
    assert data.test_size == 2 * 4 * 8
    assert [len(labels) for _, labels in data.test_batches()] == [8] * 4


@pytest.fixture
def counted(tmp_path):
    """MNIST files whose images are all of one grey: their number."""
    images = np.arange(24, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    arrays = (images, np.arange(24) % 10, images[:11], np.arange(11) % 10)
    folder = tmp_path / "MNIST/raw"
    folder.mkdir(parents=True)
    for name, array in zip(experiment_files.MNIST, arrays, strict=True):
        (folder / name).write_bytes(experiment_files.idx(array))
    return lambda **options: open_("mnist", tmp_path, image_size=8, **BYTES, **options)


def numbers(batches) -> list[int]:
    return joined(batches)[0][:, 0, 0, 0].int().tolist()


def test_an_epoch_holds_each_image_once(counted):
    data = counted()
    first, second = numbers(data.train_batches(0)), numbers(data.train_batches(1))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != list(range(24))
    images, labels = joined(data.train_batches(0))
    assert torch.equal(labels, images[:, 0, 0, 0].long() % 10)
    short = list(counted(batch_size=5).train_batches(0))  # an incomplete batch is left out
    assert [len(labels) for _, labels in short] == [5] * 4
    assert len(set(numbers(short))) == 20


@pytest.mark.parametrize("loader", LOADERS[:2])
def test_the_order_is_of_seed_and_epoch_alone(loader, counted):
    expected = numbers(counted(seed=3).train_batches(2))
    data = counted(seed=1, repeat=2, batch_size=6, **loader)  # each repeat has its own seed
    list(data.train_batches(0))
    assert numbers(data.train_batches(2)) == expected
    plain = counted(shuffle=False, **loader)
    for epoch in (1, 2):
        assert numbers(counted(seed=4).train_batches(epoch)) != expected
        assert numbers(plain.train_batches(epoch)) == list(range(24))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_processes_share_the_images(world_size, loader, counted):
    ranks = [counted(world_size=world_size, rank=rank, **loader) for rank in range(world_size)]
    assert {(data.train_size, data.test_size) for data in ranks} == {(24, 11)}
    train = [list(data.train_batches(1)) for data in ranks]
    assert {len(batches) for batches in train} == {24 // (4 * world_size)}
    assert {data.batches_per_epoch for data in ranks} == {24 // (4 * world_size)}
    # Taking turns, they go through the order that one process alone follows.
    turns = numbers(itertools.chain(*zip(*train, strict=True)))
    assert turns == numbers(counted().train_batches(1))[: len(turns)]
    tested = [numbers(data.test_batches()) for data in ranks]
    assert sorted(itertools.chain(*tested)) == list(range(11))
    assert max(map(len, tested)) - min(map(len, tested)) <= 1


def random_numbers():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["cifar10", "imagenet"])
def test_passes_begin_anywhere_may_be_left_and_take_no_global_random_numbers(kind, loader):
    before = random_numbers()
    options = {"synthetic_size": 24, "augment": True, "image_size": 16, "seed": 7, **loader}
    whole = list(open_(kind, **options).train_batches(3))
    assert len(whole) == 6
    data = open_(kind, **options)
    left = (data.train_batches(0), data.test_batches())
    assert all(map(next, left))
    for start in (4, 6):
        assert same(data.train_batches(3, start), whole[start:])
    assert [len(labels) for _, labels in data.test_batches()] == [4, 2]
    assert random_numbers() == before


def which_crops(batches, originals: torch.Tensor) -> list[int]:
    """Which of all crops to 32 by 32 of the original each image is; mirrored ones come last."""
    found = []
    for image, original in zip(joined(batches)[0], originals, strict=True):
        crops = original.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        both = torch.cat([crops, crops.flip(3)])
        (number,) = (both == image).flatten(1).all(1).nonzero().flatten().tolist()
        found.append(number)
    return found


@pytest.mark.parametrize("loader", LOADERS)
def test_cifar10_crops_and_flips(loader, tmp_path):
    written = experiment_files.write_cifar(tmp_path, each=16)
    originals = functional.pad(torch.from_numpy(written["train"][0]).float(), (4,) * 4)
    data = open_("cifar10", tmp_path, augment=True, shuffle=False, **BYTES, **loader)
    first, second = (which_crops(data.train_batches(epoch), originals) for epoch in range(2))
    # 162 variants: of 160 draws about 101 differ, half are mirrored, all offsets appear.
    assert first != second
    assert len({*first, *second}) > 80
    assert 50 < sum(number >= 81 for number in first + second) < 110
    assert {number % 81 // 9 for number in first + second} == set(range(9))
    assert {number % 9 for number in first + second} == set(range(9))
    images, _ = joined(data.test_batches())  # these stay as they are
    assert torch.equal(images, torch.from_numpy(written["test"][0]).float())


def test_imagenet_workers_crop_at_random_sizes(tmp_path):
    """A ramp from left to right shows where the crop was taken and how large it was."""
    experiment_files.write_imagenet(tmp_path, ("n01",), each=0, test_each=1)
    folder = tmp_path / "train" / "n01"
    folder.mkdir(parents=True)
    ramp = np.tile(np.arange(0, 256, 2, dtype=np.uint8), (128, 1))
    for number in range(40):
        Image.fromarray(ramp).save(folder / f"{number}.png")
    options = {"loader": "workers", "workers": 0, "augment": True, **BYTES}
    images, _ = joined(open_("imagenet", tmp_path, image_size=32, **options).train_batches(0))
    slopes = (images[:, 0, 16, 24] - images[:, 0, 16, 8]) / 16 / 2  # pixels of the file per pixel
    assert 10 < (slopes < 0).sum() < 30
    widths = slopes.abs() * 32
    assert widths.max() > 80
    assert widths.min() < 60
    assert widths.max() < 129


def test_workers_augment_an_image_alike_whatever_their_number_and_its_batch():
    def images(**options):
        data = open_(synthetic_size=24, augment=True, loader="workers", seed=5, **options)
        return joined(data.train_batches(1))

    expected = images(workers=0)
    assert same([expected], [images(workers=1)])
    assert same([expected], [images(workers=2, batch_size=8)])
    assert not same([expected], [images(workers=0, shuffle=False)])


@pytest.mark.parametrize("loader", LOADERS[:2])
def test_augmentation_is_of_seed_epoch_and_rank_alone(loader, tmp_path):
    """All training images are equal, so that only the crops can differ."""
    pixels = np.broadcast_to(experiment_files.noise(1, 3072)[0], (8, 3072))
    batch = {"data": np.ascontiguousarray(pixels), "labels": [0] * 8}
    experiment_files.write_cifar(tmp_path)
    for name in experiment_files.CIFAR[:-1]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, 2))

    def batches(epoch=0, **options):
        data = open_("cifar10", tmp_path, augment=True, **options, **loader)
        return list(data.train_batches(epoch))

    expected = batches()
    torch.manual_seed(77)
    assert same(expected, batches())
    assert not same(expected, batches(epoch=1))
    assert not same(expected, batches(repeat=5))
    ranks = [batches(rank=rank, world_size=2) for rank in range(2)]
    assert not same(*ranks)


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [
        ({}, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ({"mean": (0.5,), "std": (0.25,)}, (0.5,) * 3, (0.25,) * 3),
        ({"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
    ],
)
def test_normalisation(options, mean, std, tmp_path):
    pixels, _ = experiment_files.write_cifar(tmp_path)["test"]
    expected = (pixels / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    images, _ = joined(open_("cifar10", tmp_path, **options).test_batches())
    assert torch.allclose(images.double(), torch.from_numpy(expected), atol=1e-5)
    if options:  # grey images take the first of three values
        first = {name: values[:1] for name, values in options.items()}
        grey = (open_("cifar10", "digits", **of).test_batches() for of in (options, first))
        assert same(*grey)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("kind", ["cifar10", "imagenet"])
def test_memory_formats_and_loaders_give_the_same_bits(kind, augment):
    """Except for crops, of which each loader draws its own."""
    options = {"synthetic_size": 8, "augment": augment, "workers": 0}
    passes = {}
    for loader, channels_last in itertools.product(("resident", "workers"), (True, False)):
        data = open_(kind, loader=loader, channels_last=channels_last, **options)
        passes[loader, channels_last] = [*data.train_batches(1), *data.test_batches()]
        layout = torch.channels_last if channels_last else torch.contiguous_format
        for images, _ in passes[loader, channels_last]:
            assert images.is_contiguous(memory_format=layout)
        assert same(passes[loader, channels_last], passes[loader if augment else "resident", True])


def test_samples_can_be_sent_to_a_worker_that_was_not_forked(tmp_path):
    """Python starts processes in this way on other systems, and from 3.14 on."""
    experiment_files.write_imagenet(tmp_path)
    for source in ("synthetic", tmp_path):
        data = open_("imagenet", source, image_size=28, loader="workers", augment=True)
        assert same([pickle.loads(pickle.dumps(data._train))[1]], [data._train[1]])


def read_all(**options) -> None:
    data = open_(**{"image_size": 28, **options})
    list(itertools.chain(data.train_batches(0), data.test_batches()))


def refused(match: str, **options) -> None:
    with pytest.raises(DataError, match=match) as error:
        read_all(**options)
    assert "\n" not in str(error.value)
    # A loader that only a garbage collection finds waits 5 s for each of its workers.
    raised: BaseException | None = error.value
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__context__


def shortened(content: bytes) -> bytes:
    return content[: len(content) // 2]


def emptied(content: bytes) -> bytes:
    return b""


def replaced(content: bytes) -> bytes:
    return b"<html>"


@pytest.mark.parametrize("loader", LOADERS[1:])
@pytest.mark.parametrize("change", [shortened, emptied, replaced])
def test_damaged_images(change, loader, tmp_path):
    experiment_files.write_imagenet(tmp_path, kind="jpg")
    path = tmp_path / "train" / "n02" / "005.jpg"
    path.write_bytes(change(path.read_bytes()))
    said = f"{path}: cannot be read as an image"
    refused(said, kind="imagenet", source=tmp_path, **loader)


def labels_of(numbers: np.ndarray):
    return lambda content: experiment_files.idx(numbers)


RAW = "MNIST/raw"
LABELS, TEST_LABELS = f"{RAW}/{experiment_files.MNIST[1]}", f"{RAW}/{experiment_files.MNIST[3]}"


@pytest.mark.parametrize(
    ("kind", "name", "change", "said"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_3", shortened, ""),
        ("cifar10", "cifar-10-batches-py/batches.meta", emptied, ""),
        ("cifar10", "cifar-10-python.tar.gz", shortened, ""),
        ("mnist", f"{TEST_LABELS}.gz", emptied, ""),
        ("mnist", f"{RAW}/{experiment_files.MNIST[0]}", shortened, ""),
        ("mnist", TEST_LABELS, replaced, ""),
        ("mnist", LABELS, labels_of(np.arange(40) % 11), "40 labels, 0 to 10, for 40 images"),
        ("mnist", LABELS, labels_of(np.arange(41) % 10), "41 labels, 0 to 9, for 40 images"),
    ],
)
def test_damaged_files(kind, name, change, said, tmp_path):
    """A line that says which data set, which file, and what to do."""
    path = tmp_path / name
    if kind == "mnist":
        experiment_files.write_mnist(path.parent, zipped=name.endswith("gz"))
    else:
        experiment_files.write_cifar(tmp_path, archived=name.endswith("gz"))
    path.write_bytes(change(path.read_bytes()))
    named = path.parent if name.startswith("cifar-10-batches-py") else path
    said = f"--data {tmp_path}: {kind} could not be read: .*{said}; delete these if .*{named}"
    refused(said, kind=kind, source=tmp_path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mnist", "no network.*MNIST/raw/ with the four IDX files, or all with .gz"),
        ("cifar10", "no network.*cifar-10-batches-py/ or cifar-10-python.tar.gz"),
        ("imagenet", "No such file.*train/ and val/"),
    ],
)
def test_missing_files(kind, said, tmp_path):
    """The folder, or half of the set."""
    refused(f"{said}.*or use --data digits", kind=kind, source=tmp_path / "new")
    write_mnist(tmp_path)
    (tmp_path / LABELS).unlink()
    experiment_files.write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").unlink()
    refused(said, kind=kind, source=tmp_path)


def test_classes_that_differ(tmp_path):
    experiment_files.write_imagenet(tmp_path)
    shutil.rmtree(tmp_path / "val" / "n01")
    refused(
        "not in both train and val: n01; expected: train/ and", kind="imagenet", source=tmp_path
    )


def test_sizes_that_do_not_fit(tmp_path):
    write_mnist(tmp_path)
    options = {"kind": "mnist", "source": tmp_path}
    said = "--batch-size 41 is more than the 40 training images: use a"
    refused(said, batch_size=41, **options)
    said = "--batch-size 21 is more than the 20 training images of each of 2 processes"
    refused(said, batch_size=21, world_size=2, **options)


def test_features_of_the_mlp_are_made_for_what_is_asked_and_not_the_numbers_of_its_weights():
    options = {"kind": "mlp", "image_size": 8, "synthetic_size": 12}
    tested, untested = (open_(evaluate=evaluate, **options) for evaluate in (True, False))
    assert same(tested.train_batches(0), untested.train_batches(0))
    for data, batches in ((tested, 4), (untested, 0)):
        assert (data.train_size, data.test_size) == (12, 4 * batches)
        assert len([*data.train_batches(0)]) == 3
        assert len([*data.test_batches()]) == batches
    (features, _), *_ = untested.train_batches(0)
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(features, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_on_the_gpu_are_those_of_the_cpu(loader):
    options = {"synthetic_size": 64, "augment": True, "channels_last": True, **loader}
    cpu, gpu = (open_(device=torch.device(name), **options) for name in ("cpu", "cuda"))
    for one, other in zip(cpu.train_batches(0), gpu.train_batches(0), strict=True):
        images, labels = other
        assert images.device.type == labels.device.type == "cuda"
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert same([one], [(images.cpu(), labels.cpu())])


@pytest.mark.gpu
@pytest.mark.parametrize("augment", [False, True])
def test_resident_batches_do_not_make_the_host_wait(augment):
    data = open_(device=torch.device("cuda"), synthetic_size=64, augment=augment)
    with never_waiting():
        for batches in (data.train_batches(0), data.test_batches()):
            for _ in batches:
                pass
