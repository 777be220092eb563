"""What operations that rearrange entries do to the factors of their operand."""

from __future__ import annotations

import math

from lightning_sdp.components.dataflow import Operation, rule
from lightning_sdp.components.factors import Dim, Dims, freeze, leaves, new_dim, reshape, size_of, take, unify


@rule("view _unsafe_view reshape flatten unflatten")
def _view(call: Operation) -> Dims | None:
    if "dtype" in call.args:  # reads the bytes as another type
        return None
    return reshape(call.first, tuple(call.tensors[0].meta["val"].shape), call.shape)


@rule("view_as_complex")
def _view_as_complex(call: Operation) -> Dims:
    *dims, pair = call.first
    freeze([pair], "cut by view_as_complex")
    return dims


@rule("view_as_real")
def _view_as_real(call: Operation) -> Dims:
    return [*call.first, new_dim(2, "cut by view_as_real")]


@rule("permute transpose t")
def _permute(call: Operation) -> Dims:
    dims = call.first
    if call.op == "permute":
        return [dims[axis] for axis in call.args["dims"]]
    if call.op == "t":
        return dims[::-1]
    first, second = call.args["dim0"], call.args["dim1"]
    dims[first], dims[second] = dims[second], dims[first]
    return dims


@rule("unsqueeze")
def _unsqueeze(call: Operation) -> Dims:
    dims = call.first
    dims.insert(call.args["dim"] % (len(dims) + 1), ())
    return dims


@rule("squeeze")
def _squeeze(call: Operation) -> Dims:
    dims, axes = call.first, call.axes("dim")
    return [dim for axis, dim in enumerate(dims) if dim or axis not in axes]


@rule("expand repeat tile")
def _expand(call: Operation) -> Dims:
    dims, shape = call.first, call.shape
    dims = [()] * (len(shape) - len(dims)) + dims
    copies = [size // size_of(dim) for size, dim in zip(shape, dims, strict=True)]
    return [new_dim(count) + dim for count, dim in zip(copies, dims, strict=True)]


@rule("repeat_interleave")
def _repeat_interleave(call: Operation) -> Dims | None:
    count, axis = call.args.get("repeats"), call.args.get("dim")
    if not isinstance(count, int) or axis is None:
        return None
    dims = call.first
    dims[axis] = dims[axis] + new_dim(count)
    return dims


# Parts of a dimension


def _part(call: Operation, dim: Dim, start: int, length: int) -> Dim:
    """A range of a dimension: units of an inner factor remain where the range consists of whole turns of it."""
    if length in (0, size_of(dim)):
        return dim if length else new_dim(0)
    block = math.gcd(size_of(dim), start, length)
    cut = take(dim, size_of(dim) // block)
    if cut is None:
        freeze([dim], f"cut by {call.op}")
        return new_dim(length, f"cut by {call.op}")
    freeze([cut[0]], f"cut by {call.op}")
    return new_dim(length // block, f"cut by {call.op}") + cut[1]


def _range(call: Operation, size: int) -> tuple[int, int]:
    start, end = (call.args.get(name) for name in ("start", "end"))
    first, last, _ = slice(start, end).indices(size)
    return first, max(last - first, 0)


@rule("slice")
def _slice(call: Operation) -> Dims:
    dims, axis = call.first, call.args["dim"]
    start, length = _range(call, size_of(dims[axis]))
    if call.args["step"] == 1:
        dims[axis] = _part(call, dims[axis], start, length)
    else:
        freeze([dims[axis]], "cut by slice")
        dims[axis] = new_dim(call.shape[axis], "cut by slice")
    return dims


@rule("split split_with_sizes")
def _split(call: Operation) -> tuple[Dims, ...]:
    dims, axis = call.first, call.args["dim"]
    start, parts = 0, []
    for value in call.node.meta["val"]:
        length = int(value.shape[axis])
        parts.append([*dims])
        parts[-1][axis] = _part(call, dims[axis], start, length)
        start += length
    return tuple(parts)


@rule("glu")
def _glu(call: Operation) -> Dims:
    dims, axis = call.first, call.args["dim"]
    half = size_of(dims[axis]) // 2
    dims[axis] = _part(call, dims[axis], 0, half)
    return dims


@rule("select unbind")
def _select(call: Operation) -> Dims | tuple[Dims, ...]:
    dims = call.first
    freeze([dims.pop(call.args["dim"])], f"cut by {call.op}")
    return tuple([*dims] for _ in call.node.meta["val"]) if call.op == "unbind" else dims


@rule("slice_scatter select_scatter")
def _scatter(call: Operation) -> Dims:
    dims, written = call.first, call.dims(call.args["src"])
    axis = call.args["dim"] % len(dims)
    size = size_of(dims[axis])
    if call.op == "select_scatter":
        written.insert(axis, ())
        replaced = _part(call, dims[axis], call.args["index"] % size, 1)
    elif call.args["step"] == 1:
        replaced = _part(call, dims[axis], *_range(call, size))
    else:
        freeze([dims[axis]], "cut by slice_scatter")
        replaced = new_dim(size_of(written[axis]), "cut by slice_scatter")
    for dim, other in zip([*dims[:axis], replaced, *dims[axis + 1 :]], written, strict=True):
        unify(dim, other)
    return dims


@rule("cat stack")
def _cat(call: Operation) -> Dims:
    parts = [call.dims(node) for node in call.args["tensors"] if 0 not in node.meta["val"].shape]  # empty: a new cache
    axis = call.args["dim"] % (len(parts[0]) + (call.op == "stack"))
    if call.op == "stack":
        for part in parts:
            part.insert(axis, ())
    for part in parts[1:]:
        for i, (dim, other) in enumerate(zip(parts[0], part, strict=True)):
            if i != axis:
                unify(dim, other)
    lengths = [part[axis] for part in parts]
    if any(leaves(dim) != leaves(lengths[0]) for dim in lengths):
        freeze(lengths, "concatenated with others")
        lengths[0] = new_dim(sum(map(size_of, lengths)), "concatenated with others")
    else:
        lengths[0] = new_dim(len(parts), "concatenated with others") + lengths[0]
    return [lengths[0] if i == axis else dim for i, dim in enumerate(parts[0])]


# Picking by index


@rule("index")
def _index(call: Operation) -> Dims | None:
    dims, chosen = call.first, call.args["indices"]
    places = [i for i, index in enumerate(chosen) if index is not None]
    indices = [call.dims(chosen[i]) for i in places]
    if any(chosen[i].meta["val"].dtype.itemsize == 1 for i in places):  # a mask
        return None
    freeze([dims[i] for i in places], "picked by index")
    rank = max(map(len, indices))
    out: Dims = [()] * rank
    for index in indices:
        for i, dim in enumerate(index, rank - len(index)):
            if dim and out[i]:
                unify(out[i], dim)
            out[i] = out[i] or dim
    rest = [dim for i, dim in enumerate(dims) if i not in places]
    at = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    return rest[:at] + out + rest[at:]


@rule("index_select")
def _index_select(call: Operation) -> Dims:
    dims, axis = call.first, call.args["dim"]
    freeze([dims[axis]], "picked by index")
    index = call.dims(call.args["index"])
    dims[axis] = index[0] if index else ()
    return dims
