"""The command ``lightning-sdp``, and configuration files."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdp import MaskPlan, SDPStrategy
from lightning_sdp.cli import main
from lightning_sdp.settings import MaskSettings
from tests.distributed.pool import Pool, launch
from tests.models import CLASSES, Net, same_state

COMMAND = str(Path(sys.executable).parent / "lightning-sdp")


class Vectors(LightningDataModule):
    """Twice sixteen vectors, the same for every stage."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(5)
        self.data = TensorDataset(torch.randn(32, 5, generator=generator), torch.arange(32) % CLASSES)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Record(Callback):
    """Keeps what a stage came to, for the test that runs it in its own process."""

    metrics: ClassVar[dict[str, float]] = {}
    predictions: ClassVar[list[torch.Tensor]] = []
    strategy: ClassVar[Any] = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_test_end = on_validation_end

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predictions[:] = trainer.predict_loop.predictions

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        type(self).strategy = trainer.strategy


def configuration(root: Path, **trainer: Any) -> str:
    """Writes a configuration file, and returns its path."""
    config = {
        "seed_everything": 3,
        "model": {"class_path": "tests.models.Net", "init_args": {"blocks": 6}},
        "data": {"class_path": "tests.distributed.test_cli.Vectors"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "default_root_dir": str(root),
            "callbacks": [{"class_path": "tests.distributed.test_cli.Record"}],
            **trainer,
        },
    }
    path = root / "given.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


CLASS_PATH = {
    "class_path": "lightning_sdp.SDPStrategy",
    "init_args": {"coverage": 0.75, "num_subnetworks": 2, "keep": ["blocks.1"], "keep_ends": [1, 0], "seed": 4},
}


