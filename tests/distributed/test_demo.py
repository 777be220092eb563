"""The demo from end to end, small and short: does the table report what the plan says?"""

import json
import sys
from pathlib import Path

import pytest

from examples.image_classification.model import ImageClassifier
from lightning_sdp import MaskPlan, communication_bytes
from tests.distributed.pool import launch

FLOAT = 4  # bytes


@pytest.mark.slow
def test_demo_compares_both_strategies_and_reports_what_the_plan_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.image_classification.demo"]
    options = ["--epochs", "1", "--width", "4", "--output", str(tmp_path)]
    done = launch([*command, *options], world=2, deadline=300)
    ddp, sdp = (json.loads((tmp_path / f"demo_{name}.json").read_text()) for name in ("ddp", "sdp"))

    model = ImageClassifier(10, 1, width=4)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    plan = MaskPlan.build(model, num_subnetworks=2, coverage=0.5)
    missing = [sum(sizes.get(part.name, 0) for c in plan.missing_on(w) for part in c.slices) for w in range(2)]
    held = max(sum(sizes.values()) - lost for lost in missing)

    assert ddp["parameters"] == sum(sizes.values())
    assert sdp["parameters"] == held < 0.6 * ddp["parameters"]
    for result in (ddp, sdp):  # a gradient and SGD's momentum for each parameter
        assert result["gradient_and_optimizer_bytes"] == 2 * FLOAT * result["parameters"]
        assert 0 <= result["test_accuracy"] <= 1
    assert ddp["sent_bytes"] == FLOAT * sum(sizes.values())  # 2·(2 − 1)/2 times the gradients
    assert sdp["sent_bytes"] == max(communication_bytes(plan, model)) < ddp["sent_bytes"]

    assert (tmp_path / "demo_plan.png").read_bytes().startswith(b"\x89PNG")
    for text in (f"{held:,}", f"{sdp['test_accuracy']:.1%}", f"{held / ddp['parameters']:.2f}", "demo_plan.png"):
        assert text in done.stdout
