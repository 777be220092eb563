"""Names that users rely on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_sdp
from lightning_sdp import MaskPlan, SDPStrategy
from lightning_sdp.settings import MaskSettings
from tests.unit.models import Stack

START_METHODS = {
    "sdp": "popen",
    "sdp_neuron": "popen",
    "sdp_backward": "popen",
    "sdp_neuron_backward": "popen",
    "sdp_spawn": "spawn",
    "sdp_fork": "fork",
    "sdp_notebook": "fork",
}


def granularity_of(name: str) -> str:
    return "neuron" if "neuron" in name else "block"


def masking_of(name: str) -> str:
    return "backward" if "backward" in name else "forward"


ARGUMENTS = [
    ("granularity", "block"),
    ("masking", "forward"),
    ("coverage", 0.5),
    ("num_subnetworks", "auto"),
    ("components", None),
    ("keep", ()),
    ("keep_ends", "auto"),
    ("on_unsliceable", "keep"),
    ("balance", "params"),
    ("plan", None),
    ("seed", 0),
    ("model_averaging_period", 1),
    ("average_optimizer_state", False),
    ("bucket_cap_mb", 25),
    ("reduce_dtype", None),
    ("find_unused_parameters", None),
    ("eval_model", "full"),
    ("recalibrate_batchnorm", 16),
    ("save_distributed_checkpoint", False),
    ("record_inputs", True),
    ("check_consistency_every_n_steps", 0),
    ("accelerator", None),
    ("parallel_devices", None),
    ("cluster_environment", None),
    ("checkpoint_io", None),
    ("precision_plugin", None),
    ("process_group_backend", None),
    ("timeout", timedelta(minutes=30)),
    ("start_method", "popen"),
]


def test_public_names() -> None:
    assert sorted(lightning_sdp.__all__) == [
        "BatchNormRecalibration",
        "Component",
        "Group",
        "MaskPlan",
        "MaskingSchedule",
        "Member",
        "ParamSlice",
        "SDPFSDPStrategy",
        "SDPMonitor",
        "SDPReference",
        "SDPStrategy",
        "clip_grad_norm_",
        "communication_bytes",
        "discover_components",
        "register_block",
        "register_neurons",
    ]
    assert all(getattr(lightning_sdp, name).__doc__ for name in lightning_sdp.__all__)
    assert lightning_sdp.__version__.count(".") >= 2


def registered() -> dict[str, tuple[object, object]]:
    names = [name for name in StrategyRegistry.available_strategies() if "sdp" in name and "fsdp" not in name]
    return {name: (StrategyRegistry[name]["strategy"], StrategyRegistry[name]["init_params"]) for name in names}


def test_registered_names() -> None:
    assert registered() == {
        name: (
            SDPStrategy,
            {"granularity": granularity_of(name), "masking": masking_of(name), "start_method": method},
        )
        for name, method in START_METHODS.items()
    }


def test_importing_twice_is_harmless() -> None:
    before = registered()
    module = importlib.reload(lightning_sdp)
    assert module is lightning_sdp and module.SDPStrategy is SDPStrategy
    assert registered() == before


def test_defaults_of_the_settings_are_those_of_the_strategy() -> None:
    defaults = dict(ARGUMENTS)
    assert all(
        getattr(MaskSettings(), field.name) == defaults[field.name] for field in dataclasses.fields(MaskSettings)
    )


@pytest.mark.parametrize(("name", "start_method"), START_METHODS.items())
def test_names_give_the_strategy_with_its_launcher(name: str, start_method: str) -> None:
    if name == "sdp_notebook":
        strategy = StrategyRegistry.get(name)  # A trainer takes it in an interactive session only.
    else:
        strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, barebones=True).strategy
    assert type(strategy) is SDPStrategy and isinstance(strategy, DDPStrategy)
    assert strategy._start_method == start_method
    assert strategy.settings == MaskSettings(granularity=granularity_of(name), masking=masking_of(name))
    assert (strategy.eval_model, strategy.recalibrate_batchnorm) == ("full", 16)
    assert strategy.plan is None


def test_signature() -> None:
    parameters = inspect.signature(SDPStrategy).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == ARGUMENTS
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters)
    documented = inspect.getdoc(SDPStrategy) or ""
    assert [name for name, _ in ARGUMENTS if f"    {name}: " not in documented] == []


def test_readme_lists_the_arguments_with_their_defaults() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    launch = ARGUMENTS[[name for name, _ in ARGUMENTS].index("accelerator") :]
    for name, default in ARGUMENTS[: -len(launch)]:
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert f"| `{name}` | `{shown}` |" in readme
    assert all(f"`{name}`" in readme for name, _ in launch)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("granularity", "layer", "granularity='layer' is unknown: choose 'block' or 'neuron'"),
        ("on_unsliceable", "drop", "on_unsliceable='drop' is unknown: choose 'keep' or 'pad' or 'error'"),
        ("masking", "sideways", "masking='sideways' is unknown: choose 'forward' or 'backward'"),
        ("model_averaging_period", 0, "model_averaging_period=0 must be a number of steps, at least 1"),
        ("model_averaging_period", 1.5, "model_averaging_period=1.5 must be a number of steps, at least 1"),
        ("balance", "flops", "balance='flops' is unknown: choose 'count' or 'params'"),
        ("eval_model", "both", "eval_model='both' is unknown: choose 'full' or 'subnetwork'"),
        ("coverage", 0, r"coverage=0 must lie in \(0, 1\]"),
        ("coverage", 1.5, r"coverage=1.5 must lie in \(0, 1\]"),
        ("coverage", "x", r"coverage='x' must lie in \(0, 1\]"),
        ("coverage", [0.5, 2], r"coverage=\[0.5, 2\] must lie in \(0, 1\]"),
        ("num_subnetworks", 0, "num_subnetworks=0 must be a positive number of workers or 'auto'"),
        ("num_subnetworks", 2.5, "num_subnetworks=2.5 must be"),
        ("num_subnetworks", "two", "num_subnetworks='two' must be"),
        ("bucket_cap_mb", 0, "bucket_cap_mb=0 must be positive"),
        ("recalibrate_batchnorm", -1, "recalibrate_batchnorm=-1 must be a number of batches"),
        ("check_consistency_every_n_steps", -1, "check_consistency_every_n_steps=-1 must be a number of steps, or 0"),
        ("check_consistency_every_n_steps", 2.5, "check_consistency_every_n_steps=2.5 must be a number of steps"),
        ("num_subnetworks", True, "num_subnetworks=True must be"),
    ],
)
def test_bad_arguments_are_refused_where_they_are_given(argument: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SDPStrategy(**{argument: value})  # type: ignore[arg-type]


def test_strategy_can_be_pickled() -> None:
    plan = MaskPlan.build(Stack(3), num_subnetworks=3)
    strategy = SDPStrategy(coverage=[0.5, 0.25, 0.25], keep=["stem"], plan=plan, timeout=timedelta(seconds=7))
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is SDPStrategy
    assert again.settings == strategy.settings and again._timeout == timedelta(seconds=7)
    assert again.settings.plan == plan and again.plan is None
    assert pickle.loads(pickle.dumps(plan)) == plan
