"""Code of an env in a worker: the standard pickle, inspect, typing, decorated functions, classes."""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import enum
import functools
import inspect
import io
import linecache
import logging
import multiprocessing
import operator
import os
import pickle
import re
import sqlite3
import struct
import sys
import threading
import types
import typing
from numbers import Number, Real

import numpy as np

from tests.definitions.script_checks import (
    DEBUG,
    OfModule,
    Plain,
    ask,
    check,
    equal,
    main,
    raised,
    same_again,
    text_of,
    vector_env,
)


class Asks(Plain):
    """Calls a function in the worker."""

    def __init__(self, function):
        self.function = function

    def ask(self, *args):
        return self.function(*args)


def in_worker(function, *args):
    """What a function returns in a worker that has two envs, made by two factories."""
    factories = [functools.partial(Asks, function), lambda: Asks(function)]
    first, second = ask(factories, "ask", *args, workers=1)
    equal(first, second)
    return first


def as_here(function):
    """It returns in a worker what it returns here."""
    equal(in_worker(function), function())


# ------------------------------------------------------------ the standard pickle


class Data:
    def __init__(self, number=1):
        self.number = number

    def __eq__(self, other):
        return type(self) is type(other) and self.number == other.number

    __hash__ = None


class Color(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        pass

    class Kind(enum.Enum):
        A = 1


class Point(typing.NamedTuple):
    x: int = 1


@dataclasses.dataclass
class Config:
    data: Data = dataclasses.field(default_factory=Data)
    color: Color = Color.RED
    names: typing.ClassVar[list[str]] = []


@dataclasses.dataclass(slots=True)
class WithSlots:
    x: int = 1


def function(x):
    return x


@check
def pickle_an_instance():
    as_here(lambda: same_again(Data()) == Data())


@check
def pickle_an_enum_member():
    as_here(lambda: same_again(Color.RED) is Color.RED)


@check
def pickle_nested_classes():
    as_here(lambda: (type(same_again(Outer.Inner())) is Outer.Inner, same_again(Outer.Kind.A) is Outer.Kind.A))


@check
def pickle_a_named_tuple():
    as_here(lambda: (same_again(Point()), type(same_again(Point())) is Point))


@check
def pickle_dataclasses():
    as_here(lambda: (same_again(Config()) == Config(), same_again(WithSlots(3)) == WithSlots(3)))


@check
def pickle_classes_and_functions():
    as_here(
        lambda: (same_again(Data) is Data, same_again(function) is function, same_again(Data.__init__) is Data.__init__)
    )


@check
def pickle_with_old_protocols():
    as_here(lambda: [type(pickle.loads(pickle.dumps(Data(), protocol))) is Data for protocol in range(6)])


@check
def pickle_in_python():
    """The slow pickler looks names up as the fast one does."""

    def pickled():
        file = io.BytesIO()
        pickle._Pickler(file).dump(Data())
        return type(pickle.loads(file.getvalue())) is Data

    as_here(pickled)


class PicklesItself(Plain):
    def __init__(self, number):
        self.number = number

    def again(self):
        other = same_again(self)
        return type(other) is type(self), other.number, type(copy.deepcopy(self)) is PicklesItself


@check
def pickle_the_env():
    equal(
        ask([functools.partial(PicklesItself, 1), lambda: PicklesItself(2)], "again"),
        ((True, 1, True), (True, 2, True)),
    )


class KeepsState(Plain):
    def __init__(self):
        self.data = Data(5)

    def step(self, action):
        self.data = pickle.loads(pickle.dumps(self.data))
        return 0, float(self.data.number), type(self.data) is not Data, False, {}


@check
def pickle_in_a_step():
    with vector_env([KeepsState] * 2) as envs:
        envs.reset()
        for _ in range(2):
            result = envs.step([0, 0])
            equal((result[1].tolist(), result[2].tolist()), ([5, 5], [False, False]))


# ------------------------------------------------------------ inspect, typing, __main__


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as exc:
        return type(exc).__name__


@check
def source_of_functions():
    def local(x):
        return x

    as_here(lambda: [outcome(inspect.getsource, x) for x in (function, local, Data.__init__, in_worker)])


@check
def source_of_classes():
    as_here(lambda: [outcome(inspect.getsource, x) for x in (Data, Config, Color, Outer.Inner, Asks)])


@check
def files_of_classes_and_functions():
    as_here(lambda: [outcome(inspect.getfile, x) for x in (Data, Config, Color, Outer.Inner, function, Data.__init__)])


@check
def lines_of_classes_and_functions():
    as_here(lambda: [outcome(inspect.getsourcelines, x) for x in (Data, function)])


@check
def module_of_classes_and_functions():
    as_here(lambda: [inspect.getmodule(x) is sys.modules["__main__"] for x in (Data, function)])


@check
def source_of_the_calling_frame():
    def where():
        frame = inspect.stack()[0]
        return frame.filename, frame.lineno, frame.code_context

    as_here(where)


@check
def hints_of_a_dataclass():
    as_here(lambda: outcome(lambda: typing.get_type_hints(Config)["data"] is Data))


class OnlyInAnAnnotation:
    pass


def annotated(x: OnlyInAnAnnotation, y: list[Point]) -> Outer.Inner:
    pass


class WithHints:
    x: OnlyInAnAnnotation
    y: dict[str, Color]


@check
def hints_of_what_only_annotations_name():
    def hints():
        got = typing.get_type_hints(annotated)
        return [
            got["x"].__name__,
            got["y"] == list[Point],
            got["return"] is Outer.Inner,
            list(typing.get_type_hints(WithHints)),
        ]

    as_here(lambda: outcome(hints))


@check
def file_of_the_main_module():
    as_here(lambda: getattr(sys.modules["__main__"], "__file__", None))


@check
def file_as_a_global():
    as_here(lambda: (os.path.basename(__file__), __name__, __doc__))


@check
def names_in_the_main_module():
    as_here(
        lambda: outcome(
            lambda: sys.modules["__main__"].Data is Data and sys.modules[Data.__module__] is sys.modules["__main__"]
        )
    )


@check
def namespace_of_functions():
    as_here(lambda: [f.__globals__ is sys.modules["__main__"].__dict__ for f in (function, Data.__init__, Asks.ask)])


# ------------------------------------------------------------ decorated functions


class Calls:
    made = 0


@functools.lru_cache(maxsize=2, typed=True)
def cached(x):
    Calls.made += 1
    return [x]


@check
def lru_cache():
    def use():
        cached.cache_clear()
        return cached(3) is cached(3), cached.cache_info()[:3], cached.cache_parameters(), cached.__wrapped__(4)

    as_here(use)


@functools.cache
def asset():
    return Data(9)


class WithAsset(Plain):
    def __init__(self):
        self.asset = asset()

    def same(self):
        return self.asset is asset()


@check
def cache_that_envs_share():
    equal(ask([WithAsset, lambda: WithAsset()], "same", workers=1), (True, True))


@functools.cache
def make_numbered(slot):
    return Asks(lambda: slot)


@check
def lru_cache_as_factory():
    equal(ask([functools.partial(make_numbered, slot) for slot in range(2)], "ask"), (0, 1))


class WithCachedMethod(Plain):
    @functools.lru_cache  # noqa: B019
    def table(self, x):
        return [x]

    @functools.cached_property
    def once(self):
        return [1]

    @functools.singledispatchmethod
    def kind(self, x):
        return "object"

    @kind.register
    def _(self, x: int):
        return "int"

    def use(self):
        return self.table(1) is self.table(1), self.once is self.once, self.kind(1), self.kind("x")


@check
def cached_methods():
    equal(ask([WithCachedMethod, lambda: WithCachedMethod()], "use"), ((True, True, "int", "object"),) * 2)


@functools.singledispatch
def describe(x):
    return "object"


@describe.register
def _(x: int):
    return "int"


@describe.register(Data)
def describe_data(x):
    return "data"


@check
def singledispatch():
    as_here(lambda: [describe(1), describe(Data()), describe(None), describe.dispatch(Data) is describe_data])


@contextlib.contextmanager
def opened(x):
    yield x + 1


def entered():
    with opened(1) as x:
        return x


@check
def contextmanager():
    as_here(entered)


@functools.total_ordering
class Ordered:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x

    def __lt__(self, other):
        return self.x < other.x

    __hash__ = None


@check
def total_ordering():
    as_here(lambda: (Ordered(1) <= Ordered(2), Ordered(3) > Ordered(2)))


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        call.calls += 1
        return function(*args, **kwargs)

    call.calls = 0
    return call


@logged
def twice(x):
    return 2 * x


@check
def wraps():
    def use():
        twice.calls = 0
        return twice(2), twice(3), twice.calls, twice.__name__, twice.__wrapped__(4)

    as_here(use)


@logged
def make_logged():
    return Asks(lambda: make_logged.calls)


@check
def wrapped_factory():
    equal(ask([make_logged] * 2, "ask", workers=1), (2, 2))


HALF = functools.partial(divmod, 9)
FIRST = operator.itemgetter(0)
PATTERN = re.compile("a+")
VECTOR = np.vectorize(lambda x: x + 1)
LOGGER = logging.getLogger("script")
NAMES = types.SimpleNamespace(x=1)


@check
def callables_as_globals():
    as_here(lambda: (HALF(2), FIRST([3]), PATTERN.match("aab").group(), VECTOR([1]).tolist(), NAMES.x, LOGGER.name))


def numbers(n):
    yield from range(n)


async def waits():
    return 3


def run(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as exc:
        return exc.value


@check
def generators_and_coroutines():
    as_here(lambda: (list(numbers(3)), run(waits())))


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n > 0 and even(n - 1)


@check
def functions_that_call_each_other():
    as_here(lambda: (even(4), odd(4)))


# ------------------------------------------------------------ classes


class Base:
    def __init__(self):
        self.made = ["base"]

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    @classmethod
    def name(cls):
        return cls.__name__

    @staticmethod
    def static():
        return Base


class Child(Base):
    def __init__(self):
        super().__init__()
        self.made.append("child")

    def kind(self):
        return __class__


@check
def super_and_descriptors():
    def use():
        child = Child()
        child.size = 3
        return child.made, child.size, Child.name(), child.static() is Base, child.kind() is Child

    as_here(use)


class Slotted:
    __slots__ = ("__weakref__", "x")

    def __init__(self):
        self.x = 1


@check
def slots():
    def use():
        try:
            Slotted().y = 1
        except AttributeError:
            return Slotted().x, Slotted.__slots__
        return "a dict"

    as_here(use)


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    def area(self):
        return 4


@Shape.register
class Virtual:
    pass


class Pair:
    pass


collections.abc.Sequence.register(Pair)
Real.register(Virtual)


@check
def abstract_classes_of_the_standard_library():
    as_here(lambda: (issubclass(Pair, collections.abc.Sequence), isinstance(Virtual(), Number)))


@check
def abstract_classes():
    as_here(
        lambda: (isinstance(Square(), Shape), issubclass(Virtual, Shape), outcome(Shape), Shape.__abstractmethods__)
    )


@typing.runtime_checkable
class HasArea(typing.Protocol):
    def area(self): ...


@check
def protocols():
    as_here(lambda: (isinstance(Square(), HasArea), isinstance(Data(), HasArea)))


T = typing.TypeVar("T", bound=Base)


class Box(typing.Generic[T]):
    def __init__(self, value: T):
        self.value = value


class Children(Box[Child]):
    pass


@check
def generics():
    as_here(lambda: (Box[Child].__origin__ is Box, Children.__orig_bases__ == (Box[Child],), T.__bound__ is Base))


class Missing(enum.Enum):
    MISSING = object()


@check
def dataclass_internals():
    def use():
        data, color = dataclasses.fields(Config)
        kinds = data.default is dataclasses.MISSING, color.default is Color.RED, data.default_factory is Data
        return kinds, dataclasses.asdict(Config())["color"] is Color.RED, dataclasses.is_dataclass(Config), Config.names

    as_here(use)


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)

    def __init__(self, mass, radius):
        self.mass = mass
        self.radius = radius


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@check
def enums():
    def use():
        both = Rights.READ | Rights.WRITE
        members = Planet((5.9, 6.3)) is Planet.EARTH, Rights(3) == both, Rights.READ in both, Color["RED"] is Color.RED
        return members, Planet.EARTH.radius, list(Color) == [Color.RED], Missing.MISSING is Missing["MISSING"]

    as_here(use)


# ------------------------------------------------------------ objects that pickle as their names

UserId = typing.NewType("UserId", int)
Parameters = typing.ParamSpec("Parameters")
Shapes = typing.TypeVarTuple("Shapes")


class Sentinel:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name

    def __reduce__(self):
        return self.name


MISSING = Sentinel("MISSING")


def or_missing(value=MISSING):
    return value is MISSING


def takes_ids(user: UserId, *more: UserId) -> typing.Callable[Parameters, UserId]:
    return UserId(user)


class Stack(typing.Generic[*Shapes]):
    pass


@check
def sentinel_that_pickles_as_its_name():
    as_here(lambda: (or_missing(), or_missing(3), copy.copy(MISSING) is MISSING, same_again(MISSING) is MISSING))


@check
def sentinel_that_only_a_default_names():
    as_here(or_missing)


@check
def sentinels_in_messages():
    class Gives(Plain):
        def give(self, value):
            return value is MISSING, MISSING

    with vector_env([Gives, lambda: Gives()]) as envs:
        assert [(same, value is MISSING) for same, value in envs.call("give", MISSING)] == [(True, True)] * 2


@check
def types_that_pickle_as_their_names():
    as_here(lambda: (UserId(3), same_again(UserId) is UserId, f"{Stack[int, str]}", takes_ids(4), UserId.__supertype__))


class ClassProperty(property):
    def __get__(self, obj, owner=None):
        return self.fget(owner)


class LoggedMethod(classmethod):
    pass


class PlainMethod(staticmethod):
    pass


class HasProperties:
    @ClassProperty
    def name(cls):
        return cls.__name__

    @LoggedMethod
    def kind(cls):
        return cls

    @PlainMethod
    def three():
        return 3


HasProperties.__dict__["name"].tag = "tag"


@check
def subclasses_of_property_and_methods():
    found = HasProperties.__dict__
    as_here(lambda: (HasProperties.name, HasProperties.kind().__name__, HasProperties().three(), found["name"].tag))


class NeedsAttributes(OfModule, number=3):
    pass


@check
def metaclass_of_a_module_that_needs_attributes():
    as_here(lambda: (NeedsAttributes.number, type(NeedsAttributes).__name__))


if sys.version_info >= (3, 12):
    exec(
        """
type Names = list[str] | dict[str, Names]
type Columns[T] = dict[str, T]

def typed[T](x: Names, y: T) -> T:
    return y

def of_aliases():
    return f"{Names.__value__} {typed.__annotations__} {Columns[int].__value__}", Names.__module__
"""
    )

    @check
    def type_aliases():
        as_here(globals()["of_aliases"])


HEADER = struct.Struct("<I")


@check
def struct_as_a_global():
    as_here(lambda: HEADER.pack(3))


# ------------------------------------------------------------ what can't be sent

LOCK = threading.Lock()
FILE = open(os.devnull, "w")
DATABASE = sqlite3.connect(":memory:", check_same_thread=False)
GENERATOR = (x for x in range(3))
LOCAL = threading.local()
PROCESS_LOCK = multiprocessing.get_context("spawn").Lock()


class Names(Plain):
    """Names them in a method that is not called."""

    lock = threading.Lock()

    def unused(self):
        with LOCK, self.lock, PROCESS_LOCK:
            FILE.write(f"{DATABASE} {GENERATOR} {LOCAL}")

    def use(self):
        return 3


@check
def unused_globals_that_do_not_pickle():
    equal(ask([Names, lambda: Names()], "use"), (3, 3))


class UsesLock(Plain):
    def step(self, action):
        with LOCK:
            return 0, 1.0, False, False, {}


class UsesFile(Plain):
    def step(self, action):
        return 0, float(FILE.write("x")), False, False, {}


class UsesDatabase(Plain):
    def step(self, action):
        return 0, float(DATABASE.execute("select 1").fetchone()[0]), False, False, {}


def use_lock():
    with LOCK:
        return 1.0


class UsesLockInAFunction(Plain):
    def step(self, action):
        return 0, use_lock(), False, False, {}


class UsesProcessLock(Plain):
    def step(self, action):
        with PROCESS_LOCK:
            return 0, 1.0, False, False, {}


class UsesLockOfTheClass(Plain):
    guard = threading.Lock()

    def step(self, action):
        with self.guard:
            return 0, 1.0, False, False, {}


def refused(env, *words):
    """With `debug=True` it works; a worker's error names the global and the function that uses it."""
    factories = [env, lambda: env()]
    if DEBUG:
        with vector_env(factories) as envs:
            envs.reset()
            equal(envs.step([0, 0])[1].tolist(), [1, 1])
        return
    with vector_env(factories) as envs:
        envs.reset()
        text = text_of(raised(lambda: envs.step([0, 0])))
        equal([word for word in (*words, "could not be sent") if word not in text], [])


@check
def lock_that_is_used():
    refused(UsesLock, "LOCK", "UsesLock.step")


@check
def open_file_that_is_used():
    refused(UsesFile, "FILE", "UsesFile.step")


@check
def database_that_is_used():
    refused(UsesDatabase, "DATABASE", "UsesDatabase.step")


@check
def lock_that_a_function_uses():
    refused(UsesLockInAFunction, "LOCK", "use_lock")


@check
def lock_of_multiprocessing_that_is_used():
    refused(UsesProcessLock, "PROCESS_LOCK", "UsesProcessLock.step")


@check
def lock_of_a_class_that_is_used():
    refused(UsesLockOfTheClass, "guard")


def with_lock_as_default(x, lock=LOCK, y=3):
    return x + y


def uses_lock_as_default(lock=LOCK):
    with lock:
        return 1.0


def with_lock_as_keyword(x, *, lock=LOCK, y=3):
    return x + y


def with_lock_as_annotation(x, y=3):
    return x + y


with_lock_as_annotation.__annotations__ = {"x": typing.Annotated[int, LOCK], "y": int}


def with_lock_as_attribute(x):
    return x + with_lock_as_attribute.y


with_lock_as_attribute.lock, with_lock_as_attribute.y = LOCK, 3


@check
def lock_as_a_default_that_is_not_used():
    as_here(lambda: (with_lock_as_default(1), with_lock_as_default(1, None, 4)))


@check
def lock_as_a_keyword_that_is_not_used():
    as_here(lambda: (with_lock_as_keyword(1), with_lock_as_keyword(1, lock=None, y=4)))


@check
def lock_as_an_annotation_that_is_not_used():
    as_here(lambda: (with_lock_as_annotation(1), with_lock_as_annotation.__annotations__["y"]))


@check
def lock_as_an_attribute_that_is_not_used():
    as_here(lambda: with_lock_as_attribute(1))


class UsesLockAsDefault(Plain):
    def step(self, action):
        return 0, uses_lock_as_default(), False, False, {}


@check
def lock_as_a_default_that_is_used():
    refused(UsesLockAsDefault, "uses_lock_as_default.__defaults__[0]")


class Packet(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int),)


class UsesStructure(Plain):
    def step(self, action):
        return 0, float(Packet(1).x), False, False, {}


@check
def structure_of_ctypes_that_is_used():
    refused(UsesStructure, "Packet", "UsesStructure.step")


@check
def structure_of_ctypes_that_is_not_used():
    as_here(lambda: 3 if Plain else Packet(1))


class TakesLock(Plain):
    def __init__(self, lock):
        self.lock = lock

    def step(self, action):
        with self.lock:
            return 0, 1.0, False, False, {}


@check
def lock_of_multiprocessing_as_argument():
    factories = [functools.partial(TakesLock, PROCESS_LOCK)] * 2
    if DEBUG:
        with vector_env(factories) as envs:
            envs.reset()
            equal(envs.step([0, 0])[1].tolist(), [1, 1])
    else:
        raised(lambda: vector_env(factories).close(), Exception)


@check
def source_lines_are_known():
    as_here(lambda: linecache.getline(function.__code__.co_filename, function.__code__.co_firstlineno))


main()
