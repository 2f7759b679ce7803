import contextlib
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.readers.img_extensions import is_img_extension

import hiap
from conftest import write_photos, write_shards
from hiap.cli.main import main
from hiap.data.images import Loading
from hiap.data.interface import val_part
from hiap.data.sources import Augmentation, ByteData, Data, digits, mix_seed, open_data
from hiap.errors import InputError
from hiap.training.config import read_config
from hiap.training.evaluate import evaluate
from hiap.training.setup import load_data, note_preprocessing

HALF = ((0.5,) * 3, (0.5,) * 3)
CPU = torch.device("cpu")
LIGHT = Augmentation(crop=0.5, flip=0.5, policy="rand-m5-mstd0.5", erase=0.5)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return Path(write_photos(tmp_path))


def opened(data: Path | str, hold: bool = False, classes: int | None = None, **options: Any) -> Data:
    loading = Loading((16, 16), HALF, LIGHT, CPU, workers=0)
    return open_data(str(data), replace(loading, **options), hold, classes)


@pytest.mark.parametrize("hold", [False, True])
def test_batches_depend_on_seed_epoch_and_position_alone(photos: Path, hold: bool) -> None:
    data = opened(photos, hold=hold)
    assert data.class_names == ["cat", "dog"] and data.classes == 2
    assert (data.train_size, data.val_size) == (24, 8)
    first = list(data.train(3, 0, 8, 0, 1))
    random.seed(99), torch.manual_seed(99), np.random.seed(99)
    again = list(opened(photos, hold=hold).train(3, 1, 8, 0, 1))
    assert len(first) == 3 and len(again) == 2
    for (x, y), (x2, y2) in zip(first[1:], again, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2) and x.shape == (8, 3, 16, 16)
    assert not torch.equal(first[0][0], next(iter(data.train(4, 0, 8, 0, 1)))[0])
    shards = [list(data.train(3, 0, 8, rank, 2)) for rank in (0, 1)]
    for whole, *parts in zip(first, *shards, strict=True):
        torch.testing.assert_close(whole[0], torch.cat([part[0] for part in parts]))


