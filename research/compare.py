"""HiAP against its peers: one dense start, one data set, one budget, one training loop. Every run leaves a record.

    python research/compare.py run --data IMAGES --model NAME [--img-size 224] [--weights FILE] --records FILE
        [--target 50%] [--epochs 15] [--methods hiap,taylor] [--rates 5e-4,1e-3] [--trial-epochs 5] [--seeds 0,1,2]
        [--held-out] [--like hiap] [--hours 0.4] [--set KEY=VALUE]
    python research/compare.py run --methods hiap_time,taylor --target 1.8ms --cost TABLE ... (the same options)
    python research/compare.py run --methods hiap --target 70%,50%,35% --rates 5e-4 ... (the same options)
    python research/compare.py run --data TINY --start vit_tiny --weights FILE --records FILE ... (the same options)
    python research/compare.py clock|speed ... (the same options)
    python research/compare.py times --methods torch_pruning_taylor --target 50%,60%,70% ... (the same options)
    python research/compare.py batch --list FILE --jobs 8 ... (options of all lines)
    python research/compare.py table --records FILE [--plots DIR]

IMAGES holds `train/` and `val/`, with a folder for each class. TINY is the folder that `tiny_imagenet.py` makes.

`run` takes two steps for each method. It tries a grid of learning rates (the same for all methods, seed 0) on a
held-out tenth of the training images. Then it trains on all of them at the best learning rate, once for each seed, and
scores on the validation set. A run that is recorded is not repeated, so a comparison continues where it stopped, and
several processes may share a device and a records file. `--like hiap` gives every other method as many epochs as fit
into HiAP's training time. `--set` makes a variant of a method, with rows of its own.

With `--cost`, a table of `hiap measure`, the target is in time. `hiap_time` is HiAP with that target. Every other
method gets the most MACs with which it meets the target, `hiap` too. On the device of the table the networks of final
runs are timed before they are trained or cut out, while the other runs of a batch stand still, and chosen again where
the table is wrong. Runs that only choose a learning rate trust the table.

Several targets are the sizes of one run (`--epochs` is the length of all of them), at one learning rate. Each leaves a
record with the epochs up to it, whose `set` names the sizes before it: `after=70%:5` is five epochs at 70 %.

`--compile` compiles the training steps of all methods (HiAP's after its search). Where several runs share a device, it
has less to do for each; a run alone gains little, because compiling takes half a minute.

`clock` and `speed` measure time and need the device to themselves; in a batch, the other runs stand still for `speed`.
`clock` times training steps of each method; once there is such a record, tables and plots show no other training times.
`speed` times a forward of the pruned networks of all `--seeds` side by side: with `--cost` as the table was measured,
else compiled where there is a GPU. `times` does it for what peers make at several targets, untrained: a method that no
table knows is brought to a time in this way. Networks of Torch-Pruning run as they are and optimised, and the faster
form counts.

`batch` runs a list of such commands, one on each line, several at a time. Commands below a line `wait` start when all
above it have finished. `table` prints tables and draws plots. Torch-Pruning's methods need `torch-pruning`, plots need
`matplotlib`.
"""

import argparse
import copy
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bookkeeping import (
    best_rate,
    epochs_of,
    finished_records,
    hiap_widths,
    label_free,
    like,
    records_of,
    setting,
    write,
)
from checks import check
from forwards import Forward
from hiap.budget.controller import BudgetError
from hiap.budget.latency import LatencyTable
from hiap.data.sources import ByteData
from hiap.models.registry import sites
from hiap.training.config import Config, read_config
from hiap.training.schedule import projection_interval
from hiap.training.setup import dense_model, load_data
from ladders import take_ladder
from methods import (
    ALIGNED,
    GATED,
    LEARNED,
    METHODS,
    OPTIONS,
    PEERS,
    TIMED,
    Peer,
    from_scratch,
    gated_run,
)
from outcome import outcome
from prune_tiny_imagenet import BASE, STARTS, assignments, configuration, tenths
from record import CLOCK, KEY, SPEED, network_of, read
from report import table
from turns import LOCK, lock_of_batch, resume_all

CLOCKED = 12  # steps of an epoch that `clock` takes

_DATA: dict[bool, ByteData] = {}


# -- running ----------------------------------------------------------------------------------------------------------


