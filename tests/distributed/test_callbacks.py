"""Lightning's own callbacks on a model of which every rank has a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.models import SHAPES, Net, batches, loader, same_state

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
REGIMES = [
    BLOCK,
    {**NEURON, "masking": "backward"},
    pytest.param(NEURON, marks=pytest.mark.slow),
    pytest.param({**BLOCK, "masking": "backward"}, marks=pytest.mark.slow),
]
PER_EPOCH = 3


class Frozen(Net):
    """Its optimizer gets what is not frozen at the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3)


def frozen() -> Frozen:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Frozen("mlp").double()
    net.example_input_array = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)
    return net


class Thaw(BaseFinetuning):
    """Freezes the blocks, and adds some of them to the optimizer in the second and third epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        for start in (1, 2):
            blocks = pl_module.blocks[3 * start - 3 : 3 * start]
            if epoch == start:
                self.unfreeze_and_add_param_group(blocks, optimizer, lr=0.02 * epoch)
            elif epoch > start:  # also in a resumed run, which begins with frozen blocks
                self.make_trainable(blocks)


def fit_thawing(
    sdp: dict[str, Any], epochs: int, directory: str | None = None, resume: str | None = None
) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, callbacks = frozen(), [Thaw()]
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, filename="thawed", every_n_epochs=1))
    run = trainer(
        world, SDPStrategy(**sdp), max_epochs=epochs, callbacks=callbacks, gradient_clip_val=0.05,
        enable_checkpointing=directory is not None,
    )  # fmt: skip
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run.fit(net, loader(batches("mlp", rank, PER_EPOCH)), **options)
    assert all("on_train_epoch_start" not in vars(callback) for callback in callbacks)
    return {"full": dict(net.state_dict()), "trains": [p.requires_grad for p in net.parameters()]}


@pytest.mark.parametrize("sdp", REGIMES)
def test_thawing_blocks_and_adding_their_groups_equals_the_reference(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit_thawing, sdp, 4, str(tmp_path))
    net, thaw = frozen(), Thaw()
    thaw.freeze_before_training(net)
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    masking = sdp.get("masking", "forward")
    ref = SDPReference(net, plan, net.configure_optimizers(), gradient_clip_val=0.05, masking=masking)
    data = [batches("mlp", rank, PER_EPOCH) for rank in range(3)]
    for epoch in range(4):
        thaw.finetune_function(net, epoch, ref.optimizer)
        for step in range(PER_EPOCH):
            ref.step([[own[step]] for own in data])
    for result in results:
        torch.testing.assert_close(result["full"], net.state_dict(), rtol=1e-10, atol=1e-10)
        assert all(result["trains"])
    saved, plain = torch.load(tmp_path / "thawed.ckpt", weights_only=False), ref.optimizer.state_dict()
    assert [g["params"] for g in saved["optimizer_states"][0]["param_groups"]] == [
        g["params"] for g in plain["param_groups"]
    ]
    torch.testing.assert_close(saved["optimizer_states"][0]["state"], plain["state"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), {**NEURON, "masking": "backward"}])
def test_a_run_resumes_after_groups_were_added(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    whole = pool(2).run(fit_thawing, sdp, 4)
    pool(2).run(fit_thawing, sdp, 2, str(tmp_path))
    for a, b in zip(whole, pool(2).run(fit_thawing, sdp, 4, None, str(tmp_path / "thawed.ckpt")), strict=True):
        assert same_state(a["full"], b["full"])


class AddByHand(Callback):
    """Adds the frozen blocks to the optimizer, within the plain structure or without."""

    def __init__(self, plainly: bool) -> None:
        self.plainly = plainly

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch != 1:
            return
        if self.plainly:
            with trainer.strategy.plain_structure():
                self._add(trainer, pl_module)
        else:
            self._add(trainer, pl_module)

    def _add(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.blocks.requires_grad_(True)
        trainer.optimizers[0].add_param_group({"params": list(pl_module.blocks.parameters()), "lr": 0.02})


def fit_adding(sdp: dict[str, Any], plainly: bool) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = frozen()
    net.blocks.requires_grad_(False)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=2, callbacks=[AddByHand(plainly)])
    run.fit(net, loader(batches("mlp", rank, PER_EPOCH)))
    return dict(net.state_dict())


@pytest.mark.parametrize("sdp", [BLOCK, pytest.param({**NEURON, "masking": "backward"}, marks=pytest.mark.slow)])
def test_a_group_that_is_added_by_hand_needs_the_plain_structure(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit_adding, sdp, True)
    net = frozen()
    net.blocks.requires_grad_(False)
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    ref = SDPReference(net, plan, net.configure_optimizers(), masking=sdp.get("masking", "forward"))
    data = [batches("mlp", rank, PER_EPOCH) for rank in range(3)]
    for epoch in range(2):
        if epoch == 1:
            net.blocks.requires_grad_(True)
            ref.optimizer.add_param_group({"params": list(net.blocks.parameters()), "lr": 0.02})
        for step in range(PER_EPOCH):
            ref.step([[own[step]] for own in data])
    for full in results:
        torch.testing.assert_close(full, net.state_dict(), rtol=1e-10, atol=1e-10)
    for error in pool(3).run_expecting_errors(fit_adding, sdp, False):
        assert error is not None and "within `with trainer.strategy.plain_structure():`" in error[1]


class Tuned(Net):
    """Has a learning rate that can be searched for."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__("mlp")
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def tuned(lr: float = 0.01) -> Tuned:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Tuned(lr).double()
    net.example_input_array = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)
    return net


