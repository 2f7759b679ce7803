"""What is kept at the freeze. With a target in time, a network is timed before it is cut out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from hiap.budget.controller import Controller
from hiap.nn.compact import Widths
from hiap.pruning.topology import Topology

__all__ = ["decide"]

TIMED = 3  # networks, at most, that are timed
NEAR = 0.01  # that a time may be off


def decide(
    controller: Controller,
    round_to: int,
    table_error: Callable[[Sequence[Widths]], float | None],
    say: Callable[[str], None],
) -> tuple[Topology, float | None]:
    """The topology that the controller decides on; where a latency table is wrong about it, another one.

    A table is a little too high here and too low there, and a search for the best network prefers what the table finds
    too fast.

    Args:
        table_error: how much slower the network of these widths is than the table says; None where there is no table,
            or it is of another device.

    Returns:
        the topology, and the table's error if it was chosen for that.
    """
    target = controller.target
    seen: list[tuple[float, float, float, Topology]] = []  # by the clock, table's error and target, what is kept
    for _ in range(TIMED):
        topology = controller.decide()
        widths = topology.widths(round_to)
        error = table_error(widths)
        if error is None:
            return topology, None
        say(f"timed    {abs(error - 1):.1%} {'slower' if error >= 1 else 'faster'} than the table says")
        if not seen and abs(error - 1) <= NEAR:
            return topology, None
        clock = error * controller.cost.of_widths(controller.model, widths)
        seen.append((clock, error, controller.target, topology))
        if (1 - 2 * NEAR) * target <= clock <= target or not controller.retarget((1 - NEAR) * target / error):
            break
    fast = [one for one in seen if one[0] <= target]
    _, error, goal, topology = max(fast, key=itemgetter(0)) if fast else min(seen, key=itemgetter(0))
    controller.retarget(goal)
    return topology, error
