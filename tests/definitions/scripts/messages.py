"""Instances, Enum members, classes and functions in infos, arguments and results."""

import abc
import copy
import dataclasses
import enum
import functools
import pickle
import typing
import warnings

import gymnasium as gym
import numpy as np

import aioenv
from tests.definitions.script_checks import DEBUG, Plain, Skip, ask, check, equal, infos, main, raised, vector_env


def unchanged(cls, before):
    """The names of attributes that are no longer the same objects."""
    return [name for name, value in before.items() if vars(cls).get(name) is not value]


class Sends(Plain):
    """Sends what a function makes in the worker."""

    def __init__(self, make):
        self.make = make

    def step(self, action):
        return 0, 0.0, False, False, {"x": self.make()}

    def give(self):
        return self.make()

    def kind(self):
        return type(self)


def sent(make):
    """What comes of it: in an info, and as the result of a call."""
    with vector_env([functools.partial(Sends, make)], 1) as envs:
        envs.reset()
        return envs.step([0])[4]["x"][0], envs.call("give")[0]


# ------------------------------------------------------------ the parent's classes


class Event:
    limit = 10
    names = ["begin"]  # noqa: RUF012
    by_name: typing.ClassVar = {}

    def __init__(self, number):
        self.number = number

    def describe(self):
        return self.number

    @property
    def double(self):
        return 2 * self.number


@check
def class_attribute_that_the_user_has_set():
    with vector_env([functools.partial(Sends, lambda: Event(1))] * 2) as envs:
        Event.limit = 99
        envs.reset()
        for _ in range(2):
            (first, _) = envs.step([0, 0])[4]["x"]
        equal((Event.limit, first.limit, type(first) is Event, first.number), (99, 99, True, 1))


class Patched:
    def __init__(self):
        self.number = 3

    def value(self):
        return self.number


@check
def method_that_the_user_has_replaced():
    with vector_env([functools.partial(Sends, Patched)], 1) as envs:
        patch = Patched.value = lambda self: -self.number
        envs.reset()
        (first,) = envs.step([0])[4]["x"]
        equal((Patched.value is patch, first.value()), (True, -3))


class Listed:
    seen = []  # noqa: RUF012


@check
def list_of_a_class_is_not_copied():
    seen = Listed.seen
    before = dict(vars(Listed))
    with vector_env([functools.partial(Sends, Listed)], 1) as envs:
        envs.reset()
        seen.append("later")
        envs.step([0])
    equal((Listed.seen is seen, seen, unchanged(Listed, before)), (True, ["later"], []))


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


@check
def instance_with_slots():
    before = dict(vars(Slotted))
    got = sent(lambda: Slotted(4))
    equal([(type(x) is Slotted, x.number) for x in got], [(True, 4)] * 2)
    equal(unchanged(Slotted, before), [])


@dataclasses.dataclass
class Contact:
    body: int
    names: list = dataclasses.field(default_factory=list)
    created: typing.ClassVar[int] = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: float = 1.5


@check
def dataclass_instances():
    Contact.created = 5
    before = dict(vars(Contact))
    got = sent(lambda: [Contact(3, ["a"]), Frozen(2.5)])
    for contact, frozen in got:
        equal((contact, frozen), (Contact(3, ["a"]), Frozen(2.5)))
        equal([field.name for field in dataclasses.fields(contact)], ["body", "names"])
        equal(dataclasses.replace(contact, body=4), Contact(4, ["a"]))
    equal((unchanged(Contact, before), Contact.created), ([], 5))


class Point(typing.NamedTuple):
    x: int
    y: int = 2


@check
def named_tuple():
    before = dict(vars(Point))
    got = sent(lambda: [Point(1)])
    equal([type(x) is Point and x.y for (x,) in got], [2, 2])
    equal(unchanged(Point, before), [])


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    def __init__(self, value: T):
        self.value = value


@check
def generic_class():
    before = dict(vars(Box))
    got = sent(lambda: Box[int](7))
    equal([type(x) is Box and x.value for x in got], [7, 7])
    equal(unchanged(Box, before), [])


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    def area(self):
        return 4


