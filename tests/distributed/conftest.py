"""Fixtures of the distributed tests."""

from collections.abc import Callable, Iterator

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
