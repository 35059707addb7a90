"""`num_workers=0`: single envs in this process, with everything that workers give but what needs a process."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import os
import signal
import sys
import threading
from functools import partial, partialmethod

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
import aioenv.sync
from aioenv import speedups, sync
from aioenv.process import env_thread, thread_process
from aioenv.sync import blocking
from aioenv.testing import VectorEnvContract
from aioenv.testing.faulty_env import FaultyEnv, faulty_envs
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter
from tests.kits.loop_kit import LOOPS, run_on
from tests.kits.process_kit import OF_PROCESSES, run_alone

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")


@pytest.fixture(autouse=True)
def all_steps_count_as_short(monkeypatch):
    """After some steps the others run on the caller's thread, however busy the machine is."""
    monkeypatch.setattr(thread_process, "_INLINE_LIMIT_S", 60.0)
    monkeypatch.setattr(env_thread, "_LONG_S", 60.0)


class TestContract(VectorEnvContract):
    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=0, **options)


class TestContractOnItsThread(VectorEnvContract):
    """A limit of time keeps all steps on the thread."""

    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=0, timeout_s=60, **options)


class Where(gym.Env):
    """Tells which thread steps it; waits for a gate if there is one."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    gates: dict = {}  # noqa: RUF012

    def __init__(self, gate=None, render_mode=None, large=False):
        self.gate, self.render_mode = gate, render_mode
        self.made_on = threading.current_thread().name
        if large:
            self.observation_space = gym.spaces.Box(-1, 1, (200, 200, 3), np.float32)

    def _result(self):
        obs = np.zeros(self.observation_space.shape, np.float32)
        return obs, {"thread": threading.current_thread().name}

    def reset(self, *, seed=None, options=None):
        return self._result()

    def step(self, action):
        if action and self.gate is not None:
            Where.gates[self.gate].wait()
        obs, info = self._result()
        return obs, 0.0, False, False, info

    def threads(self):
        return self.made_on, threading.current_thread().name


ENV_THREAD = "aioenv-worker-0"


async def threads_of_steps(envs, steps=200):
    await envs.reset()
    return [(await envs.step(np.zeros(envs.num_envs, int))).info["thread"][0] for _ in range(steps)]


@pytest.mark.parametrize("large", [False, True])
def test_short_steps_run_on_the_loop_and_calls_on_the_envs_own_thread(large):
    async def main():
        async with aioenv.AsyncVectorEnv([partial(Where, large=large)] * 2, num_workers=0) as envs:
            threads = await threads_of_steps(envs)
            assert threads[0] == ENV_THREAD and threads[-1] == "MainThread"
            assert await envs.call("threads") == ((ENV_THREAD, ENV_THREAD),) * 2

    run_on("uvloop", main())


@compiled
def test_a_step_that_blocking_code_waits_for_may_take_longer_than_one_on_a_loop(monkeypatch):
    """So may the `step_async` of adapters. What `send` sends lets the caller go on, and runs on the thread."""
    monkeypatch.setattr(thread_process, "_INLINE_LIMIT_S", 0.0)
    actions = np.zeros(2, int)
    with sync.VectorEnv([Where] * 2, num_workers=0) as envs:
        envs.reset()
        envs.step(actions)  # the first one makes arrays for the others
        assert {envs.step(actions).info["thread"][0] for _ in range(20)} == {"MainThread"}
        envs.send(actions)
        assert envs.recv(2).info["thread"].tolist() == [ENV_THREAD] * 2
        step = envs._begin_step(actions)  # as adapters do for `step_async`
        step.wait()
        assert step.result().info["thread"].tolist() == ["MainThread"] * 2
        monkeypatch.setattr(blocking, "BLOCKING_LIMIT_S", 0.0)
        assert {envs.step(actions).info["thread"][0] for _ in range(20)} == {ENV_THREAD}


@pytest.mark.parametrize("options", [{"timeout_s": 60}, {"debug": True}])
def test_all_steps_run_on_the_thread(options):
    async def main():
        async with aioenv.AsyncVectorEnv([Where] * 2, num_workers=0, **options) as envs:
            assert set(await threads_of_steps(envs)) == {ENV_THREAD}
        async with aioenv.AsyncVectorEnv([partial(Where, render_mode="rgb_array")], num_workers=0) as envs:
            assert set(await threads_of_steps(envs)) == {ENV_THREAD}

    run_on("uvloop", main())


def test_a_step_with_a_limit_of_its_own_runs_on_the_thread():
    async def main():
        Where.gates["limit"] = gate = threading.Event()
        async with aioenv.AsyncVectorEnv([partial(Where, "limit")] * 2, num_workers=0) as envs:
            assert (await threads_of_steps(envs))[-1] == "MainThread"
            with pytest.raises(aioenv.StepTimeout, match=r"timeout_s=0\.05"):
                await envs.step(np.ones(2, int), timeout_s=0.05)
            gate.set()
            assert (await envs.recv(2)).slots.tolist() == [0, 1]
            await envs.step(np.zeros(2, int))

    run_on("asyncio", main())


def test_a_long_step_leaves_the_loop_to_others():
    async def main():
        Where.gates["long"] = gate = threading.Event()
        async with aioenv.AsyncVectorEnv([partial(Where, "long")], num_workers=0, timeout_s=60) as envs:
            await envs.reset()
            step = asyncio.ensure_future(envs.step(np.ones(1, int)))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not step.done()
            gate.set()
            await step

    run_on("uvloop", main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["step", "recv", "rollout"])
def test_other_tasks_have_their_turns_while_steps_run_on_the_loop(how, loop):
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        nonlocal turns
        async with aioenv.AsyncVectorEnv([partial(Counter, 50)] * 3, num_workers=0) as envs:
            await envs.reset(seed=0)
            actions = np.zeros(3, int)
            for _ in range(50):
                await envs.step(actions)
            task = asyncio.ensure_future(other())
            turns = 0
            if how == "rollout":
                await envs.rollout(lambda obs: np.zeros(len(obs), int), 1000)
            for _ in range(1000):
                if how == "step":
                    await envs.step(actions)
                elif how == "recv":
                    envs.send(actions)
                    await envs.recv(3)
            assert turns > 3
            task.cancel()

    run_on(loop, main())


@compiled
def test_a_cancelled_step_is_made_and_its_result_waits_for_recv():
    async def main():
        async with aioenv.AsyncVectorEnv([partial(Counter, 1000)] * 2, num_workers=0) as envs:
            await envs.reset(seed=0)
            actions = np.zeros(2, int)
            for _ in range(100):
                await envs.step(actions)
            made = 100
            for _ in range(400):
                step = asyncio.ensure_future(envs.step(actions))
                await asyncio.sleep(0)
                cancelled = step.cancel()
                made += 1
                try:
                    result = await step
                except asyncio.CancelledError:
                    assert cancelled
                    result = await envs.recv(2)
                assert result.obs[:, 1].tolist() == [made] * 2
            assert (await envs.step(actions)).obs[:, 1].tolist() == [made + 1] * 2

    run_on("asyncio", main())


REFUSED = {"on_timeout": "kill", **OF_PROCESSES}


@pytest.mark.parametrize("name", REFUSED)
def test_features_of_processes_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}: not with num_workers=0"):
        aioenv.AsyncVectorEnv([Counter], num_workers=0, **{name: REFUSED[name]})


def test_factories_need_not_pickle():
    lock = threading.Lock()

    async def main():
        def make():
            assert lock.acquire(blocking=False) or True
            return Counter()

        async with aioenv.AsyncVectorEnv([make] * 2, num_workers=0) as envs:
            await envs.reset(seed=0)

    run_on("asyncio", main())


@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_exception_in_a_step_on_the_loop_is_that_of_its_slot(mode):
    async def main():
        async with aioenv.AsyncVectorEnv([partial(Counter, 1000)] * 3, num_workers=0, autoreset_mode=mode) as envs:
            await envs.reset(seed=0)
            for _ in range(100):
                await envs.step(np.zeros(3, int))
            with pytest.raises(aioenv.EnvError, match=r"slot 1.*KeyError: 'as asked'") as caught:
                await envs.step(np.array([0, Counter.RAISE, 0]))
            assert caught.value.slots == (1,)
            assert isinstance(caught.value.__cause__, KeyError)
            assert caught.value.partial.obs[:, 1].tolist() == [101, 100, 101]  # of the slot its last one
            with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed"):
                await envs.step(np.zeros(3, int))
            await envs.reset(options={"reset_mask": np.array([False, True, False])})
            assert (await envs.step(np.zeros(3, int))).obs[:, 1].tolist() == [102, 1, 102]

    run_on("uvloop", main())


def test_an_env_that_exits_ends_the_others_but_not_the_program():
    async def main():
        envs = aioenv.AsyncVectorEnv(faulty_envs(2, "sys_exit", "step", slot=1, at=80), num_workers=0)
        async with envs:
            await envs.reset()
            with pytest.raises(aioenv.WorkerDied, match="exited with code 7"):
                for _ in range(100):
                    await envs.step(np.zeros(2, int))

    run_on("uvloop", main())


def test_runs_states_statistics_and_images_are_as_over_workers():
    async def trajectory(num_workers):
        make = [partial(FaultyEnv, slot=slot, length=4) for slot in range(4)]
        async with aioenv.AsyncVectorEnv(make, num_workers=num_workers, episode_stats=True) as envs:
            got = []
            envs.send_reset(seed=0)
            got.append((await envs.recv(4)).slots.tolist())
            got += [tuple(await envs.step(np.zeros(4, np.int64))) for _ in range(60)]
            envs.pause(1)
            got.append(tuple(await envs.step(np.zeros(4, np.int64))))
            envs.resume()
            rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
            got += [rollout.obs, rollout.reward, rollout.last_obs]
            evaluation = await aioenv.evaluate(envs, lambda obs: np.zeros(4, np.int64), 6, seed=1)
            got += [evaluation.lengths, evaluation.returns]
            got.append(envs.stats().env_steps)
            got.append([image.shape for image in await envs.render()])
        return got

    async def main():
        here, there = await trajectory(0), await trajectory(2)
        for mine, theirs in zip(here, there, strict=True):
            if isinstance(mine, tuple):
                mine[4].pop("episode", None), theirs[4].pop("episode", None)
                mine[4].pop("_episode", None), theirs[4].pop("_episode", None)
            assert_same(mine, theirs)

    run_on("uvloop", main())


def test_a_state_of_a_worker_goes_on_here_and_back():
    async def main():
        make = [partial(gym.make, "InvertedPendulum-v5")] * 3
        actions = np.zeros((3, 1), np.float32)
        async with aioenv.AsyncVectorEnv(make, num_workers=2) as there:
            await there.reset(seed=3)
            async with aioenv.AsyncVectorEnv(make, num_workers=0) as here:
                await here.set_state(await there.get_state())
                for _ in range(70):
                    assert_same(tuple(await here.step(actions)), tuple(await there.step(actions)))
                await there.set_state(await here.get_state())
                assert_same(tuple(await here.step(actions)), tuple(await there.step(actions)))

    run_on("uvloop", main())


def test_blocking_steps_run_on_the_callers_thread():
    with aioenv.sync.VectorEnv([partial(Where)] * 2, num_workers=0) as envs:
        envs.reset()
        threads = [envs.step(np.zeros(2, int)).info["thread"][0] for _ in range(200)]
    assert threads[0] == ENV_THREAD and threads[-1] == "MainThread"


def test_ctrl_c_in_a_blocking_step_leaves_the_result_to_recv():
    class Interrupts(Counter):
        def step(self, action):
            if action == self.WAIT:
                signal.raise_signal(signal.SIGINT)
                action = self.OK
            return super().step(action)

    with aioenv.sync.VectorEnv([partial(Interrupts, 1000)] * 2, num_workers=0) as envs:
        envs.reset(seed=0)
        for _ in range(100):
            envs.step(np.zeros(2, int))
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, Counter.WAIT]))
        ready = envs.recv(2)
        assert ready.slots.tolist() == [0, 1] and ready.obs[:, 1].tolist() == [101, 101]
        assert envs.step(np.zeros(2, int)).obs[:, 1].tolist() == [102, 102]


class Signals(Counter):
    """Raises the signal whose number is its action, or that of the options; shows its step in an info at odd steps."""

    def __init__(self):
        super().__init__(1000)
        self.action_space = gym.spaces.Discrete(65)

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        if options and "signal" in options:
            signal.raise_signal(options["signal"])
        return result

    def step(self, action):
        if action:
            signal.raise_signal(action)
        result = super().step(self.OK)
        return *result[:4], {"t": self.t} if self.t % 2 else {}


@pytest.mark.parametrize("before", [100, 101])
def test_the_result_of_an_interrupted_step_is_whole_and_counts_once(before):
    """Ctrl-C comes after a step with infos, or after one without: none of an earlier step show up."""
    with aioenv.sync.VectorEnv([Signals] * 2, num_workers=0) as envs:
        envs.reset(seed=0)
        for _ in range(before):
            envs.step(np.zeros(2, int))
        steps = envs.stats().env_steps
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, signal.SIGINT]))
        expected = {} if before % 2 else {"t": np.array([101, 101]), "_t": np.ones(2, bool)}
        assert_same(envs.recv(2).info, expected)
        assert envs.stats().env_steps == steps + 2


def test_a_step_interrupted_on_the_loops_thread_is_left_to_recv(monkeypatch):
    """There the env's step ends before the caller, who waits, handles Ctrl-C."""
    with aioenv.sync.VectorEnv([Signals] * 2, num_workers=0) as envs:
        envs.reset(seed=0)
        for _ in range(100):
            envs.step(np.zeros(2, int))
        portal = envs._portal
        for name in ("run_inline", "run_while_idle"):  # as on a busy machine: the loop does not pause
            monkeypatch.setattr(portal, name, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, signal.SIGINT]))
        assert envs.recv(2).obs[:, 1].tolist() == [101, 101]
        assert envs.step(np.zeros(2, int)).obs[:, 1].tolist() == [102, 102]


