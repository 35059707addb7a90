"""State of classes, globals, closures and defaults: one in each process."""

import collections
import functools
import itertools
import random

import gymnasium as gym
import numpy as np

import aioenv
from aioenv import sync
from tests.definitions.script_checks import (
    DEBUG,
    START,
    Plain,
    Skip,
    ask,
    check,
    counts,
    equal,
    main,
    options,
    vector_env,
)

# ------------------------------------------------------------ a registry that envs are in

SIMS = {}


class Sim(Plain):
    def __init__(self):
        self.key = len(SIMS)
        SIMS[self.key] = 0

    def step(self, action):
        SIMS[self.key] += 1
        return 0, float(SIMS[self.key]), False, False, {}


def second_step(envs):
    try:
        envs.reset()
        envs.step([0] * 4)
        return list(envs.step([0] * 4)[1])
    finally:
        envs.close()


@check
def registry_of_a_class():
    equal(second_step(vector_env([Sim] * 4)), [2, 2, 2, 2])


@check
def registry_of_lambdas():
    equal(second_step(vector_env([lambda: Sim() for _ in range(4)])), [2, 2, 2, 2])


@check
def registry_of_partials_and_lambdas():
    factories = [Sim, functools.partial(Sim), lambda: Sim(), aioenv.EnvCreator(Sim)]
    equal(second_step(vector_env(factories)), [2, 2, 2, 2])


@check
def registry_in_make_vec():
    equal(second_step(sync.make_vec(Sim, 4, **options())), [2, 2, 2, 2])


@check
def registry_in_the_drop_in():
    if DEBUG:
        raise Skip("the drop-in has no debug=True")
    envs = sync.AsyncVectorEnv([Sim] * 4, context=START, num_workers=2)
    equal(second_step(envs), [2, 2, 2, 2])


@check
def registry_of_creators():
    equal(second_step(vector_env([aioenv.EnvCreator(Sim) for _ in range(4)])), [2, 2, 2, 2])


@check
async def registry_in_the_async_api():
    async with aioenv.AsyncVectorEnv([Sim] * 4, **options()) as envs:
        await envs.reset()
        await envs.step([0] * 4)
        equal((await envs.step([0] * 4)).reward.tolist(), [2, 2, 2, 2])


@check
async def registry_in_make_vec_of_the_async_api():
    async with aioenv.make_vec(Sim, 4, **options()) as envs:
        await envs.reset()
        await envs.step([0] * 4)
        equal((await envs.step([0] * 4)).reward.tolist(), [2, 2, 2, 2])


@check
def registry_in_the_adapter_of_stable_baselines3():
    try:
        import stable_baselines3  # noqa: F401
    except ImportError as exc:
        raise Skip("Stable-Baselines3 is not installed") from exc
    from aioenv.adapters import sb3

    equal(second_step(sb3.VecEnv([Sim] * 4, **options())), [2, 2, 2, 2])


# ------------------------------------------------------------ class attributes


class Engine:
    made = 0

    def __init__(self):
        Engine.made += 1


class WithEngine(Plain):
    _engine = None

    def __init__(self):
        if WithEngine._engine is None:
            WithEngine._engine = Engine()
        self.engine = self._engine

    def seen(self):
        return Engine.made, self.engine is WithEngine._engine is type(self)._engine


@check
def class_attribute_made_once():
    equal(ask([WithEngine] * 4, "seen"), ((1, True),) * 4)


class Numbered(Plain):
    numbers = itertools.count(1)

    def __init__(self):
        self.number = next(Numbered.numbers)


@check
def counter_of_itertools():
    equal(ask([Numbered] * 4, "number"), counts())


class WithPort(Plain):
    next_port = 9001

    def __init__(self):
        self.port = self.next_port
        type(self).next_port += 1


@check
def port_numbers():
    equal(ask([WithPort] * 4, "port"), counts(9001))


class Shared(Plain):
    made = 0

    def __init__(self):
        Shared.made += 1
        self.number = Shared.made


class Left(Shared):
    pass


class Right(Shared):
    pass


@check
def attribute_of_a_common_base():
    equal(ask([Left, Right, Left, Right], "number"), counts())


class WithClassMethod(Plain):
    made = []  # noqa: RUF012

    @classmethod
    def make(cls):
        cls.made.append(cls)
        env = cls()
        env.number = len(WithClassMethod.made)
        return env


@check
def classmethod_as_factory():
    equal(ask([WithClassMethod.make] * 4, "number"), counts())


