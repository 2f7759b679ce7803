import itertools
import json
import math
import random
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hiap
from conftest import make
from hiap.budget.allocate import Allocation
from hiap.budget.branches import Floors
from hiap.budget.controller import BudgetError, Controller, Target
from hiap.budget.latency import LatencyCost, LatencyError, LatencyTable
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.pruning.attach import gates_by_block
from hiap.speed.clock import device_name
from hiap.training.config import ConfigError, read_config
from hiap.training.loop import prune
from hiap.training.run_folder import RunError
from test_budget import observed
from test_gates import ALL

CPU = torch.device("cpu")
MODEL = {"embed_dim": 32, "depth": 4, "num_heads": 4}  # 17 tokens, heads of 8, 128 neurons
SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1}
DENSE = make(**MODEL)
GRID = {"heads": [1, 2, 4], "qk_dim": [2, 8], "value_dim": [2, 4, 8], "neurons": [8, 64, 128]}


def synthetic(attention=None, ffn=None, **other: object) -> LatencyTable:
    """A table of the small model; by default a branch costs 1 to be there, and its products cost what they count."""
    attention = attention or (lambda h, q, v: 1.0 + 0.01 * h * (q + v))
    ffn = ffn or (lambda n: 1.0 + 0.01 * n)
    grid = {axis: other.get(axis, steps) for axis, steps in GRID.items()}
    cells = [[[attention(h, q, v) for v in grid["value_dim"]] for q in grid["qk_dim"]] for h in grid["heads"]]
    values = {
        "unit": "ms",
        "device": "a machine",
        "precision": "bf16",
        "batch": 256,
        "mode": "graph",
        "model": "small",
        "dim": 32,
        "tokens": 17,
        **grid,
        "attention": cells,
        "ffn": [ffn(n) for n in grid["neurons"]],
        "outside": 0.5,
        "dense": 16.0,
    }
    return LatencyTable(**{**values, **other})


def hard(cost: LatencyCost, *widths: int | None) -> float:
    return cost.block(sites(make(**MODEL))[0], Widths(*widths))


@pytest.mark.slow
def test_between_grid_points_the_cost_is_multilinear() -> None:
    cost = LatencyCost(make(**MODEL), synthetic())
    for h, q, v, n in itertools.product([1, 3, 4], [2, 5, 8], [2, 3, 7], [8, 40, 100]):
        assert hard(cost, h, q, v, n) == pytest.approx(2.0 + 0.01 * h * (q + v) + 0.01 * n)
    assert hard(cost, None, 0, 0, None) == hard(cost, 0, 0, 0, 0) == 0.0  # with a branch goes all of it
    assert hard(cost, 1, 1, 1, None) == hard(cost, 1, 2, 2, None)  # below the grid its edge counts
    assert hard(cost, None, 0, 0, 1) == hard(cost, None, 0, 0, 8)


def test_the_cost_of_counts_is_that_of_widths_and_differentiable() -> None:
    model = hiap.attach(make(**MODEL), ALL)
    cost = LatencyCost(model, synthetic())
    kept = {"heads": [1, 4, 3, 2], "value_dims": [2, 8, 6, 4], "qk_dims": [8, 4, 8, 2], "neurons": [8, 128, 77, 64]}
    topology = hiap.Topology.from_counts(make(**MODEL), **kept)
    counts = hiap.hard_counts(topology)
    widths = topology.widths()
    assert cost.total(counts).item() == pytest.approx(cost.of_widths(model, widths))
    assert (cost.macro(counts) + cost.micro(counts)).item() == pytest.approx(cost.of_widths(model, widths) - 0.5)

    def total(heads: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, neurons: torch.Tensor) -> torch.Tensor:
        return cost.total(hiap.Counts(heads, values, queries, neurons))

    inside = [torch.tensor(row, dtype=torch.float64) for row in ([1.5, 3.1], [7.2, 18.0], [8.1, 15.0], [33.0, 99.0])]
    assert torch.autograd.gradcheck(total, [row.requires_grad_() for row in inside])
    loss = cost.total(hiap.expected_counts(model))
    loss.backward()
    gradients = [gate.logit.grad for gate in hiap.gates(model)]
    assert all(g is not None and bool((g >= 0).all()) for g in gradients) and sum(g.sum() for g in gradients) > 0


