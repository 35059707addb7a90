"""The code that `test_script_code.py` runs in each surrounding: it makes vector envs, and reports what they gave.

The cells of the notebook are its parts between lines that begin with `# %%`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import json
import linecache
import os
import pickle
import sys
import typing

import gymnasium as gym

from aioenv import EnvError, sync

START = os.environ["SCRIPT_START"]  # "forkserver", "spawn" or "debug"


def options(workers):
    """With `debug=True` there is one worker, a thread: two would make envs in any order, in the same process."""
    return {"debug": True, "num_workers": 1} if START == "debug" else {"start": START, "num_workers": workers}


def attempt(function, *args):
    """Call a function: what it returns, or the type of what it raises."""
    try:
        return function(*args)
    except Exception as exc:
        return type(exc).__name__


# %% class state and globals


class Plain(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}


SIMS = {}
COUNT = 0


class Sim(Plain):
    """Registers itself in a global, and counts there."""

    def __init__(self):
        self.key = len(SIMS)
        SIMS[self.key] = 0

    def step(self, action):
        SIMS[self.key] += 1
        return 0, float(SIMS[self.key]), False, False, {}

    def registered(self):
        return len(SIMS)


class Engine:
    made = 0

    def __init__(self):
        Engine.made += 1


class Stateful:
    """Keeps state in its class, and in a global."""

    _engine = None
    numbers = itertools.count()
    next_port = 9000

    def __init__(self):
        if Stateful._engine is None:
            Stateful._engine = Engine()
        self.engine = self._engine
        self.number = next(self.numbers)
        self.port = Stateful.next_port
        Stateful.next_port += 1
        count_one()

    def class_state(self):
        return {
            "engines": Engine.made,
            "this engine": self.engine is Stateful._engine is type(self)._engine,
            "next port": Stateful.next_port,
        }

    def global_state(self):
        module = sys.modules[Env.__module__]
        return {
            "count": counted(),
            "count in the class": COUNT,
            "class by name": attempt(lambda: module.Env is Env is type(self)),
            "function by name": attempt(lambda: module.count_one is count_one),
            "namespace": module.__dict__ is globals() is count_one.__globals__ is Env.step.__globals__,
            "name": __name__,
        }


def count_one():
    global COUNT
    COUNT += 1


def counted():
    return COUNT


# %% registries

REGISTRY = []
DECORATED = {}
MADE_BY_META = []
NAMED = []


class Plugin:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.append(cls)
        cls.port = 9000 + len(REGISTRY)


class Walker(Plugin):
    pass


class Swimmer(Plugin):
    pass


def register(cls):
    DECORATED[cls.__name__] = (*DECORATED.get(cls.__name__, ()), cls)
    return cls


@register
class Task:
    pass


class Meta(type):
    classes = 0

    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        Meta.classes += 1
        MADE_BY_META.append(name)


class Model(metaclass=Meta):
    pass


class Submodel(Model):
    pass


class Field:
    def __set_name__(self, owner, name):
        NAMED.append(f"{owner.__name__}.{name}")
        self.name = name


class Record:
    x = Field()
    y = Field()


class Registered:
    def registries(self):
        return {
            "subclasses": [cls.__name__ for cls in REGISTRY],
            "subclasses are the classes": REGISTRY[:2] == [Walker, Swimmer] and Plugin.__subclasses__() == REGISTRY,
            "ports": [Walker.port, Swimmer.port],
            "decorated": {name: len(classes) for name, classes in DECORATED.items()},
            "decorated is the class": DECORATED["Task"][-1] is Task,
            "metaclass": [*MADE_BY_META, Meta.classes],
            "metaclass of the class": type(Submodel) is Meta is type(Model) and Submodel.__bases__ == (Model,),
            "names": [*NAMED, Record.x.name, Record.y.name],
        }


# %% Enums and instances


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(enum.IntFlag):
    FAST = 1
    LOUD = 2


class Event:
    limit = 10
    names = ["begin"]  # noqa: RUF012

    def __init__(self, number):
        self.number = number

    def describe(self):
        return f"event {self.number}"


class Data:
    mark = "parent"

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(self) is type(other) and self.number == other.number

    __hash__ = None


class Outer:
    class Inner:
        def __init__(self, number):
            self.number = number


@dataclasses.dataclass
class Config:
    color: Color = Color.RED
    data: Data | None = None
    sizes: list[int] = dataclasses.field(default_factory=list)


# %% functions


def helper(x: Data) -> Config:
    """Double a number."""
    return 2 * x


@functools.lru_cache(maxsize=3, typed=True)
def cached(x):
    return [x]


@functools.singledispatch
def describe(x):
    return "object"


@describe.register
def _(x: int):
    return "int"


@describe.register(Data)
def _(x):
    return f"data {x.number}"


HALF = functools.partial(divmod, 9)


def logged(function):
    @functools.wraps(function)
    def call(*args):
        call.calls += 1
        return function(*args)

    call.calls = 0
    return call


@logged
def triple(x):
    """Triple a number."""
    return 3 * x


@contextlib.contextmanager
def opened(x):
    yield x + 1


def known():
    partials = {"partial": HALF} if __name__ == "__main__" else {}  # a module's is an instance like any other
    return {
        **partials,
        "function": helper,
        "wraps": triple,
        "class": Data,
        "nested class": Outer.Inner,
        "Enum": Color,
        "Enum member": Color.BLUE,
        "Flag member": Mode.LOUD,
    }


def sources():
    """Source text, file names and annotations, or the type of the error: the same in every process."""
    return {
        "getsource of a function": attempt(inspect.getsource, helper),
        "getsource of a method": attempt(inspect.getsource, Event.describe),
        "getsource of a class": attempt(inspect.getsource, Data),
        "getsource of a decorated function": attempt(inspect.getsource, triple),
        "getsourcelines": attempt(lambda: inspect.getsourcelines(helper)[1]),
        "getfile of a function": attempt(inspect.getfile, helper),
        "getfile of a class": attempt(inspect.getfile, Data),
        "line": helper.__code__.co_firstlineno,
        "getdoc": inspect.getdoc(helper),
        "signature": str(inspect.signature(helper)),
        "hints of a class": attempt(lambda: typing.get_type_hints(Config)["color"] is Color),
        "hints of a function": attempt(lambda: typing.get_type_hints(helper) == {"x": Data, "return": Config}),
        "fields": [field.name for field in dataclasses.fields(Config)],
        "__main__.__file__": getattr(sys.modules["__main__"], "__file__", None),
    }


# %% the env that is asked for all of this


class Env(Plain, Stateful, Registered):
    def __init__(self, slot):
        self.slot = slot
        self.data = Data(slot)
        Stateful.__init__(self)

    @classmethod
    def build(cls):
        return cls(2)

    def step(self, action):
        if action == 8:
            raise RuntimeError("the step failed")
        info = {
            "event": Event(self.slot),
            "color": Color.RED,
            "inner": {"mode": Mode.LOUD, "place": Outer.Inner(self.slot)},
            "class": Event,
            "function": helper,
        }
        return 0, 0.0, False, False, info

    def limit(self):
        return Event.limit

    def fail(self):
        raise RuntimeError("the call failed")

    def file_of_step(self):
        return [type(self).step.__code__.co_filename, sys._getframe().f_code.co_filename]

    def set_mark(self):
        Data.mark = "worker"

    def take(self, value):
        return isinstance(value, Data), type(value) is Data, value.number, Data.mark

    def own_data(self):
        return isinstance(self.data, Data), self.data.number, Data.mark

    def is_known(self, name, value):
        return value is known()[name]

    def give(self, name):
        return known()[name]

    def ask_sources(self):
        return sources()

    def pickles(self):
        def again(value):
            return pickle.loads(pickle.dumps(value))

        return {
            "an instance": attempt(lambda: type(again(Data(1))) is Data),
            "an attribute": attempt(lambda: again(self.data) == self.data),
            "an Enum member": attempt(lambda: again(Color.RED) is Color.RED),
            "a Flag": attempt(lambda: again(Mode.FAST | Mode.LOUD) == Mode.FAST | Mode.LOUD),
            "a class": attempt(lambda: again(Data) is Data),
            "a nested class": attempt(lambda: type(again(Outer.Inner(1))) is Outer.Inner),
            "a function": attempt(lambda: again(helper) is helper),
            "a dataclass": attempt(lambda: again(Config(data=Data(3))) == Config(data=Data(3))),
            "the env": attempt(lambda: type(again(self)) is Env and again(self).slot == self.slot),
            "a deep copy": attempt(lambda: type(copy.deepcopy(self.data)) is Data),
        }


@logged
def make_last():
    return Env(3)


# %% the env that uses decorated functions


def decorated():
    return {"lru_cache": cached, "singledispatch": describe, "contextmanager": opened, "factory": make_decorated}


@functools.cache
def make_decorated(slot):
    return Decorated(slot)


class Decorated(Plain):
    def __init__(self, slot):
        self.slot = slot
        self.built = 0

    @functools.cached_property
    def table(self):
        self.built += 1
        return [self.slot]

    def power(self, base, exponent):
        return base**exponent

    square = functools.partialmethod(power, exponent=2)

    @property
    def doubled(self):
        return 2 * self.slot

    @staticmethod
    def constant():
        return 7

    @classmethod
    def own_name(cls):
        return cls.__name__

    def is_decorated(self, name, value):
        return value is decorated()[name]

    def give(self, name):
        return decorated()[name]

    def decorated(self):
        cached(self.slot)
        hits = cached.cache_info().hits
        with opened(4) as five:
            calls = triple.calls
            return {
                "lru_cache": cached(self.slot) is cached(self.slot) and cached.cache_info().hits == hits + 2,
                "parameters of lru_cache": cached.cache_parameters(),
                "wrapped by lru_cache": cached.__wrapped__.__name__,
                "pickle of lru_cache": pickle.loads(pickle.dumps(cached)) is cached,
                "pickle of singledispatch": pickle.loads(pickle.dumps(describe)) is describe,
                "lru_cache as factory": make_decorated(self.slot) is self,
                "singledispatch": [describe(1), describe(Data(2)), describe(None)],
                "registry of singledispatch": describe.dispatch(Data) is describe.registry[Data],
                "wraps": [triple(2), triple.__name__, triple.__doc__, triple.__wrapped__(3), triple.calls - calls],
                "contextmanager": five,
                "cached_property": [self.table is self.table, self.built],
                "partial": [*HALF(2), HALF.func is divmod],
                "partialmethod": self.square(3),
                "property, staticmethod, classmethod": [self.doubled, self.constant(), self.own_name()],
            }


# %% what is checked


def main():
    """Write what each check gave, "ok" if it is right, to the file that `SCRIPT_REPORT` names."""
    report = {}

    def check(name, function, expected):
        try:
            got = function()
        except Exception as exc:
            got = first_line(exc)
        report[name] = "ok" if got == expected else f"got {got!r}, expected {expected!r}"

    def check_all(column, function, expected):
        """As `check`, for each key of dicts, one of each slot."""
        try:
            slots = function()
        except Exception as exc:
            slots = [dict.fromkeys(expected, first_line(exc))]
        for key, value in expected.items():
            wrong = [got.get(key) for got in slots if got.get(key) != value]
            report[f"{column}: {key}"] = f"got {wrong[0]!r}, expected {value!r}" if wrong else "ok"

    for column, checks in ("globals", check_globals), ("main env", check_main_env), ("decorated", check_decorated):
        try:
            checks(check, check_all)
        except Exception as exc:
            report[f"{column}: start"] = first_line(exc)
    with open(os.environ["SCRIPT_REPORT"], "w") as file:
        json.dump(report, file)


def first_line(exc):
    return f"{type(exc).__name__}: {exc}".partition("\n")[0]


def check_globals(check, check_all):
    """Four factories that are one class, on two workers."""
    together = 4 if START == "debug" else 2  # envs in a process
    with sync.VectorEnv([Sim] * 4, **options(2)) as envs:
        envs.reset()
        envs.step([0] * 4)
        check("globals: a registry, second step", lambda: envs.step([0] * 4)[1].tolist(), [2.0] * 4)
        check("globals: a registry, its length", lambda: envs.call("registered"), (together,) * 4)


def check_main_env(check, check_all):
    """Four factories of four kinds, on two workers."""
    together = 4 if START == "debug" else 2
    per_process = sorted([*range(together)] * (4 // together))
    code_files = [Env.step.__code__.co_filename, Env.file_of_step.__code__.co_filename]
    factories = [functools.partial(Env, 0), lambda: Env(1), Env.build, make_last]
    with sync.VectorEnv(factories, **options(2)) as envs:
        envs.reset()
        check("class state: itertools.count", lambda: sorted(envs.call("number")), per_process)
        check("class state: ports", lambda: sorted(envs.call("port")), [9000 + number for number in per_process])
        state = {"engines": 1, "this engine": True, "next port": 9000 + together}
        check_all("class state", lambda: envs.call("class_state"), state)
        names = {"class by name": True, "function by name": True, "namespace": True, "name": __name__}
        state = {"count": together, "count in the class": together, **names}
        check_all("globals", lambda: envs.call("global_state"), state)
        expected = {
            "subclasses": ["Walker", "Swimmer"],
            "subclasses are the classes": True,
            "ports": [9001, 9002],
            "decorated": {"Task": 1},
            "decorated is the class": True,
            "metaclass": ["Model", "Submodel", 2],
            "metaclass of the class": True,
            "names": ["Record.x", "Record.y", "x", "y"],
        }
        check_all("registries", lambda: envs.call("registries"), expected)
        check_infos(check, envs)
        check_arguments(check, envs)
        names = ["an instance", "an attribute", "an Enum member", "a Flag", "a class", "a nested class", "a function"]
        names += ["a dataclass", "the env", "a deep copy"]
        check_all("pickle", lambda: envs.call("pickles"), dict.fromkeys(names, True))
        check_all("source", lambda: envs.call("ask_sources"), sources())
        check("traceback: file of the worker's code", lambda: envs.call("file_of_step"), (code_files,) * 4)
        check_traceback(check, "a call", Env.fail, 1, lambda: envs.call_at(0, "fail"))
        check_traceback(check, "a step", Env.step, 2, lambda: envs.step([8, 0, 0, 0]))
    now = [Env.step.__code__.co_filename, Env.file_of_step.__code__.co_filename]
    check("traceback: file of the parent's code", lambda: now, code_files)


def check_infos(check, envs):
    """The parent's classes stay as the user has left them."""
    Event.limit = 99
    before, names = dict(vars(Event)), Event.names
    names.append("end")
    infos = envs.step([0] * 4)[4]
    changed = [name for name in before if vars(Event).get(name) is not before[name]]
    check("infos: attributes of the parent's class", lambda: changed, [])
    check("infos: an attribute that the user has set", lambda: Event.limit, 99)
    check("infos: the worker's attribute", lambda: set(envs.call("limit")), {99 if START == "debug" else 10})
    check("infos: a list", lambda: Event.names is names and names == ["begin", "end"], True)
    check("infos: an instance", lambda: [type(event) is Event for event in infos["event"]], [True] * 4)
    check("infos: its value", lambda: [event.describe() for event in infos["event"]], [f"event {i}" for i in range(4)])
    check("infos: an Enum member", lambda: [color is Color.RED for color in infos["color"]], [True] * 4)
    check("infos: a Flag member", lambda: [mode is Mode.LOUD for mode in infos["inner"]["mode"]], [True] * 4)
    inner = infos["inner"].get("place", ())
    check("infos: a nested class", lambda: [type(place) is Outer.Inner for place in inner], [True] * 4)
    check("infos: a class", lambda: [cls is Event for cls in infos["class"]], [True] * 4)
    check("infos: a function", lambda: [function is helper for function in infos["function"]], [True] * 4)


