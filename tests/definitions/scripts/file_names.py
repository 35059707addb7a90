"""File names and lines of code that the script defines: in tracebacks, in notes, in what `inspect` finds."""

import faulthandler
import functools
import inspect
import logging
import sys
import traceback
import warnings

import aioenv
from aioenv.core import timeouts
from tests.definitions.script_checks import DEBUG, Plain, Skip, check, equal, main, raised, text_of, vector_env


def line_of(function, text):
    """The line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def shows(shown, function, text):
    """A traceback shows the file, the line and the source of a line."""
    where = f'File "{__file__}", line {line_of(function, text)}, in '
    equal([part for part in (where, text) if part not in shown], [])


def failing_step(env, function, text):
    with vector_env([env, lambda: env()], 1) as envs:
        envs.reset()
        error = raised(lambda: envs.step([0, 0]), aioenv.EnvError)
    shows(error.traceback, function, text)
    shows(text_of(error), function, text)


class FailsInStep(Plain):
    def step(self, action):
        raise ValueError("in step")


@check
def traceback_of_a_step():
    failing_step(FailsInStep, FailsInStep.step, 'raise ValueError("in step")')


def fails(x):
    return [1 / x]


class FailsInAFunction(Plain):
    def step(self, action):
        return fails(0)


@check
def traceback_of_a_function():
    failing_step(FailsInAFunction, fails, "return [1 / x]")
    failing_step(FailsInAFunction, FailsInAFunction.step, "return fails(0)")


def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


class FailsInADecoratedFunction(Plain):
    @logged
    def step(self, action):
        raise ValueError("decorated")


@check
def traceback_of_a_decorated_function():
    failing_step(FailsInADecoratedFunction, FailsInADecoratedFunction.step.__wrapped__, 'raise ValueError("decorated")')


def numbers():
    yield 1
    raise ValueError("in a generator")


class FailsInAGenerator(Plain):
    def step(self, action):
        return list(numbers())


@check
def traceback_of_a_generator():
    failing_step(FailsInAGenerator, numbers, 'raise ValueError("in a generator")')


class FailsInALambda(Plain):
    key = staticmethod(lambda x: x["in a lambda"])

    def step(self, action):
        return self.key({})


@check
def traceback_of_a_lambda():
    failing_step(FailsInALambda, FailsInALambda.key, 'x["in a lambda"]')


def local():
    class Local(Plain):
        @property
        def size(self):
            raise ValueError("in a property")

        def step(self, action):
            return self.size

    return Local


@check
def traceback_of_a_local_class():
    failing_step(local(), local, 'raise ValueError("in a property")')


class FailsInReset(Plain):
    def reset(self, *, seed=None, options=None):
        raise ValueError("in reset")


@check
def traceback_of_a_reset():
    with vector_env([FailsInReset], 1) as envs:
        error = raised(envs.reset, aioenv.EnvError)
    shows(error.traceback, FailsInReset.reset, 'raise ValueError("in reset")')


class FailsInInit(Plain):
    def __init__(self):
        raise ValueError("in init")


@check
def traceback_of_a_constructor():
    error = raised(lambda: vector_env([FailsInInit], 1), aioenv.WorkerStartError)
    shows(error.traceback, FailsInInit.__init__, 'raise ValueError("in init")')


def failing_factory():
    raise ValueError("in a factory")


@check
def traceback_of_a_factory():
    error = raised(lambda: vector_env([failing_factory], 1), aioenv.WorkerStartError)
    shows(error.traceback, failing_factory, 'raise ValueError("in a factory")')


@check
def traceback_of_a_lambda_as_factory():
    error = raised(lambda: vector_env([lambda: fails("as a factory")], 1), aioenv.WorkerStartError)
    shows(error.traceback, traceback_of_a_lambda_as_factory, 'fails("as a factory")')


class Spins(Plain):
    def step(self, action):
        while True:
            pass


@check
def where_of_a_timeout():
    if DEBUG:
        raise Skip("a thread that hangs can't be ended")
    timeouts._ASK_FROM_S = 0.0
    with vector_env([Spins], 1, timeout_s=0.5) as envs:
        envs.reset(timeout_s=30)
        error = raised(lambda: envs.step([0]), aioenv.StepTimeout)
    (note,) = error.__notes__
    first = line_of(Spins.step, "while True:")
    equal((__file__ in note, any(f"line {line}" in note for line in (first, first + 1))), (True, True))


class Crashes(Plain):
    def step(self, action):
        faulthandler._sigsegv()


@check
def frames_of_a_crash():
    if DEBUG:
        raise Skip("it would end the script")
    with vector_env([Crashes], 1) as envs:
        envs.reset()
        error = raised(lambda: envs.step([0]), aioenv.WorkerDied)
    where = f'File "{__file__}", line {line_of(Crashes.step, "faulthandler._sigsegv()")} in step'
    assert where in error.stderr, error.stderr


class Tells(Plain):
    def files(self):
        names = (Tells.files, Tells.reset, Tells.frame, fails, logged, Tells.doubled.fget, Tells.of_class.__func__)
        return [function.__code__.co_filename for function in names]

    @property
    def doubled(self):
        return 2

    @classmethod
    def of_class(cls):
        return cls

    def frame(self):
        frame = sys._getframe()
        return frame.f_code.co_filename, frame.f_lineno

    def caller(self):
        return logging.getLogger("script").findCaller()[:3]

    def warning(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("here", stacklevel=1)
        return caught[0].filename, caught[0].lineno

    def stack(self):
        last = traceback.extract_stack()[-1]
        return last.filename, last.lineno, last.line


def told(name):
    """The same in a worker and here."""
    expected = getattr(Tells(), name)()
    with vector_env([Tells, lambda: Tells()], 1) as envs:
        equal(envs.call(name), (expected,) * 2)
    return expected


@check
def file_names_in_a_worker():
    equal(set(told("files")) - {__file__, inspect.getfile(Plain)}, set())


@check
def file_and_line_of_a_frame():
    equal(told("frame"), (__file__, line_of(Tells.frame, "frame.f_lineno")))


@check
def file_and_line_of_a_log_record():
    equal(told("caller")[:2], (__file__, line_of(Tells.caller, "findCaller")))


@check
def file_and_line_of_a_warning():
    equal(told("warning"), (__file__, line_of(Tells.warning, "warnings.warn")))


@check
def source_line_of_a_stack():
    equal(told("stack")[2], "last = traceback.extract_stack()[-1]")


@check
def file_names_of_the_parents_own_code():
    Local = local()
    factories = [Tells, lambda: Tells(), Local, functools.partial(Local)]
    with vector_env(factories) as envs:
        envs.reset()
    equal({name for name in Tells().files() if name != __file__}, {inspect.getfile(Plain)})
    equal((Local.step.__code__.co_filename, factories[1].__code__.co_filename), (__file__, __file__))


main()
