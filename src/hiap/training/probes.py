"""How good frozen features are: nearest neighbours, a linear probe, and zero-shot classes from texts.

All of them compare images by what a model gives back of them, so that dense and compact backbones, with a classifier
or without, are scored alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.data.images import Batch
from hiap.errors import InputError
from hiap.models.family import logits_of
from hiap.training.features import pooled_output

__all__ = ["NEIGHBOURS", "TEMPERATURE", "class_texts", "embed_images", "knn_top1", "linear_probe", "zero_shot_top1"]

NEIGHBOURS, TEMPERATURE = 20, 0.07  # of the protocol of DINO
STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # of the weight decay that a linear probe chooses from
HELD_OUT = 5  # every so many-th training image chooses it
STEPS = 100  # of L-BFGS


@torch.no_grad()
def embed_images(
    model: nn.Module,
    batches: Iterable[Batch],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Tensor, Tensor]:
    """The pooled output of a model in eval mode for every image (N, D), in float32, and the labels (N)."""
    device, found, labels = next(model.parameters()).device, [], []
    with pooled_output(model) as pooled:
        for x, y in batches:
            with autocast():
                output = pooled(model(x.to(device)))
            output = output.float()
            found.append(output.mean(1) if output.ndim == 3 else output)
            labels.append(y.to(device))
    return torch.cat(found), torch.cat(labels)


def knn_top1(
    bank: tuple[Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    chunk: int = 1024,
) -> float:
    """Top-1 in percent of a vote of the nearest images of the bank, by cosine similarity.

    A neighbour's vote weighs `exp(similarity / temperature)`.

    Args:
        bank, queries: features (N, D) and labels (N).
        neighbours: fewer where the bank has fewer.
        chunk: queries at a time.
    """
    keys, labels = F.normalize(bank[0], dim=1), bank[1]
    classes, right = int(torch.cat([labels, queries[1]]).max()) + 1, 0
    for features, wanted in zip(torch.split(queries[0], chunk), torch.split(queries[1], chunk), strict=True):
        near = (F.normalize(features, dim=1) @ keys.T).topk(min(neighbours, len(keys)), dim=1)
        votes = features.new_zeros(len(features), classes)
        votes.scatter_add_(1, labels[near.indices], ((near.values - 1) / temperature).exp())
        right += int((votes.argmax(1) == wanted).sum())
    return 100 * right / len(queries[1])


def linear_probe(train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Top-1 in percent of a logistic regression on standardised features, and the weight decay that it chose.

    Of a few strengths of weight decay the one is taken that is best on a fifth of the training images, and of equally
    good ones the strongest. The regression is then fitted to all of them.

    Args:
        train, val: features (N, D) and labels (N).
    """
    (x, y), (query, wanted) = train, val
    classes = int(torch.cat([y, wanted]).max()) + 1
    held = torch.arange(len(y), device=y.device) % HELD_OUT == HELD_OUT - 1
    if not held.any():
        held[-1:] = True
    fold, judged = _standardised(x[~held], x[held])
    scores = {
        strength: _top1(_fit(fold, y[~held], classes, strength), judged, y[held]) for strength in reversed(STRENGTHS)
    }
    best = max(scores, key=lambda strength: scores[strength])  # the first of equals
    x, query = _standardised(x, query)
    return _top1(_fit(x, y, classes, best), query, wanted), best


def _standardised(train: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
    """Both by the mean and the standard deviation of the first."""
    mean, std = train.mean(0), train.std(0, correction=0).clamp(min=1e-6)
    return (train - mean) / std, (val - mean) / std


def _fit(x: Tensor, y: Tensor, classes: int, strength: float) -> nn.Linear:
    """Logistic regression under weight decay, fitted by L-BFGS."""
    layer = nn.Linear(x.shape[1], classes, device=x.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss: Tensor = F.cross_entropy(layer(x), y) + strength * layer.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return layer


@torch.no_grad()
def _top1(layer: nn.Linear, x: Tensor, y: Tensor) -> float:
    return 100 * float((layer(x).argmax(1) == y).float().mean())


@torch.no_grad()
def class_texts(folder: str, names: Sequence[str], template: str, device: torch.device) -> Tensor:
    """An embedding of each class from its name, by the text tower of a model of Transformers. (classes, D)

    Args:
        folder: of a whole CLIPModel, SiglipModel or the like with its tokenizer, or a name on the hub.
        names: of the classes; underscores stand for spaces.
        template: a sentence in which {} stands for the name.

    Raises:
        InputError: the folder holds no such model or no tokenizer, or the template has no {}.
    """
    if "{}" not in template:
        raise InputError(f"--prompt must have {{}} where the name of a class goes; found {template!r}")
    try:
        import transformers
    except ImportError as error:
        raise InputError('texts need the package transformers: pip install "hiap[transformers]"') from error
    texts = [template.replace("{}", name.replace("_", " ")) for name in names]
    try:
        model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).to(device).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        length = model.config.text_config.max_position_embeddings
        given = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        used = {name: given[name].to(device) for name in ("input_ids", "attention_mask") if name in given}
        found = model.get_text_features(**used)
    except Exception as error:  # whatever a library makes of another folder
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{folder} cannot encode texts ({lines[0][:200]}): pass the folder of a whole CLIP or SigLIP model with "
            "its tokenizer"
        ) from error
    return logits_of(found).float()


def zero_shot_top1(texts: Tensor, images: tuple[Tensor, Tensor]) -> float:
    """Top-1 in percent of the class whose text is nearest to an image, by cosine similarity.

    Args:
        texts: an embedding a class, in the order of the labels. (classes, D)
        images: embeddings (N, D) and labels (N).
    """
    similarity = F.normalize(images[0], dim=1) @ F.normalize(texts, dim=1).T
    return 100 * float((similarity.argmax(1) == images[1]).float().mean())
