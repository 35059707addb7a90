"""The contract of vector envs with aioenv's async API, as tests that any implementation can run.

Give a subclass a name that pytest collects, and implement `start`::

    class TestMine(VectorEnvContract):
        async def start(self, env_fns, **options):
            return await MyVectorEnv(env_fns, **options)

Faults of processes are not tested, since implementations lose different things (see `tests/faults/grid.py` for ours).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aioenv.errors import ActionError, ClosedError, EnvError, NoAsyncCallError, PendingCallError
from aioenv.testing.faulty_env import faulty_envs

__all__ = ["VectorEnvContract"]

_STEPS = 60  # enough for some episodes of CartPole to end


def _actions(reference: SyncVectorEnv, seed: int = 0) -> Callable[[], Any]:
    reference.action_space.seed(seed)
    return reference.action_space.sample


class VectorEnvContract:
    """Tests of one implementation; subclasses implement `start`.

    Attributes:
        env_id, env_kwargs: the task, for implementations that can't step any; some episodes must end in 60 steps.
        attribute: a numeric attribute of the task's env.
    """

    env_id = "CartPole-v1"
    env_kwargs: ClassVar[dict[str, Any]] = {}
    attribute = "gravity"

    def factories(self, n: int) -> list[Callable[[], Any]]:
        """Return the factories of n slots."""
        return [partial(gymnasium.make, self.env_id, **self.env_kwargs)] * n

    async def start(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> Any:
        """Start a vector env.

        Args:
            env_fns: a factory for each slot.
            **options: "autoreset_mode" and "copy", as of `AsyncVectorEnv`.
        """
        raise NotImplementedError

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make the loop that tests run on."""
        return asyncio.new_event_loop()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run one test on a loop of its own."""
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            runner.run(test)

    # ------------------------------------------------------------ results

    def test_the_same_seeds_give_gymnasiums_trajectories(self) -> None:
        """Trajectories are equal bit for bit in every autoreset mode, keys of infos included."""
        for mode in AutoresetMode:
            self.run(self._trajectories(mode))

    async def _trajectories(self, mode: AutoresetMode) -> None:
        reference = SyncVectorEnv(self.factories(3), autoreset_mode=mode)
        sample = _actions(reference)
        envs = await self.start(self.factories(3), autoreset_mode=mode)
        try:
            obs, _ = await envs.reset(seed=7)
            assert obs.tobytes() == reference.reset(seed=7)[0].tobytes()
            for _ in range(_STEPS):
                actions = sample()
                result, expected = await envs.step(actions), reference.step(actions)
                for mine, theirs in zip(result[:4], expected[:4], strict=True):
                    assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()
                assert result[4].keys() == expected[4].keys()
                over = result.terminated | result.truncated
                if mode is AutoresetMode.DISABLED and over.any():
                    options = {"reset_mask": over}
                    obs, _ = await envs.reset(seed=11, options=dict(options))
                    assert obs.tobytes() == reference.reset(seed=11, options=dict(options))[0].tobytes()
        finally:
            await envs.close()
            reference.close()

    def test_results_are_yours(self) -> None:
        """With `copy=True` a later step does not change the result of an earlier one."""

        async def test() -> None:
            envs = await self.start(self.factories(2), copy=True)
            try:
                obs, _ = await envs.reset(seed=1)
                kept = obs.copy()
                for _ in range(3):
                    await envs.step(envs.action_space.sample())
                assert (obs == kept).all()
            finally:
                await envs.close()

        self.run(test())

    # ------------------------------------------------------------ errors

    def test_an_exception_touches_its_slot_alone(self) -> None:
        """The error names the slot and has the others' results; a reset of that slot alone makes it work again."""

        async def test() -> None:
            envs = await self.start(faulty_envs(3, "raises", "step", slot=1, at=2))
            try:
                await envs.reset(seed=1)
                actions = np.zeros_like(envs.action_space.sample())
                first = await envs.step(actions)
                try:
                    await envs.step(actions)
                except EnvError as error:
                    assert error.slot == 1 and error.slots == (1,)
                    assert error.partial.reward[[0, 2]].tolist() == (first.reward[[0, 2]] + 1).tolist()
                else:
                    raise AssertionError("no EnvError")
                try:
                    await envs.step(actions)
                except EnvError as error:
                    assert error.slot == 1, "it stays failed until it is reset"
                else:
                    raise AssertionError("no EnvError")
                await envs.reset(options={"reset_mask": np.array([False, True, False])})
                await envs.step(actions)
            finally:
                await envs.close()

        self.run(test())

    def test_wrong_actions_send_nothing(self) -> None:
        """Wrong actions are refused as a whole, and the next step gives the result that they would have given."""

        async def test() -> None:
            reference = SyncVectorEnv(self.factories(2))
            envs = await self.start(self.factories(2))
            try:
                await envs.reset(seed=3)
                reference.reset(seed=3)
                right = _actions(reference)()
                for wrong in (right[:1], np.concatenate([right, right[:1]]), right[None], right + 0.5j):
                    try:
                        await envs.step(wrong)
                    except ActionError:
                        continue
                    raise AssertionError(f"{wrong} was accepted")
                assert (await envs.step(right)).obs.tobytes() == reference.step(right)[0].tobytes()
            finally:
                await envs.close()
                reference.close()

        self.run(test())

    # ------------------------------------------------------------ alignment

    def test_a_cancelled_step_is_taken_or_dropped_never_mixed_up(self) -> None:
        """The envs step; `recv` gives the result, or the next step drops it."""
        for take in (True, False):
            self.run(self._cancel(take))

    async def _cancel(self, take: bool) -> None:
        reference = SyncVectorEnv(self.factories(2))
        sample = _actions(reference)
        first, second = sample(), sample()
        envs = await self.start(self.factories(2))
        try:
            await envs.reset(seed=5)
            reference.reset(seed=5)
            task = asyncio.ensure_future(envs.step(first))
            await asyncio.sleep(0)  # the step is sent now
            cancelled = task.cancel()
            try:
                result = await task
            except asyncio.CancelledError:
                pass
            else:
                assert not cancelled or result is not None
            expected = reference.step(first)
            if take and envs.outstanding:
                ready = await envs.recv(2)
                assert ready.slots.tolist() == [0, 1] and ready.obs.tobytes() == expected[0].tobytes()
            following = await envs.step(second)
            assert following.obs.tobytes() == reference.step(second)[0].tobytes()
        finally:
            await envs.close()
            reference.close()

    def test_send_and_recv(self) -> None:
        """A slot has one request at a time; results come ordered by slot; nothing to receive is an error."""

        async def test() -> None:
            reference = SyncVectorEnv(self.factories(3))
            envs = await self.start(self.factories(3))
            try:
                actions = _actions(reference)()
                envs.send_reset(seed=1)
                await envs.recv(3)
                envs.send(actions[[2, 0]], [2, 0])
                try:
                    envs.send(actions[[2]], [2])
                except PendingCallError:
                    pass
                else:
                    raise AssertionError("a second request of one slot was accepted")
                ready = await envs.recv(2)
                reference.reset(seed=1)
                obs, reward = (expected[[0, 2]] for expected in reference.step(actions)[:2])
                assert ready.slots.tolist() == [0, 2] and ready.reward.tolist() == reward.tolist()
                assert ready.obs.tobytes() == obs.tobytes()
                assert not envs.outstanding
                try:
                    await envs.recv()
                except NoAsyncCallError:
                    pass
                else:
                    raise AssertionError("recv() with nothing in flight returned")
            finally:
                await envs.close()
                reference.close()

        self.run(test())

    # ------------------------------------------------------------ calls and close

    def test_calls_and_attributes(self) -> None:
        """A call gives one result a slot; an attribute can be set to one value for all slots or one each."""

        async def test() -> None:
            envs = await self.start(self.factories(2))
            try:
                await envs.set_attr(self.attribute, [1.0, 2.0])
                assert await envs.get_attr(self.attribute) == (1.0, 2.0)
                assert await envs.call_at(1, self.attribute) == 2.0
            finally:
                await envs.close()

        self.run(test())

    def test_close_is_idempotent_and_final(self) -> None:
        """A second close does nothing; any other use raises a ClosedError."""

        async def test() -> None:
            envs = await self.start(self.factories(2))
            await envs.reset(seed=1)
            actions = envs.action_space.sample()
            await envs.close()
            await envs.close()
            for call in (envs.reset, partial(envs.step, actions), partial(envs.call, self.attribute)):
                try:
                    await call()
                except ClosedError:
                    continue
                raise AssertionError("a closed vector env was used")

        self.run(test())
