"""Learning rates, best checkpoints and the end of training where processes log different values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_sdp import SDPStrategy
from tests.distributed.runs import trainer
from tests.models import Net, batches, loader

SDP = {"coverage": 0.5, "keep_ends": 0}
SCORES = [[3.0, 2.0, 2.5, 2.6, 1.0], [1.0, 4.0, 0.5, 0.4, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]]  # by rank and epoch


class Scoring(Net):
    """Logs a value of each rank's own, and lowers the learning rate whenever it does not fall."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__("mlp", blocks=3)
        self.automatic_optimization = not manual
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", SCORES[self.global_rank][self.current_epoch], on_epoch=True, on_step=False)
        return F.cross_entropy(self(batch[0]), batch[1]) if self.automatic_optimization else None

    def on_train_epoch_end(self) -> None:
        if not self.automatic_optimization:
            self.lr_schedulers().step(self.trainer.callback_metrics["score"])  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def fit(directory: str, manual: bool, callbacks: list[Callback]) -> Any:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = Scoring(manual).double()
    run = trainer(
        world, SDPStrategy(**SDP), max_epochs=5, callbacks=callbacks, enable_checkpointing=True,
        default_root_dir=directory,
    )  # fmt: skip
    run.fit(net, loader(batches("mlp", rank, 1)))
    return net, run


def fit_on_a_plateau(directory: str, manual: bool) -> list[float]:
    net, run = fit(directory, manual, [])
    assert type(run.lr_scheduler_configs[0].scheduler) is ReduceLROnPlateau
    return net.rates


@pytest.mark.parametrize("manual", [False, True])
def test_the_learning_rate_follows_rank_zero_on_all_ranks(pool, tmp_path: Path, manual: bool) -> None:
    assert pool(3).run(fit_on_a_plateau, str(tmp_path), manual) == [[1.0, 1.0, 1.0, 0.5, 0.25]] * 3
    # Where nothing steps, nothing is saved; otherwise it is before the schedule's last step.
    schedules = [torch.load(path, weights_only=True)["lr_schedulers"][0] for path in tmp_path.rglob("*.ckpt")]
    assert [schedule["best"] for schedule in schedules] == ([] if manual else [2.0])


def fit_for_the_best(directory: str) -> dict[str, Any]:
    best = ModelCheckpoint(directory, filename="{epoch}-{score:.1f}", monitor="score", save_top_k=2, save_last="link")
    net, run = fit(directory, False, [best])
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    run.test(net, loader(batches("mlp", 0, 1)), ckpt_path="best", weights_only=False, verbose=False)
    last = float(run.callback_metrics["test_loss"])
    assert "_monitor_candidates" not in vars(best)
    return {"best": best.best_model_path, "k": best.best_k_models, "last": best.last_model_path, "full": weights,
            "loss": last}  # fmt: skip


def test_the_best_checkpoint_is_rank_zero_s_on_all_ranks(pool, tmp_path: Path) -> None:
    results = pool(3).run(fit_for_the_best, str(tmp_path))
    for result in results:
        assert Path(result["best"]).name == "epoch=4-score=1.0.ckpt"
        assert {Path(path).name: float(score) for path, score in result["k"].items()} == {
            "epoch=4-score=1.0.ckpt": 1.0,
            "epoch=1-score=2.0.ckpt": 2.0,
        }
        assert result["loss"] == results[0]["loss"]
    assert {path.name for path in tmp_path.iterdir()} == {Path(p).name for p in results[0]["k"]} | {"last.ckpt"}


def fit_until_it_stops(directory: str) -> tuple[int, int]:
    stop = EarlyStopping("score", patience=2)
    net, _ = fit(directory, False, [stop])
    return stop.stopped_epoch, len(net.rates)


def test_training_stops_on_all_ranks_where_one_decides_to(pool, tmp_path: Path) -> None:
    assert pool(3).run(fit_until_it_stops, str(tmp_path)) == [(3, 4)] * 3  # rank 0 has waited twice
