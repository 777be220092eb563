"""Finetuning callbacks, which thaw parameters and add groups of them, see the structure of a plain run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, Callback

_HOOKS = ("on_fit_start", "on_train_epoch_start")


def show_plain_structure(callbacks: Iterable[Callback], view: Callable[[], AbstractContextManager[None]]) -> None:
    """Lets finetuning callbacks do their work within a context; `show_own_structure` undoes it.

    Args:
        callbacks: The trainer's callbacks.
        view: Opens the context, in which the structure is that of a plain run.
    """
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            for hook in _HOOKS:
                setattr(callback, hook, _within(view, getattr(callback, hook)))


def show_own_structure(callbacks: Iterable[Callback]) -> None:
    """Gives finetuning callbacks their own hooks back."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            for hook in _HOOKS:
                callback.__dict__.pop(hook, None)


def _within(view: Callable[[], AbstractContextManager[None]], hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def within(*args: Any, **kwargs: Any) -> Any:
        with view():
            return hook(*args, **kwargs)

    return within
