"""Distributed checkpoints: a directory to which each rank writes a share of what it holds, and reads what it holds.

[Note: The directory]
It has the form that Lightning's own strategies write: tensors in the format of `torch.distributed.checkpoint`, under
``state_dict.<key>`` and ``optimizer_<i>.state.<parameter>.<key>``, everything else in ``meta.pt``. Each tensor is there
in its full size, as boxes that together cover it once. Who writes a box is worked out by all ranks alike, so that no
tensor travels and nobody needs more memory than for one box more. Any rank of any other run can read any part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_sdp.assemble import names_by_key
from lightning_sdp.checkpoint_directory import META, beside, move, prepare, require_complete, require_files
from lightning_sdp.checkpoint_tensor import CheckpointTensor, share_out, split
from lightning_sdp.layout import TensorLayout
from lightning_sdp.optimizer_state import OptimizerLayout
from lightning_sdp.run import Run
from lightning_sdp.sync.agreement import agree

_OPTIMIZERS = "optimizers"  # in meta.pt: what a plain checkpoint has of them, but without their state
_Path = tuple[str, ...]  # of a value in the checkpoint as a nested dict; its name there, joined by dots, is its key


def model_entries(module: nn.Module, run: Run | None) -> dict[str, CheckpointTensor]:
    """The parameters and buffers of the full model, by name.

    Buffers may differ between ranks; those of the lowest holder count.
    """
    if run is None or run.is_whole:
        world = tuple(range(dist.get_world_size()))
        entries = {n: CheckpointTensor(p.shape, p.dtype, world, p) for n, p in module.named_parameters()}
        buffers = {n: CheckpointTensor(b.shape, b.dtype, world, b, lowest=True) for n, b in module.named_buffers()}
        return entries | buffers
    part, groups, full = run.part, run.groups, run.buffers.full
    with part.whole_structure():
        parameters = dict(module.named_parameters())
        tensors = parameters | dict(module.named_buffers())
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    entries = {}
    for name, (size, dtype) in kinds.items():
        layout, local = groups.layouts.get(name), run.local(name, tensors[name])
        if name in full:
            layout, local = None, full[name]
        entries[name] = CheckpointTensor(size, dtype, groups.holders(name), local, layout, name not in parameters)
    return entries


class _Content:
    """What goes into a directory: tensors, other values with the rank that writes them, and where each belongs."""

    def __init__(self) -> None:
        self.entries: dict[str, CheckpointTensor] = {}
        self.objects: dict[str, tuple[int, Any]] = {}
        self.paths: dict[str, _Path] = {}

    def add(self, path: _Path, value: CheckpointTensor | tuple[int, Any]) -> None:
        key = ".".join(path)
        self.paths[key] = path
        if isinstance(value, CheckpointTensor):
            self.entries[key] = value
        else:
            self.objects[key] = value

    def add_model(self, state: Mapping[str, Any], module: nn.Module, run: Run | None) -> None:
        """Adds a state dict. What is not the module's own in it is rank 0's."""
        entries, names = model_entries(module, run), _names(module, run)
        for key, value in state.items():
            own = entries.get(names.get(key, ""))
            if not isinstance(value, Tensor):
                self.add(("state_dict", key), (0, value))
            elif own is not None and own.is_in(value):
                self.add(("state_dict", key), own)
            elif value.is_meta:
                raise ValueError(
                    f"checkpoint['state_dict'] has something else under {key!r} than the model's tensor, of which not "
                    "every process has all: with save_distributed_checkpoint=True such an entry can be left out but "
                    "not renamed or changed. Use save_distributed_checkpoint=False."
                )
            else:
                self.add(("state_dict", key), CheckpointTensor(value.shape, value.dtype, (0,), value))

    def add_optimizer(
        self, position: int, state: Mapping[str, Mapping[str, Any]], layout: OptimizerLayout, lowest: bool
    ) -> None:
        """Adds the state of an optimizer, given by parameter; collective.

        Holders normally have the same; with ``lowest`` they may differ, and the lowest holder's counts.
        """
        own: dict[tuple[str, str], Any] = {(name, key): v for name, entry in state.items() for key, v in entry.items()}
        kinds = {
            place: (v.dtype, v.shape, layout.is_local(place[0], v)) if isinstance(v, Tensor) else None
            for place, v in own.items()
        }
        known: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(known, kinds, group=layout.group)
        for name, key in dict.fromkeys(place for kinds in known for place in kinds):
            have = tuple(rank for rank, kinds in enumerate(known) if (name, key) in kinds)
            kind, value = known[have[0]][name, key], own.get((name, key))
            entry: CheckpointTensor | tuple[int, Any] = (have[0], value)
            if kind is not None:
                dtype, size, is_cut = kind
                cut = layout.layouts[name] if is_cut else None
                if cut is not None:
                    size = layout.shapes[name]
                entry = CheckpointTensor(size, dtype, have, value, cut, lowest)
            self.add((f"optimizer_{position}", "state", name, key), entry)

    def describe(self) -> list[str]:
        """Lines that are the same on all ranks."""
        return [f"{key} {entry.size}" for key, entry in self.entries.items()] + list(self.objects)


def _names(module: nn.Module, run: Run | None) -> dict[str, str]:
    """The name of each tensor of the full model by every key that it may have in a state dict."""
    with nullcontext() if run is None else run.part.whole_structure():
        return names_by_key(module)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes this rank's share of the boxes."""

    def __init__(self, content: _Content) -> None:
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._boxes: dict[MetadataIndex, tuple[CheckpointTensor, ChunkStorageMetadata]] = {}
        self._objects = content.objects
        self._items: list[WriteItem] = []
        self.mappings: Any = content.paths
        boxes = []
        share = sum(entry.nbytes for entry in content.entries.values()) / world_size
        for key, entry in content.entries.items():
            for box, holders in entry.boxes():
                pieces = split(box, box.sizes.numel() * entry.dtype.itemsize, share / 4) if holders[1:] else [box]
                boxes += [(key, entry, piece, holders) for piece in pieces]
        sizes = [(box.sizes.numel() * entry.dtype.itemsize, holders) for _, entry, box, holders in boxes]
        for writer, (key, entry, box, _) in zip(share_out(sizes, world_size), boxes, strict=True):
            if writer == rank:
                index = MetadataIndex(key, box.offsets)
                data = TensorWriteData(chunk=box, properties=TensorProperties(dtype=entry.dtype), size=entry.size)
                self._items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
                self._boxes[index] = entry, box
        written = [key for key, (writer, _) in content.objects.items() if writer == rank]
        self._items += [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in written]

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        return SavePlan(self._items, planner_data=self.mappings)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the content is known."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of one item."""
        if index not in self._boxes:
            return self._objects[index.fqn][1]
        entry, box = self._boxes[index]
        return entry.view(box, dist.get_rank())


