"""What is kept. With a target in time a network is timed first, and chosen again where the latency table is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

from hiap.budget.controller import Controller
from hiap.nn.compact import Widths
from hiap.pruning.topology import Topology

__all__ = ["choose", "decide"]

TIMED = 3  # networks, at most, that are timed
NEAR = 0.01  # that a time may be off
MOST = 1.5  # by which the cost that is asked for changes at once: a clock may have been disturbed

Network = TypeVar("Network")


def decide(
    controller: Controller,
    round_to: int,
    measure_error: Callable[[Sequence[Widths]], float | None],
    error: float,
    say: Callable[[str], None],
) -> tuple[Topology, float, float]:
    """What the controller keeps, the cost that was allowed for it, and the error of the latency table about it.

    Args:
        measure_error: of widths; None where there is no table, or it is of another device.
        error: of the table, as far as it is known before. The controller's target is by the table.
    """

    def make(allowed: float) -> tuple[Topology, float] | None:
        return (controller.decide(allowed), allowed) if controller.reaches(allowed) else None

    def widths(made: tuple[Topology, float]) -> Sequence[Widths]:
        return made[0].widths(round_to)

    made, error = choose(
        (controller.decide(), controller.target),
        make,
        lambda made: controller.cost.of_widths(controller.model, widths(made)),
        lambda made: measure_error(widths(made)),
        controller.target * error,
        error,
        say,
    )
    return *made, error


def choose(
    made: Network,
    make: Callable[[float], Network | None],
    cost: Callable[[Network], float],
    measure_error: Callable[[Network], float | None],
    goal: float,
    error: float,
    say: Callable[[str], None],
) -> tuple[Network, float]:
    """A network that costs what is asked for by the clock, or somewhat less.

    A table is a little too high here and too low there, and a search for the best network prefers what the table finds
    too fast.

    Args:
        made: the network that costs what is asked for by the table and its known error.
        make: the network that costs so much by the table; None where that is out of reach.
        cost: by the table.
        measure_error: how many times the cost by the table the clock finds, against the dense network; None where it
            cannot be known.
        goal: the cost that is asked for.
        error: of the table, as far as it is known before.

    Returns:
        the network, and the table's error about it. Where it cannot be known, or is as it was known, that is what was
        known before.
    """
    seen: list[tuple[float, float, Network]] = []
    allowed = goal / error
    more: Network | None = made
    while more is not None and len(seen) < TIMED and (found := measure_error(more)) is not None:
        say(f"timed    {found - 1:+.1%} against the table")
        if not seen and abs(found / error - 1) <= NEAR:
            break
        clock = found * cost(more)
        seen.append((clock, found, more))
        if (1 - 2 * NEAR) * goal <= clock <= goal:
            break
        allowed = min(max((1 - NEAR) * goal / found, allowed / MOST), allowed * MOST)
        more = make(allowed)
    if not seen:
        return made, error
    fast = [one for one in seen if one[0] <= goal]
    clock, error, made = max(fast, key=itemgetter(0)) if fast else min(seen, key=itemgetter(0))
    if not fast:
        say(f"timed    nothing is fast enough; the fastest takes {clock / goal - 1:.1%} more than the target")
    return made, error
