import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hiap
from conftest import images, make
from hiap.nn import compact as plain
from hiap.pruning.extract import TOLERANCE
from test_cost import counted_macs
from test_gates import ALL, granularities, scatter_logits

H, DH, F = 3, 8, 20  # of the model the generated topologies are for


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def units(size: int) -> st.SearchStrategy[list[int]]:
    """None, one, all or any of the units."""
    some = st.lists(st.integers(0, size - 1), unique=True, max_size=size)
    return st.one_of(st.just([]), st.integers(0, size - 1).map(lambda i: [i]), st.just(list(range(size))), some)


@st.composite
def block_topologies(draw: st.DrawFn) -> dict:
    heads = draw(st.one_of(st.none(), units(H), units(H)))
    dims = st.lists(units(DH), min_size=len(heads or ()), max_size=len(heads or ()))
    return {
        "heads": heads,
        "value_dims": draw(dims),
        "qk_dims": draw(dims),
        "neurons": draw(st.one_of(st.none(), units(F), units(F))),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(block_topologies(), min_size=3, max_size=3),
    round_to=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(["augreg", "layer_scale", "no_proj_bias", "no_qkv_bias"]),
)
def test_extracted_equals_gated_hard(blocks: list[dict], round_to: int, kind: str) -> None:
    model = make(kind, mlp_ratio=F / 24)
    x = images(model)
    columns = {name: [block[name] for block in blocks] for name in blocks[0]}
    topology = hiap.Topology.from_counts(model, **columns)
    gated = hiap.attach(copy.deepcopy(model), ALL)
    hiap.set_topology(gated, topology)
    compact = hiap.extract(gated, round_to=round_to)
    assert close(compact(x), gated.eval()(x))
    assert close(compact.forward_features(x), gated.forward_features(x))
    assert hiap.macs(compact) == hiap.macs(gated, round_to=round_to) == counted_macs(compact, x)
    again = hiap.extract(model, topology, round_to=round_to)
    assert all(torch.equal(a, b) for a, b in zip(compact.parameters(), again.parameters(), strict=True))
    assert_plain(compact)


def assert_plain(compact: nn.Module) -> None:
    """No gate, no mask, no hook, no parameter the output does not depend on."""
    assert not list(hiap.gates(compact))
    assert not list(compact.buffers())
    for module in compact.modules():
        assert not isinstance(module, hiap.Gate)
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_load_state_dict_post_hooks"):
            assert not getattr(module, hooks)
    compact.zero_grad()
    compact(images(compact)).sum().backward()
    assert all(p.grad is not None for p in compact.parameters())


def test_every_kind_is_extracted(kind: str) -> None:
    model = hiap.attach(make(kind), granularities(kind))
    for seed in range(3):
        scatter_logits(model, seed)
        compact = hiap.extract(model, round_to=3)
        assert type(compact) is type(model)
        assert close(compact(images(model)), model(images(model)))
        assert_plain(compact)


def test_nothing_closed_keeps_every_tensor(kind: str) -> None:
    model = make(kind)
    compact = hiap.extract(model, hiap.Topology.from_counts(model), round_to=1)
    state = model.state_dict()
    assert compact.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in compact.state_dict().items())
    assert hiap.macs(compact) == hiap.macs(model)


def test_padding_stays_within_the_dense_width() -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, heads=[1, 2, 3], neurons=[91, 1, 96], value_dims=[5, 8, 1])
    block = hiap.extract(model, topology, round_to=8).blocks
    assert [b.attn.value_dim for b in block] == [8, 8, 8]
    assert [b.mlp.fc1.out_features for b in block] == [96, 8, 96]
    block = hiap.extract(model, topology, round_to=64).blocks
    assert [b.attn.value_dim for b in block] == [8, 8, 8]
    assert [b.mlp.fc1.out_features for b in block] == [96, 64, 96]
    block = hiap.extract(model, topology, round_to=1).blocks
    assert [b.attn.value_dim for b in block] == [5, 8, 1]
    with pytest.raises(ValueError, match="round_to must be at least 1; found 0"):
        hiap.extract(model, topology, round_to=0)


