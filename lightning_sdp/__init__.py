"""Subnetwork Data Parallelism as a PyTorch Lightning strategy: ``Trainer(strategy="sdp")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sdp.callbacks import BatchNormRecalibration, MaskingSchedule, SDPMonitor
from lightning_sdp.components import (
    Component,
    Group,
    Member,
    ParamSlice,
    discover_components,
    register_block,
    register_neurons,
)
from lightning_sdp.fsdp import SDPFSDPStrategy
from lightning_sdp.plan import MaskPlan
from lightning_sdp.precision import clip_grad_norm_
from lightning_sdp.reference import SDPReference
from lightning_sdp.strategy import SDPStrategy
from lightning_sdp.theory import communication_bytes

__version__ = "0.1.0.dev0"

__all__ = [
    "BatchNormRecalibration",
    "Component",
    "Group",
    "MaskPlan",
    "MaskingSchedule",
    "Member",
    "ParamSlice",
    "SDPFSDPStrategy",
    "SDPMonitor",
    "SDPReference",
    "SDPStrategy",
    "clip_grad_norm_",
    "communication_bytes",
    "discover_components",
    "register_block",
    "register_neurons",
]

_NAMES = {
    "sdp": ("block", "forward", "popen"),
    "sdp_neuron": ("neuron", "forward", "popen"),
    "sdp_backward": ("block", "backward", "popen"),
    "sdp_neuron_backward": ("neuron", "backward", "popen"),
    "sdp_spawn": ("block", "forward", "spawn"),
    "sdp_fork": ("block", "forward", "fork"),
    "sdp_notebook": ("block", "forward", "fork"),
}

for _name, (_granularity, _masking, _start_method) in _NAMES.items():
    StrategyRegistry.register(
        _name,
        SDPStrategy,
        description=f"Subnetwork Data Parallelism over {_granularity}s, {_masking} masking, start by {_start_method}",
        override=True,
        granularity=_granularity,
        masking=_masking,
        start_method=_start_method,
    )

StrategyRegistry.register(
    SDPFSDPStrategy.strategy_name,
    SDPFSDPStrategy,
    description="Subnetwork Data Parallelism over blocks, each sharded over the processes that hold it",
    override=True,
)