def save_directory(
    path: Path,
    checkpoint: dict[str, Any],
    module: nn.Module,
    run: Run | None,
    layout: OptimizerLayout | None,
    lowest: bool,
    save_rest: Callable[[dict[str, Any], Path], None],
) -> None:
    """Writes a checkpoint as a directory; collective.

    Args:
        path: The directory, the same on all ranks, in a file system that they share. What is there is replaced.
        checkpoint: As Lightning makes it, with `Run.outline` as the state dict and optimizer states by name.
        module: The model.
        run: What is being trained, if anything.
        layout: Of the optimizers.
        lowest: Whether holders' optimizer states differ, so that the lowest holder's counts.
        save_rest: Writes what is not a tensor of the model or the optimizers to a file.

    Raises:
        ValueError: On every rank: the directory cannot be written, or an entry of the state dict cannot be saved.
    """
    rank, group = dist.get_rank(), None if run is None else run.groups.world_group
    unfinished = beside(path, "unfinished")
    agree(lambda: prepare(path, unfinished) if rank == 0 else None, lambda _: ())
    rest, content = dict(checkpoint), _Content()
    state, optimizers = rest.pop("state_dict", {}), rest.pop("optimizer_states", None)
    agree(lambda: content.add_model(state, module, run), lambda _: content.describe())
    if optimizers is not None:
        rest[_OPTIMIZERS] = [{key: value for key, value in own.items() if key != "state"} for own in optimizers]
    for position, own in enumerate(optimizers or ()):
        assert layout is not None
        content.add_optimizer(position, own["state"], layout, lowest)
    with nullcontext() if run is None else run.means_in_place():
        writer, planner = dcp.FileSystemWriter(unfinished), _SavePlanner(content)
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)

    def finish() -> None:
        save_rest(rest, unfinished / META)
        SavedDirectory(unfinished)
        move(unfinished, path)

    agree(lambda: finish() if rank == 0 else None, lambda _: ())


def restored(rest: dict[str, Any]) -> dict[str, Any]:
    """What Lightning expects to find in a checkpoint, without the tensors; from the content of ``meta.pt``."""
    optimizers = rest.pop(_OPTIMIZERS, None)
    return rest if optimizers is None else {**rest, "optimizer_states": optimizers}


