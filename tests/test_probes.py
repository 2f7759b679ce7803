"""How good features are: nearest neighbours, linear probes and zero-shot classes, against plain equations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import hiap
from conftest import write_photos, write_shards
from hiap.cli.main import main
from hiap.data.images import Loading
from hiap.data.sources import Augmentation, digits, open_data
from hiap.errors import InputError
from hiap.training.probes import class_texts, embed_images, knn_top1, linear_probe, zero_shot_top1
from runs import noise_data

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1}
NAME = "vit_tiny_patch16_224"


def clusters(count: int, seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Points around four centres, a class each."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 4
    return centres[labels] + spread * torch.randn(count, 6, generator=generator), labels


@pytest.mark.parametrize("neighbours", [1, 5, 20, 500])
def test_neighbours_vote_by_their_similarity(neighbours: int) -> None:
    """The vote, neighbour by neighbour."""
    bank, queries = clusters(40, 1, 1.5), clusters(30, 2, 1.5)
    right = 0
    for feature, label in zip(*queries, strict=True):
        similarity = [float(torch.cosine_similarity(feature, one, dim=0)) for one in bank[0]]
        nearest = sorted(range(len(similarity)), key=lambda i: -similarity[i])[:neighbours]
        votes = [0.0] * 4
        for i in nearest:
            votes[bank[1][i]] += float(torch.tensor(similarity[i] / 0.07, dtype=torch.float64).exp())
        right += votes.index(max(votes)) == label
    assert 0 < right < 30 and knn_top1(bank, queries, neighbours, chunk=7) == pytest.approx(100 * right / 30)


def test_a_linear_probe_finds_what_a_linear_layer_can_tell_apart() -> None:
    top1, decay = linear_probe(clusters(200, 1, 0.2), clusters(80, 2, 0.2))
    assert top1 == 100.0 and decay in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    shuffled = clusters(200, 1)[0], torch.arange(200) % 4
    assert linear_probe((shuffled[0][torch.randperm(200)], shuffled[1]), clusters(80, 2))[0] < 60


def test_a_linear_probe_fits_as_scikit_learn_does() -> None:
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    train, val = clusters(200, 1, 1.2), clusters(80, 2, 1.2)
    top1, decay = linear_probe(train, val)
    mean, std = train[0].mean(0), train[0].std(0)
    model = linear.LogisticRegression(C=1 / (2 * decay * 200), max_iter=1000).fit((train[0] - mean) / std, train[1])
    assert top1 == pytest.approx(100 * model.score((val[0] - mean) / std, val[1]), abs=1.3)  # one image of 80


def test_of_equally_good_linear_probes_the_one_with_the_strongest_decay_is_taken() -> None:
    assert linear_probe(clusters(200, 1, 0.01), clusters(80, 2, 0.01)) == (100.0, 1e-2)
    assert linear_probe(clusters(2, 1, 0.01), clusters(2, 2, 0.01)) == (
        100.0,
        1e-2,
    )  # one image to fit, one to choose by


def test_zero_shot_takes_the_text_that_is_nearest() -> None:
    texts = torch.eye(3, 5)
    images = torch.tensor([[2.0, 1, 0, 0, 0], [0, 0, 3, 1, 0], [1, 9, 0, 0, 0], [0, 1, 0, 0, 0]])
    assert zero_shot_top1(texts, (images, torch.tensor([0, 2, 1, 0]))) == 75.0


@pytest.mark.parametrize("classes", [10, 0])
def test_features_are_what_the_classifier_reads(classes: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SHAPE, num_classes=classes).eval()
    data = noise_data(16, 8)
    found, labels = embed_images(model, data.bank(5))
    x = (data._train[0].float() - 127.5) / 127.5
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
    assert torch.allclose(found, expected, atol=1e-5) and torch.equal(labels, data._train[1])


@pytest.mark.parametrize("kind", ["folder", "held in memory", "stream"])
def test_the_bank_is_every_training_image_once_prepared_as_for_validation(kind: str, tmp_path: Path) -> None:
    loading = Loading((16, 16), ((0.5,) * 3, (0.5,) * 3), Augmentation(), torch.device("cpu"), workers=0)
    if kind == "stream":
        pytest.importorskip("webdataset", reason="webdataset is not installed")
        data = open_data(
            write_shards(tmp_path, {"train": [6, 6], "validation": [2]}, classes=100), loading, classes=100
        )
    else:
        data = open_data(write_photos(tmp_path / "photos"), loading, hold=kind != "folder")
    once, again = ([torch.cat(parts) for parts in zip(*data.bank(batch), strict=True)] for batch in (5, 7))
    expected = list(range(12)) if kind == "stream" else [0] * 12 + [1] * 12
    assert once[1].tolist() == expected and once[0].shape == (len(expected), 3, 16, 16)
    assert torch.equal(once[0], again[0])  # no chance in it
    if kind != "stream":  # the same photos as validation images
        (tmp_path / "photos/val").rename(tmp_path / "photos/old")
        (tmp_path / "photos/val").symlink_to("train")
        swapped = open_data(str(tmp_path / "photos"), loading, hold=kind != "folder")
        assert torch.equal(torch.cat([x for x, _ in swapped.val(6)]), once[0])


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has pruned a backbone on digits."""
    tmp_path = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SHAPE, num_classes=0)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    given: dict[str, Any] = {"model": NAME, "model_args": {**SHAPE, "num_classes": 0}, "objective": "features"}
    given |= {"weights": str(tmp_path / "dense.safetensors"), "data": "digits", "target": "60%", "epochs": 1}
    given |= {"mean": [0.5], "std": [0.5], "batch_size": 512}
    hiap.prune(hiap.read_config(None, given), tmp_path / "run")
    return tmp_path / "run"