@check
def class_with_an_abstract_base():
    Shape.register(complex)
    got = sent(Square)
    equal([isinstance(x, Shape) and type(x) is Square for x in got], [True, True])
    assert isinstance(1j, Shape), "what the user has registered is forgotten"


def local():
    class Local:
        limit = 1

        def __init__(self):
            self.number = 5

    return Local


@check
def local_class():
    Local = local()
    with vector_env([functools.partial(Sends, lambda: Local())], 1) as envs:
        Local.limit = 2
        envs.reset()
        got = [envs.step([0])[4]["x"][0], envs.call("give")[0]]
        equal([(type(x) is Local, x.number) for x in got], [(True, 5)] * 2)
        equal(Local.limit, 2)


@check
def class_itself():
    got = sent(lambda: Event)
    equal([x is Event for x in got], [True, True])


@check
def class_of_the_env():
    with vector_env([functools.partial(Sends, lambda: 0)], 1) as envs:
        assert envs.call("kind")[0] is Sends


@check
def instance_with_its_own_class_in_a_dict():
    got = sent(lambda: [{"kind": Event, "of": [Event(1), Event(2)]}])
    equal([(x["kind"] is Event, [type(part) is Event for part in x["of"]]) for (x,) in got], [(True, [True] * 2)] * 2)


# ------------------------------------------------------------ Enums


class Color(enum.Enum):
    RED = 1
    BLUE = enum.auto()


class Aliased(enum.Enum):
    ONE = 1
    ALIAS = 1


class Mode(enum.IntFlag):
    FAST = 1
    LOUD = 2


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Level(enum.IntEnum):
    LOW = 3


class Name(enum.StrEnum):
    LEFT = "left"


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = (0.6, 3.3)

    def __init__(self, mass, radius):
        self.mass = mass
        self.radius = radius

    @property
    def density(self):
        return self.mass / self.radius**3


class Coded(enum.Enum):
    A = ("a", 10)
    B = ("b", 20)

    def __new__(cls, value, code):
        member = object.__new__(cls)
        member._value_ = value
        member.code = code
        return member


MEMBERS = {
    "color": Color.BLUE,
    "mode": Mode.LOUD,
    "rights": Rights.WRITE,
    "level": Level.LOW,
    "name": Name.LEFT,
    "planet": Planet.MARS,
    "coded": Coded.B,
}


@check
def enum_members_are_the_parents():
    for (got,) in sent(lambda: [dict(MEMBERS)]):
        equal([name for name, member in MEMBERS.items() if got[name] is not member], [])


@check
def enum_members_are_the_workers():
    class Receives(Plain):
        def receive(self, members):
            return [name for name, member in members.items() if MEMBERS[name] is not member]

        def receive_one(self, member):
            return member is Color.RED, member in {Color.RED: 1}, member.name

    equal(ask([Receives] * 2, "receive", MEMBERS), ([], []))
    equal(ask([Receives] * 2, "receive_one", Color.RED), ((True, True, "RED"),) * 2)


@check
def enum_alias():
    for got in sent(lambda: Aliased.ALIAS):
        assert got is Aliased.ONE


class Opaque(enum.Enum):
    """Its values equal nothing but themselves."""

    MISSING = object()
    DONE = Event(3)


@check
def enum_members_whose_values_equal_nothing_else():
    class Receives(Plain):
        def receive(self, members):
            return members[0] is Opaque.MISSING, members[1] is Opaque.DONE

        def give(self):
            return [Opaque.MISSING, Opaque.DONE]

    with vector_env([Receives], 1) as envs:
        equal(envs.call("receive", [Opaque.MISSING, Opaque.DONE]), ((True, True),))
        missing, done = envs.call("give")[0]
        equal((missing is Opaque.MISSING, done is Opaque.DONE), (True, True))


class Calls(Plain):
    def ask(self, function):
        return function()


GAIN, GAINS = 1, [1]


def two_gains():
    return GAIN, GAINS


