"""Models on the Hugging Face hub, against a small stand-in for its API on this machine."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from torch import nn

import hiap
from conftest import make
from hiap.cli.main import main
from hiap.export.card import model_card

REVISION = "0" * 39 + "1"


class Hub:
    """What the stand-in holds: files by model and name, and who may write."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *words: Any) -> None:
        """Nothing is logged."""

    def answer(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b'{"error": "no"}', X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := re.match(r"/api/models/([\w-]+/[\w-]+)(/revision/(\w+))?(/tree/\w+)?", self.path):
            if found[1] not in self.hub.files:
                return self.refuse(404, "RepoNotFound")
            if found[3] not in (None, "main", REVISION):
                return self.refuse(404, "RevisionNotFound")
            names = self.hub.files[found[1]]
            if found[4]:
                listed = [
                    {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                    for name, text in names.items()
                ]
                return self.answer(200, json.dumps(listed).encode())
            about = {"id": found[1], "sha": REVISION, "siblings": [{"rfilename": name} for name in names]}
            about["private"] = self.hub.private.get(found[1], False)
            return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        if found := re.match(r"/([\w-]+/[\w-]+)/resolve/\w+/(.+)", self.path):
            text = self.hub.files.get(found[1], {}).get(found[2])
            if text is None:
                return self.refuse(404, "EntryNotFound")
            digest = hashlib.sha1(text).hexdigest()
            return self.answer(200, text, ETag=f'"{digest}"', X_Repo_Commit=REVISION)
        return self.refuse(404, "RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self.answer(403, b'{"error": "this token may only read"}')
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            about = {"url": f"http://{self.headers['Host']}/{name}", "name": name}
            if name in self.hub.files:
                return self.answer(409, json.dumps({**about, "error": "You already created it"}).encode())
            self.hub.files[name] = {}
            self.hub.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
            return self.answer(200, json.dumps(about).encode())
        if self.path.endswith("/validate-yaml"):
            return self.answer(200, b'{"errors": [], "warnings": []}')
        if "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self.answer(200, json.dumps({"files": files}).encode())
        if found := re.match(r"/api/models/([\w-]+/[\w-]+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.hub.messages.append(line["value"]["summary"])
                else:
                    self.hub.files[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            done = {"commitUrl": f"http://{self.headers['Host']}/{found[1]}/commit/{REVISION}", "commitOid": REVISION}
            return self.answer(200, json.dumps(done).encode())
        return self.answer(404)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    held = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": held}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield held
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def compact() -> nn.Module:
    model = make("augreg").float()
    counts = {"heads": [1, None, 2], "neurons": [40, 0, 96]}
    return hiap.extract(model, hiap.Topology.from_counts(model, **counts), 1)


@torch.no_grad()
def test_a_model_comes_back_from_the_hub_as_it_was(
    hub: Hub, compact: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    hiap.save(compact, "small")
    assert main(["push", "small", "me/small-vit", "--private", "--message", "first"]) == 0
    assert "load it with hiap.load('hf://me/small-vit')" in capsys.readouterr().out
    assert hub.files["me/small-vit"].keys() == {"README.md", "config.json", "model.safetensors"}
    assert hub.private == {"me/small-vit": True} and hub.messages == ["first"]
    images = torch.randn(2, 3, 32, 32)
    for name in ("hf://me/small-vit", f"hf://me/small-vit@{REVISION}"):
        assert torch.equal(hiap.load(name)(images), compact(images))
    assert main(["info", "hf://me/small-vit"]) == 0
    assert "    1      -       0          0        0" in capsys.readouterr().out
    assert main(["push", "small", "me/small-vit"]) == 1
    assert "me/small-vit is on the hub already: name another, or pass --overwrite" in capsys.readouterr().err
    assert main(["push", "small", "me/small-vit", "--overwrite"]) == 0 and hub.messages[1:] == ["Add small-vit"]


def test_an_update_hides_no_public_model_and_an_upload_that_failed_is_tried_again(
    hub: Hub, compact: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    hiap.save(compact, "small")
    assert main(["push", "small", "me/open"]) == 0
    written = dict(hub.files["me/open"])
    hub.files["me/open"]["config.json"] = b"older"
    assert main(["push", "small", "me/open", "--private", "--overwrite"]) == 1
    message = "me/open is public: make it private in its settings on the hub first, or omit --private"
    assert message in capsys.readouterr().err and hub.files["me/open"]["config.json"] == b"older"
    hub.private["me/open"] = True
    assert main(["push", "small", "me/open", "--private", "--overwrite"]) == 0 and hub.files["me/open"] == written
    hub.files |= {"me/empty": {".gitattributes": b""}, "me/notes": {"README.md": b"mine"}}
    assert main(["push", "small", "me/empty"]) == 0 and hub.files["me/empty"].keys() > written.keys()
    assert main(["push", "small", "me/notes"]) == 1 and hub.files["me/notes"] == {"README.md": b"mine"}
    assert "me/notes is on the hub already: name another, or pass --overwrite" in capsys.readouterr().err


def test_what_the_hub_refuses_is_told_in_one_line(
    hub: Hub, compact: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hiap.save(compact, "small")
    for name, message in (
        ("hf://me/none", "hf://me/none: there is no such model, or your token may not see it"),
        ("hf://none", "hf://none: a model on the hub is named USER/NAME; found 'none'"),
    ):
        with pytest.raises(hiap.CheckpointError, match=message):
            hiap.load(name)
    hub.files["me/other"] = {"config.json": b"{}"}
    with pytest.raises(hiap.CheckpointError, match="the model has no revision 'old'"):
        hiap.load("hf://me/other@old")
    with pytest.raises(hiap.CheckpointError, match="not a compact model's"):
        hiap.load("hf://me/other")

    def pushed(message: str, name: str = "me/new") -> bool:
        return main(["push", "small", name]) == 1 and message in capsys.readouterr().err

    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    assert pushed("your token may not write to me/new")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert pushed("the hub needs a token, and there is none here: run `hf auth login`")
    assert pushed("a model on the hub is named USER/NAME; found 'new'", "new")
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(hiap.CheckpointError, match="me/new could not be uploaded; can the hub be reached"):
        hiap.pruning.hub.upload(Path("small"), "me/new", {})
    with pytest.raises(hiap.CheckpointError, match="is not in the cache, and the hub cannot be reached"):
        hiap.load("hf://me/new")
    assert "me/new" not in hub.files


def test_the_guide_lists_the_commands_that_take_a_name_on_the_hub() -> None:
    root = Path(__file__).resolve().parents[1]
    guide = " ".join((root / "docs/hugging_face.md").read_text().split())
    (listed,) = re.findall(r"((?:`hiap \w+`[, and]*)+) take the same name in place of a folder", guide)
    takers = [
        file.name.removesuffix("_command.py")
        for file in sorted((root / "src/hiap/cli").glob("*_command.py"))
        if "compact_folder(options.folder)" in file.read_text()
    ]
    assert re.findall(r"hiap (\w+)", listed) == takers


def test_the_card_tells_what_was_measured_and_nothing_else(compact: nn.Module, tmp_path: Path) -> None:
    hiap.save(compact, tmp_path / "compact")
    alone = model_card(tmp_path / "compact", "me/small-vit")
    header = yaml.safe_load(alone.split("---")[1])
    assert header["license"] == "apache-2.0" and header["pipeline_tag"] == "image-classification"
    assert header["base_model"] == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert 'model = hiap.load("hf://me/small-vit")' in alone and "| 1 | - | 0 | 0 | 0 |" in alone
    assert "accuracy" not in alone and f"| {hiap.macs(compact):,} |" in alone
    report = {"top1": 71.234, "dense_top1": 73.5, "dense_params": 12345}
    (tmp_path / "report.json").write_text(json.dumps(report))
    settings = {"model": "vit_tiny_patch16_224", "data": "/home/me/photos", "target": "50%", "epochs": 15, "seed": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    whole = model_card(tmp_path / "compact", "me/small-vit", "mit")
    assert "| top-1 accuracy | 73.50 % | 71.23 % |" in whole and "| 12,345 |" in whole
    assert "`target 50%`, `epochs 15`" in whole and "`photos`" in whole and "/home/me" not in whole
    assert yaml.safe_load(whole.split("---")[1])["license"] == "mit"
    assert "- licence: `apache-2.0`, that of the weights it was made from." in alone
    assert "- licence: `mit`. Check that the weights it was made from and your data allow it" in whole


@pytest.mark.parametrize("model", ["/home/me/runs/half", "runs/half", "hf:photos/vit", "hf:/home/me/vit"])
def test_the_card_of_a_run_from_a_folder_names_no_path_and_compares_with_what_was_there(
    compact: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos/vit").mkdir(parents=True)
    hiap.save(compact, "compact")
    report = {"top1": 71.234, "dense_top1": 73.5, "dense_params": 12345, "dense_macs": 654321}
    Path("report.json").write_text(json.dumps(report))
    Path("config.yaml").write_text(yaml.safe_dump({"model": model}))
    card, dense = model_card(Path("compact"), "me/small-vit"), json.loads(Path("compact/config.json").read_text())
    share = dense["macs"] / dense["dense_macs"]
    assert f"`vit_tiny_patch16_224`, pruned by HiAP to {share:.1%} of its MACs" in card
    assert model not in card and "half" not in card
    assert "| | before this run, pruned already | compact |" in card and f"{dense['dense_macs']:,}" not in card
    assert f"| MACs of one image | 654,321 | {dense['macs']:,} |" in card and "| parameters | 12,345 |" in card
    Path("config.yaml").write_text(yaml.safe_dump({"model": "hf:google/vit-base-patch16-224"}))
    Path("report.json").write_text(json.dumps(report | {"dense_macs": dense["dense_macs"]}))
    card = model_card(Path("compact"), "me/small-vit")
    assert "`hf:google/vit-base-patch16-224`, pruned" in card and "| | dense | compact |" in card
