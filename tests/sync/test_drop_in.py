"""The drop-in for Gymnasium's AsyncVectorEnv: what Gymnasium's own tests of it don't ask for (make gymnasium-suite)."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import select
import signal
import threading
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv import sync
from aioenv.platform import usable_cpus
from aioenv.process.launch import START_METHODS
from aioenv.sync import AsyncVectorEnv
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter, counters
from tests.kits.process_kit import run_alone


class Faulty(gym.Env):
    """Does what its factory says, called with the action."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Box(-9, 9, (), np.float32)

    def __init__(self, fault) -> None:
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        info = self.fault(action) if action else None
        return np.ones(1), 1.0, False, False, info or {}


def faulty(*faults, **kwargs) -> AsyncVectorEnv:
    """A slot for each fault."""
    return AsyncVectorEnv([lambda fault=fault: Faulty(fault) for fault in faults], **kwargs)


def raised(kind: type[Exception], function, *args) -> tuple[Exception, list[str]]:
    """What a call raises, and the log lines before it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(kind) as info:
            function(*args)
    return info.value, [str(each.message) for each in caught]


def run_script(code: str) -> str:
    """Run code as a script of its own; what it prints."""
    return run_alone(code).stdout


# ---------------------------------------------------------------- the same as Gymnasium


def test_the_signature_is_gymnasiums_and_two_keywords_more():
    theirs = inspect.signature(gym.vector.AsyncVectorEnv).parameters
    mine = inspect.signature(AsyncVectorEnv).parameters
    newer = [] if "max_concurrency" in theirs else ["max_concurrency"]  # since Gymnasium 1.4
    assert list(mine) == [*theirs, *newer, "num_workers", "cluster"]
    for name, parameter in theirs.items():
        assert (mine[name].default, mine[name].kind) == (parameter.default, parameter.kind)
    for name in ("reset_async", "reset_wait", "step_async", "step_wait", "call_async", "call_wait", "close_extras"):
        theirs, mine = (inspect.signature(getattr(c, name)) for c in (gym.vector.AsyncVectorEnv, AsyncVectorEnv))
        assert [(p.name, p.default) for p in mine.parameters.values()] == [
            (p.name, p.default) for p in theirs.parameters.values()
        ]


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_same_results_as_sync_vector_env(mode, shared_memory):
    factories = [lambda: gym.make("CartPole-v1")] * 3
    reference = SyncVectorEnv(factories, autoreset_mode=mode)
    with AsyncVectorEnv(factories, shared_memory, autoreset_mode=mode.value) as envs:
        assert isinstance(envs, gym.vector.VectorEnv) and envs.spec is None
        assert repr(envs) == "AsyncVectorEnv(num_envs=3)"
        results = [envs.reset(seed=[3, 1, 2]), reference.reset(seed=[3, 1, 2])]
        for _ in range(60):
            if mode is AutoresetMode.DISABLED and len(results[0]) == 5 and (results[0][2] | results[0][3]).any():
                mask = results[0][2] | results[0][3]
                results = [env.reset(seed=5, options={"reset_mask": mask.copy()}) for env in (envs, reference)]
            else:
                actions = np.array([1, 1, 0])
                envs.step_async(actions)
                results = [envs.step_wait(), reference.step(actions)]
            for mine, theirs in zip(*(result[:-1] for result in results), strict=True):
                assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
            assert data_equivalence(results[0][-1], results[1][-1])
        assert envs.np_random_seed == reference.np_random_seed
    reference.close()


TRAINING = """
import gymnasium as gym
import numpy as np
{the_import}

class Walk(gym.Env):
    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(2, 7))
        return self.at, {{}}

    def step(self, action):
        self.at += 2 * int(action) - 1
        return self.at, float(self.at == 8), self.at in (0, 8), False, {{"at": self.at}}

gym.register("Walk-v0", Walk)
envs = AsyncVectorEnv([lambda: gym.make("Walk-v0") for _ in range(2)])
envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
values = np.zeros(9)
obs, _ = envs.reset(seed=1)
envs.action_space.seed(1)
for _ in range(60):
    actions = envs.action_space.sample()
    after, reward, terminated, truncated, info = envs.step(actions)
    np.add.at(values, obs, 0.1 * (reward + 0.9 * values[after] - values[obs]))
    obs = after
    if "episode" in info:
        print(info["episode"]["r"][info["_episode"]].tolist(), info["episode"]["l"][info["_episode"]].tolist())