def check_arguments(check, envs):
    """The worker's classes stay as the worker has left them."""
    envs.call("set_mark")
    check("arguments: an instance", lambda: envs.call("take", Data(3)), ((True, True, 3, "worker"),) * 4)
    envs.set_attr("data", [Data(10 + slot) for slot in range(4)])
    expected = tuple((True, 10 + slot, "worker") for slot in range(4))
    check("arguments: set_attr", lambda: envs.call("own_data"), expected)
    for name, value in known().items():
        check(f"arguments: {name}", lambda n=name, v=value: envs.call("is_known", n, v), (True,) * 4)
        check(f"results: {name}", lambda n=name, v=value: [got is v for got in envs.call("give", n)], [True] * 4)


def check_traceback(check, name, function, offset, fails):
    """The worker's traceback has the file name of the parent's code, and its source line where the parent knows it."""
    code = function.__code__
    line = code.co_firstlineno + offset
    try:
        fails()
        text = "nothing was raised"
    except EnvError as exc:
        text = exc.traceback
    where = f'File "{code.co_filename}", line {line}, in {function.__name__}'
    source = linecache.getline(code.co_filename, line).strip()
    check(f"traceback: file and line of {name}", lambda: where if where in text else text, where)
    check(f"traceback: source line of {name}", lambda: source if source in text else text, source)


def check_decorated(check, check_all):
    """A factory that is a decorated function, bound by a partial."""
    expected = {
        "lru_cache": True,
        "parameters of lru_cache": {"maxsize": 3, "typed": True},
        "wrapped by lru_cache": "cached",
        "pickle of lru_cache": True,
        "pickle of singledispatch": True,
        "lru_cache as factory": True,
        "singledispatch": ["int", "data 2", "object"],
        "registry of singledispatch": True,
        "wraps": [6, "triple", "Triple a number.", 9, 1],
        "contextmanager": 5,
        "cached_property": [True, 1],
        "partial": [4, 1, True],
        "partialmethod": 9,
    }
    slots = [functools.partial(make_decorated, slot) for slot in range(2)]
    with sync.VectorEnv(slots, **options(1)) as envs:
        check("decorated: factory", lambda: envs.call("slot"), (0, 1))
        check_all("decorated", lambda: envs.call("decorated"), expected)
        for name, value in decorated().items():
            check(f"arguments: {name}", lambda n=name, v=value: envs.call("is_decorated", n, v), (True,) * 2)
            check(f"results: {name}", lambda n=name, v=value: [got is v for got in envs.call("give", n)], [True] * 2)