class Maker:
    def __init__(self):
        self.made = 0

    def make(self):
        self.made += 1
        return WithNumber(self.made)


class WithNumber(Plain):
    def __init__(self, number):
        self.number = number


@check
def bound_method_as_factory():
    maker = Maker()
    equal(ask([maker.make] * 4, "number"), counts())


@check
def bound_methods_of_one_object():
    maker = Maker()
    equal(ask([maker.make, maker.make, lambda: maker.make(), functools.partial(maker.make)], "number"), counts())


# ------------------------------------------------------------ registries of classes


class Backend(Plain):
    ports = {}  # noqa: RUF012

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.port = 9001 + len(Backend.ports)
        Backend.ports[cls.__qualname__] = cls.port

    def registered(self):
        return dict(Backend.ports)


def backend(number):
    return type(f"Made{number}", (Backend,), {"slot": number})


MADE = [backend(number) for number in range(4)]


@check
def subclasses_of_a_function_and_their_ports():
    with vector_env(MADE) as envs:
        equal(envs.call("port"), tuple(made.port for made in MADE))
        equal(envs.call("slot"), (0, 1, 2, 3))


class Plugins(Plain):
    names = []  # noqa: RUF012

    def __init_subclass__(cls, /, name, **kwargs):
        super().__init_subclass__(**kwargs)
        Plugins.names.append(name)

    def seen(self):
        return list(Plugins.names), len(Plugins.__subclasses__())


class First(Plugins, name="first"):
    pass


class Second(Plugins, name="second"):
    pass


@check
def init_subclass_with_arguments():
    equal(ask([First, Second, First, Second], "seen"), ((["first", "second"], 2),) * 4)


class Meta(type(Plain)):
    made = 0
    names = []  # noqa: RUF012

    def __new__(mcs, name, bases, namespace, **kwargs):
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        mcs.made += 1
        cls.number = mcs.made
        return cls

    def __init__(cls, name, bases, namespace, **kwargs):
        super().__init__(name, bases, namespace, **kwargs)
        Meta.names.append(name)


class WithMeta(Plain, metaclass=Meta):
    def seen(self):
        return Meta.made, self.number, Meta.names, type(type(self)) is Meta


class WithMetaToo(WithMeta):
    pass


@check
def counter_of_a_metaclass():
    equal(
        ask([WithMeta, WithMetaToo], "seen", workers=1),
        tuple((2, n, ["WithMeta", "WithMetaToo"], True) for n in (1, 2)),
    )


class Column:
    made = 0

    def __set_name__(self, owner, name):
        Column.made += 1
        self.name, self.index = name, Column.made


class Table(Plain):
    a = Column()
    b = Column()

    def seen(self):
        return Column.made, self.a.name, self.a.index, self.b.name, self.b.index


@check
def set_name_is_called_once():
    equal(ask([Table] * 2, "seen", workers=1), ((2, "a", 1, "b", 2),) * 2)


TASKS = {}


def task(name):
    def register(cls):
        assert name not in TASKS, f"{name} is registered twice"
        TASKS[name] = cls
        return cls

    return register


@task("run")
class Run:
    pass


@task("jump")
class Jump:
    pass


class WithTasks(Plain):
    def seen(self):
        return list(TASKS), TASKS["run"] is Run, TASKS["jump"] is Jump


@check
def decorator_with_a_registry():
    equal(ask([WithTasks] * 4, "seen"), ((["run", "jump"], True, True),) * 4)


class Singleton(type):
    instances = {}  # noqa: RUF012

    def __call__(cls, *args):
        if cls not in Singleton.instances:
            Singleton.instances[cls] = super().__call__(*args)
        return Singleton.instances[cls]


class Assets(metaclass=Singleton):
    loaded = 0

    def __init__(self):
        Assets.loaded += 1


class WithAssets(Plain):
    def __init__(self):
        self.assets = Assets()

    def seen(self):
        return Assets.loaded, self.assets is Assets()


@check
def singleton_of_a_metaclass():
    equal(ask([WithAssets] * 4, "seen"), ((1, True),) * 4)


# ------------------------------------------------------------ functions, closures, defaults


def make_factories():
    made = 0

    def make():
        nonlocal made
        made += 1
        return WithNumber(made)

    def make_too():
        nonlocal made
        made += 1
        return WithNumber(made)

    return make, make_too


@check
def variable_of_a_closure():
    make, _ = make_factories()
    equal(ask([make] * 4, "number"), counts())


@check
def variable_that_two_closures_share():
    make, make_too = make_factories()
    equal(ask([make, make_too, make, make_too], "number"), counts())


