"""Ctrl-C while requests are sent or replies are read: the loop goes on, and replies stay matched."""

from __future__ import annotations

import asyncio
import warnings
from functools import partial

import numpy as np
import pytest

import aioenv
from aioenv import speedups
from aioenv.core import dispatcher
from aioenv.core.dispatcher import Dispatcher
from aioenv.testing import FaultyEnv
from tests.kits.loop_kit import LOOPS

N, WORKERS = 6, 3


def counters(n):
    return [partial(FaultyEnv, slot=slot) for slot in range(n)]


@pytest.fixture(params=LOOPS)
def loop(request):
    loop = LOOPS[request.param]()
    yield loop
    with warnings.catch_warnings():  # of a test that failed: uvloop would wait for good for what warnings keep open
        warnings.simplefilter("ignore", ResourceWarning)
        loop.close()


class Interrupts:
    """Raises a KeyboardInterrupt once `left` more requests have been sent, by C or by Python; None: never."""

    def __init__(self, monkeypatch):
        self.left = None
        submit, send_steps = Dispatcher.submit, speedups.send_steps

        def by_python(here, batch_request, part, sent):
            self.sent(0)
            submit(here, batch_request, part, sent)
            self.sent(1)

        def by_c(parts, views, cuts, payloads):
            most = len(parts) if self.left is None else self.left
            done = send_steps(parts[:most], views, cuts[:most], payloads[:most])
            self.sent(done)
            return done

        monkeypatch.setattr(Dispatcher, "submit", by_python)
        if send_steps is not None:
            monkeypatch.setattr(dispatcher.speedups, "send_steps", by_c)

    def sent(self, count):
        if self.left is not None:
            self.left -= count
            if not self.left:
                self.left = None
                raise KeyboardInterrupt


@pytest.fixture
def interrupts(monkeypatch):
    return Interrupts(monkeypatch)


async def started(**settings):
    envs = aioenv.AsyncVectorEnv(counters(N), num_workers=WORKERS, **settings)
    await envs
    await envs.reset(seed=0)
    return envs


def t_of(obs):
    """How often each env was stepped: what `FaultyEnv` shows."""
    return np.asarray(obs)[:, 2].astype(int)


async def take_and_go_on(envs, sent, t):
    """What was sent is there to be taken, nothing else; and then all go on from where they are."""
    if len(sent):
        ready = await asyncio.wait_for(envs.recv(min_slots=len(sent)), 30)
        assert ready.slots.tolist() == sent
        assert t_of(ready.obs).tolist() == t[sent].tolist()
    with pytest.raises(aioenv.NoAsyncCallError):
        await envs.recv()
    for more in (1, 2, 3, 4, 5, 6):
        obs, reward, *_ = await asyncio.wait_for(envs.step(np.zeros(N, int)), 30)
        assert t_of(obs).tolist() == (t + more).tolist() == reward.astype(int).tolist()


# actions that are shared take Python's way, others C's where it was compiled
@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"transport": "shared"}, {"copy": False}], ids=["frames", "shared", "views"])
@pytest.mark.parametrize("sent", range(WORKERS + 1))
@pytest.mark.parametrize("what", ["step", "reset", "send", "rollout"])
def test_ctrl_c_while_requests_are_sent(loop, interrupts, what, sent, settings):
    envs = loop.run_until_complete(started(**settings))
    t = np.zeros(N, int)
    for _ in range(3):
        loop.run_until_complete(envs.step(np.zeros(N, int)))
        t += 1

    async def send():
        envs.send(np.zeros(N, int))

    def policy(obs, slots):
        if (t_of(obs) == 5).all():
            interrupts.left = sent
        return np.zeros(len(obs), int)

    what_is_asked = {"step": lambda: envs.step(np.zeros(N, int)), "reset": envs.reset, "send": send}
    mine = list(range(2 * sent))
    if what == "rollout":  # of one slot a worker: the other group's step is abandoned, too
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(envs.rollout(policy, 10, groups=2))
        asked = [2 * worker for worker in range(sent)]
        t[:] = 5  # the other group's fifth step is under way
        t[asked] += 1
        mine = sorted([*range(1, N, 2), *asked])
    else:
        interrupts.left = sent
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(what_is_asked[what]())
        t[mine] = 0 if what == "reset" else t[mine] + 1
    loop.run_until_complete(take_and_go_on(envs, mine, t))
    loop.run_until_complete(envs.close())


def test_a_step_that_was_interrupted_is_dropped_by_the_next_one(loop, interrupts):
    envs = loop.run_until_complete(started())
    for sent in range(WORKERS + 1):
        interrupts.left = sent
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(envs.step(np.zeros(N, int)))
        before = np.repeat(np.arange(WORKERS) < sent, 2)
        if not sent:
            t = np.zeros(N, int)
        t += before
        for _ in range(5):
            obs, *_ = loop.run_until_complete(asyncio.wait_for(envs.step(np.zeros(N, int)), 30))
            t += 1
            assert t_of(obs).tolist() == t.tolist()
    loop.run_until_complete(envs.close())


def test_what_an_interrupted_send_has_sent_is_for_recv(loop, interrupts):
    envs = loop.run_until_complete(started())

    async def send():
        envs.send(np.zeros(N, int))

    interrupts.left = 1
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(send())

    async def go_on():
        with pytest.raises(aioenv.PendingCallError):
            await envs.step(np.zeros(N, int))
        assert (await asyncio.wait_for(envs.recv(min_slots=N), 30)).slots.tolist() == [0, 1]
        obs, *_ = await asyncio.wait_for(envs.step(np.zeros(N, int)), 30)
        assert t_of(obs).tolist() == [2, 2, 1, 1, 1, 1]
        await envs.close()

    loop.run_until_complete(go_on())


def test_images_go_on_after_ctrl_c(loop, interrupts):
    async def begun():
        makes = [partial(make, render_mode="rgb_array") for make in counters(N)]
        envs = aioenv.AsyncVectorEnv(makes, num_workers=WORKERS, render=aioenv.RenderConfig())
        await envs
        await envs.reset(seed=0)
        await envs.step(np.zeros(N, int))
        return envs

    envs = loop.run_until_complete(begun())
    interrupts.left = 1
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(envs.step(np.zeros(N, int)))

    async def go_on():
        for more in range(3):
            obs, *_ = await asyncio.wait_for(envs.step(np.zeros(N, int)), 30)
            images = await asyncio.wait_for(envs.render(), 30)
            t = [image[0, 0, 0] for image in images]
            assert t == t_of(obs).tolist() == [3 + more, 3 + more, *[2 + more] * 4]
        await envs.close()

    loop.run_until_complete(go_on())


def test_ctrl_c_while_a_reply_is_read_ends_its_worker(loop, monkeypatch):
    envs = loop.run_until_complete(started())
    read, interrupts = Dispatcher._on_reply, 1

    def interrupted(here, batch_request, part, outcome):
        nonlocal interrupts
        if interrupts and part.slots[0] == 2:
            interrupts -= 1
            raise KeyboardInterrupt
        read(here, batch_request, part, outcome)

    async def fresh():
        monkeypatch.setattr(Dispatcher, "_on_reply", interrupted)
        envs.send(np.zeros(N, int))
        await envs.recv(min_slots=N)

    task = loop.create_task(fresh())  # which goes on with the loop
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)

    async def go_on():
        with pytest.raises(aioenv.WorkerDied, match="this process was interrupted while it took in a reply") as caught:
            await asyncio.wait_for(task, 30)
        assert caught.value.slots == (2, 3)
        await envs.close()

    loop.run_until_complete(go_on())
