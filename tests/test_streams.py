"""Streams of tar shards."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import write_shards
from test_data import labels, opened, same


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
        with pytest.raises(ValueError, match=r"a timm data set that can be read \(torch/\.\.\., .*wds/\.\.\.\)"):
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
        with pytest.raises(ValueError, match=r"does not say how many images its split train has; it lists \[\]"):
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
