"""The comparison of methods: every arm ends at the budget, and records go on where they stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import hiap
from hiap.config import read_config
from hiap.data import Augmentation, ByteData

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
from arms import LEARNED, PEERS, Peer, counted_macs, from_scratch  # noqa: E402

SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
HALF = ((0.5,) * 3, (0.5,) * 3)
UNIT = 8 * 2 * 17 * 32  # eight neurons


@pytest.fixture
def start(tmp_path: Path):
    torch.manual_seed(7)
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    given = {"weights": str(tmp_path / "dense.safetensors"), "target": "60%", "epochs": 2, "batch_size": 32}
    given |= {"model": "vit_tiny_patch16_224", "model_args": SHAPE, "lr": 1e-3, "freeze_at": 0.5, "eval_every": 9}
    images = torch.randint(0, 255, (96, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(96) % 5
    half = (images[:32], labels[:32])
    data = ByteData((images, labels), half, (16, 16), HALF, Augmentation(), torch.device("cpu"), 0, list("abcde"))
    return given, data


@pytest.mark.parametrize("arm", PEERS)
def test_peers_meet_the_budget(arm: str, start, tmp_path: Path) -> None:
    if "torch_pruning" in arm:
        pytest.importorskip("torch_pruning")
    given, data = start
    peer = Peer(read_config(None, given), tmp_path / "run", data, PEERS[arm])
    network = peer.train()
    target = 0.6 * peer.dense_macs
    assert target - max(UNIT, 0.01 * target, ("torch" in arm) * 0.05 * target) < counted_macs(network, peer) <= target
    if "torch" not in arm:
        assert hiap.macs(network) == counted_macs(network, peer)
    assert 0 <= peer.record["top1"] <= 100 and peer.record["course"]["recover"]["epochs"] == 2


@pytest.mark.parametrize("arm", LEARNED)
def test_penalised_gates_are_cut_to_the_budget(arm: str, start, tmp_path: Path) -> None:
    given, data = start
    given |= {"gate_mode": "gradient", "granularities": ["head", "block", "value_dim", "neuron"], "gate_lr": 0.1}
    run = LEARNED[arm](read_config(None, given), tmp_path / "run", data=data)
    result = run.go()
    target = 0.6 * run.dense_macs
    assert target - max(UNIT, 0.01 * target) < hiap.macs(result.model) <= target
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    names = {"l1": {"l1"}, "paper": {"macro", "micro", "feasible_head", "feasible_dim", "feasible_ffn"}}[arm]
    assert names <= lines[0].keys() and not names & lines[-1].keys()


def test_a_topology_from_scratch_has_other_weights(start, tmp_path: Path) -> None:
    given, data = start
    peer = Peer(read_config(None, given), tmp_path / "run", data, lambda run: from_scratch(run, topology))
    topology = hiap.Topology.from_counts(peer.dense, heads=[1, 2, 3, 4], neurons=[8, 16, 24, 32])
    network = peer.make(peer)
    assert hiap.macs(network) == hiap.macs(hiap.extract(peer.dense, topology))
    assert not torch.equal(network.patch_embed.proj.weight, peer.dense.patch_embed.proj.weight)


def test_tables_of_records(tmp_path: Path) -> None:
    keys = {"start": "vit", "target": "50%", "epochs": 15, "like": None, "seconds": 60.0, "ms": 1.0, "device": "gpu"}
    rows = [("hiap", 0, 72.0), ("hiap", 1, 73.0), ("taylor", 0, 71.0)]
    records = [
        {**keys, "arm": arm, "seed": seed, "top1": top1, "lr": 5e-4, "final": True, "macs": 499, "dense_macs": 1000}
        for arm, seed, top1 in rows
    ]
    file = tmp_path / "records.jsonl"
    file.write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, records[0] | {"final": False, "top1": 99}])
    )
    command = [sys.executable, str(FOLDER / "compare.py"), "table", "--records", str(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "| hiap | 72.50 | 1.00 | 2 | 49.90% | 60 s | 1.000 ms | 0.0005 |" in text
    assert text.index("| hiap") < text.index("| taylor | 71.00 | 0.00 | 1 |")