def fit_tuned(sdp: dict[str, Any], directory: str, lr: float | None = None) -> tuple[dict[str, Tensor], float]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = tuned() if lr is None else tuned(lr)
    callbacks: list[Callback] = [LearningRateFinder(1e-4, 1e-1, num_training_steps=20)] if lr is None else []
    run = trainer(
        world, SDPStrategy(**sdp), max_epochs=2, callbacks=callbacks, enable_checkpointing=True,
        default_root_dir=directory,
    )  # fmt: skip
    run.fit(net, loader(batches("mlp", rank, 12)))
    return dict(net.state_dict()), net.lr


@pytest.mark.parametrize(
    "sdp",
    [
        *REGIMES[1:],
        pytest.param({**NEURON, "save_distributed_checkpoint": True}, marks=pytest.mark.slow),
        pytest.param({**BLOCK, "model_averaging_period": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_search_for_a_learning_rate_leaves_nothing_behind(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    """Training with the rate that was found is training with that rate from the start."""
    found = pool(3).run(fit_tuned, sdp, str(tmp_path))
    (lr,) = {rate for _, rate in found}
    assert lr != 0.01
    for (a, _), (b, _) in zip(found, pool(3).run(fit_tuned, sdp, str(tmp_path), lr), strict=True):
        assert same_state(a, b)


def fit_reloading(kind: str, sdp: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads other weights in the middle of training."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    other, seen = Net(kind, optimizer="sgd").double(), {}
    other_state = {n: torch.full_like(v, 0.5) if v.is_floating_point() else v for n, v in other.state_dict().items()}

    class Reload(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.load_model_state_dict({"state_dict": other_state})
                with trainer.strategy.full_model() as full:
                    seen.update({n: v.clone() for n, v in full.state_dict().items()})

    net = Net(kind, optimizer="sgd").double()
    net.example_input_array = torch.zeros(2, *SHAPES[kind], dtype=torch.float64)
    trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[Reload()]).fit(net, loader(batches(kind, rank, 3)))
    return seen, other_state


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_a_full_state_loads_into_a_running_carved_module(pool, kind: str, sdp: dict[str, Any]) -> None:
    for seen, loaded in pool(3).run(fit_reloading, kind, sdp):
        assert same_state(seen, loaded)


def fit_averaging(sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = tuned()
    callbacks: list[Callback] = [EMAWeightAveraging(decay=0.8)]
    trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=callbacks).fit(net, loader(batches("mlp", rank, 4)))
    return dict(net.state_dict())


@pytest.mark.parametrize(
    "sdp", [{**BLOCK, "masking": "backward"}, {**NEURON, "masking": "backward"}, {"coverage": 1.0}]
)
def test_averages_of_weights_are_those_of_the_full_model(pool, sdp: dict[str, Any]) -> None:
    """Where every process has all weights; forward masking refuses them."""
    results = pool(3).run(fit_averaging, sdp)
    net = tuned()
    plan = plan_for(net, 3, sdp, net.example_input_array)
    ref = SDPReference(net, plan, net.configure_optimizers(), masking=sdp.get("masking", "forward"))
    data, average = [batches("mlp", rank, 4) for rank in range(3)], {}
    for step in range(4):
        ref.step([[own[step]] for own in data])
        for name, value in net.state_dict().items():
            average[name] = 0.8 * average[name] + 0.2 * value if step else value.clone()
    for full in results:
        torch.testing.assert_close(full, average, rtol=1e-10, atol=1e-10)
