"""What can be masked in a model. Nothing in here knows of processes."""

from lightning_sdp.components.base import Component, Group, Member, ParamSlice
from lightning_sdp.components.blocks import Block, find_blocks, named_block
from lightning_sdp.components.discovery import Discovery, discover, discover_components
from lightning_sdp.components.registry import Skip, register_block, register_neurons

__all__ = [
    "Block",
    "Component",
    "Discovery",
    "Group",
    "Member",
    "ParamSlice",
    "Skip",
    "discover",
    "discover_components",
    "find_blocks",
    "named_block",
    "register_block",
    "register_neurons",
]
