"""MaskSettings: what a user asks for, and the plan that follows for a model and a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn as nn
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_sdp.assignment import check_shares
from lightning_sdp.components.calls import RecordCalls, run_without_data
from lightning_sdp.components.discovery import GRANULARITIES, ON_UNSLICEABLE, KeepEnds
from lightning_sdp.components.neurons import sample_inputs
from lightning_sdp.costs import BALANCES
from lightning_sdp.plan import MaskPlan

MASKINGS = ("forward", "backward")
_PLAN_FIELDS = ("granularity", "coverage", "components", "keep", "keep_ends", "on_unsliceable", "seed")


@dataclass(frozen=True)
class MaskSettings:
    """The masking arguments of a strategy; see `SDPStrategy` for their meaning.

    Raises:
        ValueError: An argument is not understood.
    """

    granularity: str = "block"
    masking: str = "forward"
    coverage: float | Sequence[float] = 0.5
    num_subnetworks: int | Literal["auto"] = "auto"
    components: str | Sequence[str] | None = None
    keep: str | Sequence[str] = ()
    keep_ends: KeepEnds = "auto"
    on_unsliceable: str = "keep"
    balance: str = "params"
    plan: str | MaskPlan | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("granularity", self.granularity, GRANULARITIES)
        one_of("masking", self.masking, MASKINGS)
        one_of("on_unsliceable", self.on_unsliceable, ON_UNSLICEABLE)
        one_of("balance", self.balance, BALANCES)
        check_shares(self.coverage)
        workers = self.num_subnetworks
        if workers != "auto" and (type(workers) is not int or workers < 1):
            raise ValueError(f"num_subnetworks={workers!r} must be a positive number of workers or 'auto'.")

    def make_plan(
        self,
        module: nn.Module,
        world_size: int,
        record: Mapping[str, Any] | None = None,
        record_calls: RecordCalls | None = None,
    ) -> MaskPlan:
        """The plan for a model and a number of processes.

        Args:
            module: The full model.
            world_size: Number of processes.
            record: What a checkpoint remembers of its plan. With the same settings its plan is used again, so that new
                cost figures never change a running experiment.
            record_calls: Finds out, if need be, how the model's modules are called.

        Raises:
            ValueError: The settings do not fit the model or the world.
        """
        require_initialized(module)
        if self.plan is not None:
            plan = MaskPlan.load(self.plan) if isinstance(self.plan, str) else self.plan
            if world_size % plan.num_subnetworks:
                raise ValueError(
                    f"plan is for {plan.num_subnetworks} workers, which does not divide the {world_size} processes."
                )
            return plan.fit(module, record=record_calls)
        workers = self.workers(world_size)
        if record is not None and record.get("settings") == self._plan_settings(workers):
            return MaskPlan.from_json(record["plan"]).fit(module, record=record_calls)
        return MaskPlan.build(
            module,
            num_subnetworks=workers,
            granularity=self.granularity,
            coverage=self.coverage,
            components=self.components,
            keep=self.keep,
            keep_ends=self.keep_ends,
            on_unsliceable=self.on_unsliceable,
            balance=self.balance,
            seed=self.seed,
            record=record_calls,
        )

    def workers(self, world_size: int) -> int:
        """The number of workers N in a world.

        Raises:
            ValueError: ``num_subnetworks`` does not divide the world.
        """
        if self.num_subnetworks == "auto":
            workers = max(n for n in range(1, 9) if world_size % n == 0)
            if workers == 1 and world_size > 1:
                rank_zero_warn(
                    f"num_subnetworks='auto' found no divisor of {world_size} processes between 2 and 8: every process "
                    "trains the whole model. Use another number of processes, or set num_subnetworks."
                )
            return workers
        if world_size % self.num_subnetworks:
            raise ValueError(
                f"num_subnetworks={self.num_subnetworks} does not divide the {world_size} processes: each worker needs "
                "the same number of them."
            )
        return self.num_subnetworks

    def record(self, base: MaskPlan, plan: MaskPlan, masking: str) -> dict[str, Any]:
        """What a checkpoint remembers of the plan: plain values, so that it loads without this package.

        Args:
            base: The plan that training began with.
            plan: The present one.
            masking: The present regime.
        """
        record = {"plan": base.to_json(), "settings": self._plan_settings(base.num_subnetworks)}
        if plan != base or masking != self.masking:
            record["current"] = {"plan": plan.to_json(), "masking": masking, "masking_at_start": self.masking}
        return record

    def resumed(self, base: MaskPlan, record: Mapping[str, Any] | None) -> tuple[MaskPlan, str]:
        """The plan and the regime to go on with: those of the checkpoint if its run began as this one does.

        Args:
            base: The plan that training begins with.
            record: What a checkpoint remembers.
        """
        current = (record or {}).get("current")
        if record is None or current is None or current["masking_at_start"] != self.masking:
            return base, self.masking
        if MaskPlan.from_json(record["plan"]) != base:
            return base, self.masking
        return base.with_holders_of(MaskPlan.from_json(current["plan"])), current["masking"]

    def _plan_settings(self, workers: int) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in _PLAN_FIELDS} | {"num_subnetworks": workers}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def one_of(argument: str, value: Any, choices: Sequence[str | None]) -> None:
    """Refuses a value that is not one of the choices.

    Raises:
        ValueError: It is not.
    """
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is unknown: choose {' or '.join(map(repr, choices))}.")


def runs_without_data(module: nn.Module) -> bool:
    """Whether a model has a sample input that its forward takes, without data."""
    sample = sample_inputs(module)
    if sample is None:
        return False
    try:
        run_without_data(module, sample)
    except Exception:  # user code
        return False
    return True


def require_running(module: nn.Module) -> None:
    """Refuses a carved model that does not take its sample input any more.

    Raises:
        ValueError: Its forward fails.
    """
    try:
        run_without_data(module, sample_inputs(module))
    except Exception as error:  # user code
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{type(module).__name__} does not run on its example_input_array once its neurons are cut ({what}). Keep "
            "the module where that happens whole with keep=..., or use granularity='block'."
        ) from error


def require_initialized(module: nn.Module) -> None:
    """Refuses a module whose parameters have no shape yet, or are only in part on the meta device.

    Raises:
        ValueError: There is one.
    """
    on_meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < len(list(module.parameters())):
        raise ValueError(
            f"Parameter {on_meta[0]!r} is on the meta device and others are not, as an interrupted run leaves a model: "
            "build it anew, all of it on the meta device or none, and resume from a checkpoint."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} is not initialized yet: run a batch through the model before training."
            )


def require_real_parameters(module: nn.Module) -> None:
    """Refuses a module whose parameters have no data.

    Raises:
        ValueError: A parameter is on the meta device or not initialized yet.
    """
    require_initialized(module)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device: only fit can start there. Build the model on a real one."
            )
