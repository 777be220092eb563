"""Another plan for a running training: what ranks hold moves from the old holders directly to the new ones."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.optimizer_state import OptimizerLayout
from lightning_sdp.plan import MaskPlan
from lightning_sdp.run import Run
from lightning_sdp.sync.exchange import Exchange, Held
from lightning_sdp.sync.groups import HolderGroups

_DATA, _TRAINS = "data", "requires_grad"  # beside optimizer state, what moves


@torch.no_grad()
def replan(run: Run, plan: MaskPlan, masking: str, layout: OptimizerLayout) -> None:
    """Goes on with another plan or in another regime; collective, between two steps and at the end of a period.

    Args:
        run: What is being trained. Its full model is open if it will be run from now on, otherwise it is closed.
        plan: Who will hold what; it has the components of the present plan.
        masking: ``"forward"`` or ``"backward"``.
        layout: Of the optimizers.
    """
    run.forget_gradients()
    is_whole = run.runs_everything or run.is_open
    if run.runs_everything:
        run.buffers.before_forward()
    old = run.groups
    groups = HolderGroups(plan, len(old.world), old.rank, old.device, old.timeout, previous=old)
    exchange = Exchange(run.plan, old, groups)
    states = layout.take_states()
    moved = exchange.run(_give_up(run, exchange, is_whole, states))
    for name, held in moved.items():
        _tensor(run.module, name).requires_grad_(held.facts.pop(_TRAINS))
    stored = {name: held.tensors.pop(_DATA) for name, held in moved.items() if _DATA in held.tensors}
    run.take_part(plan, masking, groups, stored=stored, statistics=None if is_whole else run.buffers.full)
    layout.follow(run.part, plan, groups)
    layout.put_states(states | moved)


def _give_up(run: Run, exchange: Exchange, is_whole: bool, states: dict[str, Held]) -> dict[str, Held]:
    """Leaves the module with its full structure, and gives away what the rank has of tensors that may move.

    Their states are taken from ``states``. Values go along unless the module has all of them.
    """
    held: dict[str, Held] = {}
    for name in filter(exchange.had, exchange.names):
        tensor = _tensor(run.module, name)
        held[name] = states.pop(name, Held())
        held[name].facts[_TRAINS] = tensor.requires_grad
        if not is_whole:
            held[name].tensors[_DATA] = tensor.detach()
    run.part.give_up()
    return held


def _tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a name."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor: Tensor | None = owner._parameters.get(key)
    if tensor is None:
        tensor = owner._buffers[key]
    assert tensor is not None
    return tensor
