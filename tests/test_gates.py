import copy
import math

import pytest
import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch.nn.parallel import DistributedDataParallel

import hiap
from conftest import images, make
from hiap.nn.gated_linear import GatedLinear
from hiap.pruning.attach import gates_by_block, noise_source
from reference import naive_forward

ALL = hiap.GRANULARITIES
PAPER = ("head", "ffn", "value_dim", "neuron")
DRAWS = 40_000  # 4 sigma of a frequency is then at most 0.01


def granularities(kind: str) -> list[str]:
    return [name for name in ALL if not (kind == "qk_norm" and name == "qk_dim")]


def scatter_logits(model: torch.nn.Module, seed: int = 3, mean: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for gate in hiap.gates(model):
        gate.logit.data = torch.randn(gate.logit.shape, generator=generator).to(gate.logit) * 2 + mean


@pytest.mark.parametrize("temperature", [2.0, 0.5, 0.05])
def test_probability_of_an_open_gate_is_the_sigmoid_of_its_logit(temperature: float) -> None:
    logits = torch.linspace(-3, 3, 13)
    model = hiap.attach(make(), PAPER)
    source = noise_source(model)
    gate = hiap.Gate((13, DRAWS))
    gate.logit.data = logits.repeat_interleave(DRAWS)
    gate.temperature = temperature
    source.gates = [gate]
    source.draw()
    share = (gate.train()() > 0.5).double().mean(dim=1)
    sigma = (torch.sigmoid(logits) * (1 - torch.sigmoid(logits)) / DRAWS).sqrt()
    assert ((share - torch.sigmoid(logits)).abs() < 4 * sigma).all()


def test_every_logit_gets_a_gradient() -> None:
    model = hiap.attach(make(), ALL).train()
    model(images(model)).square().sum().backward()
    for gate in hiap.gates(model):
        assert gate.logit.grad is not None and (gate.logit.grad != 0).all()


@pytest.mark.parametrize("head_dim", [1, 2, 8])
def test_open_gates_are_bit_identical_under_the_same_grad_mode_and_close_under_another(head_dim: int) -> None:
    dense = make(embed_dim=3 * head_dim).float()
    gated = hiap.attach(copy.deepcopy(dense), ALL)
    frozen = hiap.attach(copy.deepcopy(dense).requires_grad_(False), ALL)
    x = images(dense)
    with torch.no_grad():
        expected = dense(x)
        assert torch.equal(gated(x), expected) and torch.equal(frozen(x), expected)
    recorded = gated(x)
    assert torch.equal(recorded, dense(x))
    assert (recorded - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_open_gates_in_eval_are_bit_identical_to_the_dense_model(kind: str) -> None:
    model = make(kind)
    x = images(model)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dense = copy.deepcopy(model).to(dtype)
        gated = hiap.attach(copy.deepcopy(dense), granularities(kind))
        assert torch.equal(gated(x.to(dtype)), dense(x.to(dtype)))


@pytest.mark.parametrize("chosen", [ALL, *[(name,) for name in ALL], PAPER])
@pytest.mark.parametrize("hard", [True, False])
def test_gated_forward_is_the_papers_equations(chosen: tuple[str, ...], hard: bool) -> None:
    model = hiap.attach(make("layer_scale"), chosen).double()
    scatter_logits(model)
    model.train(not hard)
    x = images(model)
    logits = model(x)
    naive = naive_forward(model, gates_by_block(model), x, hard)
    assert (logits - naive).abs().max() <= 1e-12 * naive.abs().max()


@pytest.mark.parametrize("name", ["augreg", "clip", "dinov2_registers", "siglip", "no_qkv_bias", "no_proj_bias"])
def test_gated_forward_is_the_papers_equations_on_other_kinds(name: str) -> None:
    model = hiap.attach(make(name), ALL).double()
    scatter_logits(model)
    x = images(model)
    for hard in (True, False):
        model.train(not hard)
        logits = model(x)
        naive = naive_forward(model, gates_by_block(model), x, hard)
        assert (logits - naive).abs().max() <= 1e-12 * naive.abs().max()


@pytest.mark.parametrize("chosen", [ALL, PAPER, ("qk_dim",), ("attention",), ("ffn",), ("head", "neuron")])
@pytest.mark.parametrize("name", ["layer_scale", "no_proj_bias", "no_qkv_bias"])
def test_gradients_are_those_of_the_equations(chosen: tuple[str, ...], name: str) -> None:
    model = hiap.attach(make(name), chosen).double().train()
    scatter_logits(model)
    x = images(model)
    found, expected = [], []
    for gradients in (found, expected):
        model.zero_grad()
        logits = model(x) if gradients is found else naive_forward(model, gates_by_block(model), x, hard=False)
        logits.square().sum().backward()
        gradients.extend((key, p.grad) for key, p in model.named_parameters())
    for (key, a), (_, b) in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max(), key


def test_closed_gates_make_no_denormal_numbers() -> None:
    """CPUs compute with them many times slower, and products of gates would be full of them."""
    model = hiap.attach(make().float(), hiap.GRANULARITIES).train()
    hiap.set_gates(model, temperature=0.05, noise_scale=1.0)
    for gate in hiap.gates(model):
        gate.logit.data.uniform_(-5, 5, generator=torch.Generator().manual_seed(0))
    model(images(model).float())
    layers = [module for module in model.modules() if isinstance(module, GatedLinear)]
    scales = torch.cat(
        [layer.layout.scales({k: g()[None] for k, g in layer.by_kind().items()})[2].flatten() for layer in layers]
    )
    exact = [torch.sigmoid((g.logit.detach().double() + g.noise.double()) / 0.05) for g in hiap.gates(model)]
    assert min(float(z.min()) for z in exact) < 1e-30 and (scales == 0).any()
    assert not ((scales != 0) & (scales < 1e-20)).any()
    for gate, z in zip(hiap.gates(model), exact, strict=True):
        torch.testing.assert_close(gate().double().flatten(), z, atol=1e-6, rtol=0)


def test_dense_checkpoints_load_into_gated_models_and_back() -> None:
    dense, other = make(), make()
    for p in other.parameters():
        p.data = p.data + 1
    gated = hiap.attach(copy.deepcopy(other))
    assert set(dense.state_dict()) < set(gated.state_dict())
    gated.load_state_dict(dense.state_dict(), strict=True)
    x = images(dense)
    assert torch.equal(gated(x), dense(x))
    back = other.load_state_dict(gated.state_dict(), strict=False)
    assert not back.missing_keys and all(".gates." in key for key in back.unexpected_keys)
    assert torch.equal(other(x), dense(x))
    assert hiap.detach(gated).state_dict().keys() == dense.state_dict().keys()


def test_a_checkpoint_with_half_of_the_gates_does_not_load_strictly() -> None:
    model = hiap.attach(make())
    state = {key: value for key, value in model.state_dict().items() if ".gates.head." not in key}
    with pytest.raises(RuntimeError, match=r"gates\.head\.logit"):
        model.load_state_dict(state, strict=True)


def test_detach_gives_back_the_dense_model() -> None:
    dense = make()
    parameters = list(dense.parameters())
    x, before, text = images(dense), dense(images(dense)), str(dense)
    hiap.detach(hiap.attach(dense, ALL))
    assert torch.equal(dense(x), before) and str(dense) == text
    assert all(a is b for a, b in zip(parameters, dense.parameters(), strict=True))
    assert not any(m._forward_pre_hooks or m._load_state_dict_post_hooks for m in dense.modules())


def test_gates_travel_with_the_model() -> None:
    model = hiap.attach(make(), ALL).train()
    scatter_logits(model)
    other = hiap.attach(make(), ALL)
    other.load_state_dict(model.state_dict())
    assert hiap.harden(other) == hiap.harden(model)
    clone = copy.deepcopy(model)
    assert noise_source(clone).gates[0] is next(hiap.gates(clone))
    x = images(model)
    assert torch.equal(clone(x), model(x))
    ema = ModelEmaV3(model, decay=0.0)
    ema.update(model)
    assert hiap.harden(ema.module) == hiap.harden(model)
    for other in (copy.deepcopy(model).half(), copy.deepcopy(model).to(torch.bfloat16)):
        for gate, original in zip(hiap.gates(other), hiap.gates(model), strict=True):
            assert torch.equal(gate.logit, original.logit) and gate.logit.dtype == torch.float32
    assert all(gate.logit.dtype == torch.float64 for gate in hiap.gates(model.double()))


def test_gates_train_under_distributed_data_parallel(tmp_path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = hiap.attach(make()).train()
        DistributedDataParallel(model)(images(model)).square().sum().backward()
        assert all(gate.logit.grad is not None for gate in hiap.gates(model))
    finally:
        torch.distributed.destroy_process_group()


def test_one_draw_a_forward_that_depends_on_seed_and_count_alone() -> None:
    model = hiap.attach(make(), seed=5).train()
    x = images(model)
    torch.manual_seed(0)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    hiap.set_gates(model, draws=0)
    torch.manual_seed(99)
    assert torch.equal(model(x), first)
    assert torch.equal(hiap.attach(make(), seed=5).train()(x), first)
    assert not torch.equal(hiap.attach(make(), seed=6).train()(x), first)
    one = model.forward_features(x)  # a forward that enters below the root draws too
    assert not torch.equal(model.forward_features(x), one)
    model.blocks[0].eval()  # a frozen block stops its own noise only
    assert not torch.equal(model(x), model(x))
    draws = noise_source(model).draws
    model.eval()(x)
    assert noise_source(model).draws == draws


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_sees_the_same_draw(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMM_REENTRANT_CKPT", str(int(reentrant)))
    gradients = []
    for checkpointing in (False, True):
        model = hiap.attach(make(), ALL).train()
        model.set_grad_checkpointing(checkpointing)
        model(images(model).requires_grad_()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_checkpointing_the_whole_model_sees_the_same_draw() -> None:
    gradients = []
    for wrap in (False, True):
        model = hiap.attach(make()).train()
        x = images(model).requires_grad_()
        (torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if wrap else model(x)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_temperature_and_noise_are_set_for_all_gates() -> None:
    model = hiap.attach(make(), ALL).train()
    scatter_logits(model)
    hiap.set_gates(model, temperature=0.25, noise_scale=0.0)
    x = images(model)
    assert torch.equal(model(x), model(x))  # no noise
    for gate in hiap.gates(model):
        assert torch.allclose(gate(), torch.sigmoid(4 * gate.logit).view(gate.shape))
    with pytest.raises(ValueError, match="temperature must be positive; found 0"):
        hiap.set_gates(model, temperature=0)
    with pytest.raises(ValueError, match="noise_scale must not be negative"):
        hiap.set_gates(model, noise_scale=-1)
    with pytest.raises(ValueError, match="no gates"):
        hiap.set_gates(make(), temperature=1.0)


def test_logits_get_no_weight_decay_and_their_own_rate() -> None:
    model = hiap.attach(make(), ALL)
    logits = {id(gate.logit) for gate in hiap.gates(model)}
    groups = hiap.parameter_groups(model, weight_decay=0.1, gate_lr=5e-3)
    seen = [id(p) for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    for group in groups:
        of_gates = {id(p) for p in group["params"]} & logits
        assert of_gates in (set(), logits)
        if of_gates:
            assert group["weight_decay"] == 0 and group["lr"] == 5e-3
    decays = [group for group in groups if group["weight_decay"]]
    assert all(p.ndim > 1 for group in decays for p in group["params"]) and decays
    # timm's own factory spares them as well
    for group in create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.1).param_groups:
        assert group["weight_decay"] == 0 or not {id(p) for p in group["params"]} & logits


def test_mixed_precision_keeps_gates_in_float32() -> None:
    model = hiap.attach(make().float(), ALL).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images(model)).float().square().sum().backward()
    for gate in hiap.gates(model):
        assert gate().dtype == gate.logit.grad.dtype == torch.float32
        assert math.isfinite(gate.logit.grad.abs().sum())


def test_protected_blocks_have_no_gates() -> None:
    model = hiap.attach(make(), keep_blocks=(0, -1))
    assert [bool(kinds) for kinds in gates_by_block(model)] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularities": ("head", "token")}, r"some of head, .*; found \['token'\]"),
        ({"granularities": ()}, "found none"),
        ({"keep_blocks": (3,)}, r"keep_blocks \[3\]: the model has blocks 0 to 2"),
        ({"keep_blocks": (0, 1, 2)}, "nothing to gate"),
        ({"logit": float("nan")}, "logit must be finite"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        hiap.attach(model, **arguments)
    assert not list(hiap.gates(model))


def test_a_gated_model_is_not_gated_again() -> None:
    with pytest.raises(ValueError, match="already has gates"):
        hiap.attach(hiap.attach(make()))


def test_qk_norm_takes_every_gate_but_qk_dim() -> None:
    model = make("qk_norm")
    with pytest.raises(hiap.UnsupportedModelError, match=r"blocks\.0\.attn normalises .*Leave qk_dim out"):
        hiap.attach(model, ALL)
    assert not list(hiap.gates(model))
    hiap.attach(model, granularities("qk_norm"))


def test_the_kinds_are_what_they_say() -> None:
    assert make("siglip").attn_pool is not None and not make("siglip").has_class_token
    assert make("dinov2").blocks[0].ls1.gamma.numel() and make("dinov2_registers").num_reg_tokens == 4
    assert make("deit_distilled").num_prefix_tokens == 2 and make("deit3").no_embed_class
    assert not isinstance(make("clip").norm_pre, torch.nn.Identity)
    assert "eps=1e-05" in str(make("clip").norm) and "QuickGELU" in str(make("clip_quickgelu"))
    assert make("qk_norm").blocks[0].attn.q_norm.weight.shape == (8,) and make("no_positions").pos_embed is None
    assert make("no_qkv_bias").blocks[0].attn.qkv.bias is None and make("no_proj_bias").blocks[0].mlp.fc2.bias is None


@pytest.mark.slow
def test_a_gated_model_compiles() -> None:
    model = hiap.attach(make("layer_scale"), ALL)
    scatter_logits(model)
    x = images(model)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
    first = torch.compile(model.train(), backend="aot_eager")(x)
    hiap.set_gates(model, draws=0)
    torch.testing.assert_close(model(x), first)


def test_the_papers_name_of_ffn_gates_is_accepted() -> None:
    model, other = (hiap.attach(make(), kinds) for kinds in (("head", "block"), ("head", "ffn")))
    assert model.state_dict().keys() == other.state_dict().keys()
    scatter_logits(other)
    old = {name.replace("gates.ffn", "gates.block"): tensor for name, tensor in other.state_dict().items()}
    model.load_state_dict(old)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    config = hiap.read_config(None, {"target": "50%", "granularities": ["head", "block"]})
    assert config.gate_kinds(False) == ("head", "ffn")


def test_gates_come_out_of_a_wrapped_model() -> None:
    model = make()
    wrapped = torch.nn.DataParallel(hiap.attach(model))
    assert hiap.detach(wrapped) is wrapped and not any(hiap.gates(model))