class Rung(Exception):
    """What a handler of a signal raises."""


@pytest.fixture
def handler_raises():
    def ring(*_):
        raise Rung

    before = signal.signal(signal.SIGUSR1, ring)
    yield
    signal.signal(signal.SIGUSR1, before)


@compiled
@pytest.mark.parametrize(
    ("how", "blocking"), [("step", False), ("step", True), ("reset", False), ("send", False), ("send", True)]
)
def test_what_a_signal_handler_raises_reaches_the_caller_and_is_no_error_of_an_env(how, blocking, handler_raises):
    actions = np.array([0, signal.SIGUSR1])

    async def main():
        cls = aioenv.sync.VectorEnv if blocking else aioenv.AsyncVectorEnv
        envs = cls([Signals] * 2, num_workers=0)

        async def do(name, *args, **kwargs):
            result = getattr(envs, name)(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        if not blocking:
            await envs
        for _ in range(30):
            await do("reset", seed=0)
        for _ in range(100):
            await do("step", np.zeros(2, int))
        with pytest.raises(Rung):
            if how == "reset":
                mask = np.array([False, True])
                await do("reset", options={"signal": signal.SIGUSR1, "reset_mask": mask})
            else:
                await do(how, actions)
        if how != "step" or blocking:
            assert (await do("recv", 2)).slots.tolist() == [0, 1]
        else:  # C has stepped the env, in whose code the handler has raised
            with pytest.raises(aioenv.EnvError, match=r"slot 1 .*Rung"):
                await do("recv", 2)
            await do("reset")
        await do("step", np.zeros(2, int))
        await do("close")

    if blocking:
        with pytest.raises(StopIteration):
            main().send(None)
    else:
        run_on("asyncio", main())


@compiled
def test_a_handler_that_ends_the_program_is_no_sys_exit_of_an_env():
    def leave(*_):
        raise SystemExit(5)

    async def main():
        async with aioenv.AsyncVectorEnv([Signals] * 2, num_workers=0) as envs:
            await envs.reset(seed=0)
            for _ in range(100):
                await envs.step(np.zeros(2, int))
            with pytest.raises(SystemExit, match="5"):
                await envs.step(np.array([0, signal.SIGTERM]))
            with pytest.raises(aioenv.EnvError, match=r"slot 1 .*whose handler raised SystemExit: 5"):
                await envs.recv(2)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        run_on("uvloop", main())
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("leaves", [None, 0, 3, "a text"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_env_that_ends_its_program_does_so_as_a_process_would(num_workers, leaves, capfd):
    class Leaves(Counter):
        def step(self, action):
            if action == self.WAIT:
                raise SystemExit(leaves)
            return super().step(action)

    async def main():
        async with aioenv.AsyncVectorEnv([partial(Leaves, 1000)] * 2, num_workers=num_workers) as envs:
            await envs.reset(seed=0)
            for _ in range(40):
                await envs.step(np.zeros(2, int))
            code = 1 if leaves == "a text" else leaves or 0
            with pytest.raises(aioenv.WorkerDied, match=f"exited with code {code} while it ran slot 1") as caught:
                await envs.step(np.array([0, Counter.WAIT]))
            return caught.value.stderr

    text = run_on("uvloop", main()) + capfd.readouterr().err
    assert ("a text" in text) == (leaves == "a text")


def test_a_step_of_active_slots_with_a_limit_of_its_own_runs_on_the_thread():
    async def main():
        Where.gates["active"] = gate = threading.Event()
        async with aioenv.AsyncVectorEnv([partial(Where, "active")] * 2, num_workers=0) as envs:
            assert (await threads_of_steps(envs))[-1] == "MainThread"
            envs.pause(0)
            with pytest.raises(aioenv.StepTimeout, match=r"timeout_s=0\.05"):
                await envs.step(np.ones(2, int), timeout_s=0.05)
            gate.set()
            assert (await envs.recv(1)).slots.tolist() == [1]

    run_on("asyncio", main())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_classes_and_functions_keep_their_identity_in_infos_and_errors(num_workers):
    class Phase(enum.Enum):
        FIRST = 1

    def rule():
        pass

    class Stuck(Exception):
        pass

    class Shows(Counter):
        def step(self, action):
            if action == self.WAIT:
                raise Stuck
            return *super().step(action)[:4], {"phase": Phase.FIRST, "rule": rule}

    async def main():
        async with aioenv.AsyncVectorEnv([partial(Shows, 1000)] * 2, num_workers=num_workers) as envs:
            await envs.reset(seed=0)
            for _ in range(60):
                info = (await envs.step(np.zeros(2, int))).info
                assert info["phase"].tolist() == [Phase.FIRST] * 2
                assert info["rule"].tolist() == [rule] * 2
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.step(np.array([0, Counter.WAIT]))
            assert isinstance(caught.value.__cause__, Stuck)

    run_on("uvloop", main())


class ShortLived(Counter):
    """Raises and returns instances of classes that nothing refers to afterwards."""

    def step(self, action):
        if action == self.WAIT:
            raise self.told()
        result = super().step(action)
        return *result[:4], {"told": self.told()}

    def told(self):
        class Told(Exception):
            pass

        return Told("a class of its own")

    def raise_told(self):
        raise self.told()


@pytest.mark.parametrize("timeout_s", [None, 60])  # on the caller's thread; on the env's
def test_classes_live_until_what_was_sent_with_them_is_read(timeout_s, monkeypatch):
    """A garbage collection may come between: a class is part of a cycle, so that nothing else would free it."""
    deliver, serve = thread_process.ThreadChannel._deliver, thread_process.ThreadChannel._serve

    def collect(*args, before, **kwargs):
        gc.collect()
        if before is deliver:  # on the loop's thread
            asyncio.get_running_loop().call_soon(gc.collect)  # before the task that waits for the reply goes on
        value = before(*args, **kwargs)
        gc.collect()
        return value

    async def main():
        envs = await aioenv.AsyncVectorEnv([partial(ShortLived, 1000)] * 2, num_workers=0, timeout_s=timeout_s)
        async with envs:
            await envs.reset(seed=0)
            for _ in range(60):
                await envs.step(np.zeros(2, int))
            monkeypatch.setattr(thread_process.ThreadChannel, "_deliver", partialmethod(collect, before=deliver))
            monkeypatch.setattr(thread_process.ThreadChannel, "_serve", partialmethod(collect, before=serve))
            info = (await envs.step(np.zeros(2, int))).info
            assert [type(told).__name__ for told in info["told"]] == ["Told"] * 2
            assert type((await envs.call("told"))[1]).__name__ == "Told"
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.call("raise_told")
            assert type(caught.value.__cause__).__name__ == "Told"
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.step(np.array([0, Counter.WAIT]))
            assert type(caught.value.__cause__).__name__ == "Told"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):  # then the caller has no references any more
                    await envs.set_attr("seen", [ShortLived.told(None) for _ in range(2)])
            assert [type(told).__name__ for told in await envs.get_attr("seen")] == ["Told"] * 2

    run_on("asyncio", main())


class Told(Counter):
    """Tells its number of steps in each second info; its episodes have 7 steps. WAIT is a Ctrl-C."""

    def step(self, action):
        if action == self.WAIT:
            signal.raise_signal(signal.SIGINT)
            action = self.OK
        obs, reward, _, _, _ = super().step(action)
        steps = int(obs[1])
        return obs, reward, steps == 7, False, {} if steps % 2 else {"steps": steps}


@compiled
@pytest.mark.parametrize("steps", [101, 102, 105])  # without infos, with infos, and at an episode's end
def test_what_ctrl_c_leaves_to_recv_has_the_infos_of_its_step(steps):
    def results(interrupted):
        make = [partial(Told, 1000)] * 2
        with aioenv.sync.VectorEnv(make, num_workers=0, autoreset_mode="SameStep") as envs:
            envs.reset(seed=0)
            for _ in range(steps - 1):
                envs.step(np.zeros(2, int))
            if not interrupted:
                return tuple(envs.step(np.zeros(2, int)))
            with pytest.raises(KeyboardInterrupt):
                envs.step(np.array([0, Counter.WAIT]))
            return tuple(envs.recv(2))[1:6]

    assert_same(results(True), results(False))


@pytest.mark.parametrize("how", ["step", "recv", "blocking step"])
def test_a_rollout_begins_where_steps_on_the_callers_thread_ended(how):
    actions = np.zeros(2, int)
    envs = (sync.VectorEnv if how == "blocking step" else aioenv.AsyncVectorEnv)([Told, Told], num_workers=0)

    def policy(obs):
        return np.zeros(len(obs), int)

    async def main():
        async def do(name, *args):
            result = getattr(envs, name)(*args)
            return await result if asyncio.iscoroutine(result) else result

        if how != "blocking step":
            await envs
        await do("reset")
        for _ in range(100):
            await do("step", actions)
        await do("rollout", policy, 3)
        for _ in range(20):
            if how == "recv":
                await do("send", actions)
                last = (await do("recv", 2)).obs
            else:
                last = (await do("step", actions)).obs
            np.testing.assert_array_equal((await do("rollout", policy, 3)).obs[0], last)
        await do("close")

    if how == "blocking step":
        with pytest.raises(StopIteration):
            main().send(None)
    else:
        run_on("uvloop", main())


class Silent(Where):
    """Has no infos, and its episodes do not end."""

    def _result(self):
        return super()._result()[0], {}


@pytest.mark.parametrize("blocking", [False, True])
def test_steps_count_in_statistics_however_many_results_are_kept(blocking):
    """With more of them than there are requests in stock, a request is used once."""
    envs = (sync.VectorEnv if blocking else aioenv.AsyncVectorEnv)(
        [partial(Silent, large=True)] * 2, num_workers=0, episode_stats=True
    )

    async def main():
        if not blocking:
            await envs
        kept = []
        for name, *args in [("reset",), *[("step", np.zeros(2, int))] * 120, ("close",)]:
            result = getattr(envs, name)(*args)
            kept.append(await result if asyncio.iscoroutine(result) else result)
        assert envs.episode_stats.total_steps == 240

    if blocking:
        with pytest.raises(StopIteration):
            main().send(None)
    else:
        run_on("uvloop", main())


class Reuses(gym.Env):
    """Its observations and infos are the same objects each time. Its first episode has `first` steps, others 5."""

    observation_space = gym.spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, first, values, own_final=False):
        self.left, self.obs, self.steps = first, np.zeros(2, np.float32), 0
        self.info = {"array": np.zeros(2), "inner": {"array": np.zeros(1, np.int64)}}
        if values == "objects":
            self.info |= {"list": [0], "objects": np.array([None, 0])}
        if own_final:
            self.info["final_obs"] = np.zeros(1)

    def _result(self):
        self.steps += 1
        self.obs[:] = self.info["array"][:] = self.info["inner"]["array"][:] = self.steps
        self.info |= {"number": self.steps, "scalar": np.float32(self.steps), "text": f"step {self.steps}", "no": None}
        for key in {"list", "objects", "final_obs"} & self.info.keys():
            self.info[key][-1] = self.steps
        return self.obs, self.info

    def reset(self, *, seed=None, options=None):
        return self._result()

    def step(self, action):
        self.left = (self.left or 5) - 1
        obs, info = self._result()
        return obs, 0.5, self.left == 0, False, info


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("own_final", [False, True])
@pytest.mark.parametrize(("num_envs", "values"), [(3, "values"), (3, "objects"), (20, "values"), (20, "objects")])
def test_results_share_nothing_with_the_envs(num_envs, values, own_final, mode):
    """C, Python, or a request finish a step: each result stays as it was, and is that of worker processes."""

    async def main():
        make = [partial(Reuses, slot % 7 + 1, values, own_final) for slot in range(num_envs)]
        got = {}
        for num_workers in (0, 1):
            async with aioenv.AsyncVectorEnv(make, num_workers=num_workers, autoreset_mode=mode) as envs:
                results = got[num_workers] = [tuple(await envs.reset(seed=0))]
                for _ in range(40):
                    results.append(tuple(await envs.step(np.zeros(num_envs, int))))
                    over = results[-1][2]
                    if mode == "Disabled" and over.any():
                        results.append(tuple(await envs.reset(options={"reset_mask": over})))
        for here, there in zip(got[0], got[1], strict=True):
            assert_same(here, there)

    run_on("uvloop", main())


class SignalsAtEnds(Told):
    """Raises a signal in the reset after its 15th episode."""

    number, begun = 0, 0

    def reset(self, *, seed=None, options=None):
        self.begun += 1
        if self.begun == 16 and self.number:
            signal.raise_signal(self.number)
        return super().reset(seed=seed)


@compiled
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_python_finishes_a_step_leaves_it_to_recv(fails, handler_raises):
    """A handler that raises is held back meanwhile, so the env does not fail; here another env may."""

    class Fails(Told):
        def step(self, action):
            if fails and self.broken(action):
                raise ValueError("broken")
            return list(super().step(action))  # C leaves a list to Python, and what comes after it

        def broken(self, action):
            self.count = getattr(self, "count", 0) + 1
            return self.count == 7 * 15

    async def results(number):
        class Rings(SignalsAtEnds):
            pass

        Rings.number = number
        envs = await aioenv.AsyncVectorEnv([Fails, Rings], num_workers=0, autoreset_mode="SameStep")
        await envs.reset(seed=0)
        for _ in range(7 * 15 - 1):
            await envs.step(np.zeros(2, int))
        how = pytest.raises(Rung) if number else contextlib.nullcontext()
        try:
            with how:
                return tuple(await envs.step(np.zeros(2, int)))
            return tuple(await envs.recv(2))[1:6]
        except aioenv.EnvError as error:
            return str(error)
        finally:
            await envs.close()

    assert_same(run_on("uvloop", results(signal.SIGUSR1)), run_on("uvloop", results(0)))


@compiled
def test_a_signal_in_a_reset_after_the_end_of_an_episode_is_an_error_of_that_slot(handler_raises):
    """As in a step: C has called the env, in whose code the handler raises."""

    class Rings(SignalsAtEnds):
        number = signal.SIGUSR1

    async def main():
        async with aioenv.AsyncVectorEnv([Told, Rings], num_workers=0, autoreset_mode="SameStep") as envs:
            await envs.reset(seed=0)
            for _ in range(7 * 15 - 1):
                await envs.step(np.zeros(2, int))
            with pytest.raises(Rung):
                await envs.step(np.zeros(2, int))
            with pytest.raises(aioenv.EnvError, match=r"slot 1 .*Rung"):
                await envs.recv(2)
            await envs.reset()
            await envs.step(np.zeros(2, int))

    run_on("uvloop", main())


@compiled
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episodes_are_counted_on_the_callers_thread(mode):
    async def episodes(num_workers):
        make, got = [partial(Told, 1000)] * 3, []
        more = {"num_workers": num_workers, "autoreset_mode": mode, "episode_stats": True}
        async with aioenv.AsyncVectorEnv(make, **more) as envs:
            await envs.reset(seed=0)
            for _ in range(100):
                obs, reward, terminated, _, info = await envs.step(np.zeros(3, np.int64))
                if "episode" in info:
                    del info["episode"]["t"], info["episode"]["_t"]
                got.append((obs, reward, terminated, info))
                if mode == "Disabled" and terminated.any():
                    await envs.reset(options={"reset_mask": terminated})
            got.append((envs.episode_stats.total_episodes, envs.episode_stats.total_steps))
            inline = getattr(envs._backend, "inline", None)
        return got, inline

    async def main():
        (here, inline), (there, _) = await episodes(0), await episodes(2)
        assert inline is not None and any("episode" in each[3] for each in here[:-1])
        for mine, theirs in zip(here, there, strict=True):
            assert_same(mine, theirs)

    run_on("uvloop", main())


def test_an_env_that_runs_an_event_loop_gets_advice():
    class Runs(Counter):
        def step(self, action):
            if action == self.WAIT:
                with contextlib.closing(asyncio.new_event_loop()) as loop:
                    done = loop.create_future()
                    done.set_result(None)
                    loop.run_until_complete(done)
            return super().step(self.OK)

    async def main(**options):
        async with aioenv.AsyncVectorEnv([partial(Runs, 1000)] * 2, **options) as envs:
            await envs.reset(seed=0)
            for _ in range(100):
                await envs.step(np.zeros(2, int))
            await envs.step(np.array([0, Counter.WAIT]))

    with pytest.raises(aioenv.EnvError, match="debug=True"):
        run_on("uvloop", main(num_workers=0))
    run_on("uvloop", main(num_workers=0, debug=True))
    run_on("uvloop", main(num_workers=1))


def test_ctrl_c_in_an_awaited_step_ends_the_program():
    script = """
import asyncio, signal, gymnasium, numpy, aioenv

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        if action:
            signal.raise_signal(signal.SIGINT)
        return numpy.zeros(1, numpy.float32), 0.0, False, False, {}

async def main():
    async with aioenv.AsyncVectorEnv([Env] * 2, num_workers=0) as envs:
        await envs.reset()
        for _ in range(100):
            await envs.step(numpy.zeros(2, int))
        while True:
            await envs.step(numpy.ones(2, int))

try:
    aioenv.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run_alone(script).stdout == "interrupted\n"


def test_nothing_is_left_after_close():
    before = threading.active_count()

    async def main():
        async with aioenv.AsyncVectorEnv([Counter] * 2, num_workers=0) as envs:
            await envs.reset(seed=0)
            assert [worker.state for worker in envs.workers] == ["ready"]
        assert threading.active_count() == before
        with pytest.raises(aioenv.ClosedError):
            await envs.step(np.zeros(2, int))

    run_on("uvloop", main())


def test_a_forgotten_one_ends_its_thread():
    script = """
import asyncio, threading, gymnasium, aioenv

async def main():
    envs = await aioenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], num_workers=0)
    await envs.reset()
    del envs