def config_of(options: argparse.Namespace, method: str, lr: float, seed: int, epochs: int) -> Config:
    given: dict[str, Any] = {"target": options.target, "epochs": epochs, "lr": lr, "seed": seed, "eval_every": 1000}
    if not label_free(options):
        given["distill_features"] = 0.0  # one distillation for all, and networks of Torch-Pruning are narrower
    if method in LEARNED:  # penalised gates are learned, not set
        given |= {"gate_mode": "gradient", "granularities": ["head", "ffn", "value_dim", "neuron"], "gate_lr": 2e-2}
        given |= {"freeze_at": 0.3, "align_heads": False}
        given |= OPTIONS[method]
    given |= {"cost": str(options.cost)} if options.cost else {}
    given |= assignments(options.set)
    if options.model is None:
        return configuration(options.start, options.weights, given)
    own = {"model": options.model, "weights": options.weights, "data": str(options.data), "data_device": "cuda"}
    return read_config(None, {**BASE, **own, "img_size": options.img_size, **given})


def data_of(options: argparse.Namespace, config: Config, final: bool, device: torch.device) -> ByteData:
    """The images of a run; they are read once."""
    if final not in _DATA:
        if options.model is None:
            _DATA[final] = tenths(options.data, config, final, device, options.limit)
        else:
            model = dense_model(config)
            sites(model)  # refuses what is no ViT
            data = load_data(replace(config, objective="labels"), model, device)  # nearest neighbours need them too
            if not isinstance(data, ByteData):
                raise ValueError("all methods share images that are held in memory: data_device must be cuda or cpu")
            _DATA[final] = data if final else data.held_out()
    data = copy.copy(_DATA[final])
    data.seed = config.seed
    return data


