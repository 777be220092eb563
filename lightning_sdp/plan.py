"""MaskPlan: which worker holds which component. Pure: no processes, no devices."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from lightning_sdp.assignment import assign
from lightning_sdp.components import Component, Discovery, ParamSlice, discover
from lightning_sdp.components.discovery import GRANULARITIES, KeepEnds

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
BALANCES = ("count", "params")


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
        granularity: ``"block"``.
        sizes: Parameters of each component, where known.
        costs: What the assignment evened out, per component; default: ``sizes``, else one each.
        kept: Components that every worker holds.
        shared_size: Parameters outside of all components, where known.

    Raises:
        ValueError: There is no component, a component has no holder, or a holder is not one of the N workers.
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
    ) -> None:
        pairs = list(holders)
        if type(num_subnetworks) is not int or num_subnetworks < 1:
            raise ValueError(f"num_subnetworks={num_subnetworks!r} must be a number of workers, at least 1.")
        if not pairs:
            raise ValueError("The plan has no component.")
        for component, workers in pairs:
            if not isinstance(workers, (list, tuple)) or not all(type(worker) is int for worker in workers):
                raise ValueError(
                    f"The plan's holders of {component.name!r} are {workers!r}: give a list of worker numbers."
                )
        self.num_subnetworks = num_subnetworks
        self.granularity = granularity
        self.components = tuple(component for component, _ in pairs)
        self.kept = tuple(kept)
        self.sizes = None if sizes is None else tuple(sizes)
        self.shared_size = shared_size
        self._costs = tuple(costs or sizes or [1.0] * len(pairs))
        self._holders = {component.name: tuple(sorted(set(workers))) for component, workers in pairs}
        if len(self._holders) != len(pairs):
            raise ValueError("The plan names a component twice.")
        for name, workers in self._holders.items():
            if not workers:
                raise ValueError(f"The plan leaves component {name!r} without a holder: its parameters would be lost.")
            if workers[0] < 0 or workers[-1] >= num_subnetworks:
                raise ValueError(
                    f"The plan gives component {name!r} to workers {list(workers)}; N is {num_subnetworks}."
                )

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

    def tensor_holders(self) -> dict[str, tuple[int, ...]]:
        """Workers of every tensor that belongs to a component, by tensor name; all other tensors are held by all."""
        return {s.name: self._holders[c.name] for c in self.components for s in c.slices}

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
        balance: str = "params",
        seed: int = 0,
    ) -> MaskPlan:
        """Finds a model's components and gives each to its holders; see `SDPStrategy` for the arguments.

        Args:
            module: The full model; parameters may be on the meta device.
            num_subnetworks: Number of workers N.
            granularity: ``"block"``.
            coverage: Share C of the maskable cost that each worker holds, in (0, 1], or one share per worker.
            components: Globs over module names to treat as blocks; ``None`` finds them.
            keep: Globs over module names that every worker holds.
            keep_ends: Blocks at the ends of the stack that every worker holds.
            balance: What the assignment evens out: ``"params"`` or ``"count"``.
            seed: Varies the assignment; the global random state is neither read nor changed.

        Raises:
            ValueError: An argument is not understood or cannot be honored for this model.
        """
        if num_subnetworks < 1:
            raise ValueError(f"num_subnetworks={num_subnetworks} must be at least 1.")
        if balance not in BALANCES:
            raise ValueError(f"balance={balance!r} is unknown: choose {' or '.join(map(repr, BALANCES))}.")
        shares = check_coverage(coverage, num_subnetworks)
        found = discover(module, granularity, components, keep, keep_ends)
        sizes = _sizes(module, found.maskable)
        costs = [1.0] * len(sizes) if balance == "count" else [float(max(size, 1)) for size in sizes]
        pairs = list(zip(found.maskable, assign(costs, shares, seed), strict=True))
        return cls(num_subnetworks, pairs, granularity=granularity, costs=costs, **_report(module, found, sizes))

    def fit(self, module: nn.Module) -> MaskPlan:
        """Checks that the plan fits a model, and learns the model's sizes for its reports.

        Args:
            module: The full model.

        Returns:
            The same plan, with sizes.

        Raises:
            ValueError: A module or tensor of the plan is not in the model, or the plan masks a tensor that is
                registered outside its component as well.
        """
        modules = dict(module.named_modules())
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        seen: dict[str, str] = {}
        for component in self.components:
            if component.name not in modules:
                raise ValueError(
                    f"The plan does not fit the model: it has no module {component.name!r}. "
                    "Build the plan from this model, or pass plan=None."
                )
            for part in component.slices:
                if part.name not in tensors:
                    raise ValueError(f"The plan does not fit the model: it has no tensor {part.name!r}.")
                if part.name in seen:
                    raise ValueError(f"The plan gives {part.name!r} to {seen[part.name]!r} and {component.name!r}.")
                if not part.name.startswith(component.name + "."):
                    raise ValueError(f"The plan's component {component.name!r} cannot own {part.name!r}.")
                seen[part.name] = component.name
        found = discover(module, self.granularity, [c.name for c in self.components])
        for planned, actual in zip(sorted(self.components, key=str), sorted(found.maskable, key=str), strict=True):
            if planned.name != actual.name or set(planned.slices) != set(actual.slices):
                odd = set(planned.slices) ^ set(actual.slices)
                names = ", ".join(sorted(part.name for part in odd)[:3]) or actual.name
                raise ValueError(f"The plan does not fit the model: component {planned.name!r} differs in {names}.")
        sizes = _sizes(module, self.components)
        pairs = [(component, self._holders[component.name]) for component in self.components]
        return MaskPlan(
            self.num_subnetworks,
            pairs,
            granularity=self.granularity,
            **_report(module, Discovery(self.components, (), {}), sizes),
        )

    # reading and writing

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        components = [
            {
                "name": component.name,
                "kind": component.kind,
                "storage": "block",
                "slices": [{"name": s.name, "dim": s.dim, "start": s.start, "stop": s.stop} for s in component.slices],
                "holders": list(self._holders[component.name]),
            }
            for component in self.components
        ]
        plan = {
            "version": VERSION,
            "num_subnetworks": self.num_subnetworks,
            "granularity": self.granularity,
            "components": components,
        }
        return json.dumps(plan, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MaskPlan:
        """Reads a plan from the text that `to_json` wrote.

        Raises:
            ValueError: The text is not a plan, has unknown keys, or was written by a newer version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"The plan is not valid JSON: {error}.") from error
        version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if version != VERSION:
            raise ValueError(f"The plan has version {version!r}; this lightning_sdp reads version {VERSION}.")
        data = _only_keys(data, "the plan", ("version", "num_subnetworks", "granularity", "components"))
        if data["granularity"] not in GRANULARITIES:
            raise ValueError(f"The plan has granularity {data['granularity']!r}; known: {', '.join(GRANULARITIES)}.")
        pairs = []
        for entry in _list(data["components"], "The plan's components"):
            entry = _only_keys(entry, "a component of the plan", ("name", "kind", "storage", "slices", "holders"))
            name = entry["name"]
            if not isinstance(name, str):
                raise ValueError(f"A component of the plan has the name {name!r}, which is no text.")
            slices = _list(entry["slices"], f"The slices of {name!r}")
            parts = [_only_keys(s, f"a slice of {name!r}", ("name", "dim", "start", "stop")) for s in slices]
            if entry["storage"] != "block" or entry["kind"] != "block" or any(s["dim"] is not None for s in parts):
                raise ValueError(f"The plan's component {name!r} is not a whole block.")
            component = Component(name, entry["kind"], tuple(ParamSlice(**s) for s in parts))
            pairs.append((component, entry["holders"]))
        return cls(data["num_subnetworks"], pairs, granularity=data["granularity"])

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
        lines.append("Everything outside of the blocks (stem, embeddings, head, skip paths) is held by every worker.")
        return "\n".join(lines)