print(values.round(6).tolist())
envs.close()
"""


def test_an_old_script_changes_one_import():
    """And needs no `if __name__ == "__main__"`, for envs of its own that it registers itself."""
    before = run_script(TRAINING.format(the_import="from gymnasium.vector import AsyncVectorEnv"))
    after = run_script(TRAINING.format(the_import="from aioenv.sync import AsyncVectorEnv"))
    assert after == before and "[0.0]" in before and "[1.0]" in before


def test_envs_get_their_actions_as_they_were_given():
    """Gymnasium hands them over whatever their dtype; a cast would change the trajectories."""
    with faulty(*[lambda action: {"got": type(action).__name__, "value": float(action)}] * 2) as envs:
        for actions, name in (
            (np.array([0.1, 0.2], np.float32), "float32"),
            (np.array([0.1, 0.2]), "float64"),
            ([0.1, 0.2], "float"),
            ((np.float16(0.1), np.float16(0.2)), "float16"),
        ):
            info = envs.step(actions)[-1]
            assert info["got"].tolist() == [name] * 2
            assert info["value"].tolist() == [float(action) for action in actions]
        with pytest.raises(ValueError, match="expected one for each of 2 envs, got 3"):
            envs.step([1, 2, 3])
        with pytest.raises(ValueError, match="expected one for each of 2 envs, got 1"):
            envs.step_async(np.ones(1, np.float32))
        with pytest.raises(TypeError, match="iterate"):
            envs.step_async(1)
        assert envs.step(np.zeros(2, np.float32))[1].tolist() == [1, 1]  # nothing was sent


class Repeats(Counter):
    """Tells in its info what its action looks like."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action):
        *result, _ = super().step(Counter.OK)
        return *result, {"got": repr(action)}


@pytest.mark.parametrize("kind", [AsyncVectorEnv, sync.SyncVectorEnv])
def test_actions_may_be_masked(kind):
    numbers = np.array([[0.5, 1], [0, -1]], np.float32)
    theirs = SyncVectorEnv([Repeats] * 2)
    with kind([Repeats] * 2) as mine:
        for envs in (mine, theirs):
            envs.reset(seed=0)
        for actions in (np.ma.array(numbers, mask=[[0, 1], [1, 1]]), numbers):
            assert_same(tuple(mine.step(actions)), theirs.step(actions))
    theirs.close()


def test_actions_are_the_callers_again_after_step_async():
    with faulty(*[lambda action: {"value": float(action)}] * 2) as envs:
        for dtype in (np.float32, np.float64):
            actions = np.array([1, 2], dtype)
            envs.step_async(actions)
            actions[:] = 7
            assert envs.step_wait()[-1]["value"].tolist() == [1, 2]


def test_as_many_workers_as_cpus_unless_told_otherwise():
    each = {"num_workers": 3}
    for kwargs, workers in (
        ({}, min(3, usable_cpus())),
        (each, 3),
        ({"num_workers": 9}, 3),
        ({**each, "max_concurrency": 2}, 2),
        ({**each, "max_concurrency": 9}, 3),
    ):
        with AsyncVectorEnv(counters(3), **kwargs) as envs:
            assert len(envs.workers) == workers
    for wrong, message in ((0, "must be a positive"), (1.5, "must be an integer")):
        with pytest.raises(ValueError, match=message):
            AsyncVectorEnv(counters(1), max_concurrency=wrong)
    with pytest.raises(ValueError, match="num_workers"):
        AsyncVectorEnv(counters(1), num_workers=0)


