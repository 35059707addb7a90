"""Envs of several actors. `test_sv_…`: the lines of what an older system's vector envs did, without the traps."""

from __future__ import annotations

import types
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv import EpisodeCounter, OutOfStepError
from aioenv.envs import ActorID, PettingZooEnv, SubStepEnv
from tests.kits.process_kit import run_alone
from tests.vector_env.multi_kit import Spread, TwoStage

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
ENVS = {
    "parallel": [lambda: PettingZooEnv(Spread())] * 8,
    "structured": [lambda i=i: SubStepEnv(TwoStage(1 + i % 3)) for i in range(8)],
    "risky": [lambda: SubStepEnv(TwoStage(2, risky=True))] * 8,
}


def equal(a, b):
    """Whether two results are the same, bit for bit, dtypes and keys too."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return equal(tuple(a), tuple(b))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b) or (a != a and b != b)


def actions_of(space, seed):
    batched = gym.vector.utils.batch_space(space, 8)
    batched.seed(seed)
    return [batched.sample() for _ in range(25)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ENVS)
def test_equal_to_a_serial_loop(kind, mode):
    """Eight envs on three workers, autoresets included: results, infos, and what the actors were given."""
    serial = SyncVectorEnv(ENVS[kind], autoreset_mode=mode)
    actions = actions_of(serial.single_action_space, 1)

    async def main():
        ends = 0
        async with aioenv.AsyncVectorEnv(ENVS[kind], num_workers=3, autoreset_mode=mode) as envs:
            assert envs.single_observation_space == serial.single_observation_space
            assert equal(tuple(await envs.reset(seed=5)), serial.reset(seed=5))
            for action in actions:
                ours, theirs = await envs.step(action), serial.step(action)
                for name, a, b in zip(ours._fields, ours, theirs, strict=True):
                    assert equal(a, b), name
                rewards = np.stack(serial.call("actor_rewards"), 1)
                assert equal(await envs.actor_rewards(), rewards)
                assert await envs.actor_ids(same_step=False) == serial.call("actor_id")
                assert equal(await envs.is_actor_done(), np.array(serial.call("is_actor_done")))
                ends += (ours.terminated | ours.truncated).sum()
        assert ends > 16

    aioenv.run(main())
    serial.close()


# ------------------------------------------------------------ PettingZoo's interface


def test_agents_that_come_and_go_are_masks():
    envs = SyncVectorEnv([lambda: PettingZooEnv(Spread(max_cycles=30))] * 3)
    agents = ["agent_0", "agent_1", "agent_2"]
    obs, info = envs.reset(seed=0)
    assert list(obs) == agents
    assert info["agent_mask"].tolist() == [[True, True, False]] * 3
    seen = {tuple(row) for row in info["agent_mask"].tolist()}
    present, gone = info["agent_mask"], ~info["agent_mask"]  # `gone` before the last step: no last observation
    envs.action_space.seed(0)
    for _ in range(100):
        for i, agent in enumerate(agents):
            assert (obs[agent][gone[:, i] & ~present[:, i]] == 0).all()
            assert (obs[agent][present[:, i]] != 0).any(1).all()
        gone = ~present
        obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
        rewards = np.stack(envs.call("actor_rewards"), 1)
        done = info["terminations"] | info["truncations"]
        assert (done & ~present).sum() == 0  # no agent leaves that was not there
        assert (info["agent_mask"][terminated | truncated] == 0).all()
        stays = present.any(1)  # the others were reset, and the rewards are still those of the step before
        np.testing.assert_allclose(reward[stays], rewards.sum(0)[stays], rtol=1e-5)
        assert (rewards.T[stays][~present[stays]] == 0).all()
        present = info["agent_mask"]
        seen |= {tuple(row) for row in present.tolist()}
    assert {(True, True, False), (True, True, True), (False, False, False)} < seen
    assert len(seen) > 4
    envs.close()


def test_what_is_no_parallel_env():
    with pytest.raises(TypeError, match="expected a PettingZoo ParallelEnv, got TwoStage without possible_agents"):
        PettingZooEnv(TwoStage())
    in_turn = type("InTurn", (Spread,), {"agent_iter": lambda self: iter(())})
    with pytest.raises(TypeError, match=r"got an AECEnv, InTurn, .* take pettingzoo.utils.aec_to_parallel"):
        PettingZooEnv(in_turn(max_cycles=1))
    with pytest.raises(TypeError, match="expected a StructuredEnv, got Spread without observation_spaces"):
        SubStepEnv(Spread(max_cycles=1))
    env = PettingZooEnv(Spread(max_cycles=1))
    with pytest.raises(gym.error.ResetNeeded):
        env.step({})
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[3]
    with pytest.raises(gym.error.ResetNeeded):
        env.step(env.action_space.sample())
    env.env.agents = ["stranger"]
    env.env.reset = lambda **kwargs: ({}, {})
    with pytest.raises(ValueError, match="got 'stranger'"):
        env.reset()


def test_what_the_adapters_do_not_have_the_env_below_is_asked_for():
    env = PettingZooEnv(Spread(max_cycles=9, render_mode="rgb_array"))
    assert (env.max_cycles, env.render_mode, env.metadata["name"]) == (9, "rgb_array", "spread_v0")
    with pytest.raises(AttributeError):
        env.get_state  # noqa: B018
    with pytest.raises(AttributeError, match="nothing_such"):
        env.nothing_such  # noqa: B018
    env.reset(seed=0)
    assert env.render().tolist() == np.zeros((2, 2, 3)).tolist()
    env.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its tests import games of its own the old way
def test_pettingzoo_itself():
    """Where it is installed: it takes our kit's env for one of its own."""
    pettingzoo = pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    body = {name: value for name, value in vars(Spread).items() if name not in ("__dict__", "__weakref__")}
    kit = types.new_class("Kit", (pettingzoo.ParallelEnv,), exec_body=lambda ns: ns.update(body))
    parallel_api_test(kit(), num_cycles=50)