def run_method(
    options: argparse.Namespace, method: str, config: Config, final: bool | str, device: torch.device
) -> dict[str, Any]:
    """One run of one method: its accuracy, cost and time."""
    data = data_of(options, config, final is not False, device)
    steps = data.train_size // config.batch_size
    if final == CLOCK:
        data = data.first(CLOCKED * config.batch_size)
    longer = steps / (data.train_size // config.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        if method in GATED:
            every = None
            if final == CLOCK:  # as often as in the whole run, which has a longer search
                searched = records_of(options, method, True)[0].search * options.epochs * steps
                every = projection_interval(round(searched))
            run = gated_run(method, config, out, data, every, options.compile, timed=final is True)
            result = run.go()
            found = outcome(run, result.model, result.record, out, longer, final != CLOCK)
        else:
            peer = peer_of(options, method, config, final, data, out)
            widths = "torch_pruning" not in method
            found = outcome(peer, peer.train(), peer.record, out, longer, final != CLOCK, widths)
        if options.keep and final is True:
            name = f"{method} {options.target} lr {config.lr:g} seed {config.seed}"
            shutil.copytree(out, options.keep / name.replace(" ", "_"), dirs_exist_ok=True)
        return found


def peer_of(
    options: argparse.Namespace, method: str, config: Config, final: bool | str, data: ByteData, out: Path
) -> Peer:
    make = PEERS.get(method) or (lambda peer: from_scratch(peer, hiap_widths(options, config.seed, final)))
    return Peer(config, out, data, make, options.compile, timed=final is True)


def run(options: argparse.Namespace) -> None:
    """Run what is not recorded yet: learning rates on held-out images, then every seed at the best one."""
    deadline = time.perf_counter() + 3600 * options.hours
    rates, seeds = [float(rate) for rate in options.rates.split(",")], [int(s) for s in options.seeds.split(",")]
    refused = []
    for method in options.methods.split(","):
        if method == options.like:  # its runs at equal epochs are those
            continue
        try:
            if "," in options.target:
                for seed in seeds:
                    several_sizes(options, method, rates[0], seed, deadline)
                continue
            if len(rates) > 1 or options.held_out:
                for lr in rates:
                    take_record(options, method, lr, 0, False, options.trial_epochs or options.epochs, deadline)
            for seed in [] if options.held_out else seeds:
                epochs = epochs_of(options, method) if options.like else options.epochs
                take_record(options, method, best_rate(options, method, rates), seed, True, epochs, deadline)
        except BudgetError as error:  # its kinds of units do not go as far; the other methods go on
            refused.append(f"{method}: {error}")
    if refused:
        raise SystemExit("\n".join(["these methods were not run:", *refused]))


def several_sizes(options: argparse.Namespace, method: str, lr: float, seed: int, deadline: float) -> None:
    """A record for each target of one run."""
    if time.perf_counter() > deadline:
        raise SystemExit("out of time; the same command goes on from here")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, final = config_of(options, method, lr, seed, options.epochs), not options.held_out
    take_ladder(options, method, config, final, lambda: data_of(options, config, final, device), device)


def clock(options: argparse.Namespace) -> None:
    """Time an epoch of each stage (by the fastest of three parts), of every method with finished runs."""
    for method in options.methods.split(","):
        seed = finished_records(options, method)[0].seed
        take_record(options, method, 1e-4, seed, CLOCK, 6 if method in GATED else 3)


def speed(options: argparse.Namespace) -> None:
    """Time a forward of every method's networks, side by side with the dense model; with --cost, as the table says."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(options, options.methods.split(",")[0], 1e-4, 0, options.epochs)
    dense = dense_model(config).to(here).eval()
    how = Forward.of(LatencyTable.load(options.cost)) if options.cost else Forward.usual(dense, here)
    methods = options.methods.split(",")
    finished = {(method, one.seed): one for method in methods for one in finished_records(options, method)}
    plain: dict[Any, torch.nn.Module] = {"dense": dense}
    optimised: dict[Any, torch.nn.Module] = {"dense, optimised": dense} if how.by_torch else {}
    for key, record in finished.items():
        if record.widths is None:
            plain[key] = optimised[key] = made_network(options, key[0], record.lr, record.seed, here)
        else:
            optimised[key] = network_of(record.widths, dense)
    ms = how.times(plain, optimised)
    for (method, seed), record in finished.items():
        place = (*setting(options), options.epochs, None, method, record.lr, seed, SPEED)
        took = ms[method, seed]
        found = {"ms": took, "dense_ms": ms["dense"], "dense_optimised_ms": ms.get("dense, optimised")}
        found |= {"batch": how.batch, "precision": how.precision, "mode": how.mode}
        write(options, dict(zip(KEY, place, strict=True)) | found, how.device)
        print(f"{method} seed {seed}: {took:.3f} ms, {ms['dense'] / took:.2f}x", flush=True)


def times(options: argparse.Namespace) -> None:
    """Time a forward of what peers make at each --target, untrained: which target in MACs meets a time?"""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made: dict[Any, torch.nn.Module] = {}
    for method, target in itertools.product(options.methods.split(","), options.target.split(",")):
        own = copy.copy(options)
        own.target = target
        made[method, target] = made_network(own, method, 1e-4, int(options.seeds.split(",")[0]), here)
    dense = dense_model(config_of(own, method, 1e-4, 0, options.epochs)).to(here).eval()
    narrower = {key: network for key, network in made.items() if "torch_pruning" in key[0]}
    ms = Forward.usual(dense, here).times({"dense": dense, **narrower}, made)
    for method, target in made:
        print(f"{method} {target}: {ms[method, target]:.3f} ms, {ms['dense'] / ms[method, target]:.2f}x", flush=True)


def made_network(
    options: argparse.Namespace, method: str, lr: float, seed: int, device: torch.device
) -> torch.nn.Module:
    """The network that a peer trains, as it is at first."""
    config = config_of(options, method, lr, seed, options.epochs)
    with tempfile.TemporaryDirectory() as folder:
        data = data_of(options, config, True, device)
        return peer_of(options, method, config, True, data, Path(folder, "run")).network()


def take_record(
    options: argparse.Namespace,
    method: str,
    lr: float,
    seed: int,
    final: bool | str,
    epochs: int,
    deadline: float = float("inf"),
) -> None:
    """One more record, unless it is there."""
    place = (*setting(options), epochs, like(options) if final is True else None, method, lr, seed, final)
    if any(record.key == place for record in read(options.records)):
        print(f"{method} lr {lr:g} seed {seed}: recorded already", flush=True)
        return
    if time.perf_counter() > deadline:
        raise SystemExit("out of time; the same command goes on from here")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(options, method, lr, seed, epochs)
    if final == CLOCK:
        config.freeze_at = 0.5
    record = dict(zip(KEY, place, strict=True)) | run_method(options, method, config, final, device)
    record |= {"trial_epochs": options.trial_epochs} if final is True and options.trial_epochs else {}
    write(options, record, device)
    kind = final if isinstance(final, str) else "final" if final else "held out"
    share = record["macs"] / record["dense_macs"]
    print(f"{method} lr {lr:g} seed {seed} {kind}: {record['top1']:.2f} %, {share:.1%}", flush=True)


def add_options(go: argparse.ArgumentParser, function: Callable[[argparse.Namespace], None]) -> None:
    go.set_defaults(go=function)
    go.add_argument("--data", type=Path, required=True)
    go.add_argument("--weights", help="of the dense start; with --model timm's pretrained ones by default")
    go.add_argument(
        "--start", choices=sorted(STARTS), default="vit_tiny", help="dense model, with the folder of tiny_imagenet.py"
    )
    go.add_argument("--model", help="timm name, with a folder of images")
    go.add_argument("--img-size", type=int)
    go.add_argument(
        "--target", default="50%", help="share of the dense model's MACs; with --cost in time; several: 70%%,50%%"
    )
    go.add_argument("--cost", type=Path, help="a table of `hiap measure`, for a target in time")
    go.add_argument("--keep", type=Path, metavar="DIR", help="copy the folder of every final run here")
    go.add_argument("--epochs", type=int, default=15)
    go.add_argument(
        "--methods",
        "--arms",
        help="--arms is the old spelling",
        default=",".join(method for method in METHODS if method not in (TIMED, ALIGNED)),
    )
    go.add_argument("--rates", default="2e-4,5e-4,1e-3", help="learning rates to try; a single one is used as it is")
    go.add_argument("--trial-epochs", type=int, help="of the runs that choose a learning rate; as --epochs by default")
    go.add_argument("--seeds", default="0,1,2")
    go.add_argument("--held-out", action="store_true", help="only the runs that choose a learning rate")
    go.add_argument("--like", help="as much training time as this method took, instead of as many epochs")
    go.add_argument("--hours", type=float, default=1e9, help="start no run after this time")
    go.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of all runs, as YAML")
    go.add_argument("--limit", type=int, default=50, help="images of a class in each tenth; fewer for a quick try")
    go.add_argument(
        "--compile", action="store_true", help="compile training steps after the search: for runs that share a device"
    )
    go.add_argument("--commit", help="to be recorded; that of the checkout by default")
    go.add_argument("--records", type=Path, required=True)


def batch(options: argparse.Namespace, common: list[str], parser: argparse.ArgumentParser) -> None:
    """Run a list of commands, several at a time; one that fails does not stop the others."""
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1; found {options.jobs}")
    groups: list[list[list[str]]] = [[]]
    for line in options.list.read_text().splitlines():
        words = shlex.split(line, comments=True)
        if words == ["wait"]:
            groups.append([])
        elif words:
            groups[-1].append([words[0], *common, *words[1:]])
    for command in (command for group in groups for command in group):
        if command[0] not in COMMANDS:
            raise ValueError(f"a line of {options.list} begins with {', '.join(COMMANDS)} or wait; found {command[0]}")
        check(parser.parse_args(command))  # all of them before the first is run

    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))}

    def failed(command: list[str]) -> bool:
        variables = threads | os.environ | {LOCK: lock.name}
        ended = subprocess.run([sys.executable, __file__, *command], env=variables).returncode
        if ended < 0:  # killed, and perhaps while the others stood still for it
            resume_all()
        return bool(ended)

    with lock_of_batch() as lock, ThreadPoolExecutor(options.jobs) as pool:
        lost = [shlex.join(c) for group in groups for c, bad in zip(group, pool.map(failed, group), strict=True) if bad]
    if lost:
        raise SystemExit("\n".join(["these failed; the same batch tries them again, and nothing else:", *lost]))


COMMANDS = {"run": run, "clock": clock, "speed": speed, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in COMMANDS.items():
        add_options(commands.add_parser(name, help=function.__doc__), function)
    many = commands.add_parser("batch", help=batch.__doc__)
    many.set_defaults(go=batch)
    many.add_argument("--list", type=Path, required=True, help="commands such as `run --methods hiap`, a line each")
    many.add_argument("--jobs", type=int, default=1, help="at a time")
    show = commands.add_parser("table", help="tables and plots of the records")
    show.set_defaults(go=table)
    show.add_argument("--records", type=Path, required=True)
    show.add_argument("--plots", type=Path, help="folder for the plots")
    options, common = parser.parse_known_args()
    try:
        if options.go is batch:
            return batch(options, common, parser)
        options = parser.parse_args()
        if options.go is not table:
            check(options)
        options.go(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"compare.py: {error}") from error


if __name__ == "__main__":
    main()
