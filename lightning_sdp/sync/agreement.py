"""One result, or one error, on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agree(compute: Callable[[], T], fingerprint: Callable[[T], Sequence[str]]) -> T:
    """Computes something on every rank and makes sure that all ranks have the same; collective.

    Args:
        compute: What to compute; may raise.
        fingerprint: Describes the result in lines that are equal on all ranks.

    Returns:
        The result.

    Raises:
        ValueError: On every rank, with the same message: ``compute`` raised on some rank, or the fingerprints differ.
    """
    error: Exception | None = None
    lines: Sequence[str] = ()
    try:
        result = compute()
        lines = fingerprint(result)
    except Exception as caught:
        error = caught
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    reports = _gather((None if error is None else str(error), digest))
    message = next((text for text, _ in reports if text is not None), None)
    if message is not None:
        raise ValueError(message) from error
    if len({digest for _, digest in reports}) > 1:
        raise ValueError(_difference(_gather(list(lines))))
    return result


@contextmanager
def needing_all(what: str) -> Iterator[None]:
    """Says of what has waited in vain for other ranks that it needs them all.

    Args:
        what: What the block of code does.

    Raises:
        RuntimeError: A collective within the block has timed out.
    """
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise RuntimeError(
            f"{what} needs all processes, and one of them has not come in time: call it on every process, not within "
            "`if trainer.is_global_zero:`."
        ) from error


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _difference(all_lines: list[list[str]]) -> str:
    """Names the first line in which some rank differs from rank 0."""
    for rank, lines in enumerate(all_lines[1:], start=1):
        for i in range(max(len(lines), len(all_lines[0]))):
            mine = all_lines[0][i] if i < len(all_lines[0]) else "nothing"
            theirs = lines[i] if i < len(lines) else "nothing"
            if mine != theirs:
                return (
                    f"The model or its mask plan differs between ranks: where rank 0 has {mine}, rank {rank} has "
                    f"{theirs}. Build the same model with the same strategy arguments on every rank."
                )
    raise AssertionError("the digests differ but the lines do not")
