"""Models on the meta device: only what a rank holds becomes real, equal on all holders."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import MaskPlan, SDPReference, SDPStrategy
from tests.distributed.pool import launch
from tests.distributed.runs import make_strategy, plan_for, trainer
from tests.models import SHAPES, MLPBlock, Net, batches, loader, same_state

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}


def on_meta(kind: str = "mlp") -> Net:
    with torch.device("meta"):
        net = Net(kind, blocks=3).double()
    net.example_input_array = torch.zeros(2, *SHAPES[kind], dtype=torch.float64)
    return net


class Look(Callback):
    """What the rank has before the first step."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.held = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.devices = {str(t.device) for t in [*pl_module.parameters(), *pl_module.buffers()]}


def fit(sdp: dict[str, Any], kind: str, directory: str, resume: str | None = None, steps: int = 3) -> dict[str, Any]:
    rank, look = torch.distributed.get_rank(), Look()
    torch.manual_seed(100 + rank)
    net = on_meta(kind)
    identities = [id(p) for p in net.parameters()]
    saves = ModelCheckpoint(directory, filename=f"{steps}", every_n_train_steps=steps)
    run = trainer(
        torch.distributed.get_world_size(), SDPStrategy(**sdp), max_epochs=-1, max_steps=steps,
        callbacks=[look, saves], enable_checkpointing=True, limit_val_batches=0,
    )  # fmt: skip
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run.fit(net, loader(batches(kind, rank, 1)), **options)
    left = {n for n, p in net.named_parameters() if p.is_meta}
    same = identities == [id(p) for p in net.parameters()]
    return {"held": look.held, "devices": look.devices, "on meta": left, "same objects": same}


def full_from_parts(plan: MaskPlan, net: nn.Module, parts: list[dict[str, Tensor]], masking: str) -> dict[str, Tensor]:
    """The full parameters from what ranks hold; holders are equal."""
    full = {name: torch.full_like(parameter, torch.nan) for name, parameter in net.named_parameters()}
    for rank, held in enumerate(parts):
        for name, value in held.items():
            mask = plan.element_mask(name, rank, full[name].shape)
            mask = torch.ones_like(mask) if masking == "backward" else mask
            mine = full[name].masked_scatter(mask, value)
            known = mask & ~full[name].isnan()
            assert torch.equal(mine[known], full[name][known]), f"{name} on rank {rank}"
            full[name] = mine
    assert not any(value.isnan().any() for value in full.values())
    return full


@pytest.mark.parametrize("masking", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sdp", "kind"), [(BLOCK, "mlp"), (NEURON, "conv"), pytest.param(NEURON, "gqa", marks=pytest.mark.slow)]
)
def test_a_model_on_meta_trains_like_the_reference_from_equal_values(
    pool, tmp_path: Path, sdp: dict[str, Any], kind: str, masking: str
) -> None:
    sdp = {**sdp, "masking": masking}
    results = pool(3).run(fit, sdp, kind, str(tmp_path))
    net = Net(kind, blocks=3).double()
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES[kind], dtype=torch.float64))
    full = full_from_parts(plan, net, [result["held"] for result in results], masking)
    net.load_state_dict(full, strict=False)
    ref = SDPReference(net, plan, net.configure_optimizers(), masking=masking)
    for _ in range(3):
        ref.step([batches(kind, rank, 1) for rank in range(3)])
    saved = torch.load(tmp_path / "3.ckpt", weights_only=False)["state_dict"]
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-10, atol=1e-10)
        if name.endswith("weight") and parameter.dim() > 1:
            bound = (1 / parameter[0].numel()) ** 0.5  # of torch's own initialization
            assert 0.3 * bound < full[name].std() < bound
    for rank, result in enumerate(results):
        assert result["devices"] == {"cpu"} and result["same objects"]
        missing = {part.name for c in plan.missing_on(rank) for part in c.slices}
        assert result["on meta"] == (
            {n for n, _ in net.named_parameters()} & missing if masking == "forward" else set()
        )


