"""Where a worker's results lie in its memory."""

import numpy as np
import pytest
from gymnasium import spaces

from aioenv.ipc.frames import HEADER_BYTES
from aioenv.spaces.layout import Layout
from aioenv.worker.row_buffers import ResultRows, _zeros_at


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("offset", range(HEADER_BYTES, HEADER_BYTES + 70, 3))
def test_arrays_begin_at_or_behind_their_place_in_a_frame(offset, dtype):
    """Copies to an address up to 15 bytes behind the source, modulo a page, are slow."""
    array = _zeros_at(offset, (5, 3), np.dtype(dtype))
    assert array.shape == (5, 3) and array.dtype == dtype and not array.any()
    assert array.flags.aligned and array.flags.c_contiguous and array.flags.writeable
    assert (array.ctypes.data - offset) % 64 < 16


def test_all_observations_of_a_reply_do():
    space = spaces.Dict({"image": spaces.Box(0, 255, (5, 3), np.uint8), "state": spaces.Box(-1, 1, (7,), np.float64)})
    rows = ResultRows(Layout(space), 3, [{}], [])
    at = HEADER_BYTES
    for buffer in rows.step_buffers(0, 3)[:2]:
        assert (np.frombuffer(buffer, np.uint8).ctypes.data - at) % 64 < 16
        at += len(buffer)
