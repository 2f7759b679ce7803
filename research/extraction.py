"""Time of attach + extract, the check of the logits included.

    python research/extraction.py [--model deit_base_patch16_224] [--json FILE]

Random weights: the time does not depend on them. Half of the heads and half of the neurons are closed.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch

import hiap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_base_patch16_224")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    seconds = []
    for _ in range(options.repeat):
        model = timm.create_model(options.model)
        start = time.perf_counter()
        hiap.attach(model)
        for gate in hiap.gates(model):
            if gate.logit.numel() > 1:
                gate.logit.data[::2] = -1.0
        compact = hiap.extract(model)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    result = {
        "model": options.model,
        "threads": torch.get_num_threads(),
        "macs": hiap.macs(compact),
        "median_s": seconds[len(seconds) // 2],
        "worst_s": seconds[-1],
    }
    print("{model}: attach + extract {median_s:.2f} s (worst {worst_s:.2f} s), {threads} threads".format(**result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
