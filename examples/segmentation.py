"""A segmentation head on frozen features: the dense backbone beside the pruned one.

python examples/segmentation.py RUN --data photos/ [--steps 500]

RUN is the folder of `hiap prune` (a timm model, best with --objective features). photos/ has `train/` and `val/` with
a folder for each class. A scene is made of four photos of random classes and sizes; the task is to name the class at
every patch. So no masks are needed, and the labels are exact. One linear layer is trained on the tokens of each
backbone.
"""

import argparse
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as pictures

import hiap
from hiap.training.setup import dense_model

BATCH, TESTED = 32, 16  # scenes per batch, and batches that are scored


def read_photos(folder: Path, size: tuple[int, int], most: int) -> tuple[Tensor, Tensor, int]:
    """At most `most` photos as bytes (N, 3, H, W), with their labels (N) and the number of classes."""
    found = ImageFolder(folder)
    chosen = found.samples[:: -(-len(found) // most)]
    images = [pictures.pil_to_tensor(pictures.resize(found.loader(path), list(size))) for path, _ in chosen]
    return torch.stack(images), torch.tensor([label for _, label in chosen]), len(found.classes)


def scenes(photos: Tensor, labels: Tensor, grid: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of scenes as bytes (B, 3, H, W), and the class of every patch (B, h, w)."""
    (rows, columns), (height, width) = grid, photos.shape[-2:]
    down, across = height // rows, width // columns
    y, x = (int(torch.randint(max(1, n // 4), n - n // 4, (), generator=generator)) for n in grid)  # where they meet
    scene = torch.zeros(BATCH, 3, height, width)
    answer = torch.zeros(BATCH, rows, columns, dtype=torch.long)
    for top, bottom in ((0, y), (y, rows)):
        for left, right in ((0, x), (x, columns)):
            some = torch.randint(len(photos), (BATCH,), generator=generator)
            shape = ((bottom - top) * down, (right - left) * across)
            small = F.interpolate(photos[some].float(), shape, mode="bilinear", antialias=True)
            scene[:, :, top * down : bottom * down, left * across : right * across] = small
            answer[:, top:bottom, left:right] = labels[some].view(-1, 1, 1)
    return scene, answer


class Backbone(nn.Module):
    """Frozen patch tokens as a feature map. (B, 3, H, W) bytes -> (B, D, h, w)"""

    def __init__(self, model: nn.Module, use: dict) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.register_buffer("mean", torch.tensor(use["mean"]).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(use["std"]).view(1, -1, 1, 1))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        x = (images / 255 - self.mean) / self.std
        return self.model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)[0]


def segment(backbone: Backbone, train: tuple, val: tuple, steps: int, device: torch.device) -> tuple[float, float]:
    """Train a linear layer on the tokens; mean IoU over classes and share of patches that are right, in percent."""
    grid, classes = backbone.model.patch_embed.grid_size, train[2]
    head = nn.Conv2d(backbone.model.embed_dim, classes, 1).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)  # the same scenes for every backbone
    for _ in range(steps):
        images, answer = (one.to(device) for one in scenes(*train[:2], grid, generator))
        loss = F.cross_entropy(head(backbone(images)), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    counts = torch.zeros(classes, classes)  # patches by true and by predicted class
    generator.manual_seed(1)
    for _ in range(TESTED):
        images, answer = scenes(*val[:2], grid, generator)
        said = head(backbone(images.to(device))).argmax(1).cpu()
        counts += torch.bincount((answer * classes + said).flatten(), minlength=classes**2).view(classes, classes)
    both, either = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
    seen = counts.sum(1) > 0
    return 100 * float((both / either)[seen].mean()), 100 * float(both.sum() / counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of `hiap prune`")
    parser.add_argument("--data", type=Path, required=True, help="photos with train/ and val/, a folder for each class")
    parser.add_argument("--steps", type=int, default=500, help="training steps of the head")
    parser.add_argument("--photos", type=int, default=20_000, help="photos to read, at most")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compact = hiap.load(options.run / "compact")
    use = timm.data.resolve_data_config({}, model=compact)
    train, val = (read_photos(options.data / part, use["input_size"][1:], options.photos) for part in ("train", "val"))
    for name, model in (
        ("dense", dense_model(hiap.read_config(options.run / "config.yaml"))),
        ("compact", compact),
    ):
        torch.manual_seed(0)
        iou, right = segment(Backbone(model, use).to(device), train, val, options.steps, device)
        print(f"{name:8} {hiap.macs(model) / 1e6:8.1f} M MACs  mean IoU {iou:.2f} %  patches right {right:.2f} %")


if __name__ == "__main__":
    main()
