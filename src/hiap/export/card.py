"""The model card of a compact model: README.md for the hub, from the saved folder and what its run has reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

__all__ = ["model_card"]


def model_card(folder: Path, repo: str, license_id: str | None = None) -> str:
    """The text of README.md, with the header that the hub reads.

    Args:
        folder: of a compact model. `report.json` and `config.yaml` of its run are used where they are beside it.
        repo: USER/NAME, for the lines that load it.
        license_id: of the weights; by default that of the dense model, where timm knows it.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    report, options = _beside(folder)
    usage = config.get("pretrained_cfg") or config.get("preprocessing") or {}
    inherited = usage.get("license")
    license_id = license_id or inherited
    base = usage.get("hf_hub_id")
    header = {
        "library_name": "hiap",
        "pipeline_tag": "image-classification" if config["num_classes"] else "image-feature-extraction",
        "tags": ["vision-transformer", "pruning", "hiap"],
        **({"license": license_id} if license_id else {}),
        **({"base_model": base} if base else {}),
    }
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {repo.partition('/')[2]}",
        f"`{_name(config, options, usage)}`, pruned by HiAP to {config['macs'] / config['dense_macs']:.1%} of its "
        "MACs. It is an ordinary dense network: no masks, no sparse kernels.",
        _comparison(config, report),
        _usage(config, repo),
        _provenance(config, options, license_id, inherited),
        _blocks(config["blocks"]),
    ]
    return "\n\n".join(parts) + "\n"


def _name(config: dict[str, Any], options: dict[str, Any], usage: dict[str, Any]) -> str:
    """The dense model by a name that others know. A run may have begun from a folder, whose path tells them nothing."""
    import timm

    given = str(options.get("model", ""))
    on_hub = re.fullmatch(r"hf(-hub)?:([\w.-]+/[\w.-]+)", given)
    if timm.is_model(given) or given.startswith("torchvision:") or (on_hub and not Path(on_hub[2]).is_dir()):
        return given
    return str(usage.get("architecture") or (config.get("architectures") or [config["family"]])[0])


def _beside(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """report.json and config.yaml of the run that wrote a folder; empty where there is none."""
    report, options = folder.resolve().parent / "report.json", folder.resolve().parent / "config.yaml"
    try:
        found = json.loads(report.read_text(encoding="utf-8")), yaml.safe_load(options.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}, {}
    return found if all(isinstance(one, dict) for one in found) else ({}, {})


def _comparison(config: dict[str, Any], report: dict[str, Any]) -> str:
    """What the run began from and the compact model side by side. Only what was measured is told."""
    before, rows = report.get("dense_macs", config["dense_macs"]), []
    if "top1" in report and "dense_top1" in report:
        rows.append(f"| top-1 accuracy | {report['dense_top1']:.2f} % | {report['top1']:.2f} % |")
    rows.append(f"| MACs of one image | {before:,} | {config['macs']:,} |")
    if "dense_params" in report:
        rows.append(f"| parameters | {report['dense_params']:,} | {config['params']:,} |")
    else:
        rows.append(f"| parameters | | {config['params']:,} |")
    head = "dense" if before == config["dense_macs"] else "before this run, pruned already"
    return "\n".join([f"| | {head} | compact |", "|---|---|---|", *rows])


def _usage(config: dict[str, Any], repo: str) -> str:
    lines = ["import hiap", "", f'model = hiap.load("hf://{repo}")']
    if config["family"] == "transformers":
        auto = "AutoModelForImageClassification" if config["num_classes"] else "AutoModel"
        lines += ["", "# or, after `import hiap`:", f"from transformers import {auto}", ""]
        lines += [f'model = {auto}.from_pretrained("{repo}")']
    return "## Use it\n\n```python\n" + "\n".join(lines) + "\n```\n\n`pip install hiap` first."


def _provenance(config: dict[str, Any], options: dict[str, Any], license_id: str | None, inherited: str | None) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in config["versions"].items())
    lines = ["## Where it comes from", "", f"- made with {versions}"]
    kept = [name for name in ("target", "epochs", "objective", "seed") if options.get(name) is not None]
    if kept:
        lines.append("- settings: " + ", ".join(f"`{name} {options[name]}`" for name in kept))
    if options.get("data"):
        lines.append(f"- trained and scored on `{Path(str(options['data'])).name}`")
    lines.append(
        f"- at extraction, its outputs were within {config['logit_difference']:.1e} of the gated network's (relative)"
    )
    if license_id == inherited:
        known = f"`{license_id}`, " if license_id else ""
        lines.append(f"- licence: {known}that of the weights it was made from. Check that it suits your data too")
    else:
        lines.append(f"- licence: `{license_id}`. Check that the weights it was made from and your data allow it")
    return "\n".join(lines)


def _blocks(blocks: list[dict[str, Any]]) -> str:
    names = ("heads", "qk_dim", "value_dim", "neurons")
    rows = [
        f"| {i} | " + " | ".join("-" if block[name] is None else str(block[name]) for name in names) + " |"
        for i, block in enumerate(blocks)
    ]
    head = ["| block | heads | q/k dims | value dims | neurons |", "|---|---|---|---|---|"]
    return "\n".join(
        ["## Blocks", "", *head, *rows, "", "A dash means that the branch is gone, 0 that it is a constant."]
    )
