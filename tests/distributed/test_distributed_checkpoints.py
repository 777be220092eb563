"""Distributed checkpoints: every element once, readable in any layout and by torch's own tools."""

from __future__ import annotations

import os
import shutil
import signal
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint as consolidate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import SumMetric

from lightning_sdp import MaskPlan, SDPReference, SDPStrategy
from lightning_sdp.checkpoint_tensor import CheckpointTensor
from lightning_sdp.distributed_checkpoint import SavedDirectory
from tests.distributed.pool import RankError
from tests.distributed.runs import trainer
from tests.distributed.test_checkpoints import NEURON, Scheduled, scheduled, world_and_rank
from tests.models import Net, batches, loader, make, same_state

BACKWARD = {"masking": "backward"}
REGIMES: list[Any] = [
    ("mlp", {}),
    ("gqa", NEURON),
    ("conv", {**NEURON, "coverage": 0.34}),
    ("gqa", {**NEURON, **BACKWARD}),
    pytest.param("conv", {"coverage": 0.34}, marks=pytest.mark.slow),
    pytest.param("mlp", BACKWARD, marks=pytest.mark.slow),
]


def fit_and_save(
    directory: str,
    kind: str,
    steps: int,
    save_at: int | None,
    resume: str | None,
    both: bool = False,
    device: str = "cpu",
    **sdp: Any,
) -> dict[str, Any]:
    """Fits up to a step; saves a distributed checkpoint at one, and with ``both`` a plain one beside it."""
    world, rank = world_and_rank()
    net = scheduled(kind).to(device)
    strategy = SDPStrategy(**{"coverage": 0.5, "save_distributed_checkpoint": True, **sdp})

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == save_at:
                trainer.save_checkpoint(f"{directory}/{kind}-{save_at}.ckpt")
                if both:
                    strategy.save_distributed_checkpoint = False
                    trainer.save_checkpoint(f"{directory}/{kind}-{save_at}.plain")
                    strategy.save_distributed_checkpoint = True

    run = trainer(world, strategy, max_steps=steps, max_epochs=-1, callbacks=[Save()], gradient_clip_val=0.05)
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": True} if resume else {}
    run.fit(net, loader(batches(kind, rank, 4)), **options)
    if both:
        run.save_checkpoint(f"{directory}/after-fit.ckpt")
    return {"full": {k: v.clone() for k, v in net.state_dict().items()}, "lr": run.optimizers[0].param_groups[0]["lr"],
            "plan": strategy.plan.to_json(), "step": run.global_step}  # type: ignore[union-attr]  # fmt: skip