def checkpoint(root: Path) -> str:
    [path] = (root / "checkpoints").glob("*.ckpt")
    return str(path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``lightning-sdp fit`` leaves there."""
    root = tmp_path_factory.mktemp("fitted")
    output = launch([COMMAND, "fit", "--config", configuration(root, strategy=CLASS_PATH)], world=2, deadline=90).stdout
    assert "SDP: 2 workers hold" in output
    return root


def plan_in(path: str) -> MaskPlan:
    return MaskPlan.from_json(torch.load(path, weights_only=False)["lightning_sdp"]["plan"])


def weights_in(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["state_dict"]


def test_fit_obeys_the_configuration(fitted: Path) -> None:
    expected = MaskPlan.build(
        Net(blocks=6), num_subnetworks=2, coverage=0.75, keep="blocks.1", keep_ends=[1, 0], seed=4
    )
    assert plan_in(checkpoint(fitted)) == expected
    assert list(weights_in(checkpoint(fitted))) == list(Net(blocks=6).state_dict())


def run(*args: str) -> tuple[dict[str, float], list[torch.Tensor], MaskSettings]:
    main(list(args))
    return dict(Record.metrics), list(Record.predictions), Record.strategy.settings


def test_saved_configuration_reloads(fitted: Path, pool: Callable[[int], Pool], tmp_path: Path) -> None:
    again = str(tmp_path / "again")
    pool(2).run(run, "fit", "--config", str(fitted / "config.yaml"), "--trainer.default_root_dir", again)
    first, second = (yaml.safe_load(Path(root, "config.yaml").read_text()) for root in (fitted, again))
    assert first["trainer"].pop("default_root_dir") == str(fitted)
    assert second["trainer"].pop("default_root_dir") == again
    assert first == second
    saved = first["trainer"]["strategy"]
    assert saved["class_path"] == "lightning_sdp.SDPStrategy"
    assert {**saved["init_args"], **CLASS_PATH["init_args"]} == saved["init_args"]  # type: ignore[dict-item]
    assert same_state(weights_in(checkpoint(fitted)), weights_in(checkpoint(Path(again))))


def test_evaluation_of_a_checkpoint(fitted: Path, pool: Callable[[int], Pool], tmp_path: Path) -> None:
    path = checkpoint(fitted)
    net = Net.load_from_checkpoint(path).eval()
    inputs, targets = Vectors().data.tensors
    with torch.no_grad():
        outputs = net(inputs)
    loss = float(F.cross_entropy(outputs, targets))
    arguments = ["--config", str(fitted / "given.yaml"), "--ckpt_path", path]
    place = "--trainer.default_root_dir"
    for stage, metric in (("validate", "val_loss"), ("test", "test_loss")):
        for metrics, _, settings in pool(2).run(run, stage, *arguments, place, str(tmp_path / stage)):
            assert metrics[metric] == pytest.approx(loss, rel=1e-5)
            assert settings.coverage == 0.75
    results = pool(2).run(run, "predict", *arguments, place, str(tmp_path / "predict"))
    for rank, (_, predictions, _) in enumerate(results):
        torch.testing.assert_close(torch.cat(predictions), outputs[rank::2])


def test_short_name_and_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_sdp", "fit", "--config", configuration(tmp_path)]
    output = launch([*command, "--trainer.strategy", "sdp"], world=2, deadline=90).stdout
    assert "SDP: 2 workers hold 50%, 50% of 5 maskable blocks" in output
    assert plan_in(checkpoint(tmp_path)) == MaskPlan.build(Net(blocks=6), num_subnetworks=2)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["strategy"] == "sdp"


def test_class_path_needs_no_import(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning.pytorch.cli import LightningCLI\n"
        "assert 'lightning_sdp' not in sys.modules\n"
        "LightningCLI(save_config_callback=None)\n"
        "assert 'lightning_sdp' in sys.modules\n"
    )
    config = {"trainer": {"accelerator": "cpu", "devices": 1, "fast_dev_run": True}}
    config["trainer"]["strategy"] = {"class_path": "lightning_sdp.SDPStrategy"}
    config["model"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    result = launch([sys.executable, "-c", code, "fit", "--config", str(path)], world=1, check=False)
    assert result.returncode != 0  # A single linear layer has nothing to mask, which the strategy says.
    assert "ValueError: No maskable block was found in BoringModel." in result.stdout


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["lightning-sdp", "--help"]), pytest.raises(SystemExit) as caught:
        runpy.run_module("lightning_sdp", run_name="__main__")
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "usage: lightning-sdp" in output
    assert all(f"  {stage}  " in output for stage in ("fit", "validate", "test", "predict"))


def parsed(*args: str) -> SDPStrategy:
    """The strategy that the command line gives."""
    given = ["--seed_everything=false", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    with mock.patch.object(sys, "argv", ["lightning-sdp"]):
        cli = LightningCLI(Net, Vectors, args=[*given, *args], run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, SDPStrategy)
    return cli.trainer.strategy


STRATEGY = "--trainer.strategy=lightning_sdp.SDPStrategy"


@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        ("coverage", "0.25", 0.25),
        ("coverage", "1", 1.0),
        ("coverage", "[1.0, 0.5]", [1.0, 0.5]),
        ("num_subnetworks", "auto", "auto"),
        ("num_subnetworks", "2", 2),
        ("components", "net.blocks.*", "net.blocks.*"),
        ("components", "[a.*, b.?]", ["a.*", "b.?"]),
        ("components", "null", None),
        ("keep", "head", "head"),
        ("keep", "[a, b]", ["a", "b"]),
        ("keep_ends", "auto", "auto"),
        ("keep_ends", "1", 1),
        ("keep_ends", "[1, 0]", [1, 0]),
        ("balance", "count", "count"),
        ("plan", "some/plan.json", "some/plan.json"),
        ("seed", "7", 7),
    ],
)
def test_arguments_on_the_command_line(argument: str, text: str, value: object) -> None:
    settings = parsed(STRATEGY, f"--trainer.strategy.{argument}={text}").settings
    assert getattr(settings, argument) == value
    assert type(getattr(settings, argument)) is type(value)


@pytest.mark.parametrize("argument", ["coverage=much", "num_subnetworks=two", "seed=x", "keep_ends=both", "speed=9"])
def test_bad_arguments_on_the_command_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(STRATEGY, f"--trainer.strategy.{argument}")
    assert caught.value.code != 0
    assert argument.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(("name", "start_method"), [("sdp", "popen"), ("sdp_spawn", "spawn"), ("sdp_fork", "fork")])
def test_short_names_on_the_command_line(name: str, start_method: str) -> None:
    assert parsed(f"--trainer.strategy={name}")._start_method == start_method
