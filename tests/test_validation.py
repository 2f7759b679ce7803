"""Validation images are shared among processes."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hiap
from conftest import write_shards
from hiap.data.interface import val_part
from hiap.data.sources import ByteData
from hiap.errors import InputError
from hiap.training.evaluate import evaluate
from test_data import CPU, HALF, LIGHT, labels, opened, same


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