def names_of(kind: str) -> list[str]:
    """The parameters of the model by their positions in its optimizer."""
    net = scheduled(kind)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = net.configure_optimizers()["optimizer"].param_groups
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def require_every_element_once(path: Path, world: int) -> None:
    """Checks the boxes of all tensors, and that ranks wrote about as much as one another."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    written: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        chunk = metadata.state_dict_metadata[index.fqn].chunks[index.index]
        assert chunk.offsets == index.offset
        written[info.relative_path] = written.get(info.relative_path, 0) + chunk.sizes.numel()
    for key, tensor in metadata.state_dict_metadata.items():
        times = torch.zeros(tensor.size)
        for chunk in tensor.chunks:
            box = times
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, start, size)
            box += 1
        assert times.eq(1).all(), key
    total = sum(tensor.size.numel() for tensor in metadata.state_dict_metadata.values())
    assert sum(written.values()) == total
    assert len(written) == world and max(written.values()) < 1.1 * total / world, written


@pytest.mark.parametrize(("kind", "sdp"), REGIMES)
def test_torch_reads_the_plain_checkpoint_out_of_it(pool, tmp_path: Path, kind: str, sdp: dict[str, Any]) -> None:
    """Bit by bit, the same again after fit; in files to which each rank wrote its share."""
    pool(3).run(fit_and_save, str(tmp_path), kind, 4, 4, None, both=True, **sdp)
    plain = torch.load(tmp_path / f"{kind}-4.plain", weights_only=True)
    names, expected = names_of(kind), plain["state_dict"]
    for name in (f"{kind}-4.ckpt", "after-fit.ckpt"):
        require_every_element_once(tmp_path / name, 3)
        dcp_to_torch_save(tmp_path / name, tmp_path / "full.pt")
        full = torch.load(tmp_path / "full.pt", weights_only=True)
        assert sorted(full) == ["optimizer_0", "state_dict"] and sorted(full["state_dict"]) == sorted(expected)
        assert same_state({key: full["state_dict"][key] for key in expected}, expected)
        state = full["optimizer_0"]["state"]
        assert sorted(state) == sorted(names)
        for number, entry in plain["optimizer_states"][0]["state"].items():
            assert sorted(state[names[number]]) == sorted(entry)
            assert same_state({key: state[names[number]][key] for key in entry}, entry)
        rest = torch.load(tmp_path / name / "meta.pt", weights_only=True)
        assert rest["optimizers"][0]["param_groups"] == plain["optimizer_states"][0]["param_groups"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(("kind", "sdp"), REGIMES)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    pool, tmp_path: Path, kind: str, sdp: dict[str, Any]
) -> None:
    whole = pool(3).run(fit_and_save, str(tmp_path), kind, 8, 4, None, **sdp)
    resumed = pool(3).run(fit_and_save, str(tmp_path), kind, 8, None, str(tmp_path / f"{kind}-4.ckpt"), **sdp)
    parameters = [name for name, _ in scheduled(kind).named_parameters()]
    for a, b in zip(whole, resumed, strict=True):
        assert (a["step"], a["lr"]) == (b["step"], b["lr"]) and a["step"] == 8
        assert same_state({n: a["full"][n] for n in parameters}, {n: b["full"][n] for n in parameters})


LAYOUTS: list[Any] = [
    (2, {"coverage": 0.5, "keep_ends": 0, **BACKWARD}),
    (2, {"coverage": 1.0}),
    (1, {"coverage": 1.0}),
    (2, {**NEURON, "coverage": 0.75}),
]


def test_a_run_goes_on_in_another_layout(pool, tmp_path: Path) -> None:
    """Neurons on three ranks, then blocks under backward masking on two, everything on two, one process, and so on."""
    pool(3).run(fit_and_save, str(tmp_path), "gqa", 4, 4, None, **NEURON, coverage=0.34)
    path = tmp_path / "gqa-4.ckpt"
    checkpoint = consolidate(path)
    for world, then in LAYOUTS:
        results = pool(world).run(fit_and_save, str(tmp_path), "gqa", 6, None, str(path), **then)
        net = scheduled("gqa")
        built = net.configure_optimizers()
        net.load_state_dict(checkpoint["state_dict"])
        state = {number: checkpoint["optimizer_0"]["state"][name] for number, name in enumerate(names_of("gqa"))}
        built["optimizer"].load_state_dict(deepcopy({**checkpoint["optimizers"][0], "state": state}))
        built["lr_scheduler"]["scheduler"].load_state_dict(checkpoint["lr_schedulers"][0])
        ref = SDPReference(
            net, MaskPlan.from_json(results[0]["plan"]), built["optimizer"], gradient_clip_val=0.05,
            scheduler=built["lr_scheduler"]["scheduler"], masking=then.get("masking", "forward"),
        )  # fmt: skip
        data = [batches("gqa", rank, 4) for rank in range(world)]
        for step in range(2):
            ref.step([[own[step]] for own in data])
        for name, value in net.state_dict().items():
            torch.testing.assert_close(results[0]["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_a_run_that_starts_on_meta_resumes_from_it(pool, tmp_path: Path) -> None:
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    path = str(tmp_path / "mlp-4.ckpt")
    expected = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, path)
    for result in pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, path, device="meta"):
        held = {name: value for name, value in result["full"].items() if not value.is_meta}
        assert 0 < len(held) < len(result["full"])
        assert same_state(held, {name: expected[0]["full"][name] for name in held})


@pytest.mark.slow
def load_by_hand(path: str) -> bool:
    """Resumes from a directory, and then loads another state by hand."""
    world, rank = world_and_rank()
    net, other = scheduled("mlp"), {n: torch.zeros_like(v) for n, v in scheduled("mlp").state_dict().items()}
    equal: list[bool] = []

    class Load(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            trainer.strategy.load_model_state_dict({"state_dict": other})
            with trainer.strategy.full_model() as full:
                equal.append(same_state(full.state_dict(), other))

    run = trainer(world, SDPStrategy(coverage=0.5), max_steps=5, max_epochs=-1, callbacks=[Load()])
    run.fit(net, loader(batches("mlp", rank, 4)), ckpt_path=path, weights_only=True)
    return equal == [True]


def test_what_is_loaded_later_is_not_taken_from_the_directory(pool, tmp_path: Path) -> None:
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    assert pool(2).run(load_by_hand, str(tmp_path / "mlp-4.ckpt")) == [True, True]


def test_several_ranks_of_a_worker_share_the_writing(pool, tmp_path: Path) -> None:
    pool(3).run(fit_and_save, str(tmp_path), "gqa", 4, 4, None, **NEURON, coverage=0.34)
    sdp = {"num_subnetworks": 2, **NEURON}
    start = str(tmp_path / "gqa-4.ckpt")
    whole = pool(4).run(fit_and_save, str(tmp_path), "gqa", 12, 8, start, **sdp)
    require_every_element_once(tmp_path / "gqa-8.ckpt", 4)
    resumed = pool(4).run(fit_and_save, str(tmp_path), "gqa", 12, None, str(tmp_path / "gqa-8.ckpt"), **sdp)
    assert same_state(whole[0]["full"], resumed[0]["full"])


class Extra(Net):
    """With values in its state dict that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.count, self.total = 0, SumMetric()
        self.total.persistent(True)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1
        self.total.update(2.0)


