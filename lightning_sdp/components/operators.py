"""What operations that compute do to the factors of their operands.

An operation leaves the units of a factor independent of each other only if it works on every unit by itself, or sums
over the units weighted by a parameter; everything else freezes the factor. Batch norm counts as it works in training,
where it mixes all dimensions but the channels.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import torch.fx as fx

from lightning_sdp.components.dataflow import Operation, rule
from lightning_sdp.components.factors import (
    VOCABULARY,
    Dim,
    Dims,
    freeze,
    leaves,
    new_dim,
    new_dims,
    size_of,
    take,
    unify,
)

# Entry by entry


def _align(call: Operation, shape: Sequence[int], operands: Sequence[fx.Node], out: list[Dim | None]) -> Dims:
    """Unifies the dimensions of operands that are broadcast to a shape."""
    for node in operands:
        dims = call.dims(node)
        offset = len(shape) - len(dims)
        for i, dim in enumerate(dims, offset):
            if not dim:
                continue
            if out[i] is None:
                out[i] = dim
            else:
                unify(out[i] or (), dim)
    return [new_dim(size) if dim is None else dim for size, dim in zip(shape, out, strict=True)]


_ADDITIONS = {"add", "sub", "rsub", "lerp", "addcmul", "addcdiv"}
_RESIDUAL = "part of the residual stream"


@rule("pointwise dropout feature_dropout alpha_dropout native_dropout bernoulli hardswish log_sigmoid rsub where")
@rule("copy fill zero")
@rule("__and__ __or__ __xor__ complex polar _to_copy alias detach contiguous lift_fresh_copy masked_fill")
def _pointwise(call: Operation) -> Dims:
    shape = call.shape
    if call.op in _ADDITIONS:
        _note_residual(call, call.tensors)
    return _align(call, shape, call.tensors, [None] * len(shape))


def _note_residual(call: Operation, operands: Sequence[fx.Node]) -> None:
    """Freezes the dimensions that activations of different producers have in common when they are added."""
    terms = [node for node in operands if call.depends_on_input(node)]
    if len({call.flow.producers[node] for node in terms}) < 2:
        return
    call.new_values()
    for i in range(1, max(len(call.dims(node)) for node in terms) + 1):
        carriers = [dims[-i] for dims in map(call.dims, terms) if len(dims) >= i and dims[-i]]
        if len(carriers) > 1:
            freeze(carriers, _RESIDUAL)


@rule("type_as zeros_like ones_like full_like empty_like rand_like randn_like")
def _like_first(call: Operation) -> Dims:
    if call.op.endswith("_like"):
        call.flow.producers[call.node] = frozenset()
    return call.first


@rule("zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor")
def _constant(call: Operation) -> Dims:
    call.flow.producers[call.node] = frozenset()
    return new_dims(call.shape)


@rule("prelu")
def _prelu(call: Operation) -> Dims:
    dims, slope = call.first, call.dims(call.args["weight"])
    if slope and slope[0]:
        unify(dims[min(1, len(dims) - 1)], slope[0])
    return dims


# Sums over a dimension


def _attend(dim: Dim) -> None:
    for factor in leaves(dim):
        factor.attended = True


def _contract(
    call: Operation,
    nodes: tuple[fx.Node, fx.Node],
    labels: tuple[Sequence[Hashable], Sequence[Hashable]],
    out: Sequence,
) -> Dims:
    """A product of two tensors, summed over the labels that the result lacks, as in an einsum.

    A parameter that is multiplied with anything else reads what is summed over, and produces what it alone has.
    """
    left, right = (dict(zip(names, call.dims(node), strict=True)) for names, node in zip(labels, nodes, strict=True))
    weight = next((node for node in nodes[::-1] if node in call.flow.source), None)
    own, other = (right, left) if weight is nodes[1] else (left, right)
    for label in left.keys() & right.keys():
        if left[label] and right[label]:  # else one of them is broadcast
            unify(left[label], right[label])
            if weight is None and label in out:
                _attend(left[label])
    for label in dict.fromkeys([*labels[0], *labels[1]]):
        summed = [dims[label] for dims in (left, right) if label in dims and label not in out]
        if weight is None or not (label in left and label in right):
            freeze(summed, f"contracted between activations ({call.op})")
    if weight is not None:
        name = call.flow.source[weight]
        call.flow.reads.extend((name, dim) for label, dim in own.items() if label in other and label not in out)
        call.flow.produces.extend((name, dim) for label, dim in own.items() if label not in other and label in out)
    call.new_values()
    return [left[label] if left.get(label) else right.get(label, ()) for label in out]


def _add_bias(call: Operation, bias: Any, out: Dims) -> Dims:
    """Adds what is a bias as a rule, but may be an activation."""
    if not isinstance(bias, fx.Node):
        return out
    if call.depends_on_input(bias):
        carried = list(zip(call.dims(bias)[::-1], out[::-1], strict=False))
        freeze([dim for pair in carried if pair[0] for dim in pair], _RESIDUAL)
    return _align(call, call.shape, [bias], list(out))


def _as_weight(call: Operation, name: str) -> fx.Node:
    node = call.args[name]
    if node not in call.flow.source:
        freeze(call.dims(node), "its weight is computed in the forward")
    return node


@rule("linear")
def _linear(call: Operation) -> Dims:
    operand, weight = call.args["input"], _as_weight(call, "weight")
    batch = list(range(len(call.dims(operand)) - 1))
    inherited = ["out"] if len(call.dims(weight)) == 2 else []
    out = _contract(call, (operand, weight), ([*batch, "in"], [*inherited, "in"]), [*batch, *inherited])
    return _add_bias(call, call.args.get("bias"), out)


_PRODUCTS = {"matmul": "self other", "mm": "self mat2", "bmm": "self mat2", "mv": "self vec", "dot": "self tensor"}
_PRODUCTS |= {"vdot": "self other", "addmm": "mat1 mat2", "baddbmm": "batch1 batch2", "addmv": "mat vec"}


@rule(" ".join(_PRODUCTS))
def _product(call: Operation) -> Dims:
    left, right = (call.args[name] for name in _PRODUCTS[call.op].split())
    ranks = len(call.dims(left)), len(call.dims(right))
    batches = [[("batch", i) for i in range(rank - 2, 0, -1)] for rank in ranks]
    rows = ["row"] if ranks[0] > 1 else []
    columns = ["column"] if ranks[1] > 1 else []
    labels = [*batches[0], *rows, "in"], [*batches[1], "in", *columns]
    out = _contract(call, (left, right), labels, [*max(batches, key=len), *rows, *columns])
    return out if call.args["self"] is left else _add_bias(call, call.args["self"], out)


@rule("einsum")
def _einsum(call: Operation) -> Dims | None:
    nodes = call.args["tensors"]
    terms, arrow, result = call.args["equation"].replace(" ", "").partition("->")
    if len(nodes) != 2 or not arrow:
        return None
    labels: list[list[Hashable]] = []
    for term, node in zip(terms.split(","), nodes, strict=True):
        before, dots, after = term.partition("...")
        batch = [("batch", i) for i in range(len(call.dims(node)) - len(before + after), 0, -1)] if dots else []
        labels.append([*before, *batch, *after])
        if len(set(labels[-1])) < len(labels[-1]):
            return None
    before, dots, after = result.partition("...")
    batch = max(([name for name in names if isinstance(name, tuple)] for names in labels), key=len) if dots else []
    return _contract(call, (nodes[0], nodes[1]), (labels[0], labels[1]), [*before, *batch, *after])


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
def _convolution(call: Operation) -> Dims | None:
    weight = _as_weight(call, "weight")
    dims, kernel = call.first, call.dims(weight)
    channels = len(dims) - len(kernel) + 1  # dimension of the channels: a batch may be missing
    groups = call.args["groups"]
    cut, kernel_cut = take(dims[channels], groups), take(kernel[0], groups)
    if cut is None or kernel_cut is None:
        return None
    group, within = kernel_cut
    unify(cut[0], group)
    transposed = call.args.get("transposed", "transpose" in call.op)
    inner, outer = (within, kernel[1]) if transposed else (kernel[1], within)
    unify(cut[1], inner)
    freeze([*dims[channels + 1 :], *kernel[2:]], f"mixed by {call.op}")
    if weight in call.flow.source:
        name = call.flow.source[weight]
        call.flow.reads.append((name, inner))
        call.flow.produces.append((name, outer))
        call.flow.convolved.add(name)
    call.new_values()
    out = [*dims[:channels], group + outer, *new_dims(call.shape[channels + 1 :], f"mixed by {call.op}")]
    if call.args.get("bias") is not None:
        unify(out[channels], call.dims(call.args["bias"])[0])
    return out


@rule("scaled_dot_product_attention")
def _attention(call: Operation) -> Dims | None:
    query, key, value = (call.dims(call.args[name]) for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value):
        return None
    freeze([*query[-2:], *key[-2:], value[-2]], f"contracted between activations ({call.op})")
    unify(key[-2], value[-2])
    unify(query[-1], key[-1])
    out = query[:-1] + value[-1:]
    for i in range(len(query) - 2):
        unify(key[i], value[i])
        kept = take(query[i], size_of(key[i])) if call.args["enable_gqa"] and key[i] else (query[i], ())
        if kept is None:
            return None
        if key[i] and kept[0]:
            unify(kept[0], key[i])
        out[i] = query[i] or key[i]
        _attend(out[i])
    if call.args["attn_mask"] is not None:
        _align(call, call.shape, [call.args["attn_mask"]], [*out[:-1], key[-2]])
    call.new_values()
    return out


@rule("embedding")
def _embedding(call: Operation) -> Dims:
    weight, indices = call.args["weight"], call.args["indices"]
    rows, columns = call.dims(weight)
    freeze([rows], VOCABULARY)
    if weight in call.flow.source:
        call.flow.produces.append((call.flow.source[weight], columns))
    call.new_values()
    return [*call.dims(indices), columns]


# Norms, pooling and other mixing of a dimension's entries


@rule("batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training instance_norm")
@rule("cudnn_batch_norm _batch_norm_no_update")
def _batch_norm(call: Operation) -> Dims:
    dims = call.first
    freeze([dim for i, dim in enumerate(dims) if i != 1], f"mixed by {call.op}")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(call.args.get(name), fx.Node):
            unify(dims[1], call.dims(call.args[name])[0])
    return dims


@rule("group_norm native_group_norm")
def _group_norm(call: Operation) -> Dims | None:
    dims = call.first
    cut = take(dims[1], call.args["num_groups" if "num_groups" in call.args else "group"])
    if cut is None:
        return None
    freeze([cut[1], *dims[2:]], f"mixed by {call.op}")
    for name in ("weight", "bias"):
        if call.args[name] is not None:
            unify(dims[1], call.dims(call.args[name])[0])
    return dims


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def _layer_norm(call: Operation) -> Dims:
    dims = call.first
    count = len(call.args["normalized_shape"])
    freeze(dims[-count:], f"mixed by {call.op}")
    for name in ("weight", "bias"):
        if call.args.get(name) is not None:
            for dim, other in zip(dims[-count:], call.dims(call.args[name]), strict=True):
                unify(dim, other)
    return dims


@rule("mean sum nansum nanmean var var_mean std std_mean amax amin argmax argmin max min median prod logsumexp any all")
@rule("linalg_vector_norm norm count_nonzero")
def _reduction(call: Operation) -> Dims:
    if "other" in call.args:  # the larger or smaller of two
        return _pointwise(call)
    dims, axes = call.first, call.axes("dim")
    freeze([dims[axis] for axis in axes], f"mixed by {call.op}")
    if call.args.get("keepdim"):
        return [() if axis in axes else dim for axis, dim in enumerate(dims)]
    return [dim for axis, dim in enumerate(dims) if axis not in axes]


@rule("softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp")
@rule("roll flip sort argsort topk")
def _mixing(call: Operation) -> Dims:
    dims = call.first
    axes = call.axes("dim", "dims")
    freeze([dims[axis] for axis in axes], f"mixed by {call.op}")
    if call.op == "topk":
        dims[axes[0]] = new_dim(call.args["k"], f"mixed by {call.op}")
    return dims


_POOLS = "max_pool{0}d avg_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d max_pool{0}d_with_indices"
_UPSAMPLES = "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
_UPSAMPLES += " upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d"


@rule(" ".join([*map(_POOLS.format, (1, 2, 3)), "_adaptive_avg_pool2d", _UPSAMPLES]))
def _spatial(call: Operation) -> Dims:
    dims = call.first
    count = int(re.findall(r"(\d)d", call.op)[0])
    freeze(dims[-count:], f"mixed by {call.op}")
    return dims[:-count] + new_dims(call.shape[-count:], f"mixed by {call.op}")


@rule("pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d")
@rule("replication_pad1d replication_pad2d replication_pad3d")
def _pad(call: Operation) -> Dims:
    dims = call.first
    widths = call.args["pad" if "pad" in call.args else "padding"]
    for i in range(len(widths) // 2):
        if widths[2 * i] or widths[2 * i + 1]:
            freeze([dims[-1 - i]], "padded")
            dims[-1 - i] = new_dim(call.shape[-1 - i], "padded")
    return dims
