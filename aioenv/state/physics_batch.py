"""What images of a vector env are drawn from: one model, and the physics states of its slots, from the batch itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.state.model_edits import SHOWN
from aioenv.state.mujoco_versions import columns_of
from aioenv.state.source import MujocoSource, source_of

if TYPE_CHECKING:
    import mujoco

__all__ = ["PhysicsBatch", "PhysicsReader", "find_physics"]


class PhysicsBatch(Protocol):
    """What a vector env has whose images can be drawn elsewhere.

    It may also say how Gymnasium's renderer would look at it, by attributes that are named as arguments of Gymnasium's
    `MujocoEnv`: `camera_id`, `camera_name`, `default_camera_config`, `visual_options`, `max_geom`.

    For terminal images under SAME_STEP it has `final_physics_states(slots)`: likewise, of slots whose episodes the last
    step has ended, as they were then.

    If slots can be put into states, while what is observed of them stays until they are stepped, it has
    `observed_physics_states(slots)`: likewise, of what is observed.

    If it has a `SimPool` as its `pool`, images show the fields of the model of which slots have values of their own.

    Attributes:
        model: the model of all slots.
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
        ValueError: if its states are of another size than its model's, or no float64.
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
        pool: Any = getattr(env, "pool", None)
        own = {name: pool.changed_field(name) for name in sorted(SHOWN)} if hasattr(pool, "changed_field") else {}
        self._fields = {name: field for name, field in own.items() if field is not None}
        self.source: MujocoSource = source_of(model, view, tuple(self._fields))
        states: Any = env.physics_states()
        expected = num_envs, mujoco.mj_stateSize(model, whole)
        got = f"{states.dtype} {states.shape}" if isinstance(states, np.ndarray) else type(states).__name__
        if got != f"float64 {expected}":
            raise ValueError(
                f"physics_states of {type(env).__name__}: expected float64 {expected}, as mj_getState gives "
                f"mjSTATE_INTEGRATION of its model, got {got}"
            )
        self._columns = columns_of(model, whole, self.source.state_spec)

    @property
    def has_finals(self) -> bool:
        """Whether it can be said which states episodes ended in."""
        return callable(getattr(self._env, "final_physics_states", None))

    def read_finals(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """What images of the ends of episodes depend on, those that the last step has ended in `slots`."""
        states: npt.NDArray[np.float64] = self._env.final_physics_states(slots)  # type: ignore[attr-defined]
        out = np.empty((len(slots), self.source.state_size))
        self._put_together(states, slots, out)
        return out

    def read(self, slots: Sequence[int] | None, out: npt.NDArray[np.float64]) -> None:
        """Write what images of `slots` (None: all) depend on into `out`, float64 `(k, source.state_size)`."""
        observed = getattr(self._env, "observed_physics_states", self._env.physics_states)
        self._put_together(observed(slots), slots, out)

    def _put_together(
        self, states: npt.NDArray[np.float64], slots: Sequence[int] | None, out: npt.NDArray[np.float64]
    ) -> None:
        """What of whole states images depend on, and fields behind it."""
        if not self._fields:
            states.take(self._columns, 1, out)
            return
        size = len(self._columns)
        out[:, :size] = states[:, self._columns]
        for field in self._fields.values():
            values = (field if slots is None else field[list(slots)]).reshape(len(out), -1)
            out[:, size : size + values.shape[1]] = values
            size += values.shape[1]


def find_physics(env: Any) -> PhysicsReader | None:
    """The reader of a vector env, if that is a `PhysicsBatch`, else None.

    Raises:
        ValueError: see `PhysicsReader`.
    """
    base = env.unwrapped
    if not callable(getattr(base, "physics_states", None)) or getattr(base, "model", None) is None:
        return None
    return PhysicsReader(base, env.num_envs)