def keep_extra(path: str) -> Any:
    world, rank = world_and_rank()
    first, then = Extra().double(), Extra().double()
    data = loader(batches("mlp", rank, 2))
    strategies = [SDPStrategy(coverage=0.5, save_distributed_checkpoint=True) for _ in range(2)]

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    trainer(world, strategies[0], max_steps=2, callbacks=[Save()]).fit(first, data)
    saved = dict(then.state_dict())
    trainer(world, strategies[1], max_steps=2).fit(then, data, ckpt_path=path, weights_only=True)
    return list(saved), list(consolidate(Path(path))["state_dict"]), then.count, float(then.total.sum_value)


def test_what_modules_keep_beside_tensors_comes_back(pool, tmp_path: Path) -> None:
    for plain, saved, number, total in pool(2).run(keep_extra, str(tmp_path / "saved.ckpt")):
        assert sorted(plain) == sorted(saved)
        assert (number, total) == (1, 2.0)


def test_lightning_consolidates_it_into_a_file_that_it_can_load(pool, tmp_path: Path) -> None:
    results = pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    torch.save(consolidate(tmp_path / "mlp-4.ckpt"), tmp_path / "file.ckpt")
    net = Scheduled.load_from_checkpoint(tmp_path / "file.ckpt", weights_only=True)
    assert net.hparams["groups"] is True
    assert same_state(dict(net.state_dict()), {k: v.float() for k, v in results[0]["full"].items()})


