"""From a dense ViT to a smaller one and back from disk, without training: what each stage does.

python examples/library.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import timm
import torch

import hiap


def main() -> None:
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    dense_macs = hiap.macs(dense)
    print(f"dense      {dense_macs / 1e6:7.1f} M MACs")

    gated = hiap.attach(dense)  # in place: the same model, with gates on heads, value dims, FFN blocks and neurons
    print(f"attached   {sum(gate.logit.numel() for gate in hiap.gates(gated))} gates")

    for gate in hiap.gates(gated):  # a training run would move the logits; here they are random
        gate.logit.data = torch.randn_like(gate.logit) + 0.5
    print(f"hardened   {hiap.macs(gated) / 1e6:7.1f} M MACs")

    compact = hiap.extract(gated)  # a plain module, checked against the gated one
    kept = hiap.macs(compact) / dense_macs
    print(f"extracted  {hiap.macs(compact) / 1e6:7.1f} M MACs, widths padded to 8: {kept:.0%} of the dense model")
    print(f"verified   logits differ by {compact.hiap.logit_difference:.1e} (allowed {compact.hiap.tolerance:.0e})")

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(), "compact")
    hiap.save(compact, folder)
    loaded = hiap.load(folder)
    x = torch.randn(1, 3, 64, 64)
    same = torch.equal(loaded(x), compact.eval()(x))
    print(f"saved      {', '.join(sorted(p.name for p in folder.iterdir()))} in {folder}")
    print(f"loaded     logits equal: {same}")


if __name__ == "__main__":
    main()