def test_workers_read_what_the_main_process_reads(photos: Path) -> None:
    one, two = (list(opened(photos, workers=workers).train(0, 0, 8, 0, 1)) for workers in (0, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("hold", [False, True])
def test_broken_images_are_skipped_with_a_count_or_refused(photos: Path, hold: bool) -> None:
    (photos / "train/cat/5.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match=r"images (were skipped|cannot be read)|some images cannot be read"):
        batches = list(opened(photos, hold=hold).train(0, 0, 8 if not hold else 4, 0, 1))
    assert all(len(y) == (8 if not hold else 4) for _, y in batches)
    with pytest.raises(ValueError, match=r"image \d+ of the data set cannot be read"):
        list(opened(photos, hold=hold, strict=True).train(0, 0, 24, 0, 1))


def test_broken_images_are_not_scored(photos: Path) -> None:
    (photos / "val/cat/1.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match="skipped"):
        assert labels(list(opened(photos).val(3))) == [0, 0, 0, 1, 1, 1, 1]


def test_a_batch_of_broken_images_is_not_scored_and_a_set_of_them_refused(photos: Path) -> None:
    (photos / "val/dog/3.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match="1 images were skipped"):
        assert labels(list(opened(photos).val(7))) == [0, 0, 0, 0, 1, 1, 1]  # the last batch had one image
    for file in (photos / "val").glob("*/*"):
        file.write_bytes(b"not an image")
    with pytest.raises(ValueError, match="no image can be read"), pytest.warns(UserWarning):
        list(opened(photos).val(7))
    with pytest.raises(ValueError, match="none of 8 images can be read"), pytest.warns(UserWarning):
        opened(photos, hold=True)


def test_images_of_16_bits_are_scaled(photos: Path) -> None:
    grey = np.linspace(0, 65535, 20 * 24).astype(np.uint16).reshape(20, 24)
    Image.fromarray(grey).save(photos / "val/cat/0.png")
    data = opened(photos, size=(20, 24), hold=True)
    held = next(data.val(1))[0] * 0.5 + 0.5
    torch.testing.assert_close(held[0, 0], torch.from_numpy(grey / 65535).float(), atol=2.5e-3, rtol=0)


@pytest.mark.parametrize("kind", ["webp", "bmp", "tiff"])
def test_other_kinds_of_images_are_read(photos: Path, kind: str) -> None:
    Image.open(photos / "val/cat/3.png").save(photos / f"val/cat/4.{kind}")
    assert opened(photos).val_size == 9
    assert not is_img_extension(f".{kind}")  # timm is as it was


def test_no_colours_are_changed_without_a_policy(photos: Path) -> None:
    plain = Augmentation(crop=1.0, flip=0.0, policy=None, erase=0.0)
    for file in (photos / "train").glob("*/*"):
        Image.new("RGB", (16, 16), (128, 64, 32)).save(file)
    for x, _ in opened(photos, augmentation=plain).train(0, 0, 8, 0, 1):
        torch.testing.assert_close((x * 0.5 + 0.5)[:, :, 8, 8] * 255, torch.tensor([[128.0, 64, 32]]).expand(8, -1))


def test_the_strongest_augmentation_works(photos: Path) -> None:
    strong = Augmentation(crop=1.0, flip=0.0, policy="rand-m10-n8-inc1", erase=0.0)
    data = opened(photos, augmentation=strong, strict=True)
    assert all(x.isfinite().all() for epoch in range(4) for x, _ in data.train(epoch, 0, 8, 0, 1))


def test_wrong_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"must hold the folders train and val.*found \['images'\]"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="is no folder, no timm data set"):
        opened(tmp_path / "nowhere")
    for split in ("train/cat/images", "train/dog/images", "val/images"):
        (tmp_path / split).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "0.png")
    with pytest.raises(ValueError, match=r"images right in it; found \['images'\]"):
        opened(tmp_path)


def test_labels_that_differ_between_the_splits_are_refused(photos: Path) -> None:
    for name in ("ant", "bee"):
        (photos / "train" / name).mkdir()
        Image.new("RGB", (8, 8)).save(photos / f"train/{name}/0.png")
    (photos / "val").rename(photos / "validation")
    assert labels(list(opened(photos).val(8))) == [2] * 4 + [3] * 4
    with pytest.raises(ValueError, match=r"no validation images of \['ant', 'bee'\]"):
        opened(f"torch/image_folder:{photos}")


def test_digits_are_those_of_scikit_learn() -> None:
    (train, train_labels), (val, val_labels) = digits()
    assert (len(train), len(val)) == (1437, 360) and train.shape[1:] == (1, 8, 8)
    assert torch.bincount(torch.cat([train_labels, val_labels])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert mix_seed(1, 2) != mix_seed(2, 1)


@pytest.mark.parametrize("hold", [False, True])
def test_validation_may_lack_a_class_but_not_have_one_more(photos: Path, hold: bool) -> None:
    for image in (photos / "val/cat").iterdir():
        image.unlink()
    (photos / "val/cat").rmdir()
    assert labels(list(opened(photos, hold=hold).val(2))) == [1, 1, 1, 1]
    (photos / "val/dog").rename(photos / "val/fox")
    with pytest.raises(ValueError, match=r"validation that are not trained: \['fox'\]"):
        opened(photos, hold=hold)


def test_validation_images_are_cropped_as_the_model_wants_it(photos: Path) -> None:
    def first(share: float) -> torch.Tensor:
        return next(iter(opened(photos, crop_pct=share).val(1)))[0]

    image = Image.open(photos / "val/cat/0.png").convert("RGB")
    plain = create_transform((3, 16, 16), mean=HALF[0], std=HALF[1], interpolation="bicubic", crop_pct=1.0)
    assert torch.equal(first(1.0)[0], plain(image)) and not torch.equal(first(0.5), first(1.0))
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2)  # timm: bicubic, 0.9
    config = read_config(None, {"data": str(photos), "target": "50%", "workers": 0})
    assert torch.equal(next(iter(load_data(config, model, CPU).val(1)))[0], first(0.9))
    squashed = next(iter(opened(photos, crop_pct=1.0, crop_mode="squash").val(1)))[0][0]
    assert torch.equal(squashed, plain(image.resize((16, 16), Image.Resampling.BICUBIC)))


def test_a_folder_is_pruned_and_evaluated(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "model": "vit_tiny_patch16_224",
        "model_args": {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "pretrained": False,
        "data": str(photos),
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.3, 0.4],
        "target": "70%",
        "epochs": 4,
        "batch_size": 8,
        "workers": 0,
        "mixup": 0.5,
    }
    from hiap.training.loop import prune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = prune(read_config(None, options), tmp_path / "run")
    assert result.record["macs"] <= 0.7 * result.record["dense_macs"]
    loaded = hiap.load(tmp_path / "run/compact")
    assert loaded.class_names == ["cat", "dog"]
    preprocessing = resolve_data_config({}, model=loaded)
    assert preprocessing["input_size"] == (3, 16, 16) and loaded.pretrained_cfg["num_classes"] == 2
    assert (preprocessing["mean"], preprocessing["std"]) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run/compact"), "--data", str(photos), "--workers", "0"]) == 0
    assert capsys.readouterr().out.startswith(f"top-1 {result.record['top1']:.2f} %")


def test_what_was_held_in_memory_is_evaluated_alike(photos: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2)
    config = read_config(None, {"data": str(photos), "data_device": "cpu", "target": "50%", "workers": 0})
    held = load_data(config, model, CPU)
    note_preprocessing(model, HALF, held)
    config.data_device = "loader"
    for one, two in zip(held.val(3), load_data(config, model, CPU).val(3), strict=True):
        torch.testing.assert_close(one[0], two[0], atol=1e-6, rtol=0)


def same(first: list[tuple[torch.Tensor, ...]], second: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


def labels(batches: list[tuple[torch.Tensor, ...]]) -> list[int]:
    return torch.cat([y for _, y in batches]).tolist()


class TestStreams:
    """Tar shards; the label of a picture is its number."""

    @pytest.fixture(scope="class")
    @classmethod
    def shards(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return write_shards(tmp_path_factory.mktemp("shards"), {"train": [12, 12, 12, 12], "validation": [5, 4, 4]})

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_epoch_can_be_taken_up_anywhere(self, shards: str, workers: int) -> None:
        data = opened(shards, workers=workers, classes=100)
        assert (data.train_size, data.val_size, data.classes, data.class_names) == (48, 13, 100, None)
        whole = list(data.train(3, 0, 8, 0, 1))
        assert len(whole) == 6 and whole[0][0].shape == (8, 3, 16, 16) and sorted(labels(whole)) == list(range(48))
        for start in (1, 4):
            random.seed(99), torch.manual_seed(99), np.random.seed(99)
            again = list(opened(shards, workers=workers, classes=100).train(3, start, 8, 0, 1))
            assert same(whole[start:], again)
        other, seed = (list(one.train(4, 0, 8, 0, 1)) for one in (data, opened(shards, seed=1, classes=100)))
        assert len({tuple(labels(one)) for one in (whole, other, seed)}) == 3
        assert labels(whole) != sorted(labels(whole))

    @pytest.mark.parametrize("world", [2, 8])
    def test_ranks_share_an_epoch(self, shards: str, world: int) -> None:
        data = opened(shards, classes=100)
        parts = [list(data.train(0, 0, 8, rank, world)) for rank in range(world)]
        assert all(len(part) == 6 and len(part[0][1]) == 8 // world for part in parts)
        assert sorted(label for part in parts for label in labels(part)) == list(range(48))

    @pytest.mark.parametrize("workers", [0, 2, 4])
    def test_validation_is_whole(self, shards: str, workers: int) -> None:
        data = opened(shards, workers=workers, classes=100)
        once = list(data.val(4))
        assert sorted(labels(once)) == list(range(48, 61)) and max(len(y) for _, y in once) == 4
        assert same(once, list(data.val(4)))

    def test_an_epoch_is_never_short(self, tmp_path: Path) -> None:
        data = opened(write_shards(tmp_path, {"train": [20, 2], "validation": [1]}), workers=2, classes=100)
        whole = list(data.train(0, 0, 4, 0, 1))
        assert len(whole) == 5 and all(len(y) == 4 for _, y in whole)
        assert same(whole[3:], list(data.train(0, 3, 4, 0, 1)))

    def test_images_get_the_mode_of_the_model(self, shards: str) -> None:
        data = opened(shards, normalisation=((0.5,), (0.5,)), channels=1, strict=True, classes=100)
        assert next(iter(data.val(4)))[0].shape == (4, 1, 16, 16)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_broken_images_are_skipped_with_a_count_or_refused(self, tmp_path: Path, workers: int) -> None:
        name = write_shards(tmp_path, {"train": [8, 8], "validation": [4, 4]}, broken=3)
        with pytest.warns(UserWarning, match="1 images were skipped in this pass"):
            batches = list(opened(name, workers=workers, classes=100).train(0, 0, 8, 0, 1))
        assert len(batches) == 2 and 3 not in labels(batches)
        with pytest.raises(ValueError, match=r"image \d+ of worker \d cannot be read"):
            list(opened(name, workers=workers, strict=True, classes=100).train(0, 0, 8, 0, 1))
        (tmp_path / "validation-0001.tar").write_bytes((tmp_path / "validation-0001.tar").read_bytes()[:2000])
        with pytest.raises(ValueError, match=r"shard .*validation-0001\.tar cannot be read"):
            list(opened(name, workers=workers, classes=100).val(4))

    def test_what_is_missing_is_said(self, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=r"how many classes it has: pass --model-args '\{\"num_classes\": N\}'"):
            opened(shards)
        with pytest.raises(ValueError, match="a label must be from 0 to 49, by the number of classes; found"):
            list(opened(shards, classes=50).val(16))
        with pytest.raises(ValueError, match="is a stream, which is not held in memory: use --data-device loader"):
            opened(shards, classes=100, hold=True)
        with pytest.raises(ValueError, match=r"must hold _info\.json with the splits train and validation"):
            opened(f"wds/none:{tmp_path}")
        (tmp_path / "_info.json").write_text('{"splits": {"train": {"name": "train", "filenames": ["a.tar"]}}}')
        with pytest.raises(ValueError, match=r"num_samples, .*for train: 'num_samples'"):
            opened(f"wds/none:{tmp_path}")
        with pytest.raises(ValueError, match=r"no timm data set that can be read \(torch/\.\.\., .*wds/\.\.\.\)"):
            opened("wds:" + str(tmp_path))
        monkeypatch.setattr("hiap.data.sources.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="is read with webdataset, which is missing: pip install webdataset"):
            opened(shards)

    def test_a_set_of_the_hub(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
        folder = tmp_path_factory.mktemp("hub")
        data = f"hfids/{folder}:{folder}/cache"
        names = [f"class {i}" for i in range(50)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        for split, first, count in (("train", 0, 2), ("validation", 24, 1)):
            for shard in range(count):
                chosen = [*range(first + 12 * shard, first + 12 * (shard + 1))]
                pictures = [Image.new("L", (20, 24), i) for i in chosen]
                rows = datasets.Dataset.from_dict({"image": pictures, "label": chosen}, features=features)
                rows.to_parquet(folder / f"{split}-{shard:05}-of-{count:05}.parquet")
        with pytest.raises(ValueError, match=r"does not say how many images its split train has; it tells of \[\]"):
            opened(data)
        listed = "".join(f"          '{i}': {name}\n" for i, name in enumerate(names))
        sizes = "".join(
            f"  - {{name: {k}, num_examples: {n}, num_bytes: 1}}\n" for k, n in (("train", 24), ("validation", 12))
        )
        (folder / "README.md").write_text(
            "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n"
            f"      class_label:\n        names:\n{listed}  splits:\n{sizes}---\n"
        )
        for workers in (0, 4):
            hub = opened(data, workers=workers)
            assert (hub.train_size, hub.val_size, hub.class_names) == (24, 12, names)
            whole = list(hub.train(1, 0, 4, 0, 1))
            assert sorted(labels(whole)) == list(range(24)) != labels(whole)
            assert same(whole[3:], list(hub.train(1, 3, 4, 0, 1)))
            assert labels(list(hub.val(5))) == list(range(24, 36))
            ranks = [labels(list(hub.train(1, 0, 4, rank, 2))) for rank in (0, 1)]
            assert sorted(ranks[0] + ranks[1]) == list(range(24))


def test_a_tenth_is_held_out_of_the_training_images() -> None:
    images = torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1).expand(50, 1, 4, 4)
    rest = (Augmentation(), CPU, 0, list("abcde"))
    data = ByteData((images, torch.arange(50) % 5), (images[:3], torch.arange(3)), (4, 4), ((0.0,), (1 / 255,)), *rest)
    held = data.held_out()
    assert (held.train_size, held.val_size) == (45, 5) and (data.train_size, data.val_size) == (50, 3)
    seen = [part[0][:, 0, 0, 0] for part in (held._train, held._val)]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(50, dtype=torch.uint8))


class Foreign:
    """An object of a user's own: validation batches of several sizes, and no word of processes."""

    classes, class_names, train_size, val_size = 40, None, 0, 23

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Any:
        return iter(())

    def val(self, batch: int) -> Any:
        for numbers in torch.arange(23).split([5, 1, 7, 7, 3]):
            yield pictures(numbers), numbers


def pictures(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def shared_data(kind: str, tmp_path: Path, workers: int = 0) -> Any:
    """Data of a kind with 23 validation images, in batches of 5; a picture is known by its mean, or by its label."""
    numbers = torch.arange(23)
    if kind == "memory":
        images = pictures(numbers).to(torch.uint8)
        return ByteData((images, numbers), (images, numbers), (4, 4), HALF, LIGHT, CPU)
    if kind == "files":
        for split, count in (("train", 1), ("val", 23)):
            for i in range(count):
                for name in ("cat", "dog")[: 2 if split == "train" else 1]:
                    (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
                    Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / split / name / f"{i}.png")
        return opened(tmp_path, crop_pct=1.0, workers=workers)
    if kind == "shards":
        return opened(write_shards(tmp_path, {"train": [1], "validation": [9, 8, 6]}), classes=100, workers=workers)
    if kind == "loaders":
        pairs = torch.utils.data.TensorDataset(pictures(numbers), numbers)
        loader = torch.utils.data.DataLoader(pairs, batch_size=5, shuffle=True)
        return hiap.LoaderData(loader, loader)
    return Foreign()


class TestValidationIsSharedAmongProcesses:
    KINDS = ("memory", "files", "shards", "loaders", "foreign")

    @pytest.mark.parametrize("kind", KINDS)
    def test_parts_are_disjoint_and_together_whole(self, kind: str, tmp_path: Path) -> None:
        data = shared_data(kind, tmp_path)

        def known(batches: Any) -> list[float]:
            found = [(x.mean((1, 2, 3)), y) for x, y in batches]
            return [round(v, 4) for x, y in found for v in (y if kind == "shards" else x).tolist()]

        whole = known(data.val(5))
        assert len(whole) == len(set(whole)) == 23
        for world in (1, 2, 3, 7):
            parts = [known(val_part(data, 5, rank, world)) for rank in range(world)]
            assert sorted(one for part in parts for one in part) == sorted(whole)
            assert world == 1 or max(map(len, parts)) < 23

    def test_batches_stay_what_they_were(self, tmp_path: Path) -> None:
        for kind in ("memory", "files", "loaders", "foreign"):
            data = shared_data(kind, tmp_path)
            parts = [list(val_part(data, 5, rank, 2)) for rank in range(2)]
            merged = [parts[i % 2][i // 2] for i in range(5)]
            assert same(merged, list(data.val(5)))

    def test_images_of_other_processes_are_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files, shards = shared_data("files", tmp_path / "a"), shared_data("shards", tmp_path / "b")
        opened_images: list[Any] = []
        monkeypatch.setattr(Image, "open", lambda *a, _open=Image.open: opened_images.append(a) or _open(*a))
        list(val_part(files, 5, 1, 3))
        assert len(opened_images) == 8  # batches 1 and 4, of 5 and of 3 images
        opened_images.clear()
        list(val_part(shards, 5, 2, 3))
        assert len(opened_images) == 6  # the third shard

    @pytest.mark.parametrize("kind", ["files", "shards"])
    def test_loader_workers_share_a_part(self, kind: str, tmp_path: Path) -> None:
        data = shared_data(kind, tmp_path, workers=2)
        found = [labels(list(val_part(data, 5, rank, 2))) for rank in range(2)]
        assert sorted(found[0] + found[1]) == sorted(labels(list(data.val(5))))

    def test_a_part_of_broken_images_is_no_error(self, tmp_path: Path) -> None:
        data = shared_data("files", tmp_path)
        for i in range(5):
            (tmp_path / f"val/cat/{i}.png").write_bytes(b"not an image")
        with pytest.warns(UserWarning, match="5 images were skipped"):
            assert list(val_part(data, 5, 0, 5)) == []
        assert labels(list(val_part(data, 5, 4, 5))) == [0, 0, 0]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("world", [3, 7])
    def test_figures_are_those_of_one_process(self, kind: str, world: int, tmp_path: Path) -> None:
        data = shared_data(kind, tmp_path)
        torch.manual_seed(0)
        size, classes = 16 if kind in ("files", "shards") else 4, 6 if kind == "files" else 24
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * size**2, classes)).eval()
        alone = evaluate(model, data, 5)
        counts: list[torch.Tensor] = []

        def collect(count: torch.Tensor) -> torch.Tensor:
            counts.append(count)
            return count

        for rank in range(world):
            with contextlib.suppress(InputError):  # of an empty part on its own
                evaluate(model, data, 5, reduce=collect, rank=rank, world=world)
        assert len(counts) == world and all(count.dtype == torch.long for count in counts)
        if world == 7 and kind != "shards":  # five batches: two parts are empty
            assert sorted(count[2].item() for count in counts)[:3] == [0, 0, 1 if kind == "foreign" else 3]
        total = torch.stack(counts).sum(0)
        figures = [evaluate(model, data, 5, reduce=lambda _: total, rank=rank, world=world) for rank in range(world)]
        assert figures == [alone] * world and alone["images"] == 23 and alone["top5"] > 0

    def test_no_image_at_all_is_refused_in_every_process(self) -> None:
        none = torch.empty(0, 3, 4, 4, dtype=torch.uint8), torch.empty(0, dtype=torch.long)
        data = ByteData(none, none, (4, 4), HALF, LIGHT, CPU, class_names=["a", "b"])
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        for rank in range(2):
            with pytest.raises(InputError, match="there is no image to validate on"):
                evaluate(model, data, 5, rank=rank, world=2)