def fit_with_monitor(directory: str, last: Any, weights: bool) -> dict[str, Any]:
    world, rank = world_and_rank()
    net = make("conv", optimizer="momentum")
    best = ModelCheckpoint(
        directory, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=last, save_weights_only=weights
    )
    strategy = SDPStrategy(coverage=0.5, save_distributed_checkpoint=True)
    run = trainer(world, strategy, max_epochs=4, callbacks=[best], enable_checkpointing=True)
    run.fit(net, loader(batches("conv", rank, 3)), loader(batches("conv", 60, 2)))
    report = {"best": best.best_model_path, "score": float(best.best_model_score), "k": dict(best.best_k_models),
              "last": best.last_model_path}  # fmt: skip
    test = run.test(net, loader(batches("conv", 60, 2)), ckpt_path="best", weights_only=True, verbose=False)
    if rank == 0:
        torch.save(consolidate(Path(report["last"])), f"{directory}.plain")
    torch.distributed.barrier()
    for name, path in (("subnetworks", report["last"]), ("plain", f"{directory}.plain")):
        other = trainer(world, SDPStrategy(coverage=0.5, eval_model="subnetwork"))
        data = loader(batches("conv", 60, 2))
        result = other.validate(make("conv"), data, ckpt_path=path, weights_only=True, verbose=False)
        report[name] = result[0]["val_loss"]
    return {**report, "test": test[0]["test_loss"]}


@pytest.mark.parametrize(("last", "weights"), [(True, False), ("link", True)])
def test_model_checkpoint_keeps_the_best_directories_and_the_last(
    pool, tmp_path: Path, last: Any, weights: bool
) -> None:
    tmp_path /= "saved"
    results = pool(2).run(fit_with_monitor, str(tmp_path), last, weights)
    assert results[0]["best"] == results[1]["best"] and Path(results[0]["last"]).is_symlink() is (last == "link")
    kept = sorted(str(path) for path in tmp_path.iterdir())
    assert kept == sorted([*results[0]["k"], str(tmp_path / "last.ckpt")]) and len(kept) == 3
    assert ("optimizers" in torch.load(tmp_path / "last.ckpt" / "meta.pt", weights_only=True)) is not weights
    for path, score in results[0]["k"].items():
        net = make("conv").eval()
        net.load_state_dict(consolidate(Path(path))["state_dict"])
        with torch.no_grad():
            losses = [torch.nn.functional.cross_entropy(net(x), y) for x, y in batches("conv", 60, 2)]
        assert float(sum(losses)) / 2 == pytest.approx(float(score), rel=1e-6)
    for result in results:
        assert result["test"] == pytest.approx(result["score"], rel=1e-6)
        assert result["subnetworks"] == result["plain"] != pytest.approx(result["score"], rel=1e-6)


class Allocations(TorchDispatchMode):
    """Remembers the sizes of the storages of all new floating-point tensors that have data."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.is_floating_point():
                self.sizes.add(tensor.untyped_storage().nbytes())
        return results


def allocations(directory: str) -> dict[str, Any]:
    """What saving and resuming allocate, beside the size of a cut tensor and of this rank's part of it."""
    world, rank = world_and_rank()
    path, sdp = f"{directory}/saved.ckpt", {**NEURON, "coverage": 0.34, "save_distributed_checkpoint": True}
    name, report = "blocks.4.fc1.weight", {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            report["part"] = pl_module.get_parameter(name).nbytes
            with Allocations() as seen:
                trainer.save_checkpoint(path)
            report["saving"] = max(seen.sizes)

    def watched(what: str, load: Any) -> Any:
        def loading(*args: Any, **kwargs: Any) -> Any:
            with Allocations() as seen:
                result = load(*args, **kwargs)
            report[what] = max(seen.sizes)
            return result

        return loading

    data, resume = loader(batches("mlp", rank, 1)), SDPStrategy.load_optimizer_state_dict
    trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[Watch()]).fit(make("mlp"), data)
    net = make("mlp")
    with (
        mock.patch.object(SavedDirectory, "load_model", watched("loading", SavedDirectory.load_model)),
        mock.patch.object(SDPStrategy, "load_optimizer_state_dict", watched("resuming", resume)),
    ):
        trainer(world, SDPStrategy(**sdp), max_epochs=2).fit(net, data, ckpt_path=path, weights_only=True)
    return {**report, "full": net.get_parameter(name).nbytes}