def test_the_last_block_and_padded_neurons_cost_what_they_run_as() -> None:
    whole = synthetic()
    last = {"last_attention": (0.1 * torch.tensor(whole.attention)).tolist(), "last_ffn": [0.1, 0.2, 0.3]}
    model = hiap.attach(make(**MODEL), ALL)
    cost = LatencyCost(model, replace(whole, neuron_step=64, **last))
    widths = [Widths(2, 2, 2, 65), Widths(1, 8, 8, 8), Widths(4, 8, 8, 64), Widths(2, 2, 2, 65)]
    padded = [1.08 + 2.28, 1.16 + 1.64, 1.64 + 1.64, 0.108 + 0.3]
    assert cost.of_widths(model, widths) == pytest.approx(0.5 + sum(padded))
    counts = hiap.Counts(
        *(torch.tensor(row, dtype=torch.float64) for row in ([4.0] * 4, [32.0] * 4, [32.0] * 4, [128.0] * 4))
    )
    assert cost.total(counts).item() == pytest.approx(cost.of_widths(model, [Widths(4, 8, 8, 128)] * 4))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_width_costs_less_than_a_smaller_one(seed: int) -> None:
    chance = random.Random(seed)
    noisy = synthetic(lambda *_: chance.uniform(0.5, 2), lambda *_: chance.uniform(0.5, 2))
    cost = LatencyCost(make(**MODEL), noisy)
    most = (4, 8, 8, 128)
    small = [chance.randint(0 if i in (0, 3) else 1, n) for i, n in enumerate(most)]
    large = [chance.randint(a, n) for a, n in zip(small, most, strict=True)]
    if small[0]:
        assert hard(cost, *small) <= hard(cost, *large) + 1e-12


