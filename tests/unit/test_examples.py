"""The data and the model of the image example."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.utils.data import Dataset, TensorDataset

from examples.image_classification import data as data_module
from examples.image_classification import demo
from examples.image_classification.data import ImageData
from examples.image_classification.model import ImageClassifier, SmallImageResNet18
from lightning_sdp import MaskPlan

PARTS = ("train", "val", "test")


def images_of(dataset: Dataset[Any]) -> list[tuple[float, ...]]:
    return [tuple(dataset[i][0].flatten().tolist()) for i in range(len(dataset))]  # type: ignore[arg-type]


def digits(**options: Any) -> ImageData:
    data = ImageData(**options)
    data.prepare_data()
    data.setup("fit")
    return data


def loaders(data: ImageData) -> dict[str, Any]:
    return {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}


class FakeCIFAR(TensorDataset):
    """Takes the place of torchvision's loaders, notes how they are called, and holds a number for each image."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, root: str, **options: Any) -> None:
        self.calls.append((root, options))
        super().__init__(torch.arange(50_000 if options["train"] else 10_000))


@pytest.fixture
def fake_cifar(monkeypatch: pytest.MonkeyPatch) -> type[FakeCIFAR]:
    monkeypatch.setattr(FakeCIFAR, "calls", [])
    monkeypatch.setitem(data_module._CIFAR, "cifar10", FakeCIFAR)
    monkeypatch.setitem(data_module._CIFAR, "cifar100", FakeCIFAR)
    return FakeCIFAR


def test_digits_come_in_three_disjoint_parts() -> None:
    parts = {name: loader.dataset for name, loader in loaders(digits(image_size=8)).items()}
    assert {name: len(part) for name, part in parts.items()} == {"train": 1000, "val": 297, "test": 500}
    indices = [i for part in parts.values() for i in part.indices]
    assert sorted(indices) == list(range(1797))
    classes = {name: {int(part[i][1]) for i in range(len(part))} for name, part in parts.items()}
    assert classes == {name: set(range(10)) for name in PARTS}


def test_digits_are_the_same_in_every_run_and_leave_the_random_state_alone() -> None:
    first = images_of(digits(image_size=8).test_dataloader().dataset)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = images_of(digits(image_size=8).test_dataloader().dataset)
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [8, 20])
def test_digits_have_the_size_asked_for(size: int) -> None:
    data = digits(image_size=size, batch_size=30)
    assert (data.num_classes, data.in_channels) == (10, 1)
    for loader in loaders(data).values():
        images, labels = next(iter(loader))
        assert images.shape == (30, 1, size, size)
        assert images.dtype == torch.float32
        assert labels.shape == (30,)
    images = torch.stack([image for image, _ in data.train_dataloader().dataset])
    assert abs(images.mean()) < 0.05
    assert 0.7 < images.std() < 1.05


def test_training_images_are_shuffled_and_whole_batches_only() -> None:
    data = digits(batch_size=300)
    torch.manual_seed(0)
    loader = data.train_dataloader()
    assert [len(labels) for _, labels in loader] == [300, 300, 300]
    assert not torch.equal(next(iter(loader))[1], next(iter(loader))[1])
    assert [len(labels) for _, labels in data.test_dataloader()] == [300, 200]


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_comes_through_torchvision(name: Any, classes: int, fake_cifar: type[FakeCIFAR]) -> None:
    data = ImageData(name, root="somewhere")
    assert (data.num_classes, data.in_channels) == (classes, 3)
    data.prepare_data()
    assert fake_cifar.calls == [("somewhere", {"train": train, "download": True}) for train in (True, False)]

    fake_cifar.calls.clear()
    data.setup("fit")
    data.setup("test")
    assert [root for root, _ in fake_cifar.calls] == ["somewhere"] * 3
    options = [options for _, options in fake_cifar.calls]
    assert [o["train"] for o in options] == [True, True, False]
    assert not any("download" in o for o in options), "only prepare_data may download: setup runs in every process"
    steps = [[type(t).__name__ for t in o["transform"].transforms] for o in options]
    assert steps == [["RandomCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"], *[["ToTensor", "Normalize"]] * 2]

    parts = {part: [int(n) for (n,) in loader.dataset] for part, loader in loaders(data).items()}
    assert {part: len(numbers) for part, numbers in parts.items()} == {"train": 45_000, "val": 5_000, "test": 10_000}
    assert not set(parts["train"]) & set(parts["val"])


def test_cifar_transforms_give_normalized_images_of_32_pixels(fake_cifar: type[FakeCIFAR]) -> None:
    from torchvision.transforms.functional import to_pil_image

    data = ImageData("cifar10")
    data.setup()
    gray = to_pil_image(torch.full((3, 32, 32), 0.5))
    for _, options in fake_cifar.calls:
        image = options["transform"](gray)
        assert image.shape == (3, 32, 32)
    assert image.mean() == pytest.approx(0.12, abs=0.05)  # of the test part: (0.5 − mean) / std


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset='mnist' is unknown: choose 'digits', 'cifar10', 'cifar100'"):
        ImageData("mnist")  # type: ignore[arg-type]


@pytest.mark.parametrize(("classes", "channels", "width", "size"), [(10, 1, 4, 8), (100, 3, 8, 32)])
def test_the_classifier_scores_every_class(classes: int, channels: int, width: int, size: int) -> None:
    model = ImageClassifier(classes, channels, width)
    assert model(torch.randn(5, channels, size, size)).shape == (5, classes)
    planes = [getattr(model.net, f"layer{stage}")[1].conv2.out_channels for stage in range(1, 5)]
    assert planes == [width, 2 * width, 4 * width, 8 * width]


def test_the_model_is_torchvisions_resnet18_but_for_the_stem() -> None:
    from torchvision.models import resnet18

    ours = {name: p.shape for name, p in SmallImageResNet18(1000).named_parameters()}
    theirs = {name: p.shape for name, p in resnet18().named_parameters()}
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == ["conv1.weight"]
    assert ours["conv1.weight"] == (64, 3, 3, 3)


def test_the_first_of_its_eight_blocks_is_kept() -> None:
    plan = MaskPlan.build(ImageClassifier(width=4), num_subnetworks=2)
    assert [c.name for c in plan.components] == [f"net.layer{n}.{i}" for n in range(1, 5) for i in range(2)][1:]
    assert [kept.name for kept in plan.kept] == ["net.layer1.0"]


def test_training_runs_the_whole_cycle_of_the_learning_rate() -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=1,
        enable_model_summary=False,
        **options,
    )
    model = ImageClassifier(in_channels=1, width=4, learning_rate=0.02)
    trainer.fit(model, ImageData(image_size=8))
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(trainer.callback_metrics)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.total_steps == scheduler.last_epoch == trainer.global_step == 6
    (tested,) = trainer.test(model, ImageData(image_size=8), verbose=False)
    assert 0 <= tested["test_accuracy"] <= 1


@pytest.mark.parametrize(("code", "writes"), [(3, True), (0, False)], ids=["exit code", "no result"])
def test_the_demo_fails_with_the_run_that_fails(
    code: int, writes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    result = tmp_path / "demo_ddp.json"

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if writes:
            result.write_text("{}")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(demo.subprocess, "run", run)
    result.write_text("{}")  # of an earlier demo
    assert demo.main(["--epochs", "1", "--output", str(tmp_path)]) == 1
    assert f"The run with DDP failed (exit code {code})" in capsys.readouterr().out
    assert [command[-5:] for command in commands] == [["ddp", "--epochs", "1", "--output", str(tmp_path)]]
