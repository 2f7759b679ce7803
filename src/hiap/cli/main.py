"""The `hiap` command: prune, plan, evaluate, info, bench, measure."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import statistics
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hiap.atomic import write_text
from hiap.errors import HiapError, InputError

__all__ = ["main"]

PRUNE_EXAMPLES = """examples:
  hiap prune --model deit_small_patch16_224 --data imagenet/ --target 3.1G --epochs 300 --out runs/deit_s
  hiap prune --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/ --target 42%
  accelerate launch -m hiap prune --config deit_base_imagenet --data imagenet/ --out runs/deit_b
"""

BENCH_EXAMPLES = """examples:
  hiap bench runs/deit_s
  hiap bench runs/mine --precision bf16 --batch-size 1,64 --mode compile+graph --out speed.json
  hiap bench --model deit_base_patch16_224 --topology deit_base_7.4g --paper
"""

EVALUATE_EXAMPLES = """examples:
  hiap evaluate runs/mine --data photos/
  hiap evaluate --model deit_small_patch16_224 --data imagenet/
  hiap evaluate --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/
"""

MEASURE_EXAMPLES = """examples:
  hiap measure --model deit_base_patch16_224 --device cuda --precision bf16 --batch-size 256 -o h200.json
  hiap prune --model deit_base_patch16_224 --data imagenet/ --target 2.0x --cost h200.json
"""

METAVARS = {  # what stands for the value of an option in help
    **{"model": "NAME", "teacher": "NAME", "data": "FOLDER", "target": "BUDGET"},
    **{"weights": "FILE", "teacher_weights": "FILE", "cost": "TABLE"},
}

# Options of a configuration that `evaluate` takes: for a dense model alone, and for any
DENSE = ("model", "model_args", "weights", "pretrained", "img_size")
INPUT = ("data", "val_split", "input_key", "target_key", "download", "workers", "strict_data", "mean", "std")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command is None:
        _parser().print_help()
        return 0
    try:
        with _plain_warnings():
            status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # a run that could save has said so
        print("hiap: stopped", file=sys.stderr)
        return 130
    except SystemExit as error:
        if error.code == 143:  # SIGTERM
            print("hiap: stopped", file=sys.stderr)
        raise
    except BrokenPipeError:  # whoever reads the output, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HiapError, OSError) as error:  # anything else is a bug, and has its traceback
        print(f"hiap: {error}", file=sys.stderr)
        return 1


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings as one line each, without the line of code they come from."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = Path(__file__).parents[1] in Path(filename).parents and category is UserWarning
        return f"warning: {message}\n" if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


class _HelpAll(argparse.Action):
    """Shows the help of a command with all of its options."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        _parser(every_option=True).parse_args([parser.prog.split()[-1], "--help"])


