"""Models as users write them: built late, with tied weights, stashed parameters, an order of their own, and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.models import CLASSES, SHAPES, WIDTH, MLPBlock, batches, loader

pytestmark = pytest.mark.slow

FORWARD = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**FORWARD, "granularity": "neuron"}
REGIMES = [FORWARD, NEURON, {**FORWARD, "masking": "backward"}, {**NEURON, "masking": "backward"}]
SAMPLE = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)


class Base(LightningModule):
    """Four blocks of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = SAMPLE
        self.build()

    def build(self) -> None:
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(MLPBlock(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


class Late(Base):
    """Is built in ``configure_model``, which Lightning may call again, with other random numbers on every rank."""

    def build(self) -> None:
        self.stem = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.stem is None:
            torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
            Base.build(self)
            self.double()


class Aliased(Base):
    """A block shares a weight with a layer outside, and two blocks share one."""

    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(16, WIDTH)
        self.extra.weight = self.blocks[1].fc2.weight
        self.blocks[0].fc1.weight = self.blocks[2].fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra(F.pad(x, (0, 11)))[:, :CLASSES]


class Stashing(Base):
    """Takes the optimizer's parameters from a list made in the beginning."""

    def build(self) -> None:
        super().build()
        self.mine = {"parameters": list(self.parameters())}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.mine["parameters"], lr=0.01, eps=1e-3)


class Shuffled(Base):
    """Calls its blocks in an order that the batch says."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for i in batch[2]:
            x = self.blocks[i](x)
        return F.cross_entropy(self.head(x), batch[1])


MODELS = {"late": Late, "aliased": Aliased, "stashing": Stashing, "shuffled": Shuffled}


def built(kind: str) -> Base:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[kind]().double()


def ordered(rank: int, count: int) -> list[Any]:
    turns = [[(i + rank * step) % 4 for i in (range(4) if rank % 2 else range(3, -1, -1))] for step in range(count)]
    return [(x, y, turn) for (x, y), turn in zip(batches("mlp", rank, count), turns, strict=True)]


def fit(kind: str, sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = built(kind)
    run = trainer(world, SDPStrategy(**sdp, bucket_cap_mb=0.001), max_epochs=1, accumulate_grad_batches=3)
    run.fit(net, loader(ordered(rank, 7)))  # the last step has one batch only
    if kind == "aliased":
        assert net.extra.weight is net.blocks[1].fc2.weight and net.blocks[0].fc1.weight is net.blocks[2].fc1.weight
    return dict(net.state_dict())


@pytest.mark.parametrize(
    ("kind", "sdp"),
    [
        ("late", FORWARD),
        *[("aliased", sdp) for sdp in REGIMES],
        ("stashing", NEURON),
        ("stashing", {**NEURON, "masking": "backward"}),
        *[("shuffled", sdp) for sdp in REGIMES[:2]],
    ],
)
def test_models_of_many_kinds_equal_the_reference(pool, kind: str, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit, kind, sdp)
    net = built(kind)
    if isinstance(net, Late):
        with torch.random.fork_rng(devices=[]):
            net.configure_model()
    plan = plan_for(net, 3, sdp, SAMPLE)  # type: ignore[arg-type]
    if kind == "aliased":
        assert "blocks.1.fc2.weight" not in plan.tensor_holders()
    ref = SDPReference(
        net, plan, net.configure_optimizers(), masking=sdp.get("masking", "forward"), accumulate_grad_batches=3
    )
    data = [ordered(rank, 7) for rank in range(3)]
    for window in (slice(0, 3), slice(3, 6), slice(6, 7)):
        ref.step([own[window] for own in data])
    for full in results:
        assert list(full) == list(net.state_dict())
        torch.testing.assert_close(full, dict(net.state_dict()), rtol=1e-10, atol=1e-10)


class Remembering(MLPBlock):
    """A block with a state that is no tensor, and a buffer that is not saved."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.note = "new"
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Hooked(Base):
    """Adds to a checkpoint, takes a weight out of it, and does not mind that it is missing."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(Remembering(16) for _ in range(4))
        self.strict_loading, self.count, self.seen = False, 0, {}  # type: ignore[var-annotated]

    def on_train_start(self) -> None:
        with self.trainer.strategy.full_model() as full:
            self.seen = {name: value for name, value in full.state_dict().items() if isinstance(value, Tensor)}
            self.seen = {name: value.clone() for name, value in self.seen.items()}
        self.notes, self.counted = [block.note for block in self.blocks], self.count

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        for block in self.blocks:
            block.note = "trained"
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count
        del checkpoint["state_dict"]["head.bias"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


def fit_hooked(directory: str, resume: bool, sdp: dict[str, Any]) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = Hooked().double()
    save = ModelCheckpoint(directory, filename="saved")
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1 + resume, callbacks=[save], enable_checkpointing=True)
    options: dict[str, Any] = {"ckpt_path": f"{directory}/saved.ckpt", "weights_only": False} if resume else {}
    run.fit(net, loader(batches("mlp", rank, 2)), **options)
    return {"seen": net.seen, "notes": net.notes, "count": net.counted, "scratch": net.blocks[1].scratch}


@pytest.mark.parametrize("sdp", [FORWARD, {**NEURON, "masking": "backward"}])
def test_what_users_add_to_a_checkpoint_comes_back(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    begun = pool(3).run(fit_hooked, str(tmp_path), False, sdp)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    keys = [name for name in Hooked().state_dict() if name != "head.bias"]
    assert list(saved["state_dict"]) == keys and saved["count"] == 2
    resumed = pool(3).run(fit_hooked, str(tmp_path), True, sdp)
    for new, old in zip(resumed, begun, strict=True):
        assert (old["count"], new["count"]) == (0, 2)
        assert old["notes"] == ["new"] * 4 and new["notes"] == ["trained"] * 4
        assert new["scratch"].tolist() == [1.0, 1.0]
        assert torch.equal(new["seen"].pop("head.bias"), old["seen"]["head.bias"])
        for name, value in new["seen"].items():
            assert torch.equal(value, saved["state_dict"][name]), name
