"""sdp_fsdp: subnetworks sharded over their holders train as the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor

from lightning_sdp import SDPReference
from tests.distributed.runs import full_weights, make_strategy, plan_for, reference, trainer
from tests.models import SHAPES, Net, batches, loader, make

WORLDS = [(2, 2), (3, 3), (4, 2), (4, 4)]


class Usage(Callback):
    """What the rank holds after the last batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.usage = trainer.strategy.usage()  # type: ignore[attr-defined]


def fit(given: dict[str, Any], kind: str, steps: int, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fits a sharded model on this rank's batches.

    Returns:
        ``full`` on rank 0: the model's state dict, ``optimizer``: its optimizer's; ``usage``: see `Usage`.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    usage, strategy = Usage(), make_strategy({**given, "sharded": True})
    run = trainer(world, strategy, max_epochs=1, callbacks=[usage, *options.pop("callbacks", [])], **options)
    run.fit(make(kind, **model), loader(batches(kind, rank, steps * run.accumulate_grad_batches)))
    state = strategy.optimizer_state(strategy.optimizers[0])
    return {"full": full_weights(strategy), "optimizer": state if rank == 0 else {}, "usage": usage.usage}


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(result) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def check(
    pool: Any,
    world: int,
    workers: int,
    given: dict[str, Any],
    kind: str = "mlp",
    model: dict[str, Any] | None = None,
    steps: int = 6,
    **options: Any,
) -> list[dict[str, Any]]:
    """Fits on ranks and in the reference; weights and optimizer state agree."""
    plan = {"coverage": 0.5, "keep_ends": 0, **given, "num_subnetworks": workers}
    results: list[dict[str, Any]] = pool(world).run(fit, plan, kind, steps, model or {}, **options)
    ref = reference(world, workers, plan, kind, steps, model or {}, **options)
    assert_close(results[0]["full"], ref.module.state_dict())
    state, expected = results[0]["optimizer"], ref.optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for i, own in expected["state"].items():
        for key, value in own.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(state["state"][i][key].to(value.dtype), value, rtol=0, atol=1e-10)
    return results


@pytest.mark.parametrize("checkpointing", [None, "blocks"])
@pytest.mark.parametrize("coverage", [0.75, 0.5])
@pytest.mark.parametrize(("world", "workers"), WORLDS)
def test_twenty_steps_equal_the_reference(
    pool: Any, world: int, workers: int, coverage: float, checkpointing: str | None
) -> None:
    given = {"coverage": coverage, "activation_checkpointing_policy": checkpointing}
    check(pool, world, workers, given, model={"blocks": 5}, steps=20)


@pytest.mark.parametrize("coverage", [0.75, 0.5])
def test_everything_is_stored_once(pool: Any, coverage: float) -> None:
    """A rank has its share of parameters, gradients and optimizer state, whatever it runs."""
    results = check(pool, 4, 4, {"coverage": coverage}, "attention", {"blocks": 4}, steps=2)
    share = 8 * sum(p.numel() for p in make("attention", blocks=4).parameters()) / 4
    for usage in results[0]["usage"]:
        assert usage["parameter_bytes"] == pytest.approx(share, rel=0.03)
        assert usage["gradient_bytes"] == pytest.approx(share, rel=0.03)
        assert usage["optimizer_bytes"] == pytest.approx(2 * share, rel=0.03)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
@pytest.mark.parametrize(("world", "workers"), WORLDS)
def test_clipping_and_accumulation_equal_the_reference(pool: Any, world: int, workers: int, algorithm: str) -> None:
    clip = {"gradient_clip_val": {"value": 0.002, "norm": 0.05}[algorithm], "gradient_clip_algorithm": algorithm}
    check(pool, world, workers, {}, model={"optimizer": "sgd"}, accumulate_grad_batches=3, **clip)


@pytest.mark.parametrize(
    ("kind", "model", "given"),
    [
        ("attention", {}, {"coverage": 0.75}),
        ("mlp", {"groups": True}, {"coverage": [1.0, 0.5, 0.25]}),
        ("mlp", {"optimizer": "adagrad"}, {"coverage": 0.2}),
        ("mlp", {}, {"coverage": 1.0}),
        ("gqa", {}, {"auto_wrap_policy": [torch.nn.RMSNorm, torch.nn.Linear], "sharding_strategy": "SHARD_GRAD_OP"}),
        ("attention", {}, {"auto_wrap_policy": [torch.nn.Sequential], "activation_checkpointing_policy": "blocks"}),
        ("conv", {"optimizer": "momentum"}, {}),
    ],
)
def test_models_and_policies_equal_the_reference(
    pool: Any, kind: str, model: dict[str, Any], given: dict[str, Any]
) -> None:
    check(pool, 3, 3, given, kind, model, gradient_clip_val=0.05)


def test_one_process_equals_the_reference(pool: Any) -> None:
    check(pool, 1, 1, {"coverage": 1.0}, gradient_clip_val=0.05)


class Thaw(BaseFinetuning):
    """Freezes two blocks and the stem, and lets them train from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Net)
        self.freeze([pl_module.stem, *pl_module.blocks[:2]])  # type: ignore[index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        assert isinstance(pl_module, Net)
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.stem, *pl_module.blocks[:2]], optimizer)  # type: ignore[index]


class Trainable(Net):
    """Has the trainable parameters in its optimizer, in plain order."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def fit_own(given: dict[str, Any], cls: type[Net], callbacks: list[Callback], epochs: int) -> dict[str, Tensor]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = make_strategy(given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = cls().double()
    trainer(world, strategy, max_epochs=epochs, callbacks=callbacks).fit(net, loader(batches("mlp", rank, 3)))
    return full_weights(strategy)


def check_as_under_sdp(pool: Any, *run: Any) -> None:
    given = {"coverage": 0.5, "keep_ends": 0}
    plain = pool(3).run(fit_own, given, *run)[0]
    assert_close(pool(3).run(fit_own, {**given, "sharded": True}, *run)[0], plain)


def test_a_finetuning_callback_works_as_under_sdp(pool: Any) -> None:
    check_as_under_sdp(pool, Trainable, [Thaw()], 2)


class TwoOptimizers(Net):
    """Steps by hand: one optimizer has the blocks, the other one the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        blocks = [p for n, p in self.named_parameters() if n.startswith("blocks")]
        rest = [p for n, p in self.named_parameters() if not n.startswith("blocks")]
        return [torch.optim.SGD(blocks, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2, eps=1e-3)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()


def test_two_optimizers_that_step_and_clip_by_hand_work_as_under_sdp(pool: Any) -> None:
    check_as_under_sdp(pool, TwoOptimizers, [], 2)


class Direct(Net):
    """Calls its modules in the training step, and uses a parameter outside of any call."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:  # type: ignore[union-attr]
            x = block(x)
        penalty = self.head.weight.square().sum()  # type: ignore[union-attr, operator]
        return torch.nn.functional.cross_entropy(self.head(x), batch[1]) + 0.1 * penalty


def test_modules_that_are_called_directly_train_as_under_sdp(pool: Any) -> None:
    check_as_under_sdp(pool, Direct, [], 2)


def fit_again(path: str) -> dict[str, Any]:
    """Fits, saves and tests, then fits on with the same strategy."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = batches("mlp", rank, 6)
    given = {"coverage": 0.5, "keep_ends": 0, "sharded": True}
    strategy, net = make_strategy(given), make("mlp")
    run = trainer(world, strategy, max_epochs=1)
    run.fit(net, loader(data[:3]))
    run.save_checkpoint(path)
    tested = run.test(net, loader(batches("mlp", 0, 2)), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(net, loader(data[3:]))
    return {"tested": tested, "on": full_weights(strategy)}


def test_fitting_again_goes_on_with_the_sharded_module(pool: Any, tmp_path: Any) -> None:
    """With its weights; the optimizer is built anew, as in any second fit."""
    result = pool(3).run(fit_again, str(tmp_path / "saved.ckpt"))[0]
    given = {"coverage": 0.5, "keep_ends": 0}
    first = reference(3, 3, given, "mlp", 3, {})
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert_close(saved["state_dict"], first.module.state_dict())
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(first.module(x), y) for x, y in batches("mlp", 0, 2)]
    assert result["tested"][0]["test_loss"] == pytest.approx(float(sum(losses)) / 2, abs=1e-6)
    net = first.module
    plan = plan_for(net, 3, given, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))  # type: ignore[arg-type]
    ref = SDPReference(net, plan, net.configure_optimizers())  # type: ignore[operator]
    data = [batches("mlp", rank, 6)[3:] for rank in range(3)]
    for step in range(3):
        ref.step([[own[step]] for own in data])
    assert_close(result["on"], ref.module.state_dict())