def test_no_rank_allocates_a_whole_tensor_that_is_cut(pool, tmp_path: Path) -> None:
    for report in pool(3).run(allocations, str(tmp_path)):
        assert report["part"] < 0.5 * report["full"]
        for what in ("saving", "loading", "resuming"):
            assert 0 < report[what] <= 1.01 * report["part"], (what, report)


def fit_switching(directory: str) -> None:
    """Only one rank uses its own chunk of each layer, so that others have no state for theirs."""
    world, rank = world_and_rank()

    class Lazy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss if rank == 1 else loss * 0 + self.head.bias.sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if rank != 1:
                for block in self.blocks:
                    block.fc1.weight.grad = None

    strategy = SDPStrategy(**NEURON, coverage=0.34, save_distributed_checkpoint=True)
    run = trainer(world, strategy, max_epochs=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Lazy("mlp").double()
    run.fit(net, loader(batches("mlp", rank, 1)))
    run.save_checkpoint(f"{directory}/saved.ckpt")


def test_state_that_some_holders_do_not_have_is_zero(pool, tmp_path: Path) -> None:
    pool(3).run(fit_switching, str(tmp_path))
    require_every_element_once(tmp_path / "saved.ckpt", 3)
    full = consolidate(tmp_path / "saved.ckpt")
    plan = MaskPlan.from_json(full["lightning_sdp"]["plan"])
    state = full["optimizer_0"]["state"]["blocks.0.fc1.weight"]["exp_avg"]
    mine = plan.element_mask("blocks.0.fc1.weight", 1, state.shape)
    assert state[mine].abs().sum() > 0 and state[~mine].eq(0).all() and not mine.all()


def test_a_checkpoint_in_the_middle_of_a_period_has_the_mean(pool, tmp_path: Path) -> None:
    sdp = {"coverage": 0.67, "model_averaging_period": 3}
    without = pool(3).run(fit_and_save, str(tmp_path), "mlp", 5, None, None, **sdp)
    saved = pool(3).run(fit_and_save, str(tmp_path), "mlp", 5, 4, None, both=True, **sdp)
    assert same_state(without[0]["full"], saved[0]["full"]), "saving changes nothing"
    full = consolidate(tmp_path / "mlp-4.ckpt")
    plain = torch.load(tmp_path / "mlp-4.plain", weights_only=True)
    assert same_state({key: full["state_dict"][key] for key in plain["state_dict"]}, plain["state_dict"])
    for name, (_, entry) in zip(names_of("mlp"), sorted(plain["optimizer_states"][0]["state"].items()), strict=True):
        assert same_state({key: full["optimizer_0"]["state"][name][key] for key in entry}, entry)


# what is refused


def resume(directory: str, name: str) -> None:
    fit_and_save(directory, "mlp", 6, None, f"{directory}/{name}")


def test_an_incomplete_directory_is_refused(pool, tmp_path: Path) -> None:
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    whole = tmp_path / "mlp-4.ckpt"
    for i, (name, what) in enumerate(
        [("meta.pt", "it has no meta.pt"), (".metadata", "it has no .metadata"), ("__1_0.distcp", "is missing"),
         ("__0_0.distcp", "is cut off")]
    ):  # fmt: skip
        broken = tmp_path / f"{i}.ckpt"
        shutil.copytree(whole, broken)
        if "cut" in what:
            os.truncate(broken / name, 100)
        else:
            (broken / name).unlink()
        for error in pool(2).run_expecting_errors(resume, str(tmp_path), broken.name, deadline=30):
            assert error is not None and error[0] == "ValueError"
            assert f"{i}.ckpt is incomplete" in error[1] and what in error[1]


class Other(Net):
    """A model that changes what is saved of it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["renamed"] = state.pop("blocks.4.fc1.weight")


def refused(directory: str, what: str) -> None:
    world, rank = world_and_rank()
    strategy = SDPStrategy(coverage=0.5, save_distributed_checkpoint=True)
    options: dict[str, Any] = {}
    if what == "plugin":
        options["plugins"] = [AsyncCheckpointIO()]
    if what == "averaging":
        options["callbacks"] = [EMAWeightAveraging()]
    run = trainer(world, strategy, max_epochs=1, **options)
    run.fit((Other if what == "renamed" else Net)("mlp").double(), loader(batches("mlp", rank, 1)))
    if what == "options":
        run.save_checkpoint(f"{directory}/saved.ckpt", storage_options={"a": 1})
    if what == "remote":
        run.save_checkpoint("s3://bucket/saved.ckpt")
    if what == "directory":
        run.save_checkpoint(directory)
    if what == "shape":
        run.save_checkpoint(f"{directory}/saved.ckpt")
        run.test(Net("mlp", blocks=4).double(), loader(batches("mlp", 0, 1)), ckpt_path=f"{directory}/saved.ckpt")


def renamed(directory: str) -> None:
    world, rank = world_and_rank()

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{directory}/saved.ckpt")

    strategy = SDPStrategy(coverage=0.5, save_distributed_checkpoint=True)
    trainer(world, strategy, max_epochs=1, callbacks=[Save()]).fit(
        Other("mlp").double(), loader(batches("mlp", rank, 1))
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plugin", "AsyncCheckpointIO does not go with save_distributed_checkpoint=True"),
        ("averaging", "Weight averaging callbacks"),
        ("options", "storage_options cannot be used"),
        ("remote", "name a directory in a file system that all processes share"),
        ("directory", "it would replace a directory with other files"),
        ("shape", "is of another model: it has 'blocks.4."),
    ],
)
def test_what_cannot_be_honored_is_refused_on_every_rank(pool, tmp_path: Path, what: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    for error in pool(2).run_expecting_errors(refused, str(tmp_path), what, deadline=30):
        assert error is not None and message in error[1]
    assert (tmp_path / "notes.txt").exists()


def test_a_tensor_that_is_not_whole_anywhere_cannot_be_renamed(pool, tmp_path: Path) -> None:
    for error in pool(2).run_expecting_errors(renamed, str(tmp_path), deadline=30):
        assert error is not None and "something else under 'renamed'" in error[1]


def test_a_plain_checkpoint_takes_the_place_of_a_directory(pool, tmp_path: Path) -> None:
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    path = tmp_path / "mlp-4.ckpt"
    assert path.is_dir()
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None, save_distributed_checkpoint=False)
    assert path.is_file() and [child.name for child in tmp_path.iterdir()] == ["mlp-4.ckpt"]
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, 6, str(path))
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    assert path.is_dir()


def killed(directory: str) -> None:
    """Rank 1 dies while a second checkpoint replaces the first."""
    world, rank = world_and_rank()

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step % 4:
                return
            if trainer.global_step == 8 and rank == 1:
                view, calls = CheckpointTensor.view, count()

                def dying(*args: Any) -> Tensor:
                    if next(calls) == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return view(*args)

                CheckpointTensor.view = dying  # type: ignore[method-assign]
            trainer.save_checkpoint(f"{directory}/last.ckpt")

    strategy = SDPStrategy(coverage=0.5, save_distributed_checkpoint=True)
    trainer(world, strategy, max_epochs=3, callbacks=[Save()], gradient_clip_val=0.05).fit(
        scheduled("mlp"), loader(batches("mlp", rank, 4))
    )


def test_a_kill_while_saving_leaves_the_checkpoint_before(pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="lost a rank"):
        pool(2).run(killed, str(tmp_path))
    assert (tmp_path / ".last.ckpt.unfinished").is_dir()
    assert consolidate(tmp_path / "last.ckpt")["global_step"] == 4
    whole = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, None)
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.previous")  # as if killed while one took the other's place
    resumed = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, str(tmp_path / "last.ckpt"))
    assert same_state(whole[0]["full"], resumed[0]["full"])