class Sleeper(gym.Env):
    """Sleeps or computes for a while, as its action says."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        end = time.perf_counter() + 0.02
        while (left := end - time.perf_counter()) > 0:
            if action == 0:
                time.sleep(left)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("action", "kwargs", "warned"), [(0, {}, True), (1, {}, False), (0, {"num_workers": 4}, False)]
)
def test_envs_that_share_a_worker_and_sleep_are_told_of_once(action, kwargs, warned):
    with (
        AsyncVectorEnv([Sleeper] * 4, **{"num_workers": 2, **kwargs}) as envs,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        envs.reset()
        for _ in range(60):
            envs.step(np.full(4, action))
    told = [str(each.message) for each in caught if "num_workers=4" in str(each.message)]
    assert len(told) == warned


def test_context_is_a_start_policy():
    best = "forkserver" if "forkserver" in START_METHODS else "spawn"
    with pytest.warns(UserWarning, match=f'context="fork" is not used.*{best}') as caught:
        envs = AsyncVectorEnv(counters(1), context="fork")
    assert len(caught) == 1
    envs.close()
    for context in (None, "spawn", "forkserver"):
        with AsyncVectorEnv(counters(1), context=context) as envs:
            envs.reset(seed=0)
    with pytest.raises(ValueError, match="cannot find context for 'thread'"):
        AsyncVectorEnv(counters(1), context="thread")


def test_what_is_refused():
    with pytest.raises(ValueError, match="worker: a worker function of your own can't be used"):
        AsyncVectorEnv(counters(1), worker=lambda *args: None)
    with pytest.raises(ValueError, match="not-a-mode"):
        AsyncVectorEnv(counters(1), autoreset_mode="not-a-mode")

    class Growing(Counter):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(all=spaces.Sequence(spaces.Discrete(2)))

    with pytest.raises(TypeError, match="has a dynamic shape"):
        AsyncVectorEnv([Growing])
    AsyncVectorEnv([Growing], shared_memory=False).close()

    with pytest.raises(gym.error.NameNotFound):
        AsyncVectorEnv([lambda: gym.make("Missing-v0")])


def test_calls():
    with AsyncVectorEnv(counters(2)) as envs:
        envs.call_async("double", 4, plus=1)
        with pytest.raises(gym.error.AlreadyPendingCallError, match=r"Calling `set_attr` while .* call to `call` to"):
            envs.set_attr("length", 3)
        assert envs.call_wait() == (9, 9)
        with pytest.raises(gym.error.NoAsyncCallError, match="Calling `call_wait` without any prior call to `call_as"):
            envs.call_wait()
        envs.set_attr("length", (3, 4))
        assert envs.get_attr("length") == (3, 4)
        for name in ("reset", "step", "close"):
            with pytest.raises(ValueError, match=f"Trying to call function `{name}` with `call`, use `{name}` direc"):
                envs.call(name)
        _, lines = raised(AttributeError, envs.call, "missing")
        assert len(lines) == 5 and "Received the following error from Worker-0 - Shutting it down" in lines[0]
        assert envs.call("double", 1) == (2, 2)
    with pytest.raises(gym.error.ClosedEnvironmentError, match="Trying to operate on `AsyncVectorEnv`, after a call"):
        envs.call("double", 1)
    envs.close()


def test_without_autoreset_an_env_may_be_stepped_on():
    """As in Gymnasium's AsyncVectorEnv; its SyncVectorEnv, and aioenv's own classes, ask for a reset."""
    with AsyncVectorEnv(counters(1, length=1), autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset(seed=0)
        assert [envs.step([0])[2].tolist() for _ in range(2)] == [[True], [True]]


# ---------------------------------------------------------------- where Gymnasium is wrong


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_reset_right_after_the_end_of_an_episode_is_not_followed_by_another(shared_memory):
    with AsyncVectorEnv(counters(2, length=2), shared_memory=shared_memory) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        assert envs.step([0, 0])[2].tolist() == [True, True]
        envs.reset(seed=0)
        assert envs.step([0, 0])[0][:, 1].tolist() == [1, 1]


def test_the_step_after_a_timeout_gets_its_own_result(gate):
    path, open_gate = gate
    with AsyncVectorEnv(counters(2, gate=path)) as envs:
        first, _ = envs.reset(seed=0)
        envs.step_async([0, Counter.WAIT])
        with pytest.raises(multiprocessing.TimeoutError, match=r"The call to `step_wait` has timed out after 0.05 sec"):
            envs.step_wait(timeout=0.05)
        with pytest.raises(gym.error.NoAsyncCallError):
            envs.step_wait()
        open_gate()
        assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]
        envs.step_async([0, Counter.WAIT])
        with pytest.raises(aioenv.StepTimeout):
            envs.step_wait(timeout=0)
        open_gate()
        assert envs.get_attr("t") == (3, 3)  # a call waits for the step, too
        envs.reset_async(seed=0)
        assert np.array_equal(envs.reset_wait(timeout=60)[0], first)


@pytest.mark.parametrize("timeout", ["1", float("nan")])
def test_a_timeout_that_is_no_number_loses_nothing(timeout):
    with AsyncVectorEnv(counters(2)) as envs:
        for name, args in (("reset", ()), ("step", ([0, 0],)), ("call", ("t",))):
            getattr(envs, f"{name}_async")(*args)
            with pytest.raises(ValueError, match=f"{name}_wait: timeout: expected a number of seconds or None, got"):
                getattr(envs, f"{name}_wait")(timeout=timeout)
            getattr(envs, f"{name}_wait")(timeout=60)
        assert envs.get_attr("t") == (1, 1)


@pytest.mark.parametrize("inline", [True, False])
def test_a_result_that_is_there_needs_no_time(inline):
    with AsyncVectorEnv(counters(2, length=99), num_workers=1) as envs:
        envs.reset(seed=0)
        if not inline:
            envs._portal.may_pause = None
        for timeout in (0, -1, 1e-6):
            for _ in range(3):
                envs.step_async([0, 0])
                replied(envs)
                envs.step_wait(timeout=timeout)
        assert envs.get_attr("t") == (9, 9)


def replied(envs):
    """Wait until the worker has replied to the step, whether or not that was read."""
    batch_request, worker = envs._pending._request, envs._envs._backend.worker_pool.members[0].worker
    while batch_request.open and not select.select([worker.poll_fd], [], [], 0.01)[0]:
        pass


def test_an_interrupt_leaves_the_steps_aligned(gate):
    path, open_gate = gate
    with AsyncVectorEnv(counters(1, gate=path)) as envs:
        envs.reset(seed=0)

        def interrupt() -> None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as Ctrl-C does

        for wait in (envs.step, lambda actions: (envs.step_async(actions), envs.step_wait())):
            with pytest.raises(KeyboardInterrupt):
                timer = threading.Timer(0.1, interrupt)
                timer.start()
                wait([Counter.WAIT])
            timer.join()
            open_gate()
        assert envs.step([0])[0][0, 1] == 3


def test_the_exception_of_the_last_slot_is_raised_as_it_was():
    class Local(Exception):
        pass

    class TwoPart(Exception):
        def __init__(self, code, text):
            super().__init__(f"{code}: {text}")
            self.code = code

    def local(action):
        raise Local("100 % mine")

    def two_part(action):
        raise TwoPart(7, "no")

    with faulty(local, two_part, lambda action: None) as envs:
        error, lines = raised(TwoPart, envs.step, [1, 1, 1])
        assert error.args == ("7: no",) and error.code == 7 and "in two_part" in error.__notes__[0]
        assert [line.split("m")[1].split("\x1b")[0] for line in lines[::2]] == [
            "ERROR: Received the following error fro"  # a split at m, the end of the colour
        ] * 2 + ["ERROR: Raising the last exception back to the "]
        assert ["Worker-0" in lines[0], "100 % mine" in lines[1], "Worker-1" in lines[2]] == [True] * 3
        assert len(lines) == 5
        with pytest.raises(aioenv.EnvError, match=r"slots \[0, 1\] have failed and must be reset first"):
            envs.step([0, 0, 0])
        envs.reset(options={"reset_mask": np.array([True, True, False])})
        assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]
        error, _ = raised(Local, envs.step, [1, 0, 0])
        assert str(error) == "100 % mine"


def test_an_exception_that_can_not_travel_is_told_of():
    def fault(action):
        class Local(ValueError):
            lock = threading.Lock()

        raise Local("mine")

    with faulty(fault) as envs:
        error, _ = raised(aioenv.EnvError, envs.step, [1])
        assert error.slot == 0 and "Local: mine" in str(error) and "_thread.lock" in error.__notes__[0]


def test_a_value_that_only_a_worker_can_unpickle_is_named():
    parent = os.getpid()

    class Elsewhere:
        def __reduce__(self):
            return check, ()

    def check():
        if os.getpid() == parent:
            raise KeyError("not here")

    with faulty(lambda action: {"where": Elsewhere()}) as envs:
        envs.reset()
        error, _ = raised(aioenv.EnvError, envs.step, [1])
        assert "info['where']" in str(error) and isinstance(error.__cause__, KeyError)


def test_a_worker_that_dies_is_named_and_is_the_end_of_its_slot_alone():
    with AsyncVectorEnv(counters(2)) as envs:
        envs.reset(seed=0)
        error, lines = raised(EOFError, envs.step, [0, Counter.KILL])
        assert isinstance(error, aioenv.WorkerDied) and error.slot == 1 and "SIGKILL" in str(error)
        assert "Worker-1" in lines[0] and len(lines) == 3
        with pytest.raises(aioenv.WorkerDied):
            envs.reset()
        assert envs.workers[0].state == "ready"


def test_a_factory_that_exits_in_its_worker():
    parent = os.getpid()

    def factory():
        if os.getpid() != parent:
            os._exit(3)

    with pytest.raises(aioenv.WorkerStartError, match="exited with code 3"):
        AsyncVectorEnv([factory])


# ---------------------------------------------------------------- the end


def test_close_waits_for_a_pending_call(gate):
    path, open_gate = gate
    envs = AsyncVectorEnv(counters(1, gate=path))
    envs.reset(seed=0)
    envs.step_async([Counter.WAIT])
    opener = threading.Thread(target=open_gate)
    with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
        opener.start()
        envs.close()
    opener.join()
    assert envs.closed


@pytest.mark.parametrize("arguments", [{"terminate": True}, {"timeout": 0.1}])
def test_close_ends_what_hangs(gate, arguments):
    envs = AsyncVectorEnv(counters(2, gate=gate[0]))
    envs.reset(seed=0)
    envs.step_async([0, Counter.WAIT])
    with pytest.warns(UserWarning, match="Calling `close` while waiting"):
        envs.close(**arguments)
    assert envs.closed and [worker.state for worker in envs.workers] == ["closed"] * 2


def test_close_with_a_time_that_is_none_closes_nothing():
    with AsyncVectorEnv(counters(2)) as envs:
        envs.reset(seed=0)
        for timeout in ("1", float("nan")):
            with pytest.raises(ValueError, match="timeout: expected a number of seconds, got"):
                envs.close(timeout=timeout)
        assert envs.step([0, 0])[0][:, 1].tolist() == [1, 1]


def test_close_waits_while_envs_close(gate, tmp_path):
    """Envs that record videos write them then: Gymnasium waits for that as long as it takes."""
    path, open_gate = gate
    done = tmp_path / "done"

    class Slow(Counter):
        def close(self):
            with open(path) as handle:
                handle.read()
            time.sleep(1.2)  # longer than aioenv's other classes wait
            done.touch()

    envs = AsyncVectorEnv([Slow])
    opener = threading.Thread(target=open_gate)
    opener.start()
    envs.close()
    opener.join()
    assert done.exists()


def test_a_forgotten_one_is_closed_with_a_call_pending(gate):
    envs = AsyncVectorEnv(counters(1, gate=gate[0]))
    envs.reset(seed=0)
    envs.step_async([Counter.WAIT])
    del envs
    gc.collect()


def test_a_forked_copy_leaves_the_workers_alone():
    code = """
