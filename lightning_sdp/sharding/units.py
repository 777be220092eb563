"""Units: modules whose parameters are gathered and sharded together, and how they lie on the ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from lightning_sdp.components import ParamSlice
from lightning_sdp.layout import Part, TensorLayout
from lightning_sdp.plan import MaskPlan

Ranks = tuple[int, ...]
Policy = Callable[..., Any]


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded over the ranks that hold them.

    Attributes:
        units: Each after those within it; the model itself is the last one.
        layouts: How parameters lie on the ranks, by name, as FSDP2 cuts them along their first dimension.
        ranks_per_worker: Ranks that form one worker. With one, a unit is sharded over all its ranks; with several over
            those of a worker, and its holders have equal parts.
        rank_sets: The sets of ranks that need a process group, in the same order on all ranks.
    """

    units: tuple[Unit, ...]
    layouts: dict[str, TensorLayout]
    ranks_per_worker: int
    rank_sets: tuple[Ranks, ...]

    def slices(self) -> list[tuple[Ranks, tuple[ParamSlice, ...]]]:
        """Each unit's shards: who has them, and what they are."""
        shards: list[tuple[Ranks, tuple[ParamSlice, ...]]] = []
        for unit in self.units:
            for ranks in _shard_holders(unit.ranks, self.ranks_per_worker):
                runs = {name: self.layouts[name].runs(ranks[0]) for name in unit.parameters}
                shards.append((ranks, tuple(ParamSlice(n, 0, *run) for n, own in runs.items() for run in own)))
        return shards


@dataclass(frozen=True)
class Unit:
    """A module that is sharded by itself, without the units within it.

    Attributes:
        name: Name of the module; empty for the model itself.
        ranks: The ranks that have it, ascending.
        parameters: Names of its parameters.
    """

    name: str
    ranks: Ranks
    parameters: tuple[str, ...]


def shard(module: nn.Module, plan: MaskPlan, world_size: int, policy: Policy | None) -> Sharding:
    """Divides the parameters of a model among units, and each unit among its holders.

    Every residual block is a unit. A block whose skip path has parameters, which every rank holds, gets units within it
    for the modules of these.

    Args:
        module: The full model.
        plan: Who holds which blocks.
        world_size: Number of ranks.
        policy: Which modules are units as well, as `select` takes it; ``None``: no others.

    Raises:
        ValueError: A parameter has no dimension or belongs to two units, or a module has parameters with different
            holders.
    """
    n, world = world_size // plan.num_subnetworks, tuple(range(world_size))
    workers = plan.tensor_holders()
    holders = {name: tuple(w * n + i for w in own for i in range(n)) for name, own in workers.items()}
    blocks = [*(component.name for component in plan.components), *(kept.name for kept in plan.kept)]
    units = _find_units(module, blocks, policy, lambda name: holders.get(name, world), world)
    layouts = _layouts(units, {name: p.shape[0] for name, p in module.named_parameters()}, n)
    return Sharding(tuple(units), layouts, n, tuple(_rank_sets(units, n, world)))


def _find_units(
    module: nn.Module,
    blocks: Collection[str],
    policy: Policy | None,
    holders: Callable[[str], Ranks],
    world: Ranks,
) -> list[Unit]:
    """The units, given the names of the residual blocks and who holds each parameter."""
    chosen = {"", *blocks} | ({*select(module, policy, blocks)} if policy is not None else set())
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            raise ValueError(f"Parameter {name!r} is a scalar, which cannot be sharded: give it the shape (1,).")
    of_unit = _distribute(parameters, chosen)
    for unit, names in list(of_unit.items()):
        own = world if unit == "" else _main_holders(names, holders, world)
        for name in names:
            if holders(name) != own:
                owner = name.rpartition(".")[0]
                if owner == unit:
                    raise ValueError(
                        f"Parameter {name!r} has other holders than the rest of its module, so that they cannot be "
                        "sharded together: put it into a module of its own, or keep the block whole with "
                        f"keep={unit!r}."
                    )
                chosen.add(owner)
    of_unit = _distribute(parameters, chosen)
    _require_untied(module, chosen)
    units = []
    for path, _ in module.named_modules():
        names = of_unit.get(path, [])
        if not names and path:
            continue
        ranks = {holders(name) for name in names} if path else {world}
        if len(ranks) > 1:
            raise ValueError(
                f"Module {path!r} has parameters with different holders, {names[0]!r} among them, so that they cannot "
                f"be sharded together: keep the block whole with keep={path!r}."
            )
        units.append(Unit(path, ranks.pop(), tuple(names)))
    return units[::-1]