@check
def functions_whose_global_has_changed_since():
    global GAIN, GAINS, two_gains

    def anew():
        return GAIN, GAINS

    with vector_env([Calls, lambda: Calls()]) as envs:
        equal(envs.call("ask", lambda: (GAIN, GAINS, two_gains())), ((1, [1], (1, [1])),) * 2)
        GAIN, GAINS, two_gains = 2, [2], anew
        equal(envs.call("ask", lambda: (GAIN, GAINS, two_gains())), ((2, [2], (2, [2])),) * 2)
        GAIN = 3
        equal(envs.call("ask", lambda: (GAIN, GAINS)), ((3, [2]),) * 2)


@check
def classes_defined_anew_in_arguments():
    global Policy
    with vector_env([Calls, lambda: Calls()]) as envs:
        for number in (1, 2):

            class Policy:
                weight = number

                def __call__(self):
                    return Policy.weight, type(self) is Policy

            Policy.__qualname__ = "Policy"
            equal(envs.call("ask", Policy()), ((number, True),) * 2)


UNIT, SCALE = 1, [2]


@check
def global_that_only_some_workers_have():
    global UNIT
    with vector_env([Calls, lambda: Calls()]) as envs:
        equal(envs.call_at(0, "ask", lambda: (UNIT, SCALE)), (1, [2]))
        UNIT = 3
        equal(envs.call("ask", lambda: (UNIT, SCALE)), ((3, [2]),) * 2)


COUPLE = (np.zeros(2), 1)


class HasCouple(Calls):
    def couple(self):
        return COUPLE[1]


@check
def global_tuple_of_arrays_that_has_changed_since():
    global COUPLE
    with vector_env([HasCouple, lambda: HasCouple()]) as envs:
        COUPLE = (np.ones(2), 2)
        equal(envs.call("ask", lambda: (float(COUPLE[0][0]), COUPLE[1])), ((1.0, 2),) * 2)


class Redefined:
    pass


class HasRedefined(Calls):
    kind = Redefined


@check
def class_defined_anew_that_a_function_names_is_warned_of():
    global Redefined
    if DEBUG:
        raise Skip("no code is sent")
    old = Redefined
    with vector_env([HasRedefined, lambda: HasRedefined()]) as envs:
        try:

            class Redefined:
                __qualname__ = "Redefined"

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                envs.call("ask", lambda: Redefined)
        finally:
            Redefined = old
    equal([each.category for each in caught], [RuntimeWarning])
    assert "Redefined was defined anew" in str(caught[0].message) and "cloudpickle" not in caught[0].filename, caught[0]


@check
def functions_without_a_name_are_not_defined_anew():
    def returns(value):
        def local():
            return value

        return local

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vector_env([lambda: Calls(), functools.partial(Sends, returns(3)), Calls]) as envs:
            equal(envs.call_at(0, "ask", lambda: 4), 4)
            equal(envs.call_at(0, "ask", returns(5)), 5)


class UnreachedColor(enum.Enum):
    """No factory reaches it."""

    GREEN = 1
    OPAQUE = object()


@check
def enum_members_that_no_factory_reaches():
    class Returns(Plain):
        def again(self, member):
            return member

    with vector_env([Returns], 1) as envs:
        assert envs.call("again", UnreachedColor.GREEN)[0] is UnreachedColor.GREEN
        assert envs.call("again", [UnreachedColor.OPAQUE])[0][0] is UnreachedColor.OPAQUE


@check
def combined_flags():
    for got in sent(lambda: (Rights.READ | Rights.WRITE, Mode.FAST | Mode.LOUD)):
        equal(got, (Rights.READ | Rights.WRITE, Mode.FAST | Mode.LOUD))
        equal([type(flags) for flags in got], [Rights, Mode])


@check
def enum_members_as_keys():
    for got in sent(lambda: [{Color.RED: 1, Planet.MARS: 2}, {Coded.A}]):
        equal((got[0][Color.RED], got[0][Planet.MARS], Coded.A in got[1]), (1, 2, True))


@check
def enum_classes_keep_their_members():
    before = {cls: dict(cls.__members__) for cls in (Color, Mode, Planet, Coded)}
    Planet.EARTH.mass = 7.0  # the user's
    sent(lambda: [Color.RED, Mode.FAST, Planet.EARTH, Coded.A])
    for cls, members in before.items():
        equal([name for name in members if cls.__members__[name] is not members[name]], [])
    equal(Planet.EARTH.mass, 7.0)


