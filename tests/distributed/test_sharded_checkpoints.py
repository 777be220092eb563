"""sdp_fsdp: checkpoints as directories, to and from other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.runs import full_weights, make_strategy, reference, trainer
from tests.distributed.test_sharded_training import assert_close
from tests.models import batches, loader, make

SHARDED = {"coverage": 0.5, "keep_ends": 0, "sharded": True, "state_dict_type": "sharded"}
PLAIN = {"coverage": 0.5, "keep_ends": 0}
LAYOUTS: dict[str, Any] = {
    "sdp_fsdp": SHARDED,
    "sdp_fsdp, a file": {**SHARDED, "state_dict_type": "full"},
    "sdp": PLAIN,
    "sdp, a directory": {**PLAIN, "save_distributed_checkpoint": True},
}


def fit(given: dict[str, Any], epoch: int, saved: str | None, resume: str | None) -> dict[str, Tensor]:
    """Fits an epoch of three steps, from a checkpoint if it is the second; saves; returns the weights on rank 0."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = make_strategy(given)
    run = trainer(world, strategy, max_epochs=epoch, gradient_clip_val=0.05)
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": True} if resume else {}
    run.fit(make("mlp"), loader(batches("mlp", rank, 6)[3 * epoch - 3 : 3 * epoch]), **options)
    if saved:
        run.save_checkpoint(saved)
    strategy.save_distributed_checkpoint = False  # with it there is only an outline
    return full_weights(strategy)


def expected(world: int, workers: int, steps: int) -> Any:
    return reference(world, workers, PLAIN, "mlp", steps, {}, gradient_clip_val=0.05)


@pytest.mark.parametrize(("world", "workers"), [(2, 2), (3, 3), (4, 2)])
def test_torch_reads_the_plain_checkpoint_out_of_a_directory(
    pool: Any, tmp_path: Path, world: int, workers: int
) -> None:
    pool(world).run(fit, {**SHARDED, "num_subnetworks": workers}, 1, str(tmp_path / "saved"), None)
    assert (tmp_path / "saved").is_dir()
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "plain")
    read = torch.load(tmp_path / "plain", weights_only=True)
    ref = expected(world, workers, 3)
    weights = ref.module.state_dict()
    assert read["state_dict"].keys() == weights.keys()
    assert_close({name: read["state_dict"][name] for name in weights}, weights)
    state, wanted = read["optimizer_0"]["state"], ref.optimizer.state_dict()["state"]
    for name, number in zip(dict(ref.module.named_parameters()), wanted, strict=True):
        for key, value in wanted[number].items():
            torch.testing.assert_close(state[name][key].to(value.dtype), value, rtol=0, atol=1e-10)


PAIRS = [(before, after) for before in LAYOUTS for after in LAYOUTS if "fsdp" in before + after]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_in_another_layout(pool: Any, tmp_path: Path, before: str, after: str) -> None:
    saved = str(tmp_path / "saved")
    pool(3).run(fit, LAYOUTS[before], 1, saved, None)
    assert Path(saved).is_dir() == (before in ("sdp_fsdp", "sdp, a directory"))
    result = pool(3).run(fit, LAYOUTS[after], 2, None, saved)[0]
    assert_close(result, expected(3, 3, 6).module.state_dict())
