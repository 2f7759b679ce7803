"""A comparison of several sizes from one run."""

import json
import re
import sys
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

import compare
from conftest import grey_photos


@pytest.mark.slow
def test_several_sizes_leave_a_record_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grey_photos(tmp_path / "data", 16)
    save_file(timm.create_model("test_vit", img_size=32, num_classes=3).state_dict(), tmp_path / "dense.safetensors")
    own = ["--data", tmp_path / "data", "--weights", tmp_path / "dense.safetensors", "--model", "test_vit"]
    own += ["--img-size", 32, "--records", tmp_path / "records.jsonl", "--target", "70%,50%,40%", "--epochs", 4]
    for pair in ("precision=fp32", "data_device=cpu", "workers=0", "batch_size=16"):
        own += ["--set", pair]

    def called(*more: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["compare.py", "run", *map(str, [*own, *more])])
        compare.main()
        return [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]

    monkeypatch.setattr(compare, "_DATA", {})
    several = "several targets are the sizes of one run: `run` them with --methods hiap, one --rates and no --like"
    for wrong in (["--methods", "hiap,taylor", "--rates", "1e-4"], ["--methods", "hiap"]):
        with pytest.raises(SystemExit, match=re.escape(several)):
            called(*wrong)
    records = called("--methods", "hiap", "--rates", "1e-4", "--seeds", "0")
    usual = "batch_size=16 data_device=cpu precision=fp32 workers=0"
    assert [(r["target"], r["epochs"], r["set"].removeprefix(usual)) for r in records] == [
        ("70%", 1, ""),
        ("50%", 2, " after=70%:1"),
        ("40%", 4, " after=70%:1,50%:1"),
    ]
    assert all(r["macs"] <= float(r["target"][:-1]) / 100 * r["dense_macs"] and r["final"] is True for r in records)
    assert len({r["dense_macs"] for r in records}) == len({r["dense_top1"] for r in records}) == 1
    capsys.readouterr()
    assert called("--methods", "hiap", "--rates", "1e-4", "--seeds", "0") == records
    assert capsys.readouterr().out == "hiap 70%,50%,40% lr 0.0001 seed 0: recorded already\n"
    monkeypatch.setattr(sys, "argv", ["compare.py", "table", "--records", str(tmp_path / "records.jsonl")])
    compare.main()
    assert "after=70%:1,50%:1" in capsys.readouterr().out
