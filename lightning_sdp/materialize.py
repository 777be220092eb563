"""A model that starts on the meta device: only what a worker holds is ever made real and initialized.

[Note: Equal on all holders]
Each module is initialized by itself, at full size in host memory, with random numbers that follow from one seed and
from the module's name. So all holders of a tensor, in whole or in part, have the same values without any exchange, and
no process needs more than its part and one module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp._compat import isolate_rng
from lightning_sdp.layout import TensorLayout
from lightning_sdp.subnetwork import stand_in


def is_on_meta(module: nn.Module) -> bool:
    """Whether a module has parameters on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def materialize(
    module: nn.Module,
    device: torch.device,
    seed: int,
    holds: Callable[[str], bool],
    cut: Mapping[str, TensorLayout],
    holder: int,
) -> dict[str, Tensor]:
    """Makes the meta tensors of a module real: initialized where they are held, as stand-ins where not.

    Args:
        module: The full model. Its parameters keep their identity.
        device: Where tensors go.
        seed: Of the initialization; the same on every rank.
        holds: Whether a tensor is held, in whole or in part, by its name.
        cut: How tensors are spread of which only a part is held, by name.
        holder: Whose part it is, in these layouts.

    Returns:
        The held parts of cut tensors, by name; in the module these have no data.

    Raises:
        ValueError: A module does not say how it is initialized.
    """
    names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    parts: dict[str, Tensor] = {}
    initializer: dict[str, nn.Module] = {}
    for path, owner in module.named_modules():
        above = initializer.get(path.rpartition(".")[0], owner) if path else owner
        initializer[path] = owner if hasattr(owner, "_init_weights") else above
        own = {}
        for tree in (owner._parameters, owner._buffers):
            for key, tensor in tree.items():
                if tensor is not None and tensor.is_meta:
                    own[names[id(tensor)]] = _with_data(tree, key, stand_in(tensor, torch.device("cpu")))
        if any(holds(name) for name in own):
            _initialize(path, owner, initializer[path], seed, own.values())
        for name, tensor in own.items():
            if not holds(name):
                tensor.data = stand_in(tensor, device)
            elif name in cut:
                parts[name] = cut[name].take(tensor.data, holder).to(device)
                tensor.data = stand_in(tensor, device)
            else:
                tensor.data = tensor.data.to(device)
    return parts


def _with_data(tree: dict[str, Any], key: str, data: Tensor) -> Tensor:
    """Gives a meta tensor of a module data of another device; a parameter keeps its identity."""
    tensor = tree[key]
    if not isinstance(tensor, nn.Parameter):
        tree[key] = data
        return data
    real = nn.Parameter(data, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)
    return tensor


def _initialize(path: str, owner: nn.Module, root: nn.Module, seed: int, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
    of_a_root: Any = getattr(root, "_init_weights", None)  # as models of Hugging Face have it
    of_its_own: Any = getattr(owner, "reset_parameters", getattr(owner, "_reset_parameters", None))
    with isolate_rng(include_cuda=False), torch.no_grad():
        torch.manual_seed(seed ^ zlib.crc32(path.encode()))
        if of_a_root is not None:
            of_a_root(owner)
        elif of_its_own is not None:
            of_its_own()
        else:
            raise ValueError(
                f"{type(owner).__name__} {path!r} has parameters on the meta device, but no reset_parameters() that "
                "initializes them. Give its class one, or build the model on a real device."
            )