def _parser(every_option: bool = False) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        every_option: help shows those that few people need, too.
    """
    parser = argparse.ArgumentParser(
        prog="hiap",
        description="Make Vision Transformers smaller and really faster.",
        epilog="example: hiap prune --help",
    )
    parser.add_argument("--version", action="version", version=f"hiap {version('hiap')}")
    commands = parser.add_subparsers(dest="command", title="commands")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=help, description=help, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(run=run)
        return command

    prune = add("prune", _prune, "Prune a trained ViT to a budget in one training phase.", PRUNE_EXAMPLES)
    prune.add_argument("--out", help="folder of the run; the result is in OUT/compact (default runs/NAME)")
    prune.add_argument("--resume", action="store_true", help="go on with the run in OUT, whose options are read there")
    prune.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    _add_options(prune, every_option)
    demo = add(
        "demo",
        _demo,
        "Train a small ViT on handwritten digits and prune it to half of its MACs; no download.",
        "example:\n  hiap demo --out runs/digits",
    )
    demo.add_argument("--out", default="runs/digits", help="folder of the run (default runs/digits)")
    plan = add(
        "plan",
        _plan,
        "Say what a run would do: what is reachable, how long it is; nothing is trained.",
        "example:\n  hiap plan --model deit_small_patch16_224 --no-pretrained --data imagenet/ --target 3.1G",
    )
    _add_options(plan, every_option)
    evaluate = add(
        "evaluate",
        _evaluate,
        "Accuracy of a saved compact model, or of a dense one, on the validation part of a data set.",
        EVALUATE_EXAMPLES,
    )
    _add_evaluate(evaluate)
    info = add(
        "info",
        _info,
        "Show what a saved compact model is made of, block by block.",
        "example:\n  hiap info runs/deit_s/compact",
    )
    info.add_argument("folder", help="a folder written by hiap.save, or that of a run")
    _add_bench(add("bench", _bench, "Time a compact model against its dense one, side by side.", BENCH_EXAMPLES))
    _add_measure(add("measure", _measure, "Time the parts of a model over a grid of widths.", MEASURE_EXAMPLES))
    return parser


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", nargs="?", help="a folder written by hiap.save, or that of a run; or give --model")
    _add_options(command, every_option=True, only=(*DENSE, *INPUT))
    command.add_argument(
        "--batch-size", type=_positive, default=None, help="images at a time (default 256, on a CPU 64)"
    )


def _add_bench(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("folder", nargs="?", help="a folder written by hiap.save, or that of a run; or give --model and --topology")
    add("--against", help="of a folder: 'dense' (default), 'none', or the folder of another model")
    add("--model", help="timm name of a dense model, with random weights")
    add("--topology", help="what to keep of it: a JSON file, deit_base_10.1g or deit_base_7.4g")
    add("--img-size", type=_positive, help="input size of --model")
    add("--round-to", type=_positive, help="multiple that its widths are rounded to (default 8)")
    add("--device", help="cuda or cpu; CUDA by default where there is any")
    add(
        *("--batch-size", "--batch"),
        dest="batch",
        type=_listed(_positive),
        metavar="A,B",
        help="images at a time (default 1,256; CPU: 1,8)",
    )
    add(
        "--precision", type=_listed(str), metavar="A,B", help="of fp32, tf32, bf16, fp16 (default fp32,bf16; CPU: fp32)"
    )
    modes = "of eager, compile, graph, compile+graph (default eager,compile; CPU: eager)"
    add("--mode", type=_listed(str), metavar="A,B", help=modes)
    add("--warmup", type=_positive, help="untimed runs (default 10)")
    add("--runs", type=_positive, help="timed runs of each network (default 50)")
    add(
        "--paper", action="store_true", help="defaults by the paper's protocol: fp32, batch 1,256, eager, 50 + 100 runs"
    )
    add("--out", "--json", dest="json", metavar="FILE", help="write all figures here, as JSON")


def _add_measure(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", required=True, help="timm name of the dense model; its weights do not matter")
    add("--img-size", type=_positive, help="input size; the model's own by default")
    add("--device", help="cuda or cpu; CUDA by default where there is any")
    add("--precision", "--dtype", dest="dtype", help="fp32, tf32, bf16 or fp16 (default bf16; CPU: fp32)")
    add("--batch-size", "--batch", dest="batch", type=_positive, help="images at a time (default 256; CPU: 1)")
    add("--mode", help="how networks will run: eager, graph (default with CUDA) or compile (optimised and compiled)")
    add("--unit", default="ms", help="ms, or mJ where the GPU reports energy (default ms)")
    add("-o", "--out", "--output", dest="output", metavar="FILE", required=True, help="JSON file to write")


def _add_options(command: argparse.ArgumentParser, every_option: bool, only: Sequence[str] | None = None) -> None:
    """One option for each field of the configuration, or for some of them, in groups.

    Args:
        every_option: help shows all, not those alone that most people need.
    """
    from hiap.training.config import CHOICES, FIRST, GROUPS, Config, help_of, recipes

    if only is None:
        command.add_argument("--config", help=f"recipe or YAML file; recipes: {', '.join(recipes())}")
        command.add_argument("--help-all", nargs=0, action=_HelpAll, help="show all options, not only the usual ones")
    defaults, group = Config(), command.add_argument_group("model")
    for name, kind, text in help_of():
        if GROUPS.get(name, "model") != "model":
            group = command.add_argument_group(GROUPS[name])
        if only is not None and name not in only:
            continue
        required = only is not None and name == "data"
        default = None if name == "data" or (only and name == "model") else getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        text = f"{text} (default {default})" if default not in (None, [], {}, 0) else text
        text = text.replace("%", "%%") if every_option or name in FIRST else argparse.SUPPRESS
        more: dict[str, Any] = {"default": None, "help": text, "required": required}
        if bool in (kind, *typing.get_args(kind)):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **more)
        elif name == "ratio":
            group.add_argument(flag, type=_ratio, metavar="MACRO:MICRO", **more)
        elif "list" in str(kind):
            inner = next(a for a in (kind, *typing.get_args(kind)) if typing.get_origin(a) is list)
            group.add_argument(flag, type=_listed(typing.get_args(inner)[0]), metavar="A,B", **more)
        elif name == "model_args":
            group.add_argument(flag, type=_object, metavar="JSON", **more)
        else:
            plain = next(t for t in (*typing.get_args(kind), kind) if t in (int, float, str))
            words = f"{{{','.join(CHOICES[name])}}}" if name in CHOICES else {int: "N", float: "X"}.get(plain, "TEXT")
            group.add_argument(flag, type=plain, metavar=METAVARS.get(name, words), **more)


def _ratio(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(":")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 2:1; found {text[:80]!r}") from None


def _object(text: str) -> Any:
    """A JSON object; what JSON does not have, NaN say, is refused."""

    def refuse(constant: str) -> Any:
        raise InputError(f"{constant} is not JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise argparse.ArgumentTypeError("must be a JSON object; found values nested without end") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"depth\": 6}}'; found {text[:80]!r} ({error})"
        ) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"depth\": 6}}'; found {text[:80]!r}")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 999999999; found {text[:80]!r}")
    return int(text)


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be values with commas between them: {error}") from error
        if text and not found:
            raise argparse.ArgumentTypeError(f"must be values with commas between them; found {text!r}")
        return found

    return read


def _config(options: argparse.Namespace) -> Any:
    from hiap.training.config import help_of, read_config

    given = {name: getattr(options, name) for name, _, _ in help_of() if getattr(options, name) is not None}
    if getattr(options, "resume", False) and options.config is None and options.out:
        from hiap.training.run_folder import CONFIG, RunFolder

        RunFolder.check(Path(options.out), resume=True)
        return read_config(Path(options.out, CONFIG), given)
    if options.config is None and "data" not in given:
        raise InputError(
            f"hiap {options.command} needs images: --data FOLDER with train/ and val/ (or --val-split 0.1), the model "
            "they are for (--model NAME, --weights FILE) and a --target such as 50%. `hiap demo` runs without any"
        )
    return read_config(options.config, given)


def _prune(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.print_config:
        print(config.to_yaml(), end="")
        return 0
    if os.environ.get("RANK", "0") == "0":
        print("reading the model and the data", flush=True)
    try:
        from hiap.training.loop import prune
    except ImportError as error:
        raise InputError(f"training needs {error.name}: pip install 'hiap[train]'") from error
    out = Path(options.out or f"runs/{config.data if config.data == 'digits' else config.model}")
    result = prune(config, out, resume=options.resume)
    if result.main:
        _report(result, config)
    return 0


def _demo(options: argparse.Namespace) -> int:
    return main(["prune", "--config", "digits", "--out", options.out])


def _report(result: Any, config: Any) -> None:
    """The closing table, dense beside compact, and what to do next."""
    from hiap.budget.cost import in_words

    record = result.record
    latency = _latency(result.dense, result.model)
    record |= {"dense_ms": latency[0], "compact_ms": latency[1]}
    cut, speed = record["dense_macs"] / record["macs"], latency[0] / latency[1]
    rows = [("", "dense", "compact", "")]
    change = f"{record['top1'] - record['dense_top1']:+.2f} points"
    rows.append(("top-1", f"{record['dense_top1']:.2f} %", f"{record['top1']:.2f} %", change))
    for name, key in (("MACs", "macs"), ("parameters", "params")):
        dense, compact = record[f"dense_{key}"], record[key]
        rows.append((name, in_words(dense), in_words(compact), f"{compact / dense:.1%}"))
    rows.append(("latency, batch 32", f"{latency[0]:.2f} ms", f"{latency[1]:.2f} ms", f"{speed:.2f}x faster"))
    if "predicted" in record:
        for name, key in (("by the table", "predicted"), ("measured like it", "measured")):
            if key in record:
                dense, compact = record[f"dense_{key}"], record[key]
                unit = record["unit"]
                rows.append((name, f"{dense:.3f} {unit}", f"{compact:.3f} {unit}", f"{dense / compact:.2f}x"))
    for row in rows:
        print(f"{row[0]:18} {row[1]:>12} {row[2]:>12}  {row[3]}")
    search, recover = (record["course"].get(stage) for stage in ("search", "recover"))
    saved = recover["epochs"] * (search["fastest"] - recover["fastest"]) if search and recover else 0.0
    more = f"; without the shrink about {saved:.0f} s more" if saved >= 0.5 and record["shrunk"] else ""
    print(f"training took {record['seconds']:.0f} s{more}")
    print(f"realised: {speed / cut:.0%} of the MAC cut of {cut:.2f}x")
    print(f"gates: soft top-1 {record['soft_top1_start']:.2f} % at step 0; at the freeze:")
    print(
        f"  {record['undecided']:.0%} undecided; MACs soft {record['expected_macs']:.1%}, hard "
        f"{record['hard_macs']:.1%}; top-1 soft {record['soft_top1']:.2f} %, hard {record['hard_top1']:.2f} %"
    )
    write_text(result.folder.parent / "report.json", json.dumps(record, indent=1) + "\n")
    if best := record.get("best"):
        print(f"kept the best epoch on the validation images, {best['epoch']} of {config.epochs}")
    else:
        print("kept the last epoch; --keep best keeps the best on the validation images")
    run, source = shlex.quote(str(result.folder.parent)), shlex.quote(config.data)
    given = [(name, getattr(config, name)) for name in ("val_split", "input_key", "target_key")]
    split = "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given if value)
    print(f"saved in {result.folder}; next:")
    print(f"  hiap info {run}")
    print(f"  hiap evaluate {run} --data {source}{split}")
    print(f"  hiap bench {run}")


def _latency(*models: Any, batch: int = 32) -> list[float]:
    """Median milliseconds of a forward of each model, in turns."""
    import torch

    from hiap.models.registry import family_of
    from hiap.speed.clock import timings

    like = next(models[0].parameters())
    x = torch.randn((batch, *family_of(models[0]).input_shape(models[0])), device=like.device)
    with torch.inference_mode():
        runs = [functools.partial(model.eval(), x) for model in models]
        return [statistics.median(times) for times in timings(runs, like.device, 3, 15, rounds=15)]


def _plan(options: argparse.Namespace) -> int:
    from hiap.training.plan import plan

    for line in plan(_config(options)):
        print(line)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    import torch

    import hiap
    from hiap.models.registry import family_of
    from hiap.training.config import help_of, read_config
    from hiap.training.evaluate import evaluate
    from hiap.training.setup import dense_model, load_data

    names = [name for name, _, _ in help_of() if name in (*DENSE, *INPUT)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if (options.folder is None) == (options.model is None):
        raise InputError("give either a folder, or --model NAME")
    if options.folder is not None and (wrong := [name for name in DENSE if name in given]):
        raise InputError(f"--{wrong[0].replace('_', '-')} goes with --model; a folder is scored as it is")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = read_config(None, {"lambda_macro": 0.0, **given})  # what it would be pruned to does not matter
    model = dense_model(config).to(device).eval() if options.model else hiap.load(_compact(options.folder), device)
    family = family_of(model)
    family.sites(model)  # refuses what cannot be pruned
    classes = family.classes(model)
    if classes == 0:
        raise InputError(f"{config.weights or config.model} holds no classifier, so there is nothing to score")
    config.model_args = {"num_classes": classes}
    data = load_data(config, model, device)
    if data.classes != classes:
        raise InputError(f"the model has {classes} classes, the data {data.classes}")
    own, others = getattr(model, "class_names", None), data.class_names
    if own and others and own != others:
        first = next((a, b) for a, b in zip(own, others, strict=True) if a != b)
        raise InputError(f"the model was trained on other classes: {first[0]!r} stands where the data has {first[1]!r}")
    scores = evaluate(model, data, options.batch_size or (256 if device.type == "cuda" else 64))
    print(f"top-1 {scores['top1']:.2f} %  top-5 {scores['top5']:.2f} %  {scores['images']} images")
    return 0


def _compact(folder: str) -> Path:
    """The compact model that a folder is, or that the run in it has ended with."""
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    if (path / "config.yaml").is_file() and not (path / "compact").is_dir():
        raise InputError(f"{folder} holds a run that has not finished: there is no {path / 'compact'} yet")
    return path / "compact" if (path / "compact").is_dir() else path


def _info(options: argparse.Namespace) -> int:
    import hiap
    from hiap.budget.cost import in_words
    from hiap.models.registry import family_of
    from hiap.pruning.count import macs_of_widths
    from hiap.pruning.extract import provenance_of

    model = hiap.load(_compact(options.folder))
    family, provenance = family_of(model), provenance_of(model)
    assert provenance is not None
    macs, dense = hiap.macs(model), macs_of_widths(model, provenance.dense)
    params = sum(p.numel() for p in model.parameters())
    print(f"MACs        {in_words(macs)}, {macs / dense:.1%} of {in_words(dense)}")
    print(f"parameters  {in_words(params)}")
    print(f"classes     {family.classes(model)}")
    print(f"checked     logits within {provenance.logit_difference:.1e} of the gated model's (relative)")
    print("block  heads  qk_dim  value_dim  neurons")
    for i, site in enumerate(family.sites(model)):
        cells = [site.widths.heads, site.widths.qk_dim, site.widths.value_dim, site.widths.neurons]
        heads, qk_dim, value_dim, neurons = ("-" if cell is None else str(cell) for cell in cells)
        print(f"{i:5}  {heads:>5}  {qk_dim:>6}  {value_dim:>9}  {neurons:>7}")
    return 0


def _device(name: str | None) -> Any:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise InputError(f"--device must be cuda or cpu; found {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; pass --device cpu")
    return device


def _writable(path: str | None) -> None:
    """Raise before any work where a file cannot be written after it."""
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).absolute().parent}")
    if Path(path).is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")


def _bench(options: argparse.Namespace) -> int:
    from hiap.speed.bench import bench, record, table

    device = _device(options.device)
    _writable(options.json)
    on_gpu, paper = device.type == "cuda" and not options.paper, options.paper
    networks = _networks(options)
    settings: dict[str, Any] = {
        "batches": options.batch or ([1, 256] if device.type == "cuda" or paper else [1, 8]),
        "precisions": options.precision or (["fp32", "bf16"] if on_gpu else ["fp32"]),
        "modes": options.mode or (["eager", "compile"] if on_gpu else ["eager"]),
        "warmup": options.warmup or (50 if paper else 10),
        "repeat": options.runs or (100 if paper else 50),
    }
    rows = bench(networks, device, say=lambda text: print(f"timing {text}", file=sys.stderr), **settings)
    found = record(rows, device, settings)
    print(f"{found['device']}, torch {found['torch']}")
    print(table(rows, next(iter(networks))))
    if options.json:
        write_text(options.json, json.dumps(found, indent=1) + "\n")
    return 0


def _networks(options: argparse.Namespace) -> dict[str, Any]:
    """What a bench compares; the first is the base."""
    import hiap
    from hiap.speed.bench import dense_like, find_topology

    if (options.folder is None) == (options.model is None) or (options.model is None) != (options.topology is None):
        raise InputError("give either a folder, or both --model and --topology")
    if options.model and options.against:
        raise InputError("--against goes with a folder; --model is timed against itself")
    if options.folder and (options.img_size or options.round_to):
        raise InputError("--img-size and --round-to go with --model; a folder is timed as it is")
    if options.model:
        dense = _random_model(options)
        topology = find_topology(options.topology)
        return {"dense": dense, "compact": hiap.extract(dense, topology, options.round_to or 8)}
    compact = hiap.load(_compact(options.folder))
    if options.against == "none":
        return {"compact": compact}
    if options.against in (None, "dense"):
        return {"dense": dense_like(compact), "compact": compact}
    return {"other": hiap.load(_compact(options.against)), "compact": compact}


def _random_model(options: argparse.Namespace) -> Any:
    from hiap.models.weights import create_model

    return create_model(options.model, False, {"img_size": options.img_size} if options.img_size else {}).eval()


def _measure(options: argparse.Namespace) -> int:
    from hiap.budget.latency import LatencyCost
    from hiap.models.registry import sites
    from hiap.speed.measure import measure

    device, start = _device(options.device), time.perf_counter()
    _writable(options.output)
    model = _random_model(options).to(device)
    gpu = device.type == "cuda"
    dtype, batch = options.dtype or ("bf16" if gpu else "fp32"), options.batch or (256 if gpu else 1)
    found = measure(model, device, dtype, batch, options.unit, options.mode, options.model, say=print)
    found.save(options.output)
    parts = LatencyCost(model, found).of_widths(model, [site.widths for site in sites(model)])
    print(
        f"{found.device}, {found.precision}, batch {found.batch}: dense {found.dense:.3f} {found.unit}, "
        f"{parts:.3f} {found.unit} by the table, which targets are read on"
    )
    if abs(parts / found.dense - 1) > 0.1:
        print("the two are more than 10 % apart: the device was busy, or is too uneven for its parts to add up")
    print(f"saved in {options.output}, after {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
