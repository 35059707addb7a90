"""What images of a vector env are drawn from: one model, and the physics states of its slots, from the batch itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.host.mujoco_source import MujocoSource, source_of

if TYPE_CHECKING:
    import mujoco

__all__ = ["PhysicsBatch", "PhysicsReader", "find_physics"]


class PhysicsBatch(Protocol):
    """What a vector env has whose images can be drawn elsewhere.

    It may also say how Gymnasium's renderer would look at it, by attributes that are named as arguments of Gymnasium's
    `MujocoEnv`: `camera_id`, `camera_name`, `default_camera_config`, `visual_options`, `max_geom`.

    For terminal images under SAME_STEP it has `final_physics_states(slots)`: likewise, of slots whose episodes the last
    step has ended, as they were then.

    Attributes:
        model: the model of all slots. Where slots have values of their own for fields of it, images show the model's.
    """

    model: mujoco.MjModel

    def physics_states(
        self, slots: Sequence[int] | None = None, out: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.float64]:
        """The state of each of `slots` (None: all), as `mj_getState` gives `mjSTATE_INTEGRATION`: float64 `(k, n)`."""


class PhysicsReader:
    """Reads from a vector env what images are drawn from.

    Args:
        env: the innermost vector env.
        num_envs: how many slots it has.

    Attributes:
        source: the model and the view.

    Raises:
        ValueError: if its states are of another size than its model's.
    """

    def __init__(self, env: PhysicsBatch, num_envs: int) -> None:
        import mujoco

        self._env = env
        model, whole = env.model, int(mujoco.mjtState.mjSTATE_INTEGRATION)
        fixed, name = getattr(env, "camera_id", None), getattr(env, "camera_name", None)
        if fixed is None and name is not None:
            fixed = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)
        view = SimpleNamespace(
            camera_id=fixed,
            default_cam_config=getattr(env, "default_camera_config", None),
            _vopt=getattr(env, "visual_options", None),
            max_geom=getattr(env, "max_geom", None),
        )
        self.source: MujocoSource = source_of(model, view)
        shape, expected = env.physics_states().shape, (num_envs, mujoco.mj_stateSize(model, whole))
        if shape != expected:
            raise ValueError(
                f"physics_states of {type(env).__name__}: expected shape {expected}, that of mjSTATE_INTEGRATION of "
                f"its model, got {shape}"
            )
        columns = np.empty(self.source.state_size)
        mujoco.mj_extractState(model, np.arange(expected[1], dtype=np.float64), whole, columns, self.source.state_spec)
        self._columns = columns.astype(np.int64)

    @property
    def has_finals(self) -> bool:
        """Whether it can be said which states episodes ended in."""
        return callable(getattr(self._env, "final_physics_states", None))

    def read_finals(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """What images of the ends of episodes depend on, those that the last step has ended in `slots`."""
        states: npt.NDArray[np.float64] = self._env.final_physics_states(slots)  # type: ignore[attr-defined]
        return states[:, self._columns]

    def read(self, slots: Sequence[int] | None, out: npt.NDArray[np.float64]) -> None:
        """Write what images of `slots` (None: all) depend on into `out`, float64 `(k, source.state_size)`."""
        self._env.physics_states(slots).take(self._columns, 1, out)


def find_physics(env: Any) -> PhysicsReader | None:
    """The reader of a vector env, if that is a `PhysicsBatch`, else None.

    Raises:
        ValueError: see `PhysicsReader`.
    """
    base = env.unwrapped
    if not callable(getattr(base, "physics_states", None)) or getattr(base, "model", None) is None:
        return None
    return PhysicsReader(base, env.num_envs)
