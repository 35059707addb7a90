"""`spare_envs=True` with `render=`: images of a slot show the env whose episode runs, and its edits of the model."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest

import aioenv
from tests.kits.compare import assert_same

pytestmark = pytest.mark.asyncio


class Colours(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Colours the model in most resets; in the others it has the colour that it began with."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        model, rng = self.unwrapped.model, self.unwrapped.np_random  # type: ignore[attr-defined]
        model.geom_rgba[:, :3] = rng.random((model.ngeom, 3)) if rng.random() < 0.7 else 0.5
        return result


class Finite(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has no further episode from level 4 on."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None and options["level"] >= 4:
            raise aioenv.EpisodesDone
        return self.env.reset(seed=seed)


class NoScene(Colours):
    """The reset of slot 0's episode 2 raises, after a while."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if (options or {}).get("at") == (0, 2):
            time.sleep(0.2)
            raise ValueError("no scene")
        return super().reset(seed=seed)


def make_finite() -> gymnasium.Env[Any, Any]:
    return Finite(make())


def make() -> gymnasium.Env[Any, Any]:
    return Colours(gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array"))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
async def test_each_image_shows_the_looks_of_the_env_that_it_is_of(mode: str) -> None:
    """Two envs of a slot have different looks; discarded episodes change them, too."""
    runs = []
    for spares in (False, True):
        images: list[np.ndarray[Any, Any]] = []
        ends = 0
        async with aioenv.AsyncVectorEnv(
            [make] * 2,
            spare_envs=spares,
            autoreset_mode=mode,
            seed_plan=list(range(50)),
            render=aioenv.RenderConfig(width=32, height=32),
        ) as envs:
            await envs.reset()
            images.append(await envs.render())
            for t in range(40):
                step = await envs.step(np.full((2, 1), 1.5, np.float32))
                images.append(await envs.render())
                ends += int((step.terminated | step.truncated).sum())
                if t % 13 == 12:
                    await envs.reset(options={"reset_mask": np.array([True, False])})
                    images.append(await envs.render())
        assert ends > 8
        runs.append(np.array(images))
    different = np.flatnonzero((runs[0] != runs[1]).any((2, 3, 4)).any(1))
    assert different.tolist() == []


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
async def test_slots_without_further_episodes_keep_their_last_image(mode: str) -> None:
    runs = []
    for spares in (False, True):
        images: list[np.ndarray[Any, Any]] = []
        async with aioenv.AsyncVectorEnv(
            [make_finite] * 2,
            spare_envs=spares,
            autoreset_mode=mode,
            seed_plan=list(range(50)),
            autoreset_options=lambda slot, episode: {"level": episode},
            render=aioenv.RenderConfig(width=32, height=32),
        ) as envs:
            await envs.reset()
            after = 0
            while after < 4:
                await envs.step(np.full((2, 1), 1.5, np.float32))
                images.append(await envs.render())
                if envs.exhausted:
                    after += len(envs.exhausted) == 2
                    if after == 2:
                        envs.resume(0)
        runs.append(np.array(images))
    different = np.flatnonzero((runs[0] != runs[1]).any((2, 3, 4)).any(1))
    assert different.tolist() == []


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
async def test_a_slot_whose_reset_raised_has_an_image(mode: str) -> None:
    """Of its last observation, whether or not the step has waited for the reset."""
    runs = []
    for spares in (False, True):
        images: list[np.ndarray[Any, Any]] = []
        async with aioenv.AsyncVectorEnv(
            [lambda: NoScene(gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array"))] * 2,
            spare_envs=spares,
            autoreset_mode=mode,
            seed_plan=list(range(50)),
            autoreset_options=lambda slot, episode: {"at": (slot, episode)},
            render=aioenv.RenderConfig(width=32, height=32),
        ) as envs:
            await envs.reset()
            with pytest.raises(aioenv.EnvError, match="no scene"):
                while len(images) < 99:
                    await envs.step(np.full((2, 1), 1.5, np.float32))
                    images.append(await envs.render())
            images.append(await envs.render())
            await envs.reset(options={"reset_mask": np.array([False, True])})
            images.append(await envs.render())
        runs.append(np.array(images))
    different = np.flatnonzero((runs[0] != runs[1]).any((2, 3, 4)).any(1))
    assert different.tolist() == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("workers", [None, 1], ids=["own", "pool"])
async def test_observations_that_are_images(mode: str, workers: int | None) -> None:
    """They are drawn in the workers of both envs of a slot, or by render workers."""
    runs = []
    for spares in (False, True):
        async with aioenv.AsyncVectorEnv(
            [make] * 2,
            spare_envs=spares,
            autoreset_mode=mode,
            seed_plan=list(range(50)),
            pixels=aioenv.RenderConfig(width=32, height=32, render_only=False, workers=workers),
        ) as envs:
            found: list[Any] = [await envs.reset()]
            for t in range(40):
                found.append(await envs.step(np.full((2, 1), 1.5, np.float32)))
                if t % 13 == 12:
                    found.append(await envs.reset(options={"reset_mask": np.array([True, False])}))
            assert sum(int(step.terminated.sum()) for step in found if len(step) == 5) > 8
        runs.append(found)
    for mine, theirs in zip(*runs, strict=True):
        assert_same(mine, theirs)
