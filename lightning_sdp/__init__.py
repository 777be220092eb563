"""Subnetwork Data Parallelism as a PyTorch Lightning strategy: ``Trainer(strategy="sdp")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.components import (
    Component,
    Group,
    Member,
    ParamSlice,
    discover_components,
    register_block,
    register_neurons,
)
from lightning_sdp.plan import MaskPlan
from lightning_sdp.reference import SDPReference
from lightning_sdp.strategy import SDPStrategy
from lightning_sdp.theory import communication_bytes

__version__ = "0.1.0.dev0"

__all__ = [
    "BatchNormRecalibration",
    "Component",
    "Group",
    "MaskPlan",
    "Member",
    "ParamSlice",
    "SDPReference",
    "SDPStrategy",
    "communication_bytes",
    "discover_components",
    "register_block",
    "register_neurons",
]

_NAMES = {
    "sdp": ("block", "popen"),
    "sdp_neuron": ("neuron", "popen"),
    "sdp_spawn": ("block", "spawn"),
    "sdp_fork": ("block", "fork"),
    "sdp_notebook": ("block", "fork"),
}

for _name, (_granularity, _start_method) in _NAMES.items():
    StrategyRegistry.register(
        _name,
        SDPStrategy,
        description=f"Subnetwork Data Parallelism over {_granularity}s; processes start by {_start_method}",
        override=True,
        granularity=_granularity,
        start_method=_start_method,
    )