def _require_untied(module: nn.Module, units: Collection[str]) -> None:
    """Refuses parameters that two units have in common."""
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, units)
        other, known = first.setdefault(id(parameter), (name, unit))
        if unit != known:
            raise ValueError(
                f"Parameters {other!r} and {name!r} are one tensor, but their modules are to be sharded separately "
                f"({(known or 'the model')!r} and {(unit or 'the model')!r}). Leave these modules out of "
                "auto_wrap_policy, or keep them out of the blocks."
            )


def _main_holders(names: Sequence[str], holders: Callable[[str], Ranks], world: Ranks) -> Ranks:
    """Who holds a block, as opposed to its skip path, which all ranks hold."""
    return next((own for own in map(holders, names) if own != world), world)


def _distribute(parameters: Collection[str], units: Collection[str]) -> dict[str, list[str]]:
    """The parameters of each unit: those that are in no unit within it."""
    of_unit: dict[str, list[str]] = {}
    for name in parameters:
        of_unit.setdefault(_unit_of(name, units), []).append(name)
    return of_unit


def _unit_of(name: str, units: Collection[str]) -> str:
    path = name.rpartition(".")[0]
    while path not in units:
        path = path.rpartition(".")[0]
    return path


def select(module: nn.Module, policy: Policy, within: Collection[str] = ()) -> list[str]:
    """The modules that a policy chooses, by name, each after those within it; not the model itself.

    Args:
        module: The model.
        policy: Classes in a set or list, or a function as FSDP's ``auto_wrap_policy``: it is called with ``module``,
            ``recurse=False`` and ``nonwrapped_numel``, the parameters in the module that are in no chosen one yet.
        within: Modules that are chosen already.
    """
    if isinstance(policy, (set, frozenset, list, tuple)):
        classes = tuple(policy)
        return [name for name, m in reversed([*module.named_modules()]) if name and isinstance(m, classes)]
    chosen: list[str] = []
    taken: set[int] = set()
    for name, submodule in reversed([*module.named_modules()]):
        own = {id(p): p.numel() for p in submodule.parameters() if id(p) not in taken}
        if not name:
            continue
        if name in within or policy(module=submodule, recurse=False, nonwrapped_numel=sum(own.values())):
            taken |= own.keys()
            if name not in within:
                chosen.append(name)
    return chosen


def _layouts(units: Sequence[Unit], rows: Mapping[str, int], ranks_per_worker: int) -> dict[str, TensorLayout]:
    """How parameters lie on the ranks, given the size of each one's first dimension."""
    layouts = {}
    for unit in units:
        shards = _shard_holders(unit.ranks, ranks_per_worker)
        for name in unit.parameters:
            step = -(-rows[name] // len(shards))
            bounds = [(min(i * step, rows[name]), min((i + 1) * step, rows[name])) for i in range(len(shards))]
            layouts[name] = TensorLayout(
                0, tuple(Part(ranks, (run,)) for ranks, run in zip(shards, bounds, strict=True) if run[0] < run[1])
            )
    return layouts


def _shard_holders(ranks: Ranks, ranks_per_worker: int) -> list[Ranks]:
    """Who has each shard of a unit: one rank, or the ranks with the same place in their workers."""
    if ranks_per_worker == 1:
        return [(rank,) for rank in ranks]
    return [ranks[i::ranks_per_worker] for i in range(ranks_per_worker)]


def _rank_sets(units: Sequence[Unit], ranks_per_worker: int, world: Ranks) -> list[Ranks]:
    """The sets of ranks that need a process group, the same on all ranks."""
    distinct = list(dict.fromkeys(unit.ranks for unit in units))
    if ranks_per_worker == 1:
        return distinct
    workers = [world[i : i + ranks_per_worker] for i in range(0, len(world), ranks_per_worker)]
    shards = [own for ranks in distinct for own in _shard_holders(ranks, ranks_per_worker)]
    return list(dict.fromkeys([*workers, *(ranks for ranks in shards if len(ranks) > 1)]))
