"""Fixtures of the distributed tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Gives the session's one pool of a world size: ``pool(3).run(fn, ...)`` calls ``fn`` on three ranks."""
    pools: dict[int, Pool] = {}

    def of_size(world: int) -> Pool:
        if world not in pools:
            pools[world] = Pool(world)
        return pools[world]

    yield of_size
    for each in pools.values():
        each.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of every test on real ranks the fast run takes the first and the last case; the long run takes all of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in cases.values():
        for item in own[1:-1]:
            item.add_marker(pytest.mark.slow)
