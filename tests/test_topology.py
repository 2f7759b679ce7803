import json
import tracemalloc

import numpy as np
import pytest
import torch

import hiap
from conftest import make
from test_gates import ALL, scatter_logits

FULL8 = tuple(range(8))


def test_harden_keeps_what_has_a_positive_logit() -> None:
    model = hiap.attach(make(), ALL)
    for gate in hiap.gates(model):
        gate.logit.data.fill_(1.0)
    one = model.blocks[1]
    one.attn.proj.gates["head"].logit.data[0] = -1.0
    one.attn.proj.gates["value_dim"].logit.data.view(3, 8)[1, 2:] = -1.0
    one.attn.proj.gates["value_dim"].logit.data.view(3, 8)[2] = -1.0  # open, but empty: closed
    one.attn.qkv.gates["qk_dim"].logit.data.view(3, 8)[1, [0, 7]] = 0.0  # zero is not open
    one.mlp.fc2.gates["neuron"].logit.data[5:] = -1.0
    model.blocks[0].mlp.fc2.gates["neuron"].logit.data[:] = -1.0
    model.blocks[2].attn.proj.gates["attention"].logit.data[:] = -1.0
    model.blocks[2].mlp.fc2.gates["ffn"].logit.data[:] = -1.0
    blocks = hiap.harden(model).blocks
    assert blocks[0].heads == (0, 1, 2) and blocks[0].value_dims == (FULL8,) * 3 and blocks[0].neurons == ()
    assert blocks[1] == hiap.BlockTopology((1,), ((0, 1),), ((1, 2, 3, 4, 5, 6),), (0, 1, 2, 3, 4))
    assert blocks[2] == hiap.BlockTopology(None, (), (), None)


def test_harden_needs_gates() -> None:
    with pytest.raises(ValueError, match="no gates; attach them"):
        hiap.harden(make())


def test_set_topology_is_the_inverse_of_harden() -> None:
    model = hiap.attach(make(), ALL)
    scatter_logits(model)
    topology = hiap.harden(model)
    other = hiap.attach(make(), ALL)
    hiap.set_topology(other, topology)
    assert hiap.harden(other) == topology
    few = hiap.attach(make(), ("head",))
    before = [gate.logit.clone() for gate in hiap.gates(few)]
    with pytest.raises(hiap.TopologyError, match="closes units that have no"):
        hiap.set_topology(few, topology)
    assert all(torch.equal(a, gate.logit) for a, gate in zip(before, hiap.gates(few), strict=True))


def test_heads_without_gates_are_closed_by_their_value_dims() -> None:
    model = hiap.attach(make(), ("value_dim",))
    with torch.no_grad():
        next(iter(hiap.gates(model))).logit[:8] = -5.0  # all of the first head
    topology = hiap.harden(model)
    assert topology.blocks[0].heads == (1, 2)
    hiap.set_topology(model, topology)
    assert hiap.harden(model) == topology


def test_from_counts_keeps_the_first_units_unless_indices_are_given() -> None:
    model = make()
    topology = hiap.Topology.from_counts(
        model,
        heads=[2, [0, 2], None],
        neurons=[3, 0, None],
        value_dims=[4, [[1, 5], 3], 8],
        qk_dims=[[1, 2], 8, 8],
    )
    assert topology.blocks == (
        hiap.BlockTopology((0, 1), ((0, 1, 2, 3),) * 2, ((0,), (0, 1)), (0, 1, 2)),
        hiap.BlockTopology((0, 2), ((1, 5), (0, 1, 2)), (FULL8, FULL8), ()),
        hiap.BlockTopology(None, (), (), None),
    )
    whole = hiap.Topology.from_counts(model)
    assert whole == hiap.harden(hiap.attach(make()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": [1, 2]}, "heads has 2 entries; the model has 3 blocks"),
        ({"heads": [1, 4, 1]}, "block 1: heads: found 4, expected 0 to 3"),
        ({"heads": [1, -1, 1]}, "block 1: heads: found -1"),
        ({"neurons": [1, [1, 1], 1]}, r"block 1: neurons: indices must be distinct and in 0 to 95; found \[1, 1\]"),
        ({"neurons": [1, [96], 1]}, r"found \[96\]"),
        ({"neurons": ["all", 1, 1]}, "block 0: neurons: found 'all', expected a count or a list of indices"),
        ({"neurons": [True, 1, 1]}, "found True"),
        ({"value_dims": [[1, 2], 8, 8]}, "block 0: value_dims has 2 entries for 3 kept heads"),
        ({"qk_dims": [9, 8, 8]}, "block 0: qk_dims: found 9, expected 0 to 8"),
        ({"value_dims": [None, 8, 8]}, "block 0: value_dims: found None, expected a count or indices"),
        ({"qk_dims": [[8, None, 8], 8, 8]}, "block 0: qk_dims: found None"),
    ],
)
def test_wrong_counts_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(hiap.TopologyError, match=message):
        hiap.Topology.from_counts(make(), **arguments)


