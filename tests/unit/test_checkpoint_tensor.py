"""Boxes of the tensors of a distributed checkpoint, and who writes them."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_sdp.checkpoint_tensor import CheckpointTensor, share_out, split
from lightning_sdp.layout import make_layout


def test_ranks_write_about_as_much_as_one_another() -> None:
    boxes = [(6, (0, 1, 2)), (4, (0,)), (9, (1,)), (1, (2,)), (10, (1, 2)), (3, (0, 1, 2)), (7, (0, 2))]
    writers = share_out(boxes, 3)
    assert all(writer in holders for writer, (_, holders) in zip(writers, boxes, strict=True))
    written = [sum(size for w, (size, _) in zip(writers, boxes, strict=True) if w == rank) for rank in range(3)]
    assert sum(written) == 40 and max(written) <= 15


def test_a_large_box_is_cut_into_rows() -> None:
    box = ChunkStorageMetadata(torch.Size([2, 1]), torch.Size([7, 4]))
    pieces = list(split(box, 7 * 16, 40.0))
    assert [(tuple(p.offsets), tuple(p.sizes)) for p in pieces] == [
        ((2, 1), (2, 4)), ((4, 1), (2, 4)), ((6, 1), (2, 4)), ((8, 1), (1, 4)),
    ]  # fmt: skip
    assert list(split(box, 7 * 16, 7 * 16)) == [box]
    scalar = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    assert list(split(scalar, 8, 1.0)) == [scalar]


def test_boxes_of_a_cut_tensor_are_views_of_what_a_rank_stores() -> None:
    full = torch.arange(24.0).view(3, 8)
    layout = make_layout(1, [((0, 2), (0, 1)), ((2, 5), (1, 2)), ((5, 6), (0,)), ((6, 8), (0, 1))])
    for rank in range(3):
        local = layout.take(full, rank)
        tensor = CheckpointTensor(full.shape, full.dtype, (0, 1, 2), local, layout)
        seen = torch.zeros(3, 8)
        for box, holders in tensor.boxes():
            assert box.sizes[0] == 3
            seen.narrow(1, box.offsets[1], box.sizes[1]).add_(1)
            for piece in split(box, 3, 1) if rank in holders else ():
                expected = full[piece.offsets[0] :][: piece.sizes[0], piece.offsets[1] :][:, : piece.sizes[1]]
                view = tensor.view(piece, rank)
                assert torch.equal(view, expected)
                assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert seen.eq(1).all()
        assert sum(box.sizes.numel() for box in tensor.held(rank)) == local.numel()