asyncio.run(main())
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print("ended")
"""
    assert "ended" in run_alone(script).stdout


def test_sync_vector_envs_results_with_infos():
    """HalfCheetah's infos have several columns, which C reads."""

    async def main():
        make = [partial(gym.make, "HalfCheetah-v5")] * 2
        reference = SyncVectorEnv(make)
        async with aioenv.AsyncVectorEnv(make, num_workers=0) as envs:
            assert_same(tuple(await envs.reset(seed=1)), reference.reset(seed=1))
            reference.action_space.seed(0)
            for _ in range(100):
                actions = reference.action_space.sample()
                assert_same(tuple(await envs.step(actions)), reference.step(actions))
        reference.close()

    run_on("uvloop", main())


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"debug": True}], ids=["inline", "debug"])
def test_an_env_that_steps_its_own_vector_env_is_refused(options):
    class StepsAll(gym.Wrapper):
        def step_all(self):
            return envs.step(np.zeros(2, int))

    with aioenv.sync.make_vec("CartPole-v1", 2, wrappers=[StepsAll], **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(aioenv.SlotErrorGroup) as caught:
            envs.call("step_all")
        assert all(isinstance(error.__cause__, aioenv.LoopError) for error in caught.value.exceptions)
        assert envs.step(np.zeros(2, int)).reward.tolist() == [1.0, 1.0]


class Asks(Counter):
    """Uses its vector env in each step, once `use` is set; tells in the info whether that was refused."""

    def step(self, action):
        *result, _ = super().step(action)
        try:
            self.use()
        except aioenv.LoopError:
            return *result, {"refused": True}
        return *result, {}

    def use(self):
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda envs: envs.step(np.zeros(2, int)),
        lambda envs: envs.send(np.zeros(2, int)),
        lambda envs: envs.recv(),
        lambda envs: envs.reset(),
        lambda envs: envs.call("t"),
        lambda envs: envs.pause(0),
        lambda envs: envs.close(),
    ],
    ids="step send recv reset call pause close".split(),
)
@pytest.mark.parametrize("steps", [1, 60], ids=["thread", "inline"])
def test_an_env_that_uses_its_own_vector_env_in_a_step_is_refused(steps, use):
    """On the caller's thread it was served in the middle of the step, whose results it spoiled."""
    made = [Asks(1000), Asks(1000)]
    with aioenv.sync.VectorEnv([lambda env=env: env for env in made], num_workers=0) as envs:
        envs.reset()
        for _ in range(steps):
            envs.step(np.zeros(2, int))
        for env in made:
            env.use = lambda: use(envs)
        for t in (steps + 1, steps + 2):
            obs, *_, info = envs.step(np.zeros(2, int))
            assert info["refused"].all() and (obs[:, 1] == t).all()
        assert envs.call("t") == (t, t)


class Forks(Counter):
    """Forks a process in each step, which ends by `sys.exit(3)`, and waits for it; its exit code is the reward."""

    def step(self, action):
        result = super().step(action)
        if (child := os.fork()) == 0:
            sys.exit(3)
        return result[0], float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), *result[2:]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("timeout_s", [None, 60])  # on the caller's thread; on the env's
def test_a_process_that_an_env_forks_can_exit(timeout_s):
    with aioenv.sync.VectorEnv([partial(Forks, 1000)], num_workers=0, timeout_s=timeout_s) as envs:
        envs.reset()
        for _ in range(60):
            assert envs.step(np.zeros(1, int))[1].tolist() == [3]


def test_the_number_of_workers_may_be_numpys():
    with aioenv.sync.VectorEnv([partial(Counter, 3)], num_workers=np.int64(0)) as envs:
        assert envs.backend == "in_process"
