"""A plan as a table and as a picture."""

from __future__ import annotations

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
    """A rich table of who holds what: components in rows, workers in columns, shares below."""
    workers = range(plan.num_subnetworks)
    shown = workers if plan.num_subnetworks <= _MAX_COLUMNS else range(_MAX_COLUMNS)
    more = [] if len(shown) == len(workers) else ["…"]
    table = Table(title=f"Who holds what: {len(plan.components)} {plan.granularity}s, {plan.num_subnetworks} workers")
    table.add_column("component", overflow="fold")
    table.add_column("parameters", justify="right")
    for worker in [*map(str, shown), *more]:
        table.add_column(worker, justify="center")
    for name, size, holders in _rows(plan):
        marks = ["●" if holders is None or worker in holders else "·" for worker in shown]
        label, style = (name, None) if holders is not None else (f"{name} (kept)", "dim")
        table.add_row(label, "" if size is None else format_count(size), *marks, *more, style=style)
    table.add_section()
    table.add_row("coverage", "", *[f"{plan.coverage[w]:.2f}" for w in shown], *more)
    if plan.sizes is not None and plan.shared_size is not None:
        kept, blocks = sum(k.size for k in plan.kept), sum(plan.sizes)
        held = [kept + held_size(plan, worker) for worker in shown]
        table.add_row("share of all blocks", "", *[f"{h / max(kept + blocks, 1):.2f}" for h in held], *more)
        total = plan.shared_size + blocks
        params = [format_count(plan.shared_size + held_size(plan, worker)) for worker in shown]
        table.add_row("parameters held", format_count(total), *params, *more)
    return table


def _rows(plan: MaskPlan) -> list[tuple[str, int | None, tuple[int, ...] | None]]:
    """Name, parameters and holders of every block in the model's order; holders are ``None`` for kept ones."""
    sizes = plan.sizes or (None,) * len(plan.components)
    rows: list[tuple[str, int | None, tuple[int, ...] | None]] = [
        (c.name, size, plan.holders(c.name)) for c, size in zip(plan.components, sizes, strict=True)
    ]
    for kept in plan.kept:
        rows.insert(kept.position, (kept.name, kept.size, None))
    return rows


def held_size(plan: MaskPlan, worker: int) -> int:
    """Maskable parameters that a worker holds; the plan must know its sizes."""
    assert plan.sizes is not None
    return sum(size for c, size in zip(plan.components, plan.sizes, strict=True) if worker in plan.holders(c.name))


def plot_plan(plan: MaskPlan, path: str | Path) -> None:
    """Draws components × workers: dark where held, hatched where kept by everyone, with each worker's coverage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    rows = [(name, holders) for name, _, holders in _rows(plan)]
    width, height = 3.2 + 0.55 * plan.num_subnetworks, 1.9 + 0.28 * len(rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    held: dict[str, Any] = {"facecolor": "#0072b2"}
    kept: dict[str, Any] = {"facecolor": "#9ecae1", "hatch": "///"}
    for row, (_, holders) in enumerate(rows):
        for worker in range(plan.num_subnetworks):
            style = kept if holders is None else held if worker in holders else {"facecolor": "white"}
            axes.add_patch(Rectangle((worker - 0.5, row - 0.5), 1, 1, edgecolor="#666666", linewidth=0.6, **style))
    axes.set_xlim(-0.5, plan.num_subnetworks - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
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
        f"SDP: {plan.num_subnetworks} workers hold {shares} of {len(plan.components)} maskable {plan.granularity}s "
        f"({len(plan.kept)} more are kept by all), in {groups} process group{'s' if groups != 1 else ''}."
    )
