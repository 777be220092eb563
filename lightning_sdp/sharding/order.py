"""The one order in which ranks gather and reduce units, and what each of them may gather ahead. Pure.

[Note: No cycles]
Each rank runs the units that it has in the order in which the full model runs them, forwards and then backwards, and
gathers a unit before it runs it. Ranks that share a unit meet in its collectives. While one of them waits there, no
other must wait for it elsewhere. This holds as long as all ranks pass through their collectives in one common order.
Gathering ahead changes a rank's order: with the next unit that *this rank* has, which is FSDP2's default, two ranks may
do so for different units, each in front of what the other one waits for. With the next unit of the full model, if the
rank has it, the common order remains: the unit is gathered by all of its ranks in the same place, right after the one
before it, whether a rank has that one or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

Collective = tuple[str, str]  # what is done and the name of a unit


@dataclass
class Trace:
    """How one rank runs through its units in a forward pass.

    Attributes:
        events: Names of units with ``True`` where it enters them and ``False`` where it leaves them.
        late: Units whose gradients it reduces at the end of the backward pass: none of their inputs has a gradient.
    """

    events: list[tuple[str, bool]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def entered(self) -> list[str]:
        """The units in the order in which it enters them."""
        return [name for name, enters in self.events if enters]

    @property
    def left(self) -> list[str]:
        """The units in the order in which it leaves them, which is the reverse of that in the backward pass."""
        return [name for name, enters in self.events if not enters]

    @property
    def repeats(self) -> bool:
        """Whether it runs a unit more than once."""
        return len(set(self.entered)) < len(self.entered)


def common_order(orders: Sequence[Sequence[str]]) -> list[str] | None:
    """One order of all units that agrees with those of all ranks; ``None`` where there is no such order."""
    graph = _graph(orders)
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError:
        return None


def prefetches(order: Sequence[str], held: Sequence[str]) -> dict[str, str]:
    """What a rank gathers ahead in the backward pass while it works on each of its units.

    Args:
        order: All units, as the full model leaves them in the forward pass.
        held: Those that the rank has.

    Returns:
        The unit before it in the full model, if the rank has that; otherwise the unit itself, which is there already.
    """
    before = dict(zip(order[1:], order, strict=False))
    return {name: before[name] if before.get(name) in held else name for name in held}


def collectives(trace: Trace, ahead: Mapping[str, str]) -> list[Collective]:
    """The collectives of one rank in one step, in the order in which it enters them.

    Args:
        trace: How it runs through its units, each of them once.
        ahead: What it gathers ahead, as `prefetches` returns it.

    Returns:
        What is done (``"forward"`` and ``"backward"``: gather; ``"reduce"``) to which unit.
    """
    done: list[Collective] = [("forward", name) for name in trace.entered]
    for name, enters in reversed(trace.events):
        if not enters:
            done += [("backward", unit) for unit in (name, ahead[name])]
        elif name not in trace.late:
            done.append(("reduce", name))
    return [*dict.fromkeys(done), *(("reduce", name) for name in trace.late)]


def find_cycle(entered: Sequence[Sequence[Collective]]) -> list[Collective] | None:
    """Collectives that wait for one another in a circle, given those of every rank in their order; else ``None``."""
    try:
        TopologicalSorter(_graph(entered)).prepare()
    except CycleError as error:
        cycle: list[Collective] = error.args[1]
        return cycle
    return None


def _graph(orders: Sequence[Sequence[Any]]) -> dict[Any, list[Any]]:
    """What comes directly before what, on any rank."""
    graph: dict[Any, list[Any]] = {}
    for own in orders:
        for before, item in zip([None, *own], own, strict=False):
            graph.setdefault(item, []).extend([] if before is None else [before])
    return graph
