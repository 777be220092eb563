"""A plan as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from lightning_sdp.plan import MaskPlan

_MAX_COLUMNS = 16


def format_count(number: float) -> str:
    """A number with three significant digits and a unit: ``11.2M``."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:  # what would be rounded up to it
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def plan_table(plan: MaskPlan) -> Table:
    """A rich table of who holds what: blocks or groups in rows, workers in columns, shares below."""
    workers = range(plan.num_subnetworks)
    shown = workers if plan.num_subnetworks <= _MAX_COLUMNS else range(_MAX_COLUMNS)
    more = [] if len(shown) == len(workers) else ["…"]
    rows = _rows(plan)
    table = Table(title=f"Who holds what: {what_is_masked(plan)}, {plan.num_subnetworks} workers")
    table.add_column("component", overflow="fold")
    table.add_column("parameters", justify="right")
    for worker in [*map(str, shown), *more]:
        table.add_column(worker, justify="center")
    for row in rows:
        size = "" if row.size is None else format_count(row.size)
        label, style = (row.name, None) if not row.kept else (f"{row.name} (kept)", "dim")
        table.add_row(label, size, *[row.mark(worker) for worker in shown], *more, style=style)
    table.add_section()
    table.add_row("coverage", "", *[f"{plan.coverage[w]:.2f}" for w in shown], *more)
    if plan.sizes is not None and plan.shared_size is not None:
        shares = [f"{effective_coverage(plan)[w]:.2f}" for w in shown]
        table.add_row(f"share of all {plan.granularity}s", "", *shares, *more)
        total = plan.shared_size + sum(plan.sizes)
        params = [format_count(plan.shared_size + held_size(plan, worker)) for worker in shown]
        table.add_row("parameters held", format_count(total), *params, *more)
    return table


@dataclass(frozen=True)
class _Row:
    """A block, or all chunks of a group: their number, and how many each worker holds."""

    name: str
    size: int | None
    held: tuple[int, ...]
    parts: int = 1
    kept: bool = False

    def share(self, worker: int) -> float:
        return self.held[worker] / self.parts

    def mark(self, worker: int) -> str:
        held = self.held[worker]
        return "●" if held == self.parts else f"{held}/{self.parts}" if held else "·"


def _rows(plan: MaskPlan) -> list[_Row]:
    """Every block or group in the model's order, those that all workers keep included."""
    members: dict[str, list[int]] = {}
    for i, component in enumerate(plan.components):
        name = component.name if component.kind == "block" else component.group
        members.setdefault(name, []).append(i)
    rows = []
    for name, numbers in members.items():
        holders = [plan.holders(plan.components[i].name) for i in numbers]
        held = tuple(sum(worker in workers for workers in holders) for worker in range(plan.num_subnetworks))
        size = None if plan.sizes is None else sum(plan.sizes[i] for i in numbers)
        rows.append(_Row(name, size, held, len(numbers)))
    for kept in plan.kept:
        rows.insert(kept.position, _Row(kept.name, kept.size, (1,) * plan.num_subnetworks, kept=True))
    return rows


def what_is_masked(plan: MaskPlan, adjective: str = "") -> str:
    """The number of components in words."""
    number = len(plan.components)
    if plan.granularity == "block":
        return f"{number} {adjective}blocks"
    groups = len({component.group for component in plan.components})
    return f"{groups} {adjective}groups of neurons in {number} chunks"


def held_size(plan: MaskPlan, worker: int) -> int:
    """Maskable parameters that a worker holds; the plan must know its sizes."""
    assert plan.sizes is not None
    return sum(size for c, size in zip(plan.components, plan.sizes, strict=True) if worker in plan.holders(c.name))


def effective_coverage(plan: MaskPlan) -> list[float]:
    """Share of all blocks or groups that each worker holds, kept ones included; the plan must know its sizes."""
    assert plan.sizes is not None
    kept = sum(k.size for k in plan.kept)
    total = max(kept + sum(plan.sizes), 1)
    return [(kept + held_size(plan, worker)) / total for worker in range(plan.num_subnetworks)]


def usage_table(rows: Sequence[Mapping[str, float]], workers: int) -> Table:
    """A rich table of what each worker has, sends and takes time for.

    Args:
        rows: What each rank measured; see `SDPMonitor`. Of the ranks of a worker the largest number counts.
        workers: Number of workers.
    """
    table = Table(title="What each worker held, sent and took per step")
    columns = ("worker", "coverage", "parameters", "gradients", "optimizer", "peak", "sent", "step", "busy")
    for column in columns:
        table.add_column(column, justify="right")
    size = len(rows) // workers
    for worker in range(workers):
        own = rows[worker * size : (worker + 1) * size]
        most = {name: max(row[name] for row in own) for name in own[0]}
        sizes = [format_count(value) + "B" for name, value in most.items() if name.endswith("_bytes")]
        times = [f"{1000 * most[name]:.1f} ms" for name in ("step_time", "busy_time")]
        table.add_row(str(worker), f"{most['effective_coverage']:.2f}", *sizes, *times)
    return table


def plot_plan(plan: MaskPlan, path: str | Path) -> None:
    """Draws blocks or groups × workers: dark as far as held, hatched where kept by everyone, with the coverages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    rows = _rows(plan)
    width, height = 3.2 + 0.55 * plan.num_subnetworks, 1.9 + 0.28 * len(rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    held: dict[str, Any] = {"facecolor": "#0072b2"}
    kept: dict[str, Any] = {"facecolor": "#9ecae1", "hatch": "///"}
    frame: dict[str, Any] = {"edgecolor": "#666666", "linewidth": 0.6}
    for at, row in enumerate(rows):
        for worker in range(plan.num_subnetworks):
            corner = (worker - 0.5, at - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", **frame))
            axes.add_patch(Rectangle(corner, row.share(worker), 1, **(kept if row.kept else held), **frame))
    axes.set_xlim(-0.5, plan.num_subnetworks - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    labels = [f"{w}\n{share:.0%}" for w, share in enumerate(plan.coverage)]
    axes.set_xticks(range(plan.num_subnetworks), labels, fontsize=7)
    axes.set_xlabel("worker, coverage")
    axes.set_title("Who holds what", fontsize=9)
    handles = [
        Patch(edgecolor="#666666", label="held", **held),
        Patch(edgecolor="#666666", facecolor="white", label="missing"),
    ]
    if plan.kept:
        handles.insert(1, Patch(edgecolor="#666666", label="kept by all", **kept))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def summary(plan: MaskPlan, groups: int) -> str:
    """One line for the log: what the workers hold, and in how many process groups they average."""
    if plan.num_subnetworks == 1:
        return "SDP with one worker: it trains the whole model."
    shares = ", ".join(f"{share:.0%}" for share in plan.coverage[:8])
    return (
        f"SDP: {plan.num_subnetworks} workers hold {shares} of {what_is_masked(plan, 'maskable ')} "
        f"({len(plan.kept)} more are kept by all), in {groups} process group{'s' if groups != 1 else ''}."
    )
