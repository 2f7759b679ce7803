"""Images named by a table, and data sets of the hub."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from test_files import draw, names, opened


class TestTables:
    """CSV files of path, label and split."""

    @pytest.fixture
    def table(self, photos: Path) -> Path:
        rows = [f"train/{name}/{i}.png,{name}" for i in range(12) for name in ("dog", "cat")]
        (photos / "photos.csv").write_text("\n".join(["path,label", *rows, ""]))
        return photos / "photos.csv"

    def test_a_table_with_a_share_for_validation(self, table: Path) -> None:
        with pytest.raises(ValueError, match=r"photos\.csv has no validation images, .*pass --val-split 0\.1"):
            opened(table)
        data = opened(table, val_split=0.25)
        assert (data.train_size, data.val_size, data.class_names) == (18, 6, ["cat", "dog"])
        assert sorted(names(data)[0] + names(data)[1])[0] == "train/cat/0.png"
        assert len(list(data.train(0, 0, 6, 0, 1))) == 3

    def test_a_table_with_a_split(self, table: Path) -> None:
        lines = table.read_text().splitlines()
        lines[:] = ["\ufeffPath, Label, Split", *(f"{line},train" for line in lines[1:])]
        table.write_text("\r\n".join([*lines, "val/dog/0.png,dog,val", "", "val/cat/1.png,cat,Val", "x.png,cat,test"]))
        data = opened(table)
        assert (data.train_size, data.val_size) == (24, 2) and data._val.dataset.labels == [1, 0]
        assert names(data)[0][:2] == ["train/dog/0.png", "train/cat/0.png"]

    def test_numbers_are_labels_too_and_no_header_is_needed(self, table: Path) -> None:
        table.write_text("train/cat/0.png,2\ntrain/cat/1.png,10\ntrain/cat/2.png,2\ntrain/cat/3.png,10\n")
        data = opened(table, val_split=0.5)
        assert data.class_names == ["2", "10"] and sorted(data._train.dataset.labels) == [0, 1]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "must list training images, one per line as path,label; found none"),
            ("path,label\n", "must list training images, one per line as path,label; found none"),
            ("train/cat/0.png\n", r"line 1 of .* must be path,label or path,label,split; found \['train/cat/0\.png'\]"),
            ("path,label\ntrain/cat/0.png,\n", "line 2 of .* must be path,label or path,label,split"),
            ("train/cat/0.png,cat,trian\n", "line 1 of .*: the split must be train or val; found 'trian'"),
            (
                "a.png,x\nb.png,y\nc.png,y\nd.png,x\n",
                "4 files of .* are missing: a.png, b.png, c.png and 1 more; paths",
            ),
            ("train/cat/0.png,cat\n", r"must have at least two classes; found \['cat'\]"),
            (
                "train/cat/0.png,cat,train\ntrain/dog/0.png,dog,train\nval/cat/0.png,fox,val\n",
                r"has validation classes that are not in the training part: \['fox'\]",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, table: Path, text: str, message: str) -> None:
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            opened(table)

    def test_what_is_no_table_is_refused(self, table: Path, tmp_path: Path) -> None:
        table.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=r"photos\.csv is not a CSV file in UTF-8"):
            opened(table)
        with pytest.raises(ValueError, match=r"'.*none\.csv' cannot be read: .*No such file"):
            opened(tmp_path / "none.csv")


class TestHub:
    """Data sets of the Hugging Face hub, of which a small stand-in has the columns img and fine_label."""

    @pytest.fixture(autouse=True)
    def texts(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
        """Filled, labels are texts and there is a validation split."""
        texts: list[bool] = []
        draw(tmp_path / "0.png")
        pixels = (tmp_path / "0.png").read_bytes()

        class Rows:
            column_names = ("img", "fine_label")
            features = {"img": None, "fine_label": types.SimpleNamespace(names=["cat", "dog"])}  # noqa: RUF012

            def __init__(self, split: str = "train", **_: Any) -> None:
                if split != "train" and not texts:
                    raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")
                features = dict.fromkeys(self.features) if texts else self.features
                self.info = types.SimpleNamespace(features=features, splits={})
                self.column_names = list(Rows.column_names)
                self.rows = [{"img": {"bytes": pixels, "path": None}, "fine_label": i % 2} for i in range(8)]
                for row in self.rows if texts else ():
                    row["fine_label"] = ("cat", "ant")[row["fine_label"]]

            def cast_column(self, name: str, _: Any) -> "Rows":
                if name not in self.column_names:
                    raise ValueError(f"The columns must be identical as those in the dataset; {name}")
                return self

            def __len__(self) -> int:
                return len(self.rows)

            def __getitem__(self, index: int | str) -> Any:
                return [row[index] for row in self.rows] if isinstance(index, str) else self.rows[index]

        module = types.ModuleType("datasets")
        splits = {name: types.SimpleNamespace(num_examples=8) for name in ("train", "validation")}
        info = types.SimpleNamespace(features=Rows.features, splits=splits)

        class Builder:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.info = info

            def as_streaming_dataset(self, split: str) -> Rows:
                return Rows()

        class Picture:
            def __init__(self, decode: bool = True) -> None: ...

            def decode_example(self, value: dict[str, Any]) -> Image.Image:
                return Image.open(tmp_path / "0.png")

        for name, value in (
            ("load_dataset", lambda name, split, cache_dir: Rows(split)),
            ("load_dataset_builder", Builder),
            ("Image", Picture),
        ):
            monkeypatch.setattr(module, name, value, raising=False)
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setattr("hiap.data.sources.find_spec", lambda name: True)
        monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
        return texts

    @pytest.mark.parametrize("share", [None, 0.5])
    def test_labels_may_be_texts(self, texts: list[bool], share: float | None) -> None:
        texts.append(True)
        data = opened("hfds/mine", input_key="img", target_key="fine_label", val_split=share)
        assert (data.classes, data.class_names) == (2, ["ant", "cat"])
        assert sorted(torch.cat([y for _, y in data.val(4)]).tolist()) == [0] * (data.val_size // 2) + [1] * (
            data.val_size // 2
        )

    def test_columns_of_other_names_are_read(self) -> None:
        data = opened("hfds/mine", input_key="img", target_key="fine_label", val_split=0.25)
        assert (data.train_size, data.val_size, data.class_names) == (6, 2, ["cat", "dog"])
        assert sorted(torch.cat([y for _, y in data.val(2)]).tolist()) == [0, 1]
        stream = opened("hfids/mine", input_key="img", target_key="fine_label")
        assert (stream.train_size, stream.class_names) == (8, ["cat", "dog"])
        sample = {"img": {"bytes": b"", "path": "a.png"}, "fine_label": 1}
        assert stream._train.read(sample)[1] == 1 and stream._train.name(sample) == "a.png"

    @pytest.mark.parametrize("kind", ["hfds", "hfids"])
    def test_a_wrong_column_is_told_with_those_there_are(self, kind: str) -> None:
        with pytest.raises(ValueError) as caught:
            opened(f"{kind}/mine", val_split=0.25 if kind == "hfds" else None)
        told = f"{kind}/mine has no column 'image': pass --input-key NAME, one of img, fine_label"
        assert str(caught.value) == told
        with pytest.raises(ValueError, match=r"has no column 'label': pass --target-key NAME, one of img, fine_label"):
            opened(f"{kind}/mine", input_key="img")

    def test_a_set_without_a_validation_split_says_what_to_do(self) -> None:
        with pytest.raises(ValueError, match=r"Unknown split 'validation'.*pass --val-split 0\.1"):
            opened("hfds/mine", input_key="img", target_key="fine_label")

    def test_columns_of_a_folder_are_refused(self, photos: Path) -> None:
        with pytest.raises(ValueError, match=r"--input-key and --target-key are columns of hfds/\.\.\. and hfids"):
            opened(photos, input_key="img")


def test_every_name_of_validation_counts_in_a_table(photos: Path) -> None:
    images = sorted(photos.rglob("*.png"))
    rows = [f"{path},{path.parent.name},train" for path in images[:-2]]
    rows += [f"{images[-2]},cat,val", f"{images[-1]},cat,validation"]
    (photos / "table.csv").write_text("\n".join(rows))
    assert opened(photos / "table.csv").val_size == 2
