"""Starts a run of a sweep in a process of its own: on this machine, or wherever Ray has room.

A run that crashes, or is killed for want of memory, takes nothing else with it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hiap.errors import InputError

__all__ = ["OUTPUT", "Here", "OnRay", "Outcome", "Starter", "prune_command_of"]

OUTPUT = "output.txt"  # what a run has printed, in its folder


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: its exit status; negative where a signal ended it.
        message: the error it has printed; empty after success.
    """

    status: int
    message: str = ""


class Starter(Protocol):
    """Runs what is in a folder to its end.

    Attributes:
        jobs: how many may run at a time.
        crowded: whether several runs may use one device at a time, so that times measured in a run are not its own.
    """

    jobs: int
    crowded: bool

    def run(self, folder: Path) -> Outcome:
        """Begin the run, or go on with it, and wait for its end. It is called by several threads at a time."""

    def stop(self) -> None:
        """Ask all runs to save and stop, and wait until they have."""


def prune_command_of(folder: str) -> list[str]:
    """The command that begins the run in a folder, or goes on with it."""
    return [sys.executable, "-m", "hiap", "prune", "--resume", "--out", folder]


class Here:
    """Runs on this machine. Several at a time share out its GPUs, or the cores of its CPU.

    Args:
        command: makes the command from the folder of a run.
    """

    def __init__(self, jobs: int = 1, command: Callable[[str], list[str]] = prune_command_of) -> None:
        self.jobs, self._command = jobs, command
        self._devices = _devices() if jobs > 1 else []
        self.crowded = jobs > max(len(self._devices), 1)
        self._places: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(jobs):
            self._places.put(i)
        self._going: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, folder: Path) -> Outcome:
        place = self._places.get()
        try:
            with self._lock:
                if self._stopped:
                    return Outcome(-signal.SIGTERM, "stopped before it began")
                begun = _size(folder)
                process = _popen(self._command(str(folder)), folder, self._environment(place))
                self._going.add(process)
            process.wait()
            self._going.discard(process)
            return _outcome(process.returncode, folder, begun)
        finally:
            self._places.put(place)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        going = list(self._going)
        try:
            for process in going:
                process.send_signal(signal.SIGTERM)
            for process in going:
                process.wait()
        finally:  # a second signal came
            for process in going:
                if process.poll() is None:
                    process.kill()

    def _environment(self, place: int) -> dict[str, str]:
        if self._devices:
            return {"CUDA_VISIBLE_DEVICES": self._devices[place % len(self._devices)]}
        if self.jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs))}
        return {}


class OnRay:
    """Runs on a Ray cluster, each with one CPU core, and one GPU where the cluster has any.

    Without an address it joins the cluster that RAY_ADDRESS names or that runs on this machine, or starts one here.

    Args:
        jobs: how many at a time at most; by default as many as the cluster has room for.
        command: makes the command from the folder of a run.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(
        self,
        address: str | None = None,
        jobs: int | None = None,
        command: Callable[[str], list[str]] = prune_command_of,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--ray needs Ray: pip install 'hiap[sweep]'") from error
        self._ray, self._command = ray, command
        self._joined = not ray.is_initialized()
        if self._joined:
            _check_answers(address or "")
            try:
                ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError) as error:
                first = str(error).splitlines()[0]
                raise InputError(f"--ray {address or ''}".rstrip() + f": no cluster answers ({first})") from error
        room = ray.cluster_resources()
        gpus, cores = int(room.get("GPU", 0)), int(room.get("CPU", 1))
        self.jobs = jobs or max(1, gpus or cores)
        self.crowded = not gpus and self.jobs > 1
        # A machine that goes away is no failure of its run, which goes on elsewhere from its last checkpoint.
        self._task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=2)(_run_there)
        self._going: set[Any] = set()

    def run(self, folder: Path) -> Outcome:
        path = folder.absolute()
        task = self._task.remote(self._command(str(path)), str(path), os.getcwd())
        self._going.add(task)
        try:
            outcome: Outcome = self._ray.get(task)
            return outcome
        except self._ray.exceptions.RayError as error:
            return Outcome(1, f"Ray lost the run: {str(error).strip().splitlines()[0]}")
        finally:
            self._going.discard(task)

    def stop(self) -> None:
        going = list(self._going)
        for task in going:
            self._ray.cancel(task)
        self._ray.wait(going, num_returns=len(going)) if going else None

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._joined:
            self._ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address at which nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # "auto" and the like, which Ray knows
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray {address}: no cluster answers ({error})") from error


def _run_there(command: list[str], folder: str, home: str) -> Outcome:
    """Run a command on a machine of the cluster, which must see the folder of the run."""
    path = Path(folder)
    if not path.is_dir() or not Path(home).is_dir():
        missing = folder if not path.is_dir() else home
        return Outcome(
            1, f"{os.uname().nodename} does not see {missing}: all machines must share the folder of the sweep"
        )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # inherited from a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = _size(path)
    process = _popen([sys.executable, *command[1:]], path, {}, home)
    cancelled: BaseException | None = None
    asked = False
    while process.returncode is None:  # Ray cancels a task with KeyboardInterrupt, sometimes with several
        try:
            if cancelled is not None and not asked:
                process.send_signal(signal.SIGTERM)
                asked = True
            while process.poll() is None:  # a wait would not notice it
                time.sleep(0.2)
        except BaseException as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return _outcome(process.returncode, path, begun)


def _popen(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], home: str | None = None
) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C reaches it once and through us."""
    with (folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=home,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _size(folder: Path) -> int:
    """Bytes of output that earlier starts have left."""
    file = folder / OUTPUT
    return file.stat().st_size if file.is_file() else 0


def _outcome(status: int, folder: Path, begun: int) -> Outcome:
    """How a process ended, with the error that it printed last."""
    if status == 0:
        return Outcome(0)
    with (folder / OUTPUT).open("rb") as file:
        file.seek(begun)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    own = [i for i, line in enumerate(lines) if line.startswith("hiap: ")]
    message = "\n".join(lines[own[-1] :]).removeprefix("hiap: ") if own else "".join(lines[-1:])
    if status < 0:
        killed = "; perhaps it ran out of memory" if status == -signal.SIGKILL else ""
        message = f"ended by {signal.Signals(-status).name}{killed}"
    return Outcome(status, message or f"ended with status {status}; see {folder / OUTPUT}")


def _devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    count = torch.cuda.device_count()
    return named[:count] or [str(i) for i in range(count)]
