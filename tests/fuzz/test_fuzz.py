"""Random operations in random order, cancelled, interrupted, late and killed at random, against a model of what is due.

What is driven, `Config` in `fuzz_kit.py` draws; what may come of an operation, `fuzz_requests.py` and `fuzz_calls.py`
say; what the envs must do, `fuzz_model.py` does. Images are compared with observations in `fuzz_images.py`, those of
a `RenderPool` with a twin's in `fuzz_pool.py`. A failure shows the seed and all operations before it. For more:

    python -m pytest tests/fuzz/test_fuzz.py -m stress
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial

import pytest

from aioenv.process import thread_process
from aioenv.process.env_thread import RunTimes
from aioenv.sync import blocking, portal
from tests.fuzz.fuzz_chaos import Chaos
from tests.fuzz.fuzz_images import WAYS, ImageOperations
from tests.fuzz.fuzz_kit import Driver
from tests.fuzz.fuzz_pool import Pools
from tests.kits.loop_kit import LOOPS

KINDS = ["workers", "in-process", "vectors", "sync", "here", "sync here"]
OPERATIONS = 40


class RunTimesAtRandom(RunTimes):
    """Chooses the thread by the flip of a coin, unless all work is to run inline.

    Args:
        always: whether all work runs inline.
    """

    def __init__(self, always: bool, limit_s: float, _: bool | None, __: float | None) -> None:
        super().__init__(limit_s, True)
        self._always = always
        self._rng = random.Random(0)

    def record(self, seconds: float) -> None:
        self.inline = self._always or self._rng.random() < 0.7


def drive(kind: str, seed: int, start: str = "forkserver") -> None:
    loop = LOOPS["uvloop" if seed % 3 == 2 else "asyncio"]
    with asyncio.Runner(loop_factory=loop) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(portal, "new_event_loop", loop)
        if seed % 2:  # the loop of blocking code stands still, and no longer does, as often as it can
            for module in (portal, blocking):
                patch.setattr(module, "MAX_PAUSE_S", 1e-4)
        if seed % 4:  # envs in this process run on the loop from the first step on, or now and then
            patch.setattr(thread_process, "RunTimes", partial(RunTimesAtRandom, seed % 4 == 1))
        runner.run(Driver(seed, kind, start).run(OPERATIONS))


def draw(way: str, seed: int) -> None:
    with asyncio.Runner(loop_factory=LOOPS["uvloop" if seed % 3 == 2 else "asyncio"]) as runner:
        runner.run(ImageOperations(seed, way).run(OPERATIONS))


@pytest.fixture(autouse=True)
def quiet():
    """Deaths and drops are logged, hundreds of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [(kind, seed) for kind in KINDS for seed in range(3 if kind in ("workers", "vectors", "sync") else 6)],
)
def test_random_operations(kind, seed):
    drive(kind, seed)


@pytest.mark.parametrize("kind", ["workers", "in-process", "here"])
def test_random_operations_of_several_tasks(kind):
    asyncio.run(Chaos(0, kind).run(25))


@pytest.mark.parametrize("kind", ["workers", "in-process", "here"])
def test_closed_in_the_middle_of_random_operations(kind):
    for seed in range(3):
        asyncio.run(Chaos(seed, kind).run(1000, closes=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [8, 17])
def test_images_of_random_operations(way, seed):
    draw(way, seed)


@pytest.mark.parametrize("seed", [3, 13])
def test_random_calls_of_a_render_pool(seed):
    asyncio.run(Pools(seed).run(30))


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_many_random_calls_of_a_render_pool():
    for seed in range(1000, 1200):
        asyncio.run(Pools(seed).run(30))


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_images_of_many_random_operations(way):
    for seed in range(1000, 1100):
        draw(way, seed)


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["workers", "in-process", "vectors", "here"])
def test_many_random_operations_of_several_tasks(kind):
    for seed in range(1, 200):
        asyncio.run(Chaos(seed, kind).run(25, closes=seed % 4 == 0))


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_operations(kind):
    for seed in range(10_000, 10_300):
        drive(kind, seed)


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_many_random_operations_spawned():
    for seed in range(40):
        drive("workers", seed, "spawn")