import os, sys
import gymnasium as gym
from aioenv.sync import AsyncVectorEnv

envs = AsyncVectorEnv([lambda: gym.make("CartPole-v1")])
envs.reset(seed=0)
pid = os.fork()
if pid == 0:
    sys.exit(0)  # atexit and __del__ run here too
assert os.waitpid(pid, 0)[1] == 0
print(envs.step([0])[1].tolist())
envs.close()
"""
    assert run_script(code) == "[1.0]\n"


def test_a_forked_copy_waits_for_no_call_of_its_parent(tmp_path):
    """Its loop thread, which would end the call, has stayed there."""
    code = """
import faulthandler, itertools, os, sys
import gymnasium as gym
from aioenv.errors import LoopError
from aioenv.sync import AsyncVectorEnv

class Waits(gym.Wrapper):
    def wait(self):
        with open(sys.argv[1]) as gate:  # a FIFO
            gate.read()

    def reset(self, **kwargs):
        self.wait()
        return self.env.reset(**kwargs)

    def step(self, action):
        self.wait()
        return self.env.step(action)

def open_gate():
    open(sys.argv[1], "w").close()

os.mkfifo(sys.argv[1])
envs = AsyncVectorEnv([lambda: Waits(gym.make("CartPole-v1"))])
calls = (
    (envs.reset_async, envs.reset_wait),
    (lambda: envs.step_async([0]), envs.step_wait),
    (lambda: envs.call_async("wait"), envs.call_wait),
)
for (begin, wait), waits in itertools.product(calls, (False, True)):
    begin()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        if waits:
            try:
                wait()
            except LoopError as exc:
                assert "forked copy" in str(exc)
            else:
                os._exit(1)
        envs.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    open_gate()
    wait()
envs.close()
"""
    run_alone(code, str(tmp_path / "gate"))