# ------------------------------------------------------------ structured envs


def test_structured_envs_need_spaces_that_fit():
    env = TwoStage()
    env.action_spaces = {"choose": gym.spaces.Discrete(2)}
    with pytest.raises(ValueError, match="same step keys"):
        SubStepEnv(env)
    env = SubStepEnv(TwoStage())
    env.env.turn = "sleep"
    env.env.reset = lambda **kwargs: (0, {})
    with pytest.raises(ValueError, match=r"expected a step key of \['choose', 'cut'\], got 'sleep'"):
        env.reset()


def test_whole_states_of_borrowed_models_are_refused():
    """A snapshot of the model below would miss whose turn it is."""

    class OfMujoco(TwoStage):
        def __init__(self):
            super().__init__()
            inner = gym.make("InvertedPendulum-v5").unwrapped
            self.model, self.data = inner.model, inner.data

    async def main():
        async with aioenv.AsyncVectorEnv([lambda: SubStepEnv(OfMujoco())]) as envs:
            await envs.reset(seed=0)
            with pytest.raises(ValueError, match="the env SubStepEnv is no MuJoCo env"):
                await envs.get_state()

    aioenv.run(main())


def test_actors_of_plain_envs():
    async def main():
        async with aioenv.make_vec("CartPole-v1", num_envs=2) as envs:
            assert await envs.actor_rewards() is None
            with pytest.raises(TypeError, match="slot 0 has no actor_id"):
                await envs.actor_ids()
            with pytest.raises(TypeError, match="slot 0 has no is_actor_done"):
                await envs.is_actor_done()
        for num_workers in (None, 1):  # one vector env, here or there
            async with aioenv.make_vec("CartPole-v1", 2, backend="native", num_workers=num_workers) as envs:
                assert await envs.actor_rewards() is None
                with pytest.raises(TypeError, match="slot 0 has no actor_id"):
                    await envs.actor_ids()
        mixed = [lambda: PettingZooEnv(Spread(2)), lambda: Odd(Spread(2))]
        async with aioenv.AsyncVectorEnv(mixed) as envs:
            with pytest.raises(ValueError, match=r"same number of actors in all envs, got \[2, 3\]"):
                await envs.actor_rewards()

    class Odd(PettingZooEnv):
        def actor_rewards(self):
            return np.zeros(3)

    aioenv.run(main())


# ------------------------------------------------------------ SV


def test_sv_stacked_dict_in_and_out():
    with aioenv.sync.VectorEnv(ENVS["structured"], num_workers=3) as envs:
        obs, _ = envs.reset(seed=0)
        assert {key: (value.shape, value.dtype.name) for key, value in obs.items()} == {
            "choose": ((8, 3), "float32"),
            "cut": ((8,), "int64"),
        }
        action = {"choose": np.arange(8) % 3, "cut": np.zeros((8, 2))}
        obs, *_, info = envs.step(action)
        assert obs["cut"].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]  # each env got its own row
        assert (obs["choose"] == 0).all()  # not of this actor
        assert (info["sub_step"].tolist(), info["agent_id"].tolist()) == ([1] * 8, [0] * 8)
        with pytest.raises(aioenv.ActionError, match="expected a dict of"):
            envs.step({"choose": np.zeros(8)})


def test_sv_float32_rewards_and_bool_dones():
    """The actors' rewards are float32; those of steps are float64, as Gymnasium has them."""
    with aioenv.sync.VectorEnv(ENVS["structured"], num_workers=3) as envs:
        envs.reset(seed=0)
        _, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
        assert reward.shape == terminated.shape == truncated.shape == (8,)
        assert (envs.actor_rewards().dtype, envs.actor_rewards().shape) == (np.float32, (2, 8))
        assert envs.is_actor_done().dtype == np.bool_