def test_branches_without_units_become_constants_or_vanish() -> None:
    model = make("layer_scale")
    topology = hiap.Topology.from_counts(model, heads=[0, None, 1], neurons=[5, 0, None])
    compact = hiap.extract(model, topology)
    first, second, third = compact.blocks
    assert isinstance(first.attn, plain.Constant) and second.attn is None
    assert isinstance(second.mlp, plain.Constant) and third.mlp is None
    assert torch.equal(first.attn.bias, model.blocks[0].attn.proj.bias)
    names = set(dict(compact.named_parameters()))
    assert not names & {"blocks.0.norm1.weight", "blocks.1.ls1.gamma", "blocks.1.norm2.weight", "blocks.2.ls2.gamma"}


def test_q_k_pruning_keeps_the_softmax_scale() -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, qk_dims=[2, 3, 4])
    for block, width in zip(hiap.extract(model, topology, round_to=1).blocks, [2, 3, 4], strict=True):
        assert (block.attn.qk_dim, block.attn.head_dim) == (width, 8)


def test_unequal_widths_are_attended_in_steps_on_a_cpu_and_exported_as_one_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, qk_dims=[4] * 3, value_dims=[5] * 3), round_to=1)
    x = images(model)
    exported = torch.export.export(compact, (x,)).module()
    found = compact(x)
    monkeypatch.setattr(plain.F, "scaled_dot_product_attention", None)  # nothing calls it
    assert torch.equal(compact(x), found)
    with pytest.raises(TypeError):
        model(x)
    monkeypatch.undo()
    assert close(exported(x), found, 1e-12)
    operators = [str(node.target) for node in exported.graph.nodes]
    assert sum("scaled_dot_product_attention" in one for one in operators) == 3


@pytest.mark.parametrize(("qk_dim", "value_dim"), [(4, 6), (6, 4)])
def test_unequal_widths_are_filled_up_on_a_cpu_where_there_are_many_scores(
    qk_dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, qk_dims=[qk_dim] * 3, value_dims=[value_dim] * 3)
    few = hiap.extract(model, topology, round_to=1)
    many, x, widths = copy.deepcopy(few), images(model), []
    few(x).square().sum().backward()
    attend = plain.F.scaled_dot_product_attention

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: object, **more: object) -> torch.Tensor:
        widths.append({q.shape[-1], k.shape[-1], v.shape[-1]})
        return attend(q, k, v, *how, **more)

    monkeypatch.setattr(plain, "SCORES", 0)
    monkeypatch.setattr(plain.F, "scaled_dot_product_attention", seen)
    y = many(x)
    assert widths == [{6}] * 3 and close(y, few(x), 1e-12)
    y.square().sum().backward()
    for one, other in zip(few.parameters(), many.parameters(), strict=True):
        assert close(other.grad, one.grad, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_and_the_input_is_left_alone(dtype: torch.dtype) -> None:
    model = hiap.attach(make("layer_scale", drop_path_rate=0.1), ALL).to(dtype).train()
    model.blocks[0].requires_grad_(False)
    scatter_logits(model)
    model.blocks[0].attn.proj.gates["attention"].logit.data[:] = 1.0
    model.blocks[0].attn.proj.gates["head"].logit.data[:] = -1.0  # leaves the bias
    before = copy.deepcopy(model.state_dict())
    compact = hiap.extract(model)
    assert model.training and compact.training
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {p.dtype for p in compact.parameters()} == {dtype}
    assert compact.hiap.tolerance == TOLERANCE[torch.float64]
    assert compact.hiap.logit_difference <= 1e-12
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in compact.parameters()}
    assert "blocks.0.attn.bias" in compact.state_dict()
    assert all(p.requires_grad == (not name.startswith("blocks.0.")) for name, p in compact.named_parameters())


