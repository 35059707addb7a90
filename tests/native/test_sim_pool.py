"""`SimPool` at its edges: unusual models, invalid arguments, forks."""

from __future__ import annotations

import subprocess
import sys

import mujoco
import numpy as np
import pytest

import aioenv
from tests.kits.version_kit import needs_mujoco_batch

pytestmark = needs_mujoco_batch

ODD = """<mujoco><option timestep="0.002" integrator="implicitfast"/><size nuserdata="3"/><worldbody>
<geom type="plane" size="5 5 .1"/>
<body name="hand" mocap="true" pos="1 0 1"><geom size=".05" contype="0" conaffinity="0"/></body>
<body name="ball" pos="0 0 .3"><freejoint/><geom size=".1"/><site name="top" pos="0 0 .1"/></body>
<body pos="1 1 1"><joint name="j" axis="0 1 0" limited="true" range="-1 1"/><geom size=".05" fromto="0 0 0 .3 0 0"
type="capsule"/><site name="tip" pos=".3 0 0"/></body></worldbody>
<equality><weld body1="hand" body2="ball" solref="0.02 1"/></equality>
<actuator><motor delay="0.01" nsample="8" site="top" gear="0 0 1 0 0 0"/><position joint="j" kp="5" timeconst="0.1"/>
<general joint="j" dyntype="integrator" gainprm="2" biastype="none" actlimited="true" actrange="-1 1"/></actuator>
<sensor><accelerometer site="tip"/><jointpos joint="j" delay="0.006" nsample="5"/><force site="tip"/></sensor>
<keyframe><key qpos="1 2 3 1 0 0 0 .2" act="0.1 .2" ctrl="1 2 3" mpos="1 1 1" time="3"/></keyframe></mujoco>"""
INPUTS = ["ctrl", "xfrc_applied", "qfrc_applied", "mocap_pos", "userdata", "time", "eq_active"]
OUTPUTS = ["qpos", "qvel", "act", "history", "xpos", "sensordata", "qacc", "qfrc_constraint", "actuator_force", "cvel"]


@pytest.mark.parametrize("post_constraint", [False, True])
def test_whatever_a_model_has_is_that_of_its_simulation(post_constraint):
    """Delays, mocap bodies, activations, user data, sensors that need contact forces, counts, keyframes."""
    model = mujoco.MjModel.from_xml_string(ODD)
    datas = [mujoco.MjData(model) for _ in range(4)]
    rng = np.random.default_rng(1)
    outputs = OUTPUTS + ["cfrc_ext", "cacc"] * post_constraint
    with aioenv.SimPool(model, 4, num_threads=2, post_constraint=post_constraint) as pool:
        arrays = {name: pool.bind(name) for name in [*INPUTS, *outputs, "ncon", "nefc"]}
        pool.reset()
        for data in datas:
            mujoco.mj_forward(model, data)
        for turn in range(60):
            for name in INPUTS:
                slot, shape = int(rng.integers(4)), np.shape(getattr(datas[0], name))
                value = 0.0 if name == "eq_active" else rng.normal(size=shape) * 0.3
                arrays[name][slot] = value
                setattr(datas[slot], name, value)
            slots = np.flatnonzero(rng.random(4) < 0.6)
            which, keyframe = ("step", "forward", "reset")[min(turn % 6, 2)], turn % 2 - 1
            if which == "reset":
                pool.reset(slots, keyframe=keyframe)
            else:
                getattr(pool, which)(slots)
            for slot in slots.tolist():
                data = datas[slot]
                if which == "reset" and keyframe < 0:
                    mujoco.mj_resetData(model, data)
                elif which == "reset":
                    mujoco.mj_resetDataKeyframe(model, data, keyframe)
                (mujoco.mj_step if which == "step" else mujoco.mj_forward)(model, data)
                if post_constraint and which == "step":
                    mujoco.mj_rnePostConstraint(model, data)
            for name, array in arrays.items():
                for slot in slots.tolist():
                    assert np.array_equal(array[slot], getattr(datas[slot], name)), (turn, which, name, slot)
        with pytest.raises(ValueError, match="read-only"):
            arrays["xpos"][0] = 1


@pytest.mark.parametrize("post_constraint", [False, True])
def test_what_is_no_number_is_refused(post_constraint):
    with aioenv.SimPool(ODD, 3, num_threads=1, post_constraint=post_constraint) as pool:
        before = pool.get_states()
        for wrong, error, text in (
            (lambda: pool.step([1.7]), TypeError, "whole numbers, or a mask"),
            (lambda: pool.step(["a"]), TypeError, "whole numbers, or a mask"),
            (lambda: pool.step(1), TypeError, "expected numbers of simulations"),
            (lambda: pool.step(np.array([[0, 1]])), TypeError, "expected numbers of simulations"),
            (lambda: pool.step(n=1.5), ValueError, "n: expected an int"),
            (lambda: pool.step(n=True), ValueError, "n: expected an int"),
            (lambda: pool.step(nstep=2.0), ValueError, "nstep: expected a positive int"),
            (lambda: pool.reset(keyframe="home"), ValueError, "keyframe: expected an int"),
            (lambda: pool.model_field(3), ValueError, "name of a field"),
            (lambda: aioenv.SimPool("/", 1), FileNotFoundError, "there is no file"),
        ):
            with pytest.raises(error, match=text):
                wrong()
        pool.step([])
        pool.step(n=0)
        assert np.array_equal(pool.get_states(), before)


def test_a_forked_copy_is_closed_and_can_end():
    """The threads stay in the other process: nothing in the copy waits for them, neither calls nor its end."""
    script = f"""
import gc, os, signal, sys, warnings
import aioenv
warnings.simplefilter("ignore")
pools = [aioenv.SimPool({ODD!r}, 8, num_threads=3, post_constraint=post) for post in (False, True)]
kept = [pool.bind("qpos") for pool in pools]
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    for pool in pools:
        try:
            pool.step()
        except aioenv.ClosedError as exc:
            assert "forked copy" in str(exc), exc
        pool.close()
    del pools, pool, kept
    gc.collect()
    again = aioenv.SimPool({ODD!r}, 8, num_threads=3)
    again.step()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
for pool in pools:
    pool.step()
    pool.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("post_constraint", [False, True])
def test_a_program_may_end_while_a_thread_steps(post_constraint):
    """A thread that came back from MuJoCo while Python ends would crash it."""
    script = f"""
import sys, threading
import aioenv
pool = aioenv.SimPool({ODD!r}, 256, num_threads=2, post_constraint={post_constraint})
begun = threading.Event()

def work():
    for _ in range(1000):
        pool.step(nstep=20)
        begun.set()

threading.excepthook = lambda args: None  # it is told that there is no more to be had
threading.Thread(target=work, daemon=True).start()
begun.wait()
sys.exit(5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (5, "")
