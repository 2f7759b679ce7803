"""Outsiders get the data and the dense models of the comparisons."""

import hashlib
import io
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import dense_starts
import tiny_imagenet
from prune_tiny_imagenet import configuration, tenths
from tiny_imagenet import read_tiles

WNIDS = ("n02000000", "n01000000", "n03000000")  # the archive does not sort them


def archive(path: Path, images: int = 20, leave_out: str | None = None) -> Path:
    """A Tiny-ImageNet archive in the public layout: image i of class c, sorted, has the grey level 50 c + i (+ 100)."""

    def jpeg(level: int, mode: str) -> bytes:
        file = io.BytesIO()
        Image.new(mode, (64, 64), level if mode == "L" else (level,) * 3).save(file, "JPEG", quality=95)
        return file.getvalue()

    order = sorted(WNIDS)
    with zipfile.ZipFile(path, "w") as out:

        def write(name: str, content: str | bytes) -> None:
            if name != leave_out:
                out.writestr(f"tiny-imagenet-200/{name}", content)

        write("wnids.txt", "".join(f"{wnid}\n" for wnid in WNIDS))
        write("words.txt", "n01000000\tgoldfish, Carassius auratus\nn02000000\tbull frog\nn99000000\tentity\n")
        for wnid in WNIDS:
            write(f"train/{wnid}/{wnid}_boxes.txt", "")
            for i in reversed(range(images)):
                level = 50 * order.index(wnid) + i
                write(f"train/{wnid}/images/{wnid}_{i}.JPEG", jpeg(level, "L" if i == 3 else "RGB"))
        lines = []
        for i in range(6):  # two of each class, in turn
            wnid = WNIDS[i % 3]
            write(f"val/images/val_{i}.JPEG", jpeg(100 + 50 * order.index(wnid) + i, "RGB"))
            lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n")
        write("val/val_annotations.txt", "".join(reversed(lines)))
        write("test/images/test_0.JPEG", jpeg(0, "RGB"))
    return path


def test_the_public_archive_becomes_ten_tenths_and_a_validation_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes are in the order of their ids, images in that of their numbers: 2 comes before 10."""
    zipped = archive(tmp_path / "tiny-imagenet-200.zip")
    monkeypatch.setattr(sys, "argv", f"tiny_imagenet.py {zipped} --out {tmp_path / 'tiny'}".split())
    tiny_imagenet.main()
    for k in range(10):
        images, labels = read_tiles(tmp_path / f"tiny/train_{k}.jpg", range(2))
        assert labels.tolist() == [0, 0, 1, 1, 2, 2] and images.shape == (6, 3, 64, 64)
        levels = torch.tensor([50 * label + 2 * k + i for label in range(3) for i in range(2)])
        torch.testing.assert_close(images.float().mean((1, 2, 3)), levels.float(), atol=1.5, rtol=0)
    images, labels = read_tiles(tmp_path / "tiny/val.jpg", range(2))
    levels = [101, 104, 150, 153, 202, 205]  # val_1 and val_4 are of the class that sorts first
    torch.testing.assert_close(images.float().mean((1, 2, 3)), torch.tensor(levels).float(), atol=1.5, rtol=0)
    names = [("n01000000", "goldfish, Carassius auratus"), ("n02000000", "bull frog"), ("n03000000", "n03000000")]
    assert json.loads((tmp_path / "tiny/classes.json").read_text()) == [
        {"wnid": wnid, "name": name} for wnid, name in names
    ]
    with Image.open(tmp_path / "tiny/val.jpg") as sheet:
        assert sheet.size == (2 * 64, 3 * 64) and sheet.info["progressive"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"leave_out": "wnids.txt"}, "must have one wnids.txt, as tiny-imagenet-200.zip has; found 0"),
        ({"leave_out": "val/val_annotations.txt"}, "has no val/val_annotations.txt, as tiny-imagenet-200.zip has"),
        (
            {"leave_out": "train/n01000000/images/n01000000_4.JPEG"},
            "every class must have the same number of training images; found 19 to 20",
        ),
        ({"images": 15}, "the training images of a class must divide into ten equal parts; found 15"),
    ],
)
def test_another_archive_is_refused(given: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = archive(tmp_path / "a.zip", **given)
    monkeypatch.setattr(sys, "argv", f"tiny_imagenet.py {zipped} --out {tmp_path / 'tiny'}".split())
    with pytest.raises(SystemExit, match=re.escape(message)):
        tiny_imagenet.main()
    assert not (tmp_path / "tiny").exists()


def test_a_broken_download_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK and no more")
    with pytest.raises(ValueError, match=re.escape("a.zip is no zip archive: is the download complete?")):
        tiny_imagenet.Archive(tmp_path / "a.zip")


def test_a_dense_start_is_made_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the archive to weights that a comparison loads, on a model and images that take no time."""
    tiny_imagenet.convert(archive(tmp_path / "a.zip", images=10), tmp_path / "tiny")
    half = (0.5, 0.5, 0.5)
    monkeypatch.setitem(dense_starts.STARTS, "vit_tiny", ("test_vit", 32, (half, half)))
    out = tmp_path / "starts/dense.safetensors"
    command = f"dense_starts.py vit_tiny --data {tmp_path / 'tiny'} --out {out} --no-pretrained --limit 1 --batch 10"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--epochs", "4", "--lr", "3e-3", "--precision", "fp32"])
    dense_starts.main()
    record, weights = json.loads(out.with_suffix(".json").read_text()), load_file(out)
    assert record["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (record["model"], record["img_size"], record["epochs"]) == ("test_vit", 32, 4)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    model = timm.create_model("test_vit", img_size=32, num_classes=3)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    assert not any(torch.equal(tensor, fresh[name]) for name, tensor in weights.items() if name.endswith("fc1.weight"))
    data = tenths(tmp_path / "tiny", configuration("vit_tiny", None, {}), True, torch.device("cpu"), 1)
    right = sum((model.eval()(x).argmax(1) == y).sum().item() for x, y in data.val(3))
    assert record["top1"] == pytest.approx(100 * right / 3) and (data.train_size, data.val_size) == (30, 3)
