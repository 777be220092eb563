"""A plan as JSON text, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lightning_sdp.components import Component, ParamSlice
from lightning_sdp.components.base import KINDS
from lightning_sdp.components.discovery import GRANULARITIES

if TYPE_CHECKING:
    from lightning_sdp.plan import MaskPlan

VERSION = 1
_STORAGES = ("block", "sliced", "padded")


def plan_to_json(plan: MaskPlan) -> str:
    """The JSON text of a plan."""
    components = [
        {
            "name": component.name,
            "kind": component.kind,
            "storage": _storage(component),
            "slices": [{"name": s.name, "dim": s.dim, "start": s.start, "stop": s.stop} for s in component.slices],
            "holders": list(plan.holders(component.name)),
        }
        for component in plan.components
    ]
    head = {"version": VERSION, "num_subnetworks": plan.num_subnetworks, "granularity": plan.granularity}
    return json.dumps({**head, "components": components}, indent=1)


def plan_from_json(text: str) -> dict[str, Any]:
    """Reads what `plan_to_json` wrote.

    Returns:
        The arguments of `MaskPlan`.

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
    granularity = data["granularity"]
    if granularity not in GRANULARITIES:
        raise ValueError(f"The plan has granularity {granularity!r}; known: {', '.join(GRANULARITIES)}.")
    pairs = []
    for entry in _list(data["components"], "The plan's components"):
        entry = _only_keys(entry, "a component of the plan", ("name", "kind", "storage", "slices", "holders"))
        pairs.append((_component(entry, granularity), entry["holders"]))
    return {"num_subnetworks": data["num_subnetworks"], "holders": pairs, "granularity": granularity}


def _storage(component: Component) -> str:
    return "block" if component.kind == "block" else "padded" if component.padded else "sliced"


def _component(entry: dict[str, Any], granularity: str) -> Component:
    name = entry["name"]
    if not isinstance(name, str):
        raise ValueError(f"A component of the plan has the name {name!r}, which is no text.")
    slices = _list(entry["slices"], f"The slices of {name!r}")
    parts = [
        ParamSlice(**_only_keys(part, f"a slice of {name!r}", ("name", "dim", "start", "stop"))) for part in slices
    ]
    if entry["kind"] not in KINDS or entry["storage"] not in _STORAGES:
        raise ValueError(
            f"The plan's component {name!r} has kind {entry['kind']!r} and storage {entry['storage']!r}; known are the "
            f"kinds {', '.join(KINDS)} and the storages {', '.join(_STORAGES)}."
        )
    component = Component(name, entry["kind"], tuple(parts), entry["storage"] == "padded")
    if granularity == "block":
        if _storage(component) != entry["storage"] or entry["kind"] != "block" or any(p.dim is not None for p in parts):
            raise ValueError(f"The plan's component {name!r} is not a whole block.")
    elif entry["kind"] == "block" or entry["storage"] == "block" or not all(_is_range(part) for part in parts):
        raise ValueError(f"The plan's component {name!r} is not a chunk of neurons, channels or heads.")
    return component


def _is_range(part: ParamSlice) -> bool:
    numbers = (part.dim, part.start, part.stop)
    return all(type(number) is int and number >= 0 for number in numbers) and part.start < part.stop


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