@torch.no_grad()
def expected_knn(model: Any) -> float:
    (bank, labels), (queries, wanted) = digits()
    features = [
        model.forward_head(model.forward_features((x / 255 - 0.5) / 0.5), pre_logits=True) for x in (bank, queries)
    ]
    return knn_top1((features[0], labels), (features[1], wanted))


def test_dense_and_compact_features_stand_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    command = ["evaluate", str(run), "--data", "digits", "--knn", "--linear-probe", "--against", "dense"]
    capsys.readouterr()
    assert main([*command, "--out", str(out)]) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    dense = timm.create_model(
        NAME, **SHAPE, num_classes=0, checkpoint_path=str(run.parent / "dense.safetensors")
    ).eval()
    assert found["dense"]["knn"] == pytest.approx(expected_knn(dense), abs=0.3)  # a tie or two
    assert found["compact"]["knn"] == pytest.approx(expected_knn(hiap.load(run / "compact")), abs=0.3)
    assert (found["neighbours"], found["temperature"], found["bank"], found["images"]) == (20, 0.07, 1437, 360)
    knn, probe = ([found[name][kind] for name in ("dense", "compact")] for kind in ("knn", "linear_probe"))
    assert said == (
        f"{'':14}       dense     compact\n"
        f"kNN top-1     {knn[0]:>10.2f} %{knn[1]:>10.2f} %  {knn[1] - knn[0]:+.2f} points\n"
        f"linear probe  {probe[0]:>10.2f} %{probe[1]:>10.2f} %  {probe[1] - probe[0]:+.2f} points\n"
        "360 validation images, 1437 training images\n"
    )