def check_coverage(coverage: float | Sequence[float], num_subnetworks: int) -> list[float]:
    """Validates a coverage and spells it out per worker.

    Raises:
        ValueError: A share is outside (0, 1], or a list does not have one share per worker or sums to less than one.
    """
    check_shares(coverage)
    single = isinstance(coverage, (int, float))
    shares = [coverage] * num_subnetworks if isinstance(coverage, (int, float)) else list(coverage)
    if len(shares) != num_subnetworks:
        raise ValueError(f"coverage={coverage!r} has {len(shares)} shares for {num_subnetworks} workers.")
    if sum(shares) < 1 - 1e-9:
        if not single:
            raise ValueError(f"coverage={coverage!r} sums to less than 1: some blocks would have no holder.")
        share = 1 / num_subnetworks
        warnings.warn(
            f"coverage={coverage} is less than one of {num_subnetworks} workers: using 1/{num_subnetworks}, so "
            "that every block has a holder.",
            stacklevel=2,
        )
        shares = [share] * num_subnetworks
    return [float(s) for s in shares]


def check_shares(coverage: float | Sequence[float]) -> None:
    """Validates a coverage as far as that goes without the number of workers.

    Raises:
        ValueError: A share is not a number in (0, 1].
    """
    shares: list[Any] = list(coverage) if isinstance(coverage, (list, tuple)) else [coverage]
    if not shares or not all(type(s) in (int, float) and 0 < s <= 1 for s in shares):
        raise ValueError(
            f"coverage={coverage!r} must lie in (0, 1]: the share of the maskable part that a worker holds."
        )


def _only_keys(data: Any, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what[0].upper()}{what[1:]} is not an object with the keys {', '.join(keys)}.")
    odd = [key for key in data if key not in keys] or [key for key in keys if key not in data]
    if odd:
        state = "an unknown" if odd[0] in data else "no"
        raise ValueError(f"{what[0].upper()}{what[1:]} has {state} key {odd[0]!r}; its keys are {', '.join(keys)}.")
    return data


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{what} are {data!r}, which is no list.")
    return data


def _sizes(module: nn.Module, components: Sequence[Component]) -> list[int]:
    numel = {name: parameter.numel() for name, parameter in module.named_parameters()}
    return [sum(numel.get(part.name, 0) for part in component.slices) for component in components]


def _report(module: nn.Module, found: Discovery, sizes: Sequence[int]) -> dict[str, Any]:
    kept_sizes = _sizes(module, [component for component, *_ in found.kept])
    kept = [Kept(c.name, why, size, at) for (c, why, at), size in zip(found.kept, kept_sizes, strict=True)]
    total = sum(parameter.numel() for parameter in module.parameters())
    return {"sizes": sizes, "kept": kept, "shared_size": total - sum(sizes)}


def settings_key(settings: Mapping[str, Any]) -> str:
    """A canonical text of the settings that a plan was built from, to compare a checkpoint's with a run's."""
    return json.dumps(settings, sort_keys=True, default=list)
