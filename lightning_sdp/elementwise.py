"""Whether an optimizer updates each element by itself, which tensors that are cut need."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp._compat import isolate_rng

_KNOWN = {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
_STEPS = 3


CUT = (
    "are cut, so that processes with different parts of one would update their common entries differently. Use an "
    "elementwise optimizer such as SGD or AdamW, or granularity='block', or keep the modules of these tensors whole "
    "with keep=..."
)
AVERAGED = (
    "have their optimizer state averaged element by element. Use an elementwise optimizer such as SGD or AdamW, or "
    "average_optimizer_state=False."
)


def require_elementwise(optimizers: Sequence[Optimizer], names_of: Mapping[int, str], because: str = CUT) -> None:
    """Refuses optimizers whose update of one element depends on the rest of its tensor.

    Ranks that hold different parts of a tensor would update the entries that they share differently. The optimizers of
    ``torch.optim`` are known; any other class is tried on a small tensor and on a part of it.

    Args:
        optimizers: The optimizers.
        names_of: Names of the tensors that need it, by their ``id``.
        because: What is the matter with these tensors.

    Raises:
        ValueError: One of them is not elementwise, or cannot be tried.
    """
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [names_of[id(p)] for p in parameters if id(p) in names_of]
        if names and not is_elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} updates a tensor as a whole, but {names[0]!r} and {len(names) - 1} more "
                f"tensors {because}"
            )


def require_separate(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that update all tensors together: processes have different ones.

    Raises:
        ValueError: One of them does.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS updates all parameters together, but processes have different ones. Use another optimizer, or "
            "coverage=1."
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each element by itself; ``False`` where that cannot be found out."""
    cls = type(optimizer)
    if cls.__module__.startswith("torch.optim.") and cls.__name__ in _KNOWN:
        return True
    accepted = inspect.signature(cls).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        with isolate_rng(), torch.enable_grad():
            whole = _train(cls, options, slice(None), slice(None))
            parts = [_train(cls, options, slice(1, 4), slice(None)), _train(cls, options, slice(None), slice(1, 3))]
    except Exception:  # whatever a stranger's code raises
        return False
    return torch.allclose(parts[0], whole[1:4], atol=1e-12) and torch.allclose(parts[1], whole[:, 1:3], atol=1e-12)


def _train(cls: type[Optimizer], options: dict[str, Any], rows: slice, columns: slice) -> Tensor:
    """A few steps on a part of a tensor, with the gradients that the whole would have there."""
    values = torch.linspace(-1, 1, 24 * (_STEPS + 1), dtype=torch.float64).sin().view(_STEPS + 1, 6, 4)
    parameter = values[0, rows, columns].clone().requires_grad_()
    optimizer = cls([parameter], **options)
    for _, gradient in pairwise(values):
        parameter.grad = gradient[rows, columns].clone()
        optimizer.step()
    return parameter.detach()
