"""Configuration shared by all tests."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the fast run fast, and skips the tests marked ``gpu`` where there is no GPU."""
    _keep_ends(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _keep_ends(items: list[pytest.Item]) -> None:
    """Of every test the fast run takes the first and the last case; the long run takes all of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in cases.values():
        for item in own[1:-1]:
            item.add_marker(pytest.mark.slow)