def test_a_wrong_extraction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hiap.attach(make().float(), ALL)
    scatter_logits(model)

    def wrong(*arguments: object) -> dict:
        cuts = original(*arguments)
        dim, index = cuts["blocks.1.mlp.fc2.weight"]
        cuts["blocks.1.mlp.fc2.weight"] = (dim, index.flip(0))
        return cuts

    original = hiap.extract.__globals__["slices"]
    monkeypatch.setitem(hiap.extract.__globals__, "slices", wrong)
    with pytest.raises(hiap.ExtractionError, match=r"does not reproduce .* in torch\.float64, allowed 1e-05"):
        hiap.extract(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_refused(value: float) -> None:
    model = hiap.attach(make())
    model.blocks[0].mlp.fc2.bias.data[0] = value
    with pytest.raises(hiap.ExtractionError, match="differ by nan"):
        hiap.extract(model)


def test_ungated_models_need_a_topology() -> None:
    with pytest.raises(ValueError, match="pass a topology, or attach"):
        hiap.extract(make())


def test_a_topology_overrides_the_gates() -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, heads=[1, 2, 3], neurons=[8, 9, 10])
    gated = hiap.attach(copy.deepcopy(model))
    scatter_logits(gated)
    assert close(hiap.extract(gated, topology)(images(model)), hiap.extract(model, topology)(images(model)))


def test_a_compact_model_is_pruned_again(kind: str) -> None:
    first = hiap.attach(make(kind), granularities(kind))
    scatter_logits(first, mean=2.0)
    once = hiap.extract(first, round_to=3)
    second = hiap.attach(copy.deepcopy(once), granularities(kind))
    assert torch.equal(second(images(once)), once(images(once)))
    scatter_logits(second, seed=9, mean=1.0)
    twice = hiap.extract(second, round_to=1)
    assert close(twice(images(once)), second(images(once)))
    assert hiap.macs(twice) == counted_macs(twice, images(once)) < hiap.macs(once)
    topology = hiap.harden(second)
    assert close(hiap.extract(once, topology, round_to=1)(images(once)), twice(images(once)))


