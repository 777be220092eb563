"""MaskPlan: which worker holds which component. Pure: no processes, no devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from lightning_sdp.assignment import assign, assign_chunks, check_coverage
from lightning_sdp.components import Component, Discovery, Group, Skip, discover, named_block
from lightning_sdp.components.calls import RecordCalls
from lightning_sdp.components.discovery import KeepEnds
from lightning_sdp.costs import balanced_costs, component_sizes
from lightning_sdp.layout import Run, TensorLayout, make_layout
from lightning_sdp.plan_checks import check_holders, fit_blocks, fit_groups, require_same_components
from lightning_sdp.plan_json import plan_from_json, plan_to_json

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Kept:
    """A component that every worker holds.

    Attributes:
        name: Its name.
        reason: Why it is not distributed.
        size: Its number of parameters.
        position: Its place among all blocks of the model.
    """

    name: str
    reason: str
    size: int
    position: int


class MaskPlan:
    """Says which of N workers hold which component of a model; immutable.

    Two plans are equal when they have the same workers, components and holders; what a plan knows about sizes and about
    kept blocks serves its reports only, and is not part of its JSON.

    Args:
        num_subnetworks: Number of workers N.
        holders: For each component the workers that hold it.
        granularity: ``"block"`` or ``"neuron"``.
        sizes: Parameters of each component, where known.
        costs: What the assignment evened out, per component; default: ``sizes``, else one each.
        kept: Components that every worker holds.
        shared_size: Parameters outside of all components, where known.
        groups: The coupled groups that the components are chunks of, where known.
        skips: What remains of each block where it is missing, where known.
        reasons: Why other parts of the model are held by everyone, by name.

    Raises:
        ValueError: There is no component, a component has no holder, a holder is not one of the N workers, a worker
            has no chunk of a group, or a tensor is cut along two dimensions.
    """

    def __init__(
        self,
        num_subnetworks: int,
        holders: Iterable[tuple[Component, Sequence[int]]],
        *,
        granularity: str = "block",
        sizes: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        kept: Sequence[Kept] = (),
        shared_size: int | None = None,
        groups: Sequence[Group] = (),
        skips: Mapping[str, Skip] | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        pairs = list(holders)
        check_holders(pairs, num_subnetworks, granularity)
        self.num_subnetworks = num_subnetworks
        self.granularity = granularity
        self.components = tuple(component for component, _ in pairs)
        self.kept = tuple(kept)
        self.groups = tuple(groups)
        self.skips, self.reasons = dict(skips or {}), dict(reasons or {})
        self.sizes = None if sizes is None else tuple(sizes)
        self.shared_size = shared_size
        self._costs = tuple(costs or sizes or [1.0] * len(pairs))
        self._holders = {component.name: tuple(sorted(set(workers))) for component, workers in pairs}

    # who holds what

    def holders(self, component: str) -> tuple[int, ...]:
        """Workers that hold a component, ascending."""
        return self._holders[component]

    def held_by(self, worker: int) -> tuple[str, ...]:
        """Names of the components that a worker holds, in the model's order."""
        return tuple(name for name, workers in self._holders.items() if worker in workers)

    def missing_on(self, worker: int) -> tuple[Component, ...]:
        """The components that a worker lacks, in the model's order."""
        return tuple(c for c in self.components if worker not in self._holders[c.name])

    def skip(self, name: str, block: nn.Module) -> Skip:
        """What remains of a block of the plan where it is missing."""
        return self.skips.get(name) or named_block(name, block).skip

    def held_units(self, group: Group, worker: int) -> list[int]:
        """The units of a group that a worker holds, ascending."""
        chunks = [self._holders[c.name] for c in self.components if c.group == group.name]
        ranges = group.ranges(len(chunks))
        return [unit for units, workers in zip(ranges, chunks, strict=True) if worker in workers for unit in units]

    def tensor_holders(self) -> dict[str, tuple[int, ...]]:
        """Workers of every tensor that belongs to one component as a whole, by tensor name."""
        return {s.name: self._holders[c.name] for c in self.components for s in c.slices if s.dim is None}

    @cached_property
    def layouts(self) -> dict[str, TensorLayout]:
        """How the tensors that some worker has only a part of are spread over the workers, by tensor name.

        Tensors neither in here nor in `tensor_holders` are held by everyone.
        """
        runs: dict[tuple[str, int], list[tuple[Run, tuple[int, ...]]]] = {}
        for component in self.components:
            for part in component.slices:
                if part.dim is not None:
                    entry = ((part.start, part.stop), self._holders[component.name])
                    runs.setdefault((part.name, part.dim), []).append(entry)
        layouts = {name: make_layout(dim, entries) for (name, dim), entries in runs.items()}
        everyone = tuple(range(self.num_subnetworks))
        return {n: layout for n, layout in layouts.items() if any(p.holders != everyone for p in layout.parts)}

    @property
    def padded(self) -> dict[str, None]:
        """Names of tensors of which workers store their part but compute with all, zero elsewhere."""
        return {part.name: None for c in self.components if c.padded for part in c.slices if part.name in self.layouts}

    def element_mask(self, name: str, worker: int, shape: Sequence[int]) -> torch.Tensor:
        """Which elements of a tensor a worker holds.

        Args:
            name: Name of a parameter or buffer in the full model.
            worker: The worker.
            shape: Shape of the full tensor.

        Returns:
            A boolean tensor of that shape, true where held.
        """
        mask = torch.ones(tuple(shape), dtype=torch.bool)
        for component in self.missing_on(worker):
            for part in component.slices:
                if part.name == name:
                    where = mask if part.dim is None else mask.narrow(part.dim, part.start, part.stop - part.start)
                    where.fill_(False)
        return mask

    @cached_property
    def sources(self) -> dict[str, int]:
        """For each component the holder that sends it to the others, chosen such that all send about as much."""
        sent = [0.0] * self.num_subnetworks
        sources = {}
        for name, cost in zip(self._holders, self.sizes or self._costs, strict=True):
            sources[name] = min(self._holders[name], key=lambda worker: (sent[worker], worker))
            sent[sources[name]] += cost
        return sources

    @property
    def holder_sets(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Each distinct set of holders with the names of its components, in the model's order."""
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, workers in self._holders.items():
            sets.setdefault(workers, []).append(name)
        return {workers: tuple(names) for workers, names in sets.items()}

    @property
    def coverage(self) -> tuple[float, ...]:
        """Share of the maskable cost that each worker holds."""
        total = sum(self._costs)
        return tuple(load / total for load in self._loads)

    @property
    def is_complete(self) -> bool:
        """Whether every worker holds everything."""
        return all(len(workers) == self.num_subnetworks for workers in self._holders.values())

    @property
    def imbalance(self) -> float:
        """Largest worker's maskable cost over the mean."""
        return max(self._loads) * self.num_subnetworks / sum(self._loads)

    @property
    def _loads(self) -> list[float]:
        costs = dict(zip(self._holders, self._costs, strict=True))
        return [sum(costs[name] for name in self.held_by(w)) for w in range(self.num_subnetworks)]

    # building

    @classmethod
    def build(
        cls,
        module: nn.Module,
        *,
        num_subnetworks: int,
        granularity: str = "block",
        coverage: float | Sequence[float] = 0.5,
        components: str | Sequence[str] | None = None,
        keep: str | Sequence[str] = (),
        keep_ends: KeepEnds = "auto",
        on_unsliceable: str = "keep",
        balance: str = "params",
        seed: int = 0,
        example_inputs: Any = None,
        record: RecordCalls | None = None,
    ) -> MaskPlan:
        """Finds a model's components and gives each to its holders; see `SDPStrategy` for the arguments.

        Args:
            module: The full model; parameters may be on the meta device.
            num_subnetworks: Number of workers N.
            granularity: ``"block"`` or ``"neuron"``.
            coverage: Share C of the maskable cost that each worker holds, in (0, 1], or one share per worker.
            components: Globs over module names to treat as maskable; ``None`` finds them.
            keep: Globs over module names that every worker holds.
            keep_ends: Blocks at the ends of the stack that every worker holds.
            on_unsliceable: What becomes of neurons that cannot be cut out of their modules: ``"keep"``, ``"pad"`` or
                ``"error"``.
            balance: What the assignment evens out: ``"params"`` or ``"count"``.
            seed: Varies the assignment; the global random state is neither read nor changed.
            example_inputs: Sample input of the model's forward, a tensor, a tuple of arguments or a dict of keyword
                arguments; default: ``module.example_input_array`` where there is one.
            record: Finds out, if need be, how the model's modules are called where there is no sample input.

        Raises:
            ValueError: An argument is not understood or cannot be honored for this model.
        """
        if num_subnetworks < 1:
            raise ValueError(f"num_subnetworks={num_subnetworks} must be at least 1.")
        shares = check_coverage(coverage, num_subnetworks)
        found = discover(
            module,
            granularity,
            components,
            keep,
            keep_ends,
            on_unsliceable=on_unsliceable,
            example_inputs=example_inputs,
            record=record,
        )
        parts = list(found.maskable)
        if granularity == "neuron":
            parts = [c for group in found.groups for c in group.chunks(num_subnetworks, group.name in found.padded)]
        sizes = component_sizes(module, parts)
        costs = balanced_costs(sizes, balance)
        pairs = list(zip(parts, _assign(granularity, parts, costs, shares, seed), strict=True))
        report = _report(module, found, sizes)
        return cls(num_subnetworks, pairs, granularity=granularity, costs=costs, **report)

    def with_holders(self, holders: Mapping[str, Sequence[int]]) -> MaskPlan:
        """The same components of the same model with other holders.

        Args:
            holders: Workers of every component, by its name.

        Raises:
            ValueError: The holders are not possible; see `MaskPlan`.
        """
        missing = [component.name for component in self.components if component.name not in holders]
        if missing:
            raise ValueError(
                f"holders says nothing about component {missing[0]!r}: name the workers of every component."
            )
        return MaskPlan(
            self.num_subnetworks,
            [(component, holders[component.name]) for component in self.components],
            granularity=self.granularity,
            sizes=self.sizes,
            costs=self._costs,
            kept=self.kept,
            shared_size=self.shared_size,
            groups=self.groups,
            skips=self.skips,
            reasons=self.reasons,
        )

    def with_holders_of(self, other: MaskPlan) -> MaskPlan:
        """The same components of the same model, held as another plan says.

        Args:
            other: A plan for the same components and workers.

        Raises:
            ValueError: It is for other ones.
        """
        require_same_components(self, other)
        return self.with_holders({c.name: other.holders(c.name) for c in self.components})

    def reassigned(
        self, *, coverage: float | Sequence[float] = 0.5, balance: str = "params", seed: int = 0
    ) -> MaskPlan:
        """The same components, given to holders anew; what `build` gives for the same model and arguments.

        Args:
            coverage: As for `build`.
            balance: As for `build`.
            seed: As for `build`.

        Raises:
            ValueError: An argument is not understood, or the sizes of components are not known.
        """
        if self.sizes is None:
            raise ValueError("The plan does not know the sizes of its components: use plan.fit(module) first.")
        shares, costs = check_coverage(coverage, self.num_subnetworks), balanced_costs(self.sizes, balance)
        holders = _assign(self.granularity, self.components, costs, shares, seed)
        return self.with_holders({c.name: workers for c, workers in zip(self.components, holders, strict=True)})

    def rotated(self, turns: int) -> MaskPlan:
        """The same plan with every worker in the place of the one that comes ``turns`` before it, around the circle.

        Over N turns every worker holds every component at some time. (With one coverage for all; a worker's own
        coverage moves along.)
        """
        n = self.num_subnetworks
        return self.with_holders(
            {name: sorted((worker + turns) % n for worker in workers) for name, workers in self._holders.items()}
        )

    def fit(self, module: nn.Module, example_inputs: Any = None, record: RecordCalls | None = None) -> MaskPlan:
        """Checks that the plan fits a model, and learns the model's sizes for its reports.

        Args:
            module: The full model.
            example_inputs: Sample input, as for `build`.
            record: As for `build`.

        Returns:
            The same plan, with sizes.

        Raises:
            ValueError: A module or tensor of the plan is not in the model, or the plan masks a tensor that is
                registered outside its component as well.
        """
        if self.granularity == "neuron":
            found = fit_groups(self.components, module, example_inputs, record)
        else:
            found = fit_blocks(self.components, module, example_inputs, record)
        pairs = [(component, self._holders[component.name]) for component in self.components]
        report = _report(module, found, component_sizes(module, self.components))
        return MaskPlan(self.num_subnetworks, pairs, granularity=self.granularity, **report | {"kept": ()})

    # reading and writing

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> MaskPlan:
        """Reads a plan from the text that `to_json` wrote.

        Raises:
            ValueError: The text is not a plan, has unknown keys, or was written by a newer version.
        """
        return cls(**plan_from_json(text))

    def save(self, path: str | Path) -> None:
        """Writes the plan's JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MaskPlan:
        """Reads a plan from a JSON file.

        Raises:
            ValueError: The file cannot be read or is not a plan.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"plan={str(path)!r} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"plan={str(path)!r} is not a plan: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskPlan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3g}" for share in self.coverage)
        return f"MaskPlan({len(self.components)} components, {self.num_subnetworks} workers, coverage [{shares}])"

    # reports

    def table(self) -> Table:
        """A rich table of components × workers, with what each worker holds of the maskable part and of all blocks."""
        from lightning_sdp.report import plan_table

        return plan_table(self)

    def plot(self, path: str | Path) -> None:
        """Writes a picture of who holds what to a file; its suffix chooses the format."""
        from lightning_sdp.report import plot_plan

        plot_plan(self, path)

    def explain(self) -> str:
        """What every worker holds, and why, a line each."""
        lines = [f"{kept.name}: held by every worker, {kept.reason}" for kept in self.kept]
        lines += [f"{name}: held by every worker: {reason}" for name, reason in self.reasons.items()]
        what = "blocks (stem, embeddings, head, skip paths)" if self.granularity == "block" else "groups of neurons"
        lines.append(f"Everything outside of the {what} is held by every worker.")
        return "\n".join(lines)


def _assign(
    granularity: str, components: Sequence[Component], costs: Sequence[float], shares: Sequence[float], seed: int
) -> list[tuple[int, ...]]:
    """Holders of each component; the chunks of one group are assigned together."""
    if granularity == "block":
        return assign(costs, shares, seed)
    chunks: dict[str, list[float]] = {}
    for component, cost in zip(components, costs, strict=True):
        chunks.setdefault(component.group, []).append(cost)
    return [workers for own in assign_chunks(list(chunks.values()), shares, seed) for workers in own]


def _report(module: nn.Module, found: Discovery, sizes: Sequence[int]) -> dict[str, Any]:
    kept_sizes = component_sizes(module, [component for component, *_ in found.kept])
    kept = [Kept(c.name, why, size, at) for (c, why, at), size in zip(found.kept, kept_sizes, strict=True)]
    total = sum(parameter.numel() for parameter in module.parameters())
    return {
        "sizes": sizes,
        "kept": kept,
        "shared_size": total - sum(sizes),
        "groups": found.groups,
        "skips": found.skips,
        "reasons": found.reasons,
    }
