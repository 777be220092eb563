"""Subnetwork Data Parallelism as a PyTorch Lightning strategy: ``Trainer(strategy="sdp")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.components import Component, ParamSlice, discover_components, register_block
from lightning_sdp.plan import MaskPlan
from lightning_sdp.reference import SDPReference
from lightning_sdp.strategy import SDPStrategy
from lightning_sdp.theory import communication_bytes

__version__ = "0.1.0.dev0"

__all__ = [
    "BatchNormRecalibration",
    "Component",
    "MaskPlan",
    "ParamSlice",
    "SDPReference",
    "SDPStrategy",
    "communication_bytes",
    "discover_components",
    "register_block",
]

_START_METHODS = {"sdp": "popen", "sdp_spawn": "spawn", "sdp_fork": "fork", "sdp_notebook": "fork"}

for _name, _start_method in _START_METHODS.items():
    StrategyRegistry.register(
        _name,
        SDPStrategy,
        description=f"Subnetwork Data Parallelism over blocks; processes start by {_start_method}",
        override=True,
        start_method=_start_method,
    )
