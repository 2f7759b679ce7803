"""The loop of a sweep: start what is not finished, note what comes of each run, and write the summary each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from hiap.atomic import write_text
from hiap.report.markdown import markdown_table
from hiap.sweep.starting import OUTPUT, Outcome, Starter
from hiap.sweep.summary import models_json, summarise, sweep_notes, sweep_table
from hiap.sweep.sweep_folder import Member, SweepFolder
from hiap.sweep.sweep_page import sweep_html
from hiap.training.signals import Signals

__all__ = ["run_sweep", "time_again", "write_summary"]


def run_sweep(folder: SweepFolder, starter: Starter, say: Callable[[str], None]) -> None:
    """Run all that is not finished. A run that fails does not end the others.

    Raises:
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, once all runs have saved and stopped.
    """
    todo, total = [member for member in folder.members if member.state != "finished"], len(folder.members)
    done = total - len(todo)
    write_summary(folder)

    def begin(member: Member) -> Outcome:
        say(f"started {member.name}")
        return starter.run(member.folder)

    with Signals(loud=False), ThreadPoolExecutor(max(1, min(starter.jobs, len(todo)))) as pool:
        futures = {pool.submit(begin, member): member for member in todo}
        try:
            for future in as_completed(futures):
                done += 1
                member = _noted(folder, futures[future], future, starter.crowded)
                write_summary(folder)
                said = "finished" if member.state == "finished" else f"failed: {member.message.splitlines()[0]}"
                say(f"{done}/{total} {member.name} {said}")
        except BaseException:
            for waiting in futures:
                waiting.cancel()
            say(f"stopping; go on with `hiap sweep --resume --out {folder.path}`")
            starter.stop()
            raise


def _noted(folder: SweepFolder, member: Member, future: Future[Outcome], crowded: bool) -> Member:
    """Note how a run ended."""
    try:
        outcome = future.result()
    except OSError as error:
        outcome = Outcome(1, f"it could not be started: {error}")
    if outcome.status == 0 and member.models():
        return folder.note(member.name, state="finished", message="", shared=crowded)
    message = outcome.message or f"it ended without a result; see {member.folder / OUTPUT}"
    return folder.note(member.name, state="failed", message=message)


def time_again(folder: SweepFolder, say: Callable[[str], None]) -> None:
    """Time the models of runs that shared a device with others, one after the other, and renew their reports."""
    import torch

    from hiap.pruning.saving import load
    from hiap.report.writing import write_report
    from hiap.speed.bench import dense_like
    from hiap.speed.deployed import speeds

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for member in [one for one in folder.members if one.shared and one.state == "finished"]:
        say(f"timing {member.name} again, alone")
        for model in member.models():
            compact = load(model.folder / "compact").to(device)
            found = speeds(dense_like(compact).to(device), compact, device)
            record = {**model.record, "speed": [one.to_json() for one in found]}
            write_text(model.folder / "report.json", json.dumps(record, indent=1) + "\n")
            write_report(model.folder)
        folder.note(member.name, shared=False)
    write_summary(folder)


def write_summary(folder: SweepFolder) -> None:
    """Write sweep.json, sweep.md and sweep.html."""
    summary = summarise(folder.members)
    folder.write(models_json(folder.members, summary))
    table = markdown_table(sweep_table(folder.members, summary))
    notes = [f"- {note}" for note in sweep_notes(folder.members)]
    parts = [f"# {Path(folder.path).resolve().name}", table, *(["\n".join(notes)] if notes else [])]
    write_text(folder.path / "sweep.md", "\n\n".join(parts) + "\n")
    write_text(folder.path / "sweep.html", sweep_html(folder.path, folder.members, summary))