class TestBehavesLikeTimm:
    @pytest.fixture(params=["augreg", "deit_distilled", "siglip", "dinov2_registers", "clip"])
    def pair(self, request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
        dense = make(request.param)
        topology = hiap.Topology.from_counts(
            dense, heads=[2, 0, None], neurons=[16, 8, None], value_dims=[[3, 8], 8, 8], qk_dims=[5, 8, 8]
        )
        gated = hiap.attach(copy.deepcopy(dense), ALL)
        hiap.set_topology(gated, topology)
        return gated.eval(), hiap.extract(dense, topology)

    def test_features_head_and_intermediates(self, pair: tuple[nn.Module, nn.Module]) -> None:
        gated, compact = pair
        x = images(compact)
        features = compact.forward_features(x)
        assert close(features, gated.forward_features(x))
        assert close(compact.forward_head(features, pre_logits=True), gated.forward_head(features, pre_logits=True))
        for a, b in zip(compact.get_intermediate_layers(x, n=3), gated.get_intermediate_layers(x, n=3), strict=True):
            assert close(a, b)

    def test_classifier_and_input_size_can_be_changed(self, pair: tuple[nn.Module, nn.Module]) -> None:
        gated, compact = pair
        for model in pair:
            torch.manual_seed(4)
            model.reset_classifier(5)
            model.set_input_size((48, 40))
            model.double()  # older timm makes the new classifier in float32
        x = images(compact)
        assert x.shape[-2:] == (48, 40) and compact(x).shape == (2, 5) and close(compact(x), gated(x))
        assert hiap.macs(compact) == counted_macs(compact, x)

    def test_copies_modes_and_metadata(self, pair: tuple[nn.Module, nn.Module]) -> None:
        gated, compact = pair
        x = images(compact)
        assert torch.equal(copy.deepcopy(compact)(x), compact(x))
        assert compact.pretrained_cfg == gated.pretrained_cfg and compact.num_features == gated.num_features
        assert compact.train().blocks[0].attn.training and not compact.eval().blocks[0].attn.training
        state = compact.state_dict()
        assert state.keys() - {"blocks.1.attn.bias"} <= gated.state_dict().keys()
        compact.load_state_dict({name: tensor + 0 for name, tensor in state.items()}, strict=True)
        assert compact.half()(x.half()).dtype == torch.float16

    def test_masks_reach_the_attention(self, pair: tuple[nn.Module, nn.Module]) -> None:
        gated, compact = pair
        n = gated.pos_embed.shape[1] + (gated.num_prefix_tokens if gated.no_embed_class else 0)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        x = images(compact)
        masked = compact.forward_features(x, attn_mask=mask)
        assert close(masked, gated.forward_features(x, attn_mask=mask))
        assert not close(masked, compact.forward_features(x))

    def test_it_trains_on(self, pair: tuple[nn.Module, nn.Module]) -> None:
        _, compact = pair
        compact.train().set_grad_checkpointing()
        optimiser = torch.optim.SGD(compact.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            loss = compact(images(compact)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_it_compiles() -> None:
    model = make("layer_scale")
    topology = hiap.Topology.from_counts(model, heads=[2, 0, None], neurons=[16, 8, None], value_dims=[[3, 8], 8, 8])
    compact = hiap.extract(model, topology)
    x = images(compact)
    compiled = torch.compile(compact, fullgraph=True, backend="aot_eager")
    assert close(compiled(x), compact(x))


def test_constants_can_be_closed_later() -> None:
    model = make("layer_scale")
    once = hiap.extract(model, hiap.Topology.from_counts(model, heads=[0, 3, 3], neurons=[0, 8, 8]))
    counts = {"heads": [None, 3, 3], "neurons": [None, 8, 8]}
    twice = hiap.extract(once, hiap.Topology.from_counts(once, **counts))
    assert twice.blocks[0].attn is None and twice.blocks[0].mlp is None
    direct = hiap.extract(model, hiap.Topology.from_counts(model, **counts))
    assert close(twice(images(model)), direct(images(model)))
    empty = hiap.extract(model, hiap.Topology.from_counts(model, heads=[0] * 3, neurons=[0] * 3))
    again = hiap.extract(empty, hiap.Topology.from_counts(empty))
    assert torch.equal(again(images(model)), empty(images(model)))


def test_hooks_of_the_user_stay_on_the_model_and_out_of_the_result() -> None:
    model = make()
    calls = []
    model.blocks[0].mlp.fc2.register_forward_hook(lambda *_: calls.append("fc2"))
    model.norm.register_forward_hook(lambda *_: calls.append("norm"))
    hiap.attach(model)
    model(images(model))
    assert calls == ["fc2", "norm"]
    compact = hiap.extract(model)
    calls.clear()
    compact(images(model))
    assert not calls
    hiap.detach(model)(images(model))
    assert calls == ["fc2", "norm"]


def test_diverged_gates_are_refused() -> None:
    model = hiap.attach(make())
    model.blocks[0].mlp.fc2.gates["neuron"].logit.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite: the run that trained them has diverged"):
        hiap.extract(model)


def test_tf32_settings_do_not_matter() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        model = make().float()
        assert hiap.extract(model, hiap.Topology.from_counts(model)).hiap.logit_difference < 1e-12
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_wrapped_models_are_refused_with_the_way_out() -> None:
    model = hiap.attach(make())
    with pytest.raises(hiap.UnsupportedModelError, match=r"wrapped in DataParallel: pass model\.module"):
        hiap.macs(nn.DataParallel(model))
    with pytest.raises(hiap.UnsupportedModelError, match=r"pass model\._orig_mod"):
        hiap.macs(torch.compile(model))