def test_one_model_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run / "compact"), "--data", "digits", "--knn", "--neighbours", "1"]) == 0
    assert re.fullmatch(
        r"kNN top-1 +\d+\.\d\d %\n360 validation images, 1437 training images\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "/run has no classifier, so only its features can be scored: pass --knn or --linear-probe"),
        (["--neighbours", "3"], "--neighbours goes with --knn"),
        (["--prompt", "a {}"], "--prompt goes with --zero-shot"),
        (["--against", "dense"], "--against goes with --knn, --linear-probe or --zero-shot and a folder"),
        (["--knn", "--out", "nowhere/a.json"], "nowhere/a.json cannot be written: there is no folder"),
        (["--zero-shot", "nowhere", "--prompt", "a photo"], "--prompt must have {} where the name of a class goes"),
        (["--zero-shot", "."], ". cannot encode texts ("),
    ],
)
def test_what_cannot_be_probed(
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hiap.training.probes.embed_images", None)  # all of it is found before images are read
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", "digits", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_dense_model_that_has_changed_since_is_not_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run.parent / "dense.safetensors"
    before = weights.read_bytes()
    try:
        save_file(timm.create_model(NAME, **SHAPE, num_classes=0).state_dict(), weights)
        assert main(["evaluate", str(run), "--data", "digits", "--knn", "--against", "dense"]) == 1
    finally:
        weights.write_bytes(before)
    assert "is not the one that was pruned" in capsys.readouterr().err


@pytest.mark.parametrize(
    "made, given, message",
    [
        ({"num_heads": 4}, {"dense_epochs": 1}, "is not the one that was pruned: it came from Python or changed"),
        ({}, {}, "is not the one that was pruned: it came from Python or changed"),
        ({}, {"weights": None, "pretrained": False}, "was not kept: its weights were random, or it came from Python"),
        (None, {}, None),  # the classifier alone is new
        ({}, {"dense_epochs": 1}, None),  # the weights it was pruned with are in the folder
    ],
)
def test_a_run_with_labels_is_compared_with_no_other_model_than_its_own(
    made: dict[str, Any] | None,
    given: dict[str, Any],
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file(timm.create_model(NAME, **SHAPE, num_classes=7).state_dict(), tmp_path / "dense.safetensors")
    config = {"model": NAME, "model_args": SHAPE, "weights": str(tmp_path / "dense.safetensors"), "teacher": "none"}
    config |= {"data": "digits", "target": "60%", "epochs": 1, "mean": [0.5], "std": [0.5], "batch_size": 32}
    model = None if made is None else timm.create_model(NAME, **{**SHAPE, "num_classes": 10, **made})
    hiap.prune(hiap.read_config(None, {**config, **given}), tmp_path / "run", data=noise_data(32, 8), model=model)
    command = ["evaluate", str(tmp_path / "run"), "--data", "digits", "--knn", "--against", "dense"]
    assert main(command) == (1 if message else 0)
    said = capsys.readouterr()
    assert message in said.err if message else "dense     compact" in said.out


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pruned_image_tower_still_meets_the_texts_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("transformers", reason="Transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {**tower, "image_size": 8, "patch_size": 4, "num_channels": 1}
    text = {**tower, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 1}
    torch.manual_seed(0)
    whole = library.CLIPModel(library.CLIPConfig(vision_config=vision, text_config=text, projection_dim=12)).eval()
    whole.save_pretrained(tmp_path / "clip")
    words = ["<pad>", "<end>", "a", "photo", "of", ".", *map(str, range(10))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 1)])
    kind = library.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    kind.save_pretrained(tmp_path / "clip")

    texts = class_texts(str(tmp_path / "clip"), ["3", "7"], "a photo of a {}.", torch.device("cpu"))
    ids = torch.tensor([[2, 3, 4, 2, 6 + digit, 5, 1, 0] for digit in (3, 7)])
    with torch.no_grad():
        found = whole.get_text_features(input_ids=ids, attention_mask=torch.tensor([[1] * 7 + [0]] * 2))
    assert torch.allclose(texts, getattr(found, "pooler_output", found), atol=1e-6)

    given = {
        "model": f"hf:{tmp_path / 'clip'}",
        "objective": "features",
        "data": "digits",
        "target": "60%",
        "epochs": 1,
    }
    given |= {"batch_size": 512, "mean": [0.5], "std": [0.5]}
    hiap.prune(hiap.read_config(None, given), tmp_path / "run")
    compact = hiap.load(tmp_path / "run/compact")
    assert isinstance(compact, library.CLIPVisionModelWithProjection)
    command = ["evaluate", str(tmp_path / "run"), "--data", "digits", "--zero-shot", str(tmp_path / "clip")]
    assert main([*command, "--against", "dense", "--out", str(tmp_path / "out.json")]) == 0
    x, labels = digits()[1]
    texts = class_texts(str(tmp_path / "clip"), [str(i) for i in range(10)], "a photo of a {}.", torch.device("cpu"))
    with torch.no_grad():
        found = whole.get_image_features(pixel_values=(x / 255 - 0.5) / 0.5)
    right = zero_shot_top1(texts, (getattr(found, "pooler_output", found), labels))
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["dense"]["zero_shot"] == pytest.approx(right) and "compact" in record

    braces = class_texts(str(tmp_path / "clip"), ["3", "7"], "{x} of {}", torch.device("cpu"))
    assert braces.shape == (2, 12)  # other braces are text
    with pytest.raises(InputError, match="cannot encode texts"):
        class_texts(str(tmp_path / "run/compact"), ["a"], "{}", torch.device("cpu"))