def local_class():
    total = 0

    class Local(Plain):
        def __init__(self):
            self.add()

        def add(self):
            nonlocal total
            total += 1
            self.number = total

        def total(self):
            return total

    return Local


@check
def variable_that_methods_of_a_local_class_share():
    Local = local_class()
    with vector_env([Local] * 4) as envs:
        equal(envs.call("number"), counts())
        equal(envs.call("total"), (4 if DEBUG else 2,) * 4)


def make_by_attribute():
    make_by_attribute.made += 1
    return WithNumber(make_by_attribute.made)


make_by_attribute.made = 0


@check
def attribute_of_a_function():
    equal(ask([make_by_attribute] * 4, "number"), counts())


def make_by_default(seen=[]):  # noqa: B006
    seen.append(None)
    return WithNumber(len(seen))


@check
def mutable_default():
    equal(ask([make_by_default, lambda: make_by_default()] * 2, "number"), counts())


COUNT = 0


def make_by_global():
    global COUNT
    COUNT += 1
    return WithNumber(count_now())


def count_now():
    return COUNT


@check
def global_that_is_assigned():
    global COUNT
    COUNT = 10
    equal(ask([make_by_global, lambda: make_by_global()] * 2, "number"), counts(11))
    equal(COUNT, 14 if DEBUG else 10)


@check
def second_vector_env_starts_from_the_parents_state():
    global COUNT
    COUNT = 0
    with vector_env([make_by_global] * 4):
        COUNT = 20
        equal(ask([make_by_global] * 4, "number"), counts(21))


_MISSING = object()


def default_of(value=_MISSING):
    return value is _MISSING


class WithSentinel(Plain):
    missing = _MISSING

    def seen(self, value=_MISSING):
        return value is _MISSING is self.missing, default_of()


@check
def sentinel_as_default_and_global():
    equal(ask([WithSentinel, lambda: WithSentinel()], "seen", workers=1), ((True, True),) * 2)


BY_NAME = collections.defaultdict(list)
ALIAS = BY_NAME


class WithAlias(Plain):
    def __init__(self):
        BY_NAME["x"].append(1)

    def seen(self):
        return ALIAS is BY_NAME, len(ALIAS["x"])


@check
def two_names_of_one_object():
    equal(ask([WithAlias, lambda: WithAlias()] * 2, "seen"), ((True, 4 if DEBUG else 2),) * 4)


RNG = np.random.default_rng(5)
RANDOM = random.Random(5)


class Draws(Plain):
    def __init__(self):
        self.drawn = int(RNG.integers(1000)), RANDOM.randrange(1000)


@check
def global_generators():
    rng, other = np.random.default_rng(5), random.Random(5)
    drawn = [(int(rng.integers(1000)), other.randrange(1000)) for _ in range(4)]
    equal(ask([Draws, lambda: Draws()] * 2, "drawn"), tuple(drawn if DEBUG else drawn[:2] * 2))


# ------------------------------------------------------------ objects that factories share


class WithConfig(Plain):
    def __init__(self, config):
        self.config = config
        config["made"] = config.get("made", 0) + 1
        self.number = config["made"]

    def is_global(self):
        return self.config is CONFIG


CONFIG = {}


@check
def dict_that_partials_share():
    config = {}
    equal(ask([functools.partial(WithConfig, config) for _ in range(4)], "number"), counts())


@check
def dict_that_lambdas_and_partials_share():
    config = {}
    factories = [functools.partial(WithConfig, config), lambda: WithConfig(config)] * 2
    equal(ask(factories, "number"), counts())


@check
def dict_that_is_an_argument_and_a_global():
    equal(ask([functools.partial(WithConfig, CONFIG) for _ in range(4)], "is_global"), (True,) * 4)


@check
def dict_that_creators_share():
    config = {}
    equal(ask([aioenv.EnvCreator(WithConfig, config) for _ in range(4)], "number"), counts())


@check
def keyword_of_make_vec():
    with sync.make_vec(WithConfig, 4, config={}, **options()) as envs:
        equal(envs.call("number"), counts())


class CountingWrapper(gym.Wrapper):
    wrapped = 0

    def __init__(self, env):
        super().__init__(env)
        CountingWrapper.wrapped += 1
        self.number = CountingWrapper.wrapped


@check
def wrapper_of_make_vec():
    with sync.make_vec(Plain, 4, wrappers=[CountingWrapper], **options()) as envs:
        equal(envs.call("number"), counts())


main()
