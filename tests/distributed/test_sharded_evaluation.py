"""sdp_fsdp: every stage runs the full model, of which every rank has a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from tests.distributed.runs import full_weights, make_strategy, reference, trainer
from tests.models import batches, loader, make, same_state

GIVEN = {"coverage": 0.5, "keep_ends": 0, "sharded": True}


def stages(kind: str, given: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Fits, validates, tests and predicts, with uneven batches; or without a fit, from the given weights."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy, net = make_strategy(given), make(kind, optimizer="momentum")
    run = trainer(world, strategy, max_epochs=1, num_sanity_val_steps=1)
    own = loader(batches(kind, 0, 2))
    logged: dict[str, Any] = {}
    if before is None:
        run.fit(net, loader(batches(kind, rank, 4)), own)
        logged["in fit"] = float(run.callback_metrics["val_loss"])
    else:
        net.load_state_dict(before)
    logged["validate"] = run.validate(net, own, verbose=False)[0]["val_loss"]
    logged["test"] = run.test(net, own, verbose=False)[0]["test_loss"]
    predicted = run.predict(net, own)
    assert predicted is not None
    return {**logged, "predicted": [value.clone() for value in predicted]}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_every_stage_equals_the_reference(pool: Any, kind: str, world: int, workers: int, trains: bool) -> None:
    given = {**GIVEN, "num_subnetworks": workers}
    net: Any = make(kind, optimizer="momentum")
    if trains:
        net = reference(world, workers, {"coverage": 0.5, "keep_ends": 0}, kind, 4, {"optimizer": "momentum"}).module
    net.eval()
    data = batches(kind, 0, 2)
    with torch.no_grad():
        outputs = [net(x) for x, _ in data]
    loss = sum(float(F.cross_entropy(out, y)) for out, (_, y) in zip(outputs, data, strict=True)) / 2
    before = None if trains else {k: v.clone() for k, v in net.state_dict().items()}
    for result in pool(world).run(stages, kind, given, before):
        for name in ("in fit", "validate", "test") if trains else ("validate", "test"):
            assert result[name] == pytest.approx(loss, abs=1e-6), name
        torch.testing.assert_close(result["predicted"], outputs, rtol=0, atol=1e-10)


class Outline(Callback):
    """Looks at the model in training and validation."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, list[Any]]] = {}

    def _look(self, when: str, net: Any) -> None:
        self.seen[when] = (len(list(net.parameters())), [tuple(p.shape) for p in net.parameters()])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._look("train", pl_module)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._look("validation", pl_module)


def fit_with_validation(kind: str, validate: bool, checkpointing: str | None, eval_model: str) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    given = {**GIVEN, "activation_checkpointing_policy": checkpointing, "eval_model": eval_model}
    strategy, net, outline = make_strategy(given), make(kind, optimizer="momentum"), Outline()
    options: dict[str, Any] = {"val_check_interval": 2} if validate else {"limit_val_batches": 0}
    run = trainer(world, strategy, max_epochs=1, accumulate_grad_batches=3, callbacks=[outline], **options)
    run.fit(net, loader(batches(kind, rank, 7)), loader(batches(kind, rank, 2)))
    return {"full": full_weights(strategy), "seen": outline.seen}


@pytest.mark.parametrize(("kind", "checkpointing"), [("conv", None), ("mlp", "blocks")])
def test_validation_in_the_middle_of_accumulation_changes_nothing(pool: Any, kind: str, checkpointing: Any) -> None:
    without = pool(3).run(fit_with_validation, kind, False, checkpointing, "full")
    with_it = pool(3).run(fit_with_validation, kind, True, checkpointing, "full")
    assert same_state(without[0]["full"], with_it[0]["full"])
    shapes = [tuple(p.shape) for p in make(kind).parameters()]
    for result in with_it:
        assert result["seen"]["train"][0] < len(shapes)
        assert result["seen"]["validation"][1] == shapes


def test_subnetworks_are_evaluated_on_request(pool: Any) -> None:
    for result in pool(3).run(fit_with_validation, "mlp", True, None, "subnetwork"):
        assert result["seen"]["validation"] == result["seen"]["train"]