@pytest.mark.parametrize(
    "sdp", [NEURON, *[pytest.param(sdp, marks=pytest.mark.slow) for sdp in (BLOCK, {**NEURON, "masking": "backward"})]]
)
def test_a_run_on_meta_resumes_bit_equal(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    pool(3).run(fit, sdp, "mlp", str(tmp_path), None, 6)
    pool(3).run(fit, sdp, "mlp", str(tmp_path), None, 3)
    whole = torch.load(tmp_path / "6.ckpt", weights_only=False)
    (tmp_path / "6.ckpt").unlink()
    pool(3).run(fit, sdp, "mlp", str(tmp_path), str(tmp_path / "3.ckpt"), 6)
    resumed = torch.load(tmp_path / "6.ckpt", weights_only=False)
    assert same_state(whole["state_dict"], resumed["state_dict"])
    a, b = whole["optimizer_states"][0]["state"], resumed["optimizer_states"][0]["state"]
    assert all(same_state(a[i], b[i]) for i in a)


class Counting(MLPBlock):
    """Keeps a number beside its tensors."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def resume_counting(sdp: dict[str, Any], directory: str) -> list[int]:
    """Trains and saves blocks with numbers from 10 on, and resumes with others; returns what they have then."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options: dict[str, Any] = {}
    for steps in (1, 2):
        net = on_meta()
        with torch.device("meta"):
            net.blocks = nn.ModuleList(Counting(8 * (i + 1)).double() for i in range(3))
        blocks: list[Any] = list(net.blocks)
        for i, block in enumerate(blocks):
            block.count = 10 + i if steps == 1 else 0
        saves = ModelCheckpoint(directory, filename=f"{steps}", every_n_train_steps=steps)
        run = trainer(
            world, make_strategy(sdp), max_epochs=-1, max_steps=steps, callbacks=[saves], enable_checkpointing=True,
            limit_val_batches=0,
        )  # fmt: skip
        run.fit(net, loader(batches("mlp", rank, 1)), **options)
        options = {"ckpt_path": f"{directory}/1.ckpt", "weights_only": True}
    return [block.count for block in blocks]


@pytest.mark.parametrize("sdp", [BLOCK, NEURON, {**BLOCK, "sharded": True}], ids=["block", "neuron", "sharded"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_missing_modules_keep_beside_tensors_comes_back(
    pool, tmp_path: Path, kind: str, sdp: dict[str, Any]
) -> None:
    if kind == "directory":
        sdp = {**sdp, **({"state_dict_type": "sharded"} if "sharded" in sdp else {"save_distributed_checkpoint": True})}
    assert pool(3).run(resume_counting, sdp, str(tmp_path)) == [[10, 11, 12]] * 3


class Own(nn.Module):
    """Does not say how its parameter is initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def fit_own() -> None:
    net = on_meta()
    with torch.device("meta"):
        net.stem = nn.Sequential(Own().double(), net.stem)
    trainer(2, SDPStrategy(**BLOCK), max_epochs=1).fit(net, loader(batches("mlp", 0, 1)))


def test_a_module_without_an_initialization_is_refused_by_name(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_own):
        assert error is not None and error[0] == "ValueError"
        assert "Own 'stem.0' has parameters on the meta device, but no reset_parameters()" in error[1]


class Large(LightningModule):
    """Eight blocks, of 32 MiB each by default."""

    def __init__(self, hidden: int = 8192) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(hidden) for _ in range(8))
        self.head = nn.Linear(512, 3)
        self.example_input_array = torch.zeros(2, 512)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Wide(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, hidden), nn.Linear(hidden, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def grown(coverage: float, starts_on_meta: bool) -> float:
    """How far this process's peak memory grows from before the model to the start of training, in MiB."""

    class Peak(Callback):
        def on_train_start(self, *_: Any) -> None:
            self.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def peak_with(hidden: int) -> float:
        with torch.device("meta" if starts_on_meta else "cpu"):
            net = Large(hidden)
        net.example_input_array, peak = torch.zeros(2, 512), Peak()
        sdp = {"granularity": "neuron", "keep_ends": 0, "coverage": coverage}
        run = trainer(4, SDPStrategy(**sdp), max_epochs=1, callbacks=[peak], limit_train_batches=1)
        run.fit(net, loader([(torch.zeros(2, 512), torch.zeros(2))]))
        return peak.value

    small = peak_with(16)  # what the libraries need
    return peak_with(8192) - small


SCRIPT = """
import sys
from tests.distributed.test_meta_start import grown
sys.stdout.write(f"grown {{grown(0.25, {})}}\\n")
"""


@pytest.mark.slow
def test_no_process_ever_needs_the_full_model(tmp_path: Path) -> None:
    def largest(starts_on_meta: bool) -> float:
        script = tmp_path / "program.py"
        script.write_text(SCRIPT.format(starts_on_meta))
        output = launch(script, world=4, env={"PYTHONPATH": str(Path(__file__).parents[2])}).stdout
        return max(float(line.split()[1]) for line in output.splitlines() if line.startswith("grown"))

    full, part, module = 256, 64, 16
    assert largest(False) > full
    assert largest(True) < part + 4 * module  # a module in the making, the part that is taken of it, and its gradient