def test_save_and_load(tmp_path) -> None:
    model = hiap.attach(make(), ALL)
    scatter_logits(model)
    topology = hiap.harden(model)
    path = tmp_path / "topology.json"
    topology.save(path)
    assert hiap.Topology.load(path) == topology
    assert list(tmp_path.iterdir()) == [path]
    whole = hiap.Topology.from_counts(model, heads=[2, 3, None], neurons=[7, 0, None])
    whole.save(path)
    assert hiap.Topology.load(path) == whole
    assert json.loads(path.read_text())["blocks"][0] == {"heads": 2, "value_dims": 8, "qk_dims": 8, "neurons": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "not a topology"),
        ("[" * 100_000, "is not valid JSON"),
        (
            '{"format": 1, "dense": [{"heads": "x", "qk_dim": 8, "value_dim": 8, "neurons": 9}], "blocks": [{}]}',
            "numbers",
        ),
        ('{"format": 9, "dense": [], "blocks": []}', "topology format 9 is unknown; this version reads 1"),
        ('{"format": 1, "dense": [], "blocks": [{}]}', "1 blocks and 0 dense widths"),
        ('{"format": 1, "dense": [{"heads": 1}], "blocks": [{}]}', "wrong shape"),
        (
            '{"format": 1, "dense": [{"heads": 3, "qk_dim": 8, "value_dim": 8, "neurons": 9}], '
            '"blocks": [{"head": 1}]}',
            "block 0: unknown entry 'head'",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text)
    with pytest.raises(hiap.TopologyError, match=message):
        hiap.Topology.load(path)


def test_a_topology_of_another_model_is_refused() -> None:
    topology = hiap.Topology.from_counts(make(num_heads=6))
    with pytest.raises(hiap.TopologyError, match="block 0: the topology is for Widths"):
        hiap.extract(make(), topology)
    with pytest.raises(hiap.TopologyError, match="the topology has 3 blocks, the model 2"):
        hiap.extract(make(depth=2), hiap.Topology.from_counts(make()))


def test_dims_belong_to_the_heads_they_were_given_for() -> None:
    topology = hiap.Topology.from_counts(make(), heads=[[2, 0], 3, 3], value_dims=[[3, [1, 5]], 8, 8])
    assert topology.blocks[0].heads == (0, 2)
    assert topology.blocks[0].value_dims == ((1, 5), (0, 1, 2))


def test_integers_of_other_libraries_are_read() -> None:
    counts = torch.tensor([1, 2, 3])
    same = hiap.Topology.from_counts(make(), heads=list(counts), neurons=list(counts.numpy()))
    assert same == hiap.Topology.from_counts(make(), heads=[1, 2, 3], neurons=[1, 2, 3])


def test_indices_of_other_libraries_are_read() -> None:
    listed = hiap.Topology.from_counts(make(), heads=[[2], [0, 2], 3], value_dims=[8, [[1, 5], [3]], 8])
    heads, dims = [torch.tensor([2]), np.array([2, 0]), torch.tensor(3)], [torch.tensor([3]), np.array([5, 1])]
    assert hiap.Topology.from_counts(make(), heads=heads, value_dims=[8, dims, 8]) == listed
    with pytest.raises(hiap.TopologyError, match=r"block 0: heads: found 2\.5"):
        hiap.Topology.from_counts(make(), heads=[torch.tensor(2.5), 3, 3])


def test_set_topology_needs_a_positive_logit() -> None:
    with pytest.raises(ValueError, match="logit must be positive; found -3"):
        hiap.set_topology(hiap.attach(make()), hiap.Topology.from_counts(make()), logit=-3.0)


def test_counts_no_model_has_are_refused_before_they_are_expanded() -> None:
    dense = {"heads": 3, "qk_dim": 8, "value_dim": 8, "neurons": 50_000_000}
    data = {"format": 1, "dense": [dense], "blocks": [{"neurons": 50_000_000}]}
    tracemalloc.start()
    try:
        with pytest.raises(hiap.TopologyError, match="have 50000051 units; at most 4194304 are read"):
            hiap.Topology.from_json(data)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