def test_tables_travel_as_json(tmp_path: Path) -> None:
    table = synthetic()
    table.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table
    cost = LatencyCost.load(tmp_path / "table.json", make(**MODEL), device="a machine", precision="bf16")
    assert cost.outside + cost.dense == pytest.approx(0.5 + 4 * (2 + 0.64 + 1.28))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "s"}, "unit must be one of ms, mJ; found 's'"),
        ({"precision": "int8"}, "precision must be one of .* found 'int8'"),
        ({"mode": "fast"}, "mode must be one of .* found 'fast'"),
        ({"device": ""}, "device must be named"),
        ({"heads": [2, 1, 4]}, r"heads must be rising widths from 1; found \[2, 1, 4\]"),
        ({"neurons": [8, 128]}, "ffn must be 2 numbers"),
        ({"qk_dim": [2, 4, 8]}, r"attention must be \[3, 3, 3\] numbers; found \[3, 2, 3\]"),
        ({"attention": [[[1.0], [1.0, 2.0]]]}, "rows of one length"),
        ({"outside": -1.0}, "positive and finite"),
        ({"outside": None}, "costs must be numbers"),
        ({"attention": None}, "costs must be numbers"),
        ({"heads": None}, "heads must be rising widths from 1; found None"),
        ({"heads": ["a"]}, "heads must be rising widths"),
        ({"heads": [1.5, 2, 4]}, "heads must be rising widths"),
        ({"tokens": "17"}, "tokens must be a whole number; found '17'"),
        ({"ffn": [1.0, float("nan"), 2.0]}, "ffn must be positive and finite, below 1e.12; found nan"),
        ({"dense": float("inf")}, "dense must be positive and finite, below 1e.12; found inf"),
        ({"dense": 10**400}, "dense must be positive and finite"),
        ({"batch": -1}, "batch must be at least 1 and at most 1000000000; found -1"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"dim": 10**30}, "dim must be at least 1 and at most 1000000000; found 1000"),
        ({"batch": True}, "batch must be a whole number; found True"),
        ({"heads": [1, 2, 10**30]}, "heads must be rising widths"),
        ({"neurons": list(range(1, 5000))}, "neurons must be rising widths"),
        ({"precision": ["bf16"]}, r"precision must be one of .* found \['bf16'\]"),
        ({"mode": {}}, "mode must be one of .* found {}"),
        ({"device": 7}, "device must be text; found 7"),
        ({"model": None}, "model must be text; found None"),
        ({"torch_version": [2]}, r"torch_version must be text; found \[2\]"),
        ({"ffn": ["1", "2", "3"]}, "ffn: costs must be numbers, in rows of one length; found \\['1', '2', '3'\\]"),
        ({"ffn": [True, True, True]}, "ffn: costs must be numbers"),
        ({"outside": [1.0]}, r"outside must be one number; found \[1\]"),
        ({"attention": {"a": 1}}, "attention: costs must be numbers"),
        ({"attention": []}, r"attention must be \[3, 2, 3\] numbers; found \[0\]"),
        ({"extra": 1}, "'extra' is not a field of a table"),
        ({"kernels": "yes"}, "kernels must be true or false; found 'yes'"),
        ({"neuron_step": 0}, "neuron_step must be at least 1"),
        ({"last_ffn": [1.0, 2.0, 3.0]}, "last_attention and last_ffn must be given together"),
        (
            {"last_attention": 1.0, "last_ffn": [1.0, 2.0, 3.0]},
            r"last_attention must be \[3, 2, 3\] numbers; found \[\]",
        ),
    ],
)
def test_wrong_tables_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"format": 1, **asdict(synthetic()), **change}))
    with pytest.raises(LatencyError, match=message):
        LatencyTable.load(tmp_path / "t.json")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**400, 2**63]),
    st.floats(),
    st.text(max_size=5),
    st.recursive(st.integers(-1, 3), lambda inner: st.lists(inner, max_size=4), max_leaves=12),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_table_is_refused_or_works(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some fields, or numbers inside them, are replaced or gone; what is still accepted makes a cost."""
    content = {"format": 1, **asdict(synthetic())}
    for name in data.draw(st.lists(st.sampled_from(list(content)), min_size=1, max_size=2, unique=True)):
        place, key = content, name
        while isinstance(place[key], list) and place[key] and data.draw(st.booleans()):
            place, key = place[key], data.draw(st.integers(0, len(place[key]) - 1))
        if data.draw(st.integers(0, 4)):
            place[key] = data.draw(ODD)
        else:
            del place[key]
    file = tmp_path_factory.getbasetemp() / "mutated.json"
    file.write_text(json.dumps(content))
    try:
        table = LatencyTable.load(file)
    except LatencyError as error:
        assert "mutated.json" in str(error) and len(str(error)) < 1000
        return
    assert type(table.batch) is int and table.batch > 0
    with suppress(LatencyError):  # it may be one of another model
        assert 0 < LatencyCost(DENSE, table).dense < math.inf


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    deep, long = "[" * 10**5, '{"format": 1' + " " * 2**26 + "}"
    for content in ("", "[]", '{"format": 2}', '{"format": 1, "unit": "ms"}', deep, long, "9" * 5000, "\0"):
        file.write_text(content)
        with pytest.raises(LatencyError, match=r"t\.json"):
            LatencyTable.load(file)


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        ({}, {"device": "NVIDIA H200"}, "it is for device 'a machine'; needed is 'NVIDIA H200'"),
        ({}, {"precision": "fp32"}, "it is for precision 'bf16'; needed is 'fp32'"),
        ({"embed_dim": 64}, {}, "it is for width 32 and 17 tokens; the model has 64 and 17"),
        ({"img_size": 64}, {}, "the model has 32 and 65"),
        ({"mlp_ratio": 8}, {}, "its grid of neurons ends at 128; the model has 256"),
        ({"num_heads": 8}, {}, "its grid of heads ends at 4; the model has 8"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(model: dict, wanted: dict, message: str) -> None:
    with pytest.raises(LatencyError, match=message):
        LatencyCost(make(**{**MODEL, **model}), synthetic(), **wanted)


def test_a_unit_is_priced_by_what_it_saves() -> None:
    model = hiap.attach(make(**MODEL), ALL)
    movable = [set(kinds) for kinds in gates_by_block(model)]
    cost, floors = LatencyCost(model, synthetic()), Floors(neurons=8 / 128)  # where the grid begins
    assert Allocation(sites(model), movable, cost, floors, multiple=2).prices()[0] == pytest.approx(
        {
            "neuron": 0.01,
            "head": 0.01 * (8 + 8),
            "value_dim": 0.01,
            "qk_dim": 0.01,
            "attention": 1 + 0.01 * 4 * (8 + 8),
            "ffn": 1 + 1.28,
        }
    )


@pytest.mark.parametrize("target", ["1.2x", "1.5x", "2x", "3x", "40%", "9ms"])
@pytest.mark.parametrize("kinds", [ALL, ("head", "ffn", "value_dim", "neuron")])
def test_a_latency_target_is_met(target: str, kinds: tuple[str, ...]) -> None:
    for seed, table in enumerate((synthetic(), synthetic(lambda h, q, v: 0.7 + 0.3 * h))):
        model = hiap.attach(make(**MODEL), kinds)
        cost = LatencyCost(model, table)
        limit = Target.parse(target).absolute(cost.outside + cost.dense)
        try:
            controller = observed(Controller(model, cost, limit), seed)
        except BudgetError as error:
            assert "attention" not in kinds and "out of reach" in str(error)
            continue
        controller.project(limit, 20.0)
        compact = hiap.extract(model, controller.decide())
        reached = cost.of_widths(compact, [site.widths for site in sites(compact)])
        assert limit - max(0.01 * limit, 0.3) <= reached <= limit  # 0.3: a head, or eight neurons and a bit


@pytest.mark.slow
def test_a_run_with_a_latency_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ffn, attention = (lambda n: 1.0 + 0.01 * n), (lambda h, q, v: 1.0 + 0.01 * h * (q + v))
    table = synthetic(attention, ffn, dim=16, tokens=5, mode="eager", device="elsewhere")
    table.save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 1, "epochs": 2, "target": "1.6x", "cost": str(tmp_path / "t.json")}
    result = prune(read_config("digits", given), tmp_path / "run")
    record = result.record
    assert record["unit"] == "ms" and "measured" not in record  # the table is of another machine
    assert record["dense_predicted"] / 1.6 * 0.9 < record["predicted"] <= record["dense_predicted"] / 1.6
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["cost"] == pytest.approx(record["predicted"])
    assert "-> 1.6x" in capsys.readouterr().out
    own = replace(table, device=device_name(CPU), precision="fp32", batch=2)
    own.save(tmp_path / "t.json")
    again = prune(read_config("digits", given), tmp_path / "own")
    assert again.record["measured"] > 0


def test_targets_and_costs_that_do_not_go_together(tmp_path: Path) -> None:
    synthetic(dim=16, tokens=5).save(tmp_path / "t.json")
    table = str(tmp_path / "t.json")
    for options, message in (
        (
            {"target": "2x", "deploy": "bf16,fast"},
            r"deploy 'bf16,fast': 'fast' is not a runtime \(torch, onnx, openvino\), ",
        ),
        ({"target": "2x", "deploy": "8,9"}, "deploy '8,9' names two of one kind: 8 and 9"),
        ({"target": "50%", "deploy": "bf16"}, "deploy needs a target in time, such as 1.8ms or 2.0x"),
        ({"target": "2x", "deploy": "bf16", "cost": table}, "deploy does not go with cost"),
        ({"target": "2G", "cost": table}, "target '2G' does not go with cost"),
        ({"target": None, "lambda_macro": 1.0, "lambda_micro": 1.0, "cost": table}, "cost needs a target"),
        ({"target": "2x", "cost": str(tmp_path / "no.json")}, "cost must be a file that exists"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config("digits", options)
    with pytest.raises(LatencyError, match="does not fit"):
        prune(read_config("digits", {"target": "2x", "cost": table}), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"target is in mJ, the table .* in ms"):
        prune(read_config("digits", {"target": "7mJ", "cost": table, "model_args": SHAPE}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_clock_that_fails_loses_nothing(tmp_path: Path) -> None:
    here = device_name(CPU)
    synthetic(dim=16, tokens=5, mode="compile", device=here).save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "target": "1.6x", "cost": str(tmp_path / "t.json")}
    config = read_config("digits", given)
    if torch.cuda.is_available():
        pytest.skip("the mode needs a CUDA device, and there is one")
    with pytest.warns(UserWarning, match="the network cannot be timed here"):
        result = prune(config, tmp_path / "run")
    assert "measured" not in result.record and hiap.load(tmp_path / "run/compact").num_classes == 10


@pytest.mark.slow
def test_a_changed_table_is_noticed(tmp_path: Path) -> None:
    table = synthetic(dim=16, tokens=5)
    table.save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "target": "1.6x", "cost": str(tmp_path / "t.json")}
    prune(read_config("digits", given), tmp_path / "run")
    replace(table, outside=0.7).save(tmp_path / "t.json")
    with pytest.raises(RunError, match="has changed since the run"):
        prune(read_config("digits", given), tmp_path / "run", resume=True)
