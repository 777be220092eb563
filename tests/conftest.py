"""Configuration shared by all tests."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the fast run fast, and skips the tests marked ``gpu`` where there is no GPU."""
    _keep_some(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _keep_some(items: list[pytest.Item]) -> None:
    """The fast run takes the first and the last case of a test, on real ranks the last; the long run takes all."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in cases.values():
        is_on_ranks = "distributed" in own[0].path.parts
        for item in own[0 if is_on_ranks else 1 : -1]:
            item.add_marker(pytest.mark.slow)
