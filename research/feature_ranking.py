"""Which ranking of units keeps the features of a dense model best, before any training? ViT-Ti, without labels.

    python research/feature_ranking.py --data DIR --weights vit_tiny_tin128.safetensors [--target 70%] [--json FILE]

DIR is made by `tiny_imagenet.py`. Heads are aligned, units of all five kinds are ranked once on 416 training images,
and the network is cut to the target. The feature error is measured on 200 validation images, one of each class. A few
minutes on one CPU core.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import hiap
from hiap.data.sources import Augmentation, ByteData
from hiap.training.phases import align
from methods import BATCHES, FIVE, Peer, controller_of, random_topology
from prune_tiny_imagenet import configuration
from tiny_imagenet import CLASSES, read_tiles

BATCH = 16


def images(folder: Path, size: int, normalisation: tuple[list[float], list[float]]) -> ByteData:
    """Five training images and one validation image of each class, the training images in random order."""
    x, y = read_tiles(folder / "train_0.jpg", range(5))
    mixed = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    names = [str(i) for i in range(CLASSES)]
    plain, val = Augmentation(1.0, 0.5, None, 0.0), read_tiles(folder / "val.jpg", range(1))
    return ByteData((x[mixed], y[mixed]), val, (size, size), normalisation, plain, torch.device("cpu"), 0, names)


def ranked(peer: Peer, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], noisy: bool) -> nn.Module:
    """What squared gate gradients of a loss choose, with gates open or as noisy as at the start of a search."""
    gated, controller = controller_of(peer, FIVE)
    hiap.set_gates(gated.train(), temperature=2.0 if noisy else 1.0, noise_scale=float(noisy))
    torch.manual_seed(0)
    for x, y in peer.batches():
        torch.autograd.grad(loss(gated, x, y), [gate.logit for gate in controller.all_gates])
        controller.observe()
    return hiap.extract(peer.dense, controller.decide(), peer.config.round_to)


def rankings(peer: Peer) -> dict[str, Callable[[], nn.Module]]:
    objective = peer.objective

    def feature_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return objective.weighted(objective.terms(model, x, y))

    def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    return {
        "features with random signs": lambda: ranked(peer, peer.loss, noisy=False),
        "feature loss, gates nearly open": lambda: ranked(peer, feature_loss, noisy=False),
        "feature loss, noisy gates": lambda: ranked(peer, feature_loss, noisy=True),
        "cross-entropy (needs labels)": lambda: ranked(peer, cross_entropy, noisy=False),
        "random": lambda: random_topology(peer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--weights", required=True, help="weights of ViT-Ti (safetensors)")
    parser.add_argument("--target", default="70%", help="share of the MACs")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    given = {"objective": "features", "target": options.target, "batch_size": BATCH, "precision": "fp32", "epochs": 1}
    config = configuration("vit_tiny", options.weights, given)
    assert config.img_size and config.mean and config.std
    data, result = images(options.data, config.img_size, (config.mean, config.std)), {}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(config, Path(folder, "run"), data, lambda peer: peer.dense)
        align(peer.context, peer.dense)
        print(f"{config.target} of the MACs, ranked on {BATCHES * BATCH} images, {data.val_size} scored")
        for name, make in rankings(peer).items():
            scores = peer.context.scores(make().eval(), peer.objective.teacher)
            result[name] = {key: scores[key] for key in ("error", "cosine")}
            print(f"{name:32} feature error {scores['error']:6.1f} %  cosine {scores['cosine']:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"target": options.target, **result}) + "\n")


if __name__ == "__main__":
    main()
