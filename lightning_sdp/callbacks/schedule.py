"""MaskingSchedule: a table of when the plan and the regime change during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_sdp.assignment import check_shares
from lightning_sdp.callbacks.masking import strategy_of
from lightning_sdp.plan import MaskPlan
from lightning_sdp.settings import MASKINGS, one_of
from lightning_sdp.sync.agreement import agree

if TYPE_CHECKING:
    from lightning_sdp.strategy import SDPStrategy

_EVEN = 1.2  # parts cannot always be exactly even
_UNITS = ("epoch", "step")
_SETTINGS = ("masking", "coverage", "seed", "plan", "rotate_every_n_steps")


class MaskingSchedule(Callback):
    """Changes the regime, the coverage and the assignment during training.

    Before the first entry the strategy's own arguments hold. An entry holds from its epoch or step on, and what it does
    not mention stays as it was. Changes wait until accumulated gradients have been used. The present mean coverage and
    whether masking is backward are logged as ``sdp_coverage`` and ``sdp_backward``, also to the progress bar.

    Args:
        entries: In order of time. Each has ``epoch`` (as `Trainer.current_epoch` counts) or ``step`` (as
            `Trainer.global_step` counts), the same in all entries, and at least one of

            - ``masking``: ``"forward"`` or ``"backward"``;
            - ``coverage``: as for `SDPStrategy`;
            - ``seed``: of the assignment;
            - ``plan``: a `MaskPlan` or the path of its JSON, in place of ``coverage`` and ``seed``;
            - ``rotate_every_n_steps``: after every n steps each worker takes over the place of the one before it, so
              that in time every worker holds everything; 0 stops that.

    Raises:
        ValueError: An entry is not understood, or the entries are not in order.
    """

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries
        self._unit = _check(entries)
        self._applied: tuple[int, int] | None = None  # the entry in force and its turns
        self._entered: tuple[int, int] | None = None  # the entry in force and the step at which it came into force
        self._resumed: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sees to it that every entry can be honored."""
        self._applied = self._entered = None
        strategy = _strategy(trainer)

        def try_all() -> None:
            for index, entry in enumerate(self.entries):
                with _naming(entry):
                    self._plan(strategy, index, turns=0)

        agree(try_all, lambda _: ())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the entry with which training begins or goes on."""
        self._update(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Applies the entry that holds from now on."""
        self._update(trainer)
        strategy = _strategy(trainer)
        assert strategy.plan is not None
        shares = strategy.plan.coverage
        pl_module.log("sdp_coverage", sum(shares) / len(shares), prog_bar=True)
        pl_module.log("sdp_backward", float(strategy.masking == "backward"), prog_bar=True)

    def _update(self, trainer: Trainer) -> None:
        now = trainer.current_epoch if self._unit == "epoch" else trainer.global_step
        index = sum(entry[self._unit] <= now for entry in self.entries) - 1
        strategy = _strategy(trainer)
        if index < 0 or not strategy.is_between_steps:
            return
        if self._entered is None or self._entered[0] != index:
            resumes = self._resumed.get("entry") == _plain(self.entries[index])
            self._entered = index, self._resumed["since"] if resumes else trainer.global_step
            self._resumed = {}
        settings = self._settings(index)
        period = settings.get("rotate_every_n_steps", 0)
        turns = (trainer.global_step - self._entered[1]) // period if period else 0
        if self._applied == (index, turns):
            return
        plan, masking = self._plan(strategy, index, turns), settings.get("masking", strategy.settings.masking)
        strategy.replan(plan, masking)
        if self._applied is None or self._applied[0] != index:
            shares = sorted({f"{share:.3g}" for share in plan.coverage})
            at = f"{self._unit} {self.entries[index][self._unit]}"
            rank_zero_info(f"MaskingSchedule, from {at}: {masking} masking, coverage {' to '.join(shares)}")
        self._applied = index, turns

    def _settings(self, index: int) -> dict[str, Any]:
        """What an entry says, and what it leaves as it was."""
        settings: dict[str, Any] = {}
        for entry in self.entries[: index + 1]:
            if "plan" in entry:
                settings.pop("coverage", None)
                settings.pop("seed", None)
            elif "coverage" in entry or "seed" in entry:
                settings.pop("plan", None)
            settings |= {name: value for name, value in entry.items() if name != self._unit}
        return settings

    def _plan(self, strategy: SDPStrategy, index: int, turns: int) -> MaskPlan:
        settings, own, plan = self._settings(index), strategy.settings, strategy.initial_plan
        assert plan is not None
        if "plan" in settings:
            given = settings["plan"]
            plan = plan.with_holders_of(MaskPlan.load(given) if isinstance(given, str) else given)
        elif "coverage" in settings or "seed" in settings:
            if "coverage" not in settings and own.plan is not None:
                raise ValueError("seed alone does not go with SDPStrategy(plan=...): give coverage too.")
            coverage, seed = settings.get("coverage", own.coverage), settings.get("seed", own.seed)
            plan = plan.reassigned(coverage=coverage, balance=own.balance, seed=seed)
        asked = plan.coverage if "plan" in settings else settings.get("coverage", own.coverage)
        shares = [asked] if isinstance(asked, (int, float)) else list(asked)
        if settings.get("rotate_every_n_steps") and max(shares) > _EVEN * min(shares):
            raise ValueError(
                f"rotate_every_n_steps gives every worker's part to the next one, but their coverage differs: "
                f"{', '.join(f'{share:.3g}' for share in shares)}. Rotate with one coverage for all."
            )
        return plan.rotated(turns)

    def state_dict(self) -> dict[str, Any]:
        """Which entry is in force, and since when."""
        if self._entered is None:
            return {}
        index, since = self._entered
        return {"entry": _plain(self.entries[index]), "since": since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets an entry that was in force go on, if it is one of this schedule."""
        self._resumed = dict(state_dict)


def _strategy(trainer: Trainer) -> SDPStrategy:
    return strategy_of(trainer, "MaskingSchedule changes")


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry in plain values, for a checkpoint."""
    return {name: value.to_json() if isinstance(value, MaskPlan) else value for name, value in entry.items()}


def _check(entries: Sequence[Mapping[str, Any]]) -> str:
    """Checks the entries of a schedule, and returns their unit."""
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError(f"entries={entries!r} must be a list of at least one entry, such as {{'step': 0, ...}}.")
    unit = "epoch" if isinstance(entries[0], Mapping) and "epoch" in entries[0] else "step"
    previous = -1
    for entry in entries:
        with _naming(entry):
            previous = _check_time(entry, unit, previous)
            _check_settings(entry)
    return unit


@contextmanager
def _naming(entry: Any) -> Iterator[None]:
    """Says in errors of a block of code which entry they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"MaskingSchedule, entry {entry}: {error}") from error


def _check_time(entry: Mapping[str, Any], unit: str, previous: int) -> int:
    """Checks when an entry comes into force, and returns it."""
    if not isinstance(entry, Mapping) or unit not in entry or len({*_UNITS} & {*entry}) > 1:
        raise ValueError("every entry needs 'epoch', or every entry needs 'step', beside what is to change.")
    at = entry[unit]
    if type(at) is not int or at < 0:
        raise ValueError(f"{unit}={at!r} must be a number, 0 or more.")
    if at <= previous:
        raise ValueError(f"{unit} {at} does not come after {previous}: put the entries in order of time.")
    return at


def _check_settings(entry: Mapping[str, Any]) -> None:
    unknown = [name for name in entry if name not in (*_UNITS, *_SETTINGS)]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join((*_UNITS, *_SETTINGS))}.")
    if not any(name in entry for name in _SETTINGS):
        raise ValueError(f"it changes nothing; give one of {', '.join(_SETTINGS)}.")
    if "plan" in entry and ("coverage" in entry or "seed" in entry):
        raise ValueError("plan takes the place of coverage and seed; give the one or the others.")
    if "plan" in entry and not isinstance(entry["plan"], (str, MaskPlan)):
        raise ValueError(f"plan={entry['plan']!r} must be a MaskPlan or the path of one.")
    if "masking" in entry:
        one_of("masking", entry["masking"], MASKINGS)
    if "coverage" in entry:
        check_shares(entry["coverage"])
    if type(entry.get("seed", 0)) is not int:
        raise ValueError(f"seed={entry['seed']!r} must be an integer.")
    period = entry.get("rotate_every_n_steps", 0)
    if type(period) is not int or period < 0:
        raise ValueError(f"rotate_every_n_steps={period!r} must be a number of steps, or 0 for no rotation.")
