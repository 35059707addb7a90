"""Exceptions of envs, as they arrive: with their chains, and without what does not pickle."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
import traceback
import warnings

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.ipc.exceptions import dump_exception
from tests.kits.process_kit import run_alone

LOCK = threading.Lock()


class TwoPart(Exception):
    """Its constructor takes two arguments, of which `args` knows nothing."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Repeating(Exception):
    """Pickles, but says something else when it comes back."""

    def __init__(self, text: str) -> None:
        super().__init__(f"because of {text}")


class Refusing(ValueError):
    def __reduce__(self):
        raise RuntimeError("not me")


class Silent(ValueError):
    def __str__(self):
        raise RuntimeError("not a word")


class OwnGroup(ExceptionGroup):
    def __new__(cls, errors, code):
        return super().__new__(cls, "several", errors)

    def __init__(self, errors, code):
        self.code = code


def there_and_back(exc):
    return pickle.loads(dump_exception(exc))


def with_attributes(exc, **attributes):
    vars(exc).update(attributes)
    return exc


def raised(function):
    try:
        function()
    except BaseException as exc:
        return exc
    raise AssertionError


def test_exceptions_come_back_as_they_were():
    class Local(KeyError):
        pass

    noted = ValueError("x", 2)
    noted.add_note("by the way")
    unreadable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")
    unfound = ModuleNotFoundError("no gym", name="gym")
    for exc in (
        *(noted, Local("key"), TwoPart(7, "no"), Repeating("that"), FileNotFoundError(2, "not there", "name")),
        *(Refusing("no", 3), with_attributes(Refusing("no"), code=4), Silent("x"), unreadable, unfound, SystemExit(3)),
    ):
        back = there_and_back(exc)
        assert type(back) is type(exc) and back.args == exc.args
        assert vars(back) == vars(exc)
        if type(exc) is not Silent:
            assert str(back) == str(exc)


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("bad", 3),
        TwoPart(7, "no"),
        Repeating("that"),
        Refusing("no"),
        FileNotFoundError(2, "not there", "name"),
        ModuleNotFoundError("no gym", name="gym"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_attribute_that_does_not_pickle_is_left_out_and_nothing_else(exc):
    back = there_and_back(with_attributes(exc, lock=LOCK, other=[1, "two"], frame=sys._getframe()))
    assert type(back) is type(exc) and back.args == exc.args and str(back) == str(exc)
    assert back.other == [1, "two"] and not hasattr(back, "lock") and not hasattr(back, "frame")
    first, second = back.__notes__
    assert first.startswith("The attribute 'lock' was left out, since it can't be sent: ") and "_thread.lock" in first
    assert "'frame'" in second
    assert getattr(back, "filename", None) == getattr(exc, "filename", None)
    assert getattr(back, "name", None) == getattr(exc, "name", None)
    assert not hasattr(exc, "__notes__")


def test_an_argument_that_does_not_pickle_becomes_text():
    back = there_and_back(ValueError("held", LOCK))
    assert back.args == ("held", repr(LOCK)) and type(back) is ValueError
    assert "An argument was replaced by its repr" in back.__notes__[0] and "_thread.lock" in back.__notes__[0]


def test_chains_arrive_as_chains():
    def deep():
        try:
            try:
                raise KeyError("first")
            except KeyError as exc:
                raise with_attributes(OSError(5, "second"), lock=LOCK) from exc
        except OSError:
            raise TwoPart(3, "third")  # noqa: B904

    back = there_and_back(raised(deep))
    assert type(back) is TwoPart and back.__cause__ is None and not back.__suppress_context__
    second = back.__context__
    assert type(second) is OSError and second.errno == 5 and "'lock'" in second.__notes__[0]
    assert second.__suppress_context__ and second.__cause__ is second.__context__
    assert repr(second.__cause__) == "KeyError('first')" and second.__cause__.__context__ is None

    def hiding():
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None

    back = there_and_back(raised(hiding))
    assert back.__suppress_context__ and back.__cause__ is None and type(back.__context__) is KeyError
    assert "hidden" not in "".join(traceback.format_exception(back))


def test_circles_and_long_chains():
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__context__ = other, one
    back = there_and_back(one)
    assert type(back.__cause__) is KeyError and back.__cause__.__context__ is back
    first = exc = ValueError(0)
    for number in range(1, 20_000):
        exc.__cause__ = ValueError(number)
        exc = exc.__cause__
    back = there_and_back(first)
    links = [back]
    while links[-1].__cause__ is not None:
        links.append(links[-1].__cause__)
    assert [link.args[0] for link in links] == list(range(64))
    assert links[-1].__notes__ == ["Further exceptions of this chain were left out: it has more than 64"]
    while first is not None:  # or the interpreter would follow all of it at once
        exc, first.__cause__ = first.__cause__, None
        first = exc


def test_groups_keep_all_members():
    inner = ExceptionGroup("inner", [Refusing("a"), raised(lambda: {}["b"])])
    inner.exceptions[1].__cause__ = TwoPart(1, "why")
    group = BaseExceptionGroup("all", [with_attributes(ValueError("v"), lock=LOCK), inner, KeyboardInterrupt()])
    group.add_note("three")
    back = there_and_back(group)
    assert type(back) is BaseExceptionGroup and back.message == "all" and back.__notes__ == ["three"]
    value, nested, interrupt = back.exceptions
    assert type(value) is ValueError and "'lock'" in value.__notes__[0] and type(interrupt) is KeyboardInterrupt
    assert type(nested) is ExceptionGroup and [type(exc) for exc in nested.exceptions] == [Refusing, KeyError]
    assert str(nested.exceptions[1].__cause__) == "1: why"
    back = there_and_back(OwnGroup([ValueError("v"), KeyError("k")], 7))
    assert type(back) is OwnGroup and back.code == 7 and len(back.exceptions) == 2
    many = there_and_back(ExceptionGroup("many", [ValueError(i) for i in range(500)]))
    assert [exc.args[0] for exc in many.exceptions] == list(range(500))


def unpicklable_class():
    class Kind(ValueError):
        lock = LOCK

    return Kind


def test_what_can_not_be_sent_takes_no_other_with_it():
    kind = unpicklable_class()
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        dump_exception(kind("no"))
    exc = ValueError("head")
    exc.__cause__ = kind("in the middle")
    exc.__cause__.__context__ = KeyError("at the end")
    back = there_and_back(exc)
    middle = back.__cause__
    assert type(middle) is aioenv.AioenvError and str(middle) == "Kind: in the middle"
    assert "_thread.lock" in middle.__notes__[0] and type(middle.__context__) is KeyError
    group = there_and_back(ExceptionGroup("g", [kind("a member"), ValueError("b")]))
    assert [str(each) for each in group.exceptions] == ["Kind: a member", "b"]


class Raising(gym.Env):
    """Raises what its action asks for."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(9)

    def __init__(self, early=False):
        if early:
            self.step(0)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        try:
            try:
                raise KeyError("below")
            except KeyError as exc:
                raise OSError(5, "amid") from exc
        except OSError as exc:
            if action == 1:
                raise unpicklable_class()("lost") from exc
            if action == 2:
                raise ExceptionGroup("both", [with_attributes(ValueError("v"), lock=LOCK), exc]) from None
            raise with_attributes(ValueError("above"), lock=LOCK, slot=3) from exc


def check_chain(exc):
    assert type(exc) is ValueError and exc.slot == 3 and "'lock'" in exc.__notes__[0]
    assert type(exc.__cause__) is OSError and exc.__context__ is exc.__cause__ and exc.__suppress_context__
    assert type(exc.__cause__.__cause__) is KeyError


@pytest.mark.parametrize("debug", [False, True])
def test_envs_errors_say_what_was_lost(debug):
    async def main() -> None:
        async with aioenv.make_vec(Raising, 3, num_workers=1, debug=debug) as envs:
            await envs.reset()
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.step([0, 1, 2])
            first, second, third = caught.value.errors
            check_chain(first.__cause__)
            if debug:  # in this very process
                assert type(second.__cause__).__name__ == "Kind" and type(second.__cause__.__cause__) is OSError
            else:
                assert second.__cause__ is None
                assert second.__notes__[0].startswith("The unpicklable_class.<locals>.Kind itself can't be sent")
            assert [type(exc) for exc in third.__cause__.exceptions] == [ValueError, OSError]
        with pytest.raises(aioenv.WorkerStartError) as failed:
            async with aioenv.make_vec(Raising, 1, early=True, debug=debug):
                pass
        check_chain(failed.value.__cause__)

    asyncio.run(main())


def test_the_drop_in_raises_what_old_code_expects():
    with pytest.raises(ValueError, match="above") as caught:
        sync.AsyncVectorEnv([lambda: Raising(early=True)])
    check_chain(caught.value)
    envs = sync.AsyncVectorEnv([Raising] * 2)
    envs.reset()
    try:
        with warnings.catch_warnings(), pytest.raises(ValueError, match="above") as caught:
            warnings.simplefilter("ignore")  # Gymnasium's logger says what it was
            envs.step([0, 0])
        check_chain(caught.value)
    finally:
        envs.close(terminate=True)


SCRIPT = """
    import asyncio, threading
    import gymnasium as gym, numpy as np
    import aioenv

    class Below(Exception):
        def __init__(self, code, text):
            super().__init__(text)
            self.code = code

    class Above(ValueError):
        pass

    class Raising(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            class Local(Above):
                pass
            try:
                raise Below(3, "deep")
            except Below as exc:
                error = (Above, Local)[(options or {}).get("local", 0)]("high")
                error.lock = threading.Lock()
                raise error from exc

    async def main():
        async with aioenv.make_vec(Raising, 1) as envs:
            for local in (0, 1):
                try:
                    await envs.reset(options={"local": local})
                except aioenv.EnvError as exc:
                    cause = exc.__cause__
                    assert isinstance(cause, Above) and "'lock'" in cause.__notes__[0], cause
                    assert (type(cause) is Above) != local
                    assert type(cause.__cause__) is Below and cause.__cause__.code == 3
                else:
                    raise AssertionError

    asyncio.run(main())
"""


def test_exceptions_of_a_script_arrive_with_their_chains(own_fork_server):
    run_alone(SCRIPT)
