"""Rules for known classes; users add theirs with `register_block` and `register_neurons`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from lightning_sdp.components.base import Group

SkipFn = Callable[..., Any]
NeuronRule = Callable[[Any], list[Group]]


@dataclass(frozen=True)
class Skip:
    """What a residual block does without its branch.

    Attributes:
        function: Called as ``function(block, *args, **kwargs)`` with the arguments of the block's forward; returns
            what the block returns when its branch adds nothing.
        path: Names of the block's children that the skip path itself needs, e.g. ``("downsample",)``. Every worker
            keeps them.
    """

    function: SkipFn
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rule:
    skip: Skip
    applies: Callable[[nn.Module], bool]


_RULES: dict[str, _Rule] = {}
_NEURON_RULES: dict[str, NeuronRule] = {}


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register_block(
    cls: type[nn.Module] | str, *, path: tuple[str, ...] = (), applies: Callable[[nn.Module], bool] | None = None
) -> Callable[[SkipFn], SkipFn]:
    """Declares a class of modules to be residual blocks, and what remains of one where it is missing.

    Example::

        @register_block(MyBlock, path=("shortcut",))
        def skip(block, x, mask=None):
            return block.shortcut(x)

    Args:
        cls: The class of the blocks, or its qualified name (``"package.module.Class"``), so that its package need not
            be imported. Subclasses are covered.
        path: Names of children that ``skip`` uses; they stay with every worker.
        applies: Decides for one module whether it is such a block; ``None``: always.

    Returns:
        A decorator for the function ``skip(block, *args, **kwargs)``, which returns what the block's forward
        returns, in the same structure, when its branch adds nothing.
    """

    def decorate(function: SkipFn) -> SkipFn:
        name = cls if isinstance(cls, str) else _qualified_name(cls)
        _RULES[name] = _Rule(Skip(function, tuple(path)), applies or (lambda _: True))
        return function

    return decorate


def registered_skip(module: nn.Module) -> tuple[bool, Skip | None]:
    """Looks up the rule for a module.

    Returns:
        Whether a rule knows the module's class, and its skip; the skip is ``None`` where the rule says that this module
        is not a residual block (e.g. a post-norm layer).
    """
    for cls in type(module).__mro__:
        rule = _RULES.get(_qualified_name(cls))
        if rule is not None:
            return True, rule.skip if rule.applies(module) else None
    return False, None


def register_neurons(cls: type[nn.Module] | str) -> Callable[[NeuronRule], NeuronRule]:
    """Declares which units the modules of a class consist of.

    Example::

        @register_neurons(MyMLP)
        def groups(mlp):
            width = (mlp.up.out_features,)
            members = produces(mlp, "up", width) + reads(mlp, "down", width)
            return [Group("hidden", "neurons", mlp.up.out_features, tuple(members))]

    Args:
        cls: The class of the modules, or its qualified name (``"package.module.Class"``), so that its package need not
            be imported. Subclasses are covered. Of several rules for one class the latest counts.

    Returns:
        A decorator for the function ``rule(module)``, which returns the module's groups, with names relative to the
        module: a member ``"up.weight"``, an attribute ``"n_heads"``, the owner ``""``. It may return none.
    """

    def decorate(rule: NeuronRule) -> NeuronRule:
        _NEURON_RULES[cls if isinstance(cls, str) else _qualified_name(cls)] = rule
        return rule

    return decorate


def registered_neurons(module: nn.Module) -> tuple[type | None, NeuronRule | None]:
    """Looks up the rule for the units of a module.

    Returns:
        The class, among those that the module's class derives from, that has a rule, and the rule.
    """
    for cls in type(module).__mro__:
        rule = _NEURON_RULES.get(_qualified_name(cls))
        if rule is not None:
            return cls, rule
    return None, None


def first_argument(module: nn.Module) -> SkipFn:
    """The skip of an identity block: returns the first argument of its forward, however it is passed."""
    name = next(iter(inspect.signature(module.forward).parameters), "")

    def skip(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs[name]

    return skip


# A pre-norm layer is an identity plus two branches; a post-norm one normalizes the residual stream itself, so that
# nothing can be taken out of it. Their forwards choose between code paths at run time and cannot be traced.
def _is_prenorm(layer: Any) -> bool:
    return bool(layer.norm_first)


@register_block("torch.nn.modules.transformer.TransformerEncoderLayer", applies=_is_prenorm)
def _pass_source(layer: nn.Module, src: Any, *args: Any, **kwargs: Any) -> Any:
    return src


@register_block("torch.nn.modules.transformer.TransformerDecoderLayer", applies=_is_prenorm)
def _pass_target(layer: nn.Module, tgt: Any, *args: Any, **kwargs: Any) -> Any:
    return tgt
