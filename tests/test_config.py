"""Configurations: what is wrong is said at once."""

import pytest

from hiap.training.config import Config, ConfigError, read_config, recipes
from hiap.training.plan import plan
from runs import tiny


class TestConfig:
    def test_everything_wrong_is_said_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            read_config("digits", {"epochs": 0, "target": "fast", "precision": "int8", "granularities": ["token"]})
        for text in (
            "epochs must be at least 1; found 0",
            "'fast' is not a budget",
            "precision must be",
            "granularities must be",
        ):
            assert text in str(caught.value)
        late = {"eval_every": 0, "min_heads": -1, "seed": -1, "checkpoint_every": 0, "clip_grad": -1.0}
        late |= {"policy": "nonsense", "opt": "kron", "distill_features": -1.0, "mixup": -1.0}
        with pytest.raises(ConfigError) as caught:
            read_config("digits", late)
        assert all(f"\n  {name} must be" in str(caught.value) for name in late)
        with pytest.raises(ConfigError, match=r"unknown option 'epoch'\n.*lr must be float \| null; found 'high'"):
            read_config("digits", {"epoch": 3, "lr": "high"})
        for teacher in ("none", "resnet18"):
            with pytest.raises(ConfigError, match=r"0 unless the teacher is 'self' .*; found 1"):
                tiny(distill_features=1.0, teacher=teacher)
        with pytest.raises(ConfigError, match=r"no patch_drop_rate\); found 1"):
            tiny(distill_features=1.0, model_args={"patch_drop_rate": 0.5})
        with pytest.raises(ConfigError, match="give either target, or lambda_macro"):
            read_config(None, {"model": "vit_tiny_patch16_224"})
        with pytest.raises(ConfigError, match=r"no recipe and no file 'nothing'; recipes: .*digits"):
            read_config("nothing")

    @pytest.mark.parametrize(
        ("given", "features"),
        [
            ({}, 10.0),
            ({"distill_features": 2.0}, 2.0),
            ({"distill_features": 0.0}, 0.0),
            ({"distill_weight": 0.0}, 0.0),
            ({"teacher": "none"}, 0.0),
            ({"teacher": "resnet18"}, 0.0),
            ({"model_args": {"patch_drop_rate": 0.5}}, 0.0),  # other patches than the teacher sees
            ({"target": None, "lambda_macro": 1.0}, 0.0),  # the paper has none
        ],
    )
    def test_features_are_learned_with_a_target_from_a_dense_model_that_teaches(self, given, features) -> None:
        assert (
            read_config(None, {"model": "vit_tiny_patch16_224", "target": "50%", **given}).features_weight == features
        )

    @pytest.mark.parametrize("name", recipes())
    def test_recipes_are_valid(self, name: str) -> None:
        config = read_config(name)
        assert read_config(None, {**vars(config)}) == config

    def test_unreachable_hub_names_the_way_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*arguments: object, **options: object) -> None:
            raise OSError("no connection")

        monkeypatch.setattr("timm.create_model", offline)
        with pytest.raises(ConfigError, match=r"no connection.*--weights FILE, or --no-pretrained"):
            plan(read_config(None, {"model": "vit_tiny_patch16_224", "target": "50%", "data": "digits"}))

    def test_q_k_dims_join_where_a_target_allows_it(self) -> None:
        assert "qk_dim" in Config(target="50%").gate_kinds(qk_norm=False)
        assert "qk_dim" not in Config(target="50%").gate_kinds(qk_norm=True)
        assert "qk_dim" not in Config(target="50%", ratio=[2.0, 1.0]).gate_kinds(qk_norm=False)
        assert "qk_dim" not in Config(lambda_macro=1.0, lambda_micro=1.0).gate_kinds(qk_norm=False)


def test_a_tracker_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trackers must be some of tensorboard, wandb; found \['logbook'\]"):
        tiny(trackers=["logbook"])
    monkeypatch.setattr("hiap.training.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the tracker wandb is not installed: pip install 'hiap\[wandb\]'"):
        tiny(trackers=["wandb"])
