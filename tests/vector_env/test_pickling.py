"""Arguments and results of the API pickled and copied: they cross processes, are kept in files, are keys of dicts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import aioenv
from aioenv.testing import faulty_envs

WAYS = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]


def errors():
    one = aioenv.EnvError("one", slots=(1,), pid=3, traceback="Traceback", stderr="said")
    died = aioenv.WorkerDied("two", slots=(2, 3), returncode=-9, running=3)
    both = aioenv.SlotError.join([one, died], partial=aioenv.ResetResult(np.zeros(4), {}))
    again = aioenv.EnvError("again", slots=(5,))
    alike = aioenv.SlotError.join([aioenv.EnvError("alike", slots=(4,)), again], partial=None)
    late = aioenv.StepTimeout("late", slots=(1,), running=(1,))
    start = aioenv.WorkerStartError("start", slots=(0,), pid=5, traceback="Traceback")
    return [one, died, both, alike, again, late, start, aioenv.PendingCallError("p"), aioenv.NoAsyncCallError("n")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__name__)
def test_an_error_keeps_what_it_tells(error, way):
    other = way(error)
    assert type(other) is type(error) and str(other) == str(error)
    for name in ("slot", "slots", "pid", "traceback", "stderr", "returncode", "running"):
        assert getattr(other, name, None) == getattr(error, name, None), name
    assert [str(e) for e in getattr(other, "errors", ())] == [str(e) for e in getattr(error, "errors", ())]
    assert [type(e) for e in getattr(other, "exceptions", ())] == [type(e) for e in getattr(error, "exceptions", ())]
    if isinstance(getattr(error, "partial", None), aioenv.ResetResult):
        assert other.partial.obs.tolist() == [0] * 4


def test_the_error_of_a_step():
    with aioenv.sync.VectorEnv(faulty_envs(2, "raises", "step", slot=1), num_workers=1) as envs:
        envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError) as caught:
            envs.step(envs.action_space.sample())
    for way in WAYS:
        error = way(caught.value)
        assert error.slots == (1,) and "the fault has struck" in error.traceback
        assert error.partial.reward.shape == (2,) and error.pid == caught.value.pid


def test_a_rollout_with_its_infos():
    with aioenv.sync.make_vec("CartPole-v1", 3, num_workers=1, episode_stats=True) as envs:
        envs.reset(seed=0)
        rollout = envs.rollout(lambda obs: np.ones(len(obs), np.int64), 20)
    for way in WAYS[::2]:
        other = way(rollout)
        assert np.array_equal(other.reward, rollout.reward) and len(other.infos) == 20
        for mine, theirs in zip(other.infos, rollout.infos, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[key], theirs[key]) for key in mine if key.startswith("_"))
    assert any("episode" in info for info in rollout.infos)


def test_configs_are_equal_and_keys():
    one = aioenv.RenderConfig(camera=["track", -1], devices=[0, 1])
    assert one == aioenv.RenderConfig(camera=("track", -1), devices=(0, 1)) and one.shape == (2, 256, 256)
    event = aioenv.EpisodeEvent(["a", "b"], epoch=["mean"])
    assert event == aioenv.EpisodeEvent(("a", "b"), epoch="mean")
    values = [one, event, aioenv.RestartPolicy(), aioenv.RenderQuality()]
    assert len({*values, *(way(value) for value in values for way in WAYS)}) == len(values)