class SavedDirectory:
    """A checkpoint that is a directory, to read parts of it.

    Args:
        path: The directory.
        weights_only: Whether values that are not tensors may be of simple types only; as for `torch.load`.

    Raises:
        ValueError: It is incomplete.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        require_complete(path)
        self._path, self._weights_only = path, weights_only
        self._metadata = dcp.FileSystemReader(path).read_metadata()
        self._paths: dict[str, _Path] = self._metadata.planner_data or {}
        ends: dict[str, int] = {}
        for info in (self._metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        require_files(path, ends)

    def load_model(self, module: nn.Module, run: Run | None, strict: bool) -> None:
        """Loads what this rank has of the model.

        Args:
            module: The model, whole or carved.
            run: The run that carved it, if any.
            strict: Whether the checkpoint has to have what the model has, no less and no more.

        Raises:
            ValueError: It has not, or a tensor has another shape.
        """
        entries, names = model_entries(module, run), _names(module, run)
        keys = module.state_dict() if run is None or run.is_whole else run.outline()
        saved = {path[1]: key for key, path in self._paths.items() if path[0] == "state_dict"}
        lacks, adds = [key for key in keys if key not in saved], [key for key in saved if key not in keys]
        if strict and (lacks or adds):
            key, what = (lacks[0], "lacks") if lacks else (adds[0], "has")
            raise ValueError(
                f"The checkpoint {self._path} is of another model: it {what} {key!r} ({len(lacks)} keys are missing, "
                f"{len(adds)} are unexpected). Set strict_loading=False on the LightningModule to load what fits."
            )
        own = {key: entries[names[key]] for key in keys if key in saved and key in names}
        self._read({saved[key]: entry for key, entry in own.items()})
        others = self._values({saved[key]: None for key in keys if key in saved and key not in own})
        # Modules load what they keep beside tensors; those that are missing are hollow, but there.
        module.load_state_dict({self._paths[key][1]: value for key, value in others.items()}, strict=False)
        if run is not None:
            run.after_loading()

    def optimizer_state(self, position: int, layout: OptimizerLayout) -> dict[str, dict[str, Any]]:
        """What this rank trains of the state of an optimizer, by the names of its parameters.

        Args:
            position: Which optimizer.
            layout: Of the optimizers.

        Raises:
            ValueError: A tensor does not have the shape that it should have.
        """
        prefix = (f"optimizer_{position}", "state")
        layouts: dict[str, TensorLayout | None] = {}
        for key, path in self._paths.items():
            if path[:2] == prefix and path[2] in layout.trained:
                is_cut = getattr(self._metadata.state_dict_metadata[key], "size", None) == layout.shapes[path[2]]
                layouts[key] = layout.layouts.get(path[2]) if is_cut else None
        states: dict[str, dict[str, Any]] = {}
        for key, value in self._values(layouts).items():
            _, _, name, own = self._paths[key]
            states.setdefault(name, {})[own] = value
        return states

    def _values(self, layouts: Mapping[str, TensorLayout | None]) -> dict[str, Any]:
        """Values in host memory, of tensors with a layout this rank's part; by their keys, as the layouts are."""
        rank, entries = dist.get_rank(), {}
        for key, layout in layouts.items():
            info = self._metadata.state_dict_metadata[key]
            if isinstance(info, TensorStorageMetadata):
                dtype, shape = info.properties.dtype, info.size
                shape = shape if layout is None else layout.local_shape(shape, rank)
                entries[key] = CheckpointTensor(info.size, dtype, (rank,), torch.empty(shape, dtype=dtype), layout)
        self._read(entries)
        objects = self._read_objects([key for key in layouts if key not in entries])
        return {key: entries[key].local if key in entries else objects[key] for key in layouts}

    def _read(self, entries: Mapping[str, CheckpointTensor]) -> None:
        """Fills what this rank stores of some tensors."""
        rank = dist.get_rank()
        items: list[ReadItem] = []
        views: dict[MetadataIndex, Tensor] = {}
        for key, entry in entries.items():
            info = self._metadata.state_dict_metadata[key]
            if not isinstance(info, TensorStorageMetadata) or info.size != entry.size:
                size = tuple(info.size) if isinstance(info, TensorStorageMetadata) else "no shape"
                raise ValueError(
                    f"The checkpoint {self._path} is of another model: {key!r} has {size} in it, {tuple(entry.size)} "
                    "in this run."
                )
            if entry.local is not None:
                boxes = entry.held(rank)
                items += create_read_items_for_chunk_list(key, info, boxes)
                views |= {MetadataIndex(key, box.offsets): entry.view(box, rank) for box in boxes}
        self._run_plan(items, _LoadPlanner(views, self._weights_only))

    def _read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Values that are not tensors of the model or an optimizer."""
        planner, none = _LoadPlanner({}, self._weights_only), torch.Size((0,))
        indices = [MetadataIndex(key) for key in keys]
        self._run_plan([ReadItem(LoadItemType.BYTE_IO, i, none, i, none, none) for i in indices], planner)
        return planner.objects

    def _run_plan(self, items: list[ReadItem], planner: _LoadPlanner) -> None:
        """Reads from the files; local."""
        reader = dcp.FileSystemReader(self._path)
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        reader.read_data(LoadPlan(items), planner).wait()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Knows where boxes go that are read, and keeps other values."""

    def __init__(self, views: Mapping[MetadataIndex, Tensor], weights_only: bool | None) -> None:
        super().__init__()
        self._views, self._weights_only = views, weights_only
        self.objects: dict[str, Any] = {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The place of a box."""
        return self._views[index]

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Takes a value that is not a tensor."""
        loaded = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.objects[read_item.dest_index.fqn] = loaded