def test_sv_terminal_observation():
    """As `final_obs`, beside the new episode's first observation, and the reward of the step that ended the old one."""
    mode = AutoresetMode.SAME_STEP
    alone = SubStepEnv(TwoStage(1))
    alone.reset(seed=3)
    with aioenv.sync.VectorEnv([lambda: SubStepEnv(TwoStage(1))] * 2, autoreset_mode=mode) as envs:
        envs.reset(seed=[3, 3])
        for t in range(2):
            action = {"choose": np.array([t, t]), "cut": np.full((2, 2), 0.5, np.float32)}
            obs, reward, _, truncated, info = envs.step(action)
            expected = alone.step({key: value[0] for key, value in action.items()})
        assert truncated.all()
        assert info["final_obs"][0]["choose"].tolist() == expected[0]["choose"].tolist() != obs["choose"][0].tolist()
        assert reward[0] == expected[1]
        assert envs.actor_rewards()[:, 1].tolist() == alone.actor_rewards().tolist() != [0, 0]
        assert envs.actor_ids() == (ActorID("choose", 0),) * 2


def test_sv_actor_ids_must_be_in_the_same_sub_step():
    """Under SAME_STEP they stay together; an episode that ends within a step takes its env out of it."""

    async def main():
        mode = AutoresetMode.SAME_STEP
        async with aioenv.AsyncVectorEnv(ENVS["structured"], num_workers=3, autoreset_mode=mode) as envs:
            await envs.reset(seed=0)
            for t in range(12):
                assert await envs.actor_ids() == (ActorID(("choose", "cut")[t % 2], 0),) * 8
                await envs.step(envs.action_space.sample())
        async with aioenv.AsyncVectorEnv(ENVS["risky"], num_workers=3, autoreset_mode=mode) as envs:
            await envs.reset(seed=0)
            while True:
                terminated = (await envs.step(envs.action_space.sample())).terminated
                keys = [actor.step_key for actor in await envs.actor_ids(same_step=False)]
                if terminated.any():
                    break
            assert {*keys} == {"choose", "cut"}
            first = [slot for slot, key in enumerate(keys) if key == keys[0]]
            with pytest.raises(OutOfStepError) as caught:
                await envs.actor_ids()
            assert f"{keys[0]!r} in slots {first}" in str(caught.value)

    aioenv.run(main())


def test_sv_get_actor_rewards_or_none():
    factories = [lambda: SubStepEnv(TwoStage(rewards=False)), lambda: SubStepEnv(TwoStage())]
    with aioenv.sync.VectorEnv(factories) as envs:
        envs.reset(seed=0)
        assert envs.actor_rewards() is None


def test_sv_env_close_called_in_the_worker():
    class Closing(TwoStage):
        def __init__(self, counter):
            super().__init__()
            self.counter = counter

        def close(self):
            self.counter.next_id()

    with EpisodeCounter() as counter:
        with aioenv.sync.VectorEnv([partial(lambda c: SubStepEnv(Closing(c)), counter)] * 3, num_workers=2):
            assert counter.count == 0
        assert counter.count == 3


def test_sv_sequential_twin_gives_identical_trajectories():
    """Gymnasium's own SyncVectorEnv is the twin: see `test_equal_to_a_serial_loop`. Here with any number of workers."""
    outcomes = set()
    for num_workers in (1, 4):
        with aioenv.sync.VectorEnv(ENVS["risky"][:4], num_workers=num_workers) as envs:
            envs.reset(seed=9)
            actions = actions_of(envs.single_action_space, 2)
            rows = [envs.step({key: value[:4] for key, value in action.items()}) for action in actions]
            outcomes.add(b"".join(row.obs["choose"].tobytes() + row.reward.tobytes() for row in rows))
    assert len(outcomes) == 1


def test_sv_logging_prefix_and_no_statistics_of_unfinished_episodes(caplog):
    """Of a structured env, whose episodes are of four sub-steps: three each, and one that is cut off by the reset."""
    factories = [lambda: SubStepEnv(TwoStage(2))] * 3
    options = {"autoreset_mode": AutoresetMode.SAME_STEP, "episode_stats": True, "stats_prefix": "eval"}
    with caplog.at_level("INFO"), aioenv.sync.VectorEnv(factories, num_workers=2, **options) as envs:
        expected = np.zeros(3)
        envs.reset(seed=0)
        for t in range(14):
            reward = envs.step(envs.action_space.sample())[1]
            expected += reward if t < 12 else 0
        envs.reset()
        epoch = envs.episode_stats.write(step=1)
    assert epoch["episode_count"] == 9
    assert epoch["length/mean"] == 4
    np.testing.assert_allclose(epoch["return/mean"] * 9, expected.sum())
    assert any("eval" in record.getMessage() for record in caplog.records if record.name == "aioenv.stats")


def test_the_adapters_import_neither_asyncio_nor_pettingzoo():
    code = "import sys, aioenv.envs; print(sorted({'asyncio', 'pettingzoo', 'mujoco', 'aioenv.envs'} & {*sys.modules}))"
    done = run_alone(code)
    assert done.stdout == "['aioenv.envs']\n", done.stderr
