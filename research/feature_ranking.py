"""Which ranking of units keeps the features of a dense model best, before any training? ViT-Ti, without labels.

    python research/feature_ranking.py --data DIR --weights vit_tiny_tin128.safetensors [--target 70%] [--json FILE]
    python research/feature_ranking.py --data DIR --weights FILE --search --target 60% --seeds 0,1

DIR is made by `tiny_imagenet.py`. Heads are aligned, units of all five kinds are ranked once on 416 training images,
and the network is cut to the target. The feature error is measured on 200 validation images, one of each class. A few
minutes on one CPU core.

`--search` compares two rankings inside a run instead: by default 43 steps of 32 images, of which 26 search. `--images`,
`--batch-size`, `--epochs`, `--lr` and `--freeze-at` make it longer.
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
from hiap.training.config import Config
from hiap.training.loop import Run
from hiap.training.phase import Phase
from hiap.training.phases import Search
from methods import BATCHES, FIVE, Peer, controller_of, random_topology
from prune_tiny_imagenet import configuration
from tiny_imagenet import CLASSES, read_tiles

BATCH = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def images(folder: Path, config: Config, count: int) -> ByteData:
    """So many training images of each class, at most 50, and a tenth as many validation images, at least one."""
    assert config.img_size and config.mean and config.std
    train = read_tiles(folder / "train_0.jpg", range(count))
    val = read_tiles(folder / "val.jpg", range(max(1, count // 10)))
    size, normalisation = (config.img_size, config.img_size), (config.mean, config.std)
    varied, names = Augmentation(config.crop, config.flip, None, 0.0), [str(i) for i in range(CLASSES)]
    return ByteData(train, val, size, normalisation, varied, DEVICE, config.seed, names)


def ranked(peer: Peer, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], noisy: bool) -> nn.Module:
    """What squared gate gradients of a loss choose, with gates open or as noisy as at the start of a search."""
    gated, controller = controller_of(peer, FIVE)
    hiap.set_gates(gated.train(), temperature=2.0 if noisy else 1.0, noise_scale=float(noisy))
    torch.manual_seed(0)
    for x, y in peer.batches():
        torch.autograd.grad(loss(gated, x, y), [gate.logit for gate in controller.all_gates], allow_unused=True)
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


class LossRanked(Search):
    """A search that ranks units by the squared gradient of the feature loss itself, under its noisy gates."""

    def terms(self, model: nn.Module, x: Tensor, target: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        assert self.controller is not None
        self.controller.listen(True)
        return Phase.terms(self, model, x, target, share)


def searched(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The feature error after a run, by how its search ranks units."""
    result = {}
    given = {"objective": "features", "target": options.target, "batch_size": options.batch_size, "crop": 0.5}
    given |= {"epochs": options.epochs, "lr": options.lr, "freeze_at": options.freeze_at, "eval_every": 1000}
    given |= {"warmup_epochs": 0.1 * options.epochs, "precision": "bf16" if DEVICE.type == "cuda" else "fp32"}
    for seed in map(int, options.seeds.split(",")):
        for name, kind in (("features with random signs", Search), ("feature loss, noisy gates", LossRanked)):
            config = configuration("vit_tiny", options.weights, {**given, "seed": seed})
            with tempfile.TemporaryDirectory() as folder:
                data = images(options.data, config, options.images)
                record = Run(config, Path(folder, "run"), data=data, first=kind).go().record
            key = f"{name}, seed {seed}"
            found = result[key] = {part: record[part] for part in ("hard_error", "error", "cosine")}
            print(
                f"{key:36} error at the freeze {found['hard_error']:.1f} %, in the end {found['error']:.1f} %",
                flush=True,
            )
    return result


def ranked_once(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The feature error of networks that are cut at once and not trained, by how units are ranked."""
    given = {"objective": "features", "target": options.target, "batch_size": BATCH, "precision": "fp32", "epochs": 1}
    config = configuration("vit_tiny", options.weights, {**given, "crop": 1.0})
    data, result = images(options.data, config, 5), {}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(config, Path(folder, "run"), data, lambda peer: peer.dense)
        peer.context.align(peer.dense)
        print(f"{config.target} of the MACs, ranked on {BATCHES * BATCH} images, {data.val_size} scored")
        for name, make in rankings(peer).items():
            scores = peer.context.scores(make().eval(), peer.objective.teacher)
            result[name] = {key: scores[key] for key in ("error", "cosine")}
            print(f"{name:32} feature error {scores['error']:6.1f} %  cosine {scores['cosine']:.3f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--weights", required=True, help="weights of ViT-Ti (safetensors)")
    parser.add_argument("--target", default="70%", help="share of the MACs")
    parser.add_argument("--search", action="store_true", help="rank inside a short run")
    parser.add_argument("--seeds", default="0", help="of these runs")
    parser.add_argument("--images", type=int, default=7, help="training images of a class, at most 50")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--freeze-at", type=float, default=0.6, help="share of the run that searches")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    result = searched(options) if options.search else ranked_once(options)
    if options.json:
        options.json.write_text(json.dumps({"target": options.target, **result}) + "\n")


if __name__ == "__main__":
    main()