# ------------------------------------------------------------ arguments


class Data:
    mark = "parent"

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(self) is type(other) and self.number == other.number

    __hash__ = None


class Sub(Data):
    pass


class Takes(Plain):
    def __init__(self):
        self.data = Data(0)
        Data.mark = "worker"

    def reset(self, *, seed=None, options=None):
        if options:
            self.data = options["data"]
        return 0, {}

    def take(self, value):
        return isinstance(value, Data), type(value) is Data, value.number, Data.mark

    def take_sub(self, value):
        return isinstance(value, Data), type(value) is Sub, Data.mark

    def own(self):
        return self.take(self.data)

    def again(self, value):
        return value

    def unknown(self, value):
        return type(value).__name__, value.number

    def same_class(self, one, other):
        return type(one) is type(other)


def takes(name, *args):
    with vector_env([Takes] * 2) as envs:
        return envs.call(name, *args)


@check
def instance_as_argument():
    equal(takes("take", Data(3)), ((True, True, 3, "worker"),) * 2)


@check
def instance_of_a_subclass_as_argument():
    equal(takes("take_sub", Sub(3)), ((True, True, "worker"),) * 2)


@check
def instance_of_set_attr():
    with vector_env([Takes] * 2) as envs:
        envs.set_attr("data", [Data(5), Data(6)])
        equal(envs.call("own"), ((True, True, 5, "worker"), (True, True, 6, "worker")))


@check
def instance_in_options_of_reset():
    with vector_env([Takes] * 2) as envs:
        envs.reset(options={"data": Data(7)})
        equal(envs.call("own"), ((True, True, 7, "worker"),) * 2)


@check
def instance_there_and_back():
    mark = Data.mark
    got = takes("again", {"x": [Data(1), Color.RED]})
    equal(got, ({"x": [Data(1), Color.RED]},) * 2)
    assert got[0]["x"][1] is Color.RED
    equal(Data.mark, "worker" if DEBUG else mark)


class Unreached:
    """No factory reaches it."""

    mark = 1

    def __init__(self, number):
        self.number = number


@check
def instance_of_a_class_that_no_factory_reaches():
    with vector_env([Takes] * 2) as envs:
        Unreached.mark = 2
        equal(envs.call("unknown", Unreached(3)), (("Unreached", 3),) * 2)
        equal(envs.call("same_class", Unreached(3), Unreached(4)), (True,) * 2)
        (got, _) = envs.call("again", Unreached(5))
        equal((type(got) is Unreached, got.number, Unreached.mark), (True, 5, 2))


class Actions(gym.Space):
    def sample(self, mask=None, probability=None):
        return Data(1)

    def contains(self, x):
        return type(x) is Data

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None


class ActsOnData(Plain):
    action_space = Actions()

    def __init__(self):
        Data.mark = "worker"

    def step(self, action):
        return 0, float(action.number), type(action) is not Data, Data.mark != "worker", {}


@check
def instance_as_action():
    with vector_env([ActsOnData] * 2) as envs:
        envs.reset()
        result = envs.step([Data(4), Data(5)])
        equal([part.tolist() for part in result[1:4]], [[4, 5], [False, False], [False, False]])


class Keeps(Plain):
    """Changes later what it has sent, and what it was given."""

    def __init__(self):
        self.log = [Data(0)]

    def step(self, action):
        self.log[0].number += 1
        return 0, 0.0, False, False, {"log": self.log}

    def change(self, values):
        values.append(Data(9))
        values[0].number = 8
        return len(values)


@check
def messages_are_copies():
    with vector_env([Keeps], 1) as envs:
        envs.reset()
        first, second = (envs.step([0])[4]["log"][0] for _ in range(2))
        equal((first, second), ([Data(1)], [Data(2)]))
        values = [Data(1)]
        equal((envs.call("change", values), values), ((2,), [Data(1)]))


# ------------------------------------------------------------ functions


def plain(x):
    return x


@functools.cache
def cached(x):
    return [x]


@functools.singledispatch
def dispatched(x):
    return "object"


@dispatched.register
def _(x: int):
    return "int"


PARTIAL = functools.partial(plain, 3)


def wrapper(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


@wrapper
def wrapped(x):
    return x


class Static:
    @staticmethod
    def static():
        return 1

    @classmethod
    def of_class(cls):
        return cls


def identity_of(make):
    """Whether what a function gives is the same object, sent to a worker and back from it."""

    class Compares(Plain):
        def compare(self, value):
            return value is make()

        def give(self):
            return make()

    with vector_env([Compares], 1) as envs:
        return envs.call("compare", make())[0], envs.call("give")[0] is make()


@check
def identity_of_a_function():
    equal(identity_of(lambda: plain), (True, True))


@check
def identity_of_a_cached_function():
    equal(identity_of(lambda: cached), (True, True))


@check
def identity_of_a_generic_function():
    equal(identity_of(lambda: dispatched), (True, True))


@check
def identity_of_a_partial():
    equal(identity_of(lambda: PARTIAL), (True, True))


@check
def identity_of_a_wrapped_function():
    equal(identity_of(lambda: wrapped), (True, True))


@check
def identity_of_a_method():
    equal(identity_of(lambda: Data.__init__), (True, True))


@check
def identity_of_a_static_method():
    equal(identity_of(lambda: Static.static), (True, True))


@check
def identity_of_a_function_of_a_closure():
    def inner():
        return 1

    equal(identity_of(lambda: inner), (True, True))


@check
def functions_still_work_when_sent():
    class Calls(Plain):
        def apply(self, function, *args):
            return function(*args)

    with vector_env([Calls], 1) as envs:
        equal(envs.call("apply", lambda x: Data(x).number, 3), (3,))
        equal(envs.call("apply", plain, Data(4)), (Data(4),))


# ------------------------------------------------------------ exceptions


class MyError(Exception):
    codes = [1]  # noqa: RUF012

    def __init__(self, code, where="here"):
        super().__init__(f"code {code}")
        self.code = code
        self.where = where


class Raises(Plain):
    def step(self, action):
        raise MyError(7, where="there")

    def fail(self):
        raise MyError(8)


@check
def exception_of_a_step():
    before = dict(vars(MyError))
    with vector_env([Raises] * 2) as envs:
        envs.reset()
        error = raised(lambda: envs.step([0, 0]), aioenv.EnvError)
    cause = error.__cause__
    equal((type(cause) is MyError, cause.code, cause.where, str(cause)), (True, 7, "there", "code 7"))
    equal(unchanged(MyError, before), [])


@check
def exception_of_a_call():
    MyError.codes.append(2)
    codes = MyError.codes
    with vector_env([Raises], 1) as envs:
        error = raised(lambda: envs.call("fail"), aioenv.EnvError)
    try:
        raise error.__cause__
    except MyError as exc:
        equal(exc.code, 8)
    assert MyError.codes is codes


@check
def exception_in_an_info():
    for got in sent(lambda: MyError(9)):
        assert type(got) is MyError


# ------------------------------------------------------------ bytes that the standard pickle has made


class Pickles(Plain):
    def dumps(self):
        return pickle.dumps([Data(3), Color.RED, plain])

    def loads(self, data):
        got = pickle.loads(data)
        return type(got[0]) is Data, got[0].number, got[1] is Color.RED, got[2] is plain


@check
def bytes_of_a_worker_in_the_parent():
    (data,) = ask([Pickles], "dumps", workers=1)
    got = pickle.loads(data)
    equal((got[0], got[1] is Color.RED, got[2] is plain), (Data(3), True, True))


@check
def bytes_of_the_parent_in_a_worker():
    data = pickle.dumps([Data(3), Color.RED, plain])
    equal(ask([Pickles], "loads", data, workers=1), ((True, 3, True, True),))


@check
def arrays_of_instances_in_infos():
    array = np.empty(2, object)
    array[:] = [Event(1), Color.RED]
    (got,) = infos([functools.partial(Sends, lambda: copy.copy(array))])["x"]
    equal((type(got[0]) is Event, got[1] is Color.RED), (True, True))


main()
