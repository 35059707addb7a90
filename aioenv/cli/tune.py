"""Find the settings that step an env fastest on this machine, one setting after the other."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from aioenv.cli import contenders
from aioenv.cli.arguments import (
    SYNTHETIC,
    env_problem,
    json_file,
    native_problem,
    positive_float,
    positive_int,
    registered,
)
from aioenv.cli.bench import JSON_HELP, NOISY_CPUS, describe_machine, print_noise
from aioenv.cli.contenders import Outcome, Workload
from aioenv.cli.processes import foreign_load
from aioenv.cli.terminal import STDOUT, closest, did_you_mean, progress, say, short_number, show_table, write_json
from aioenv.ipc.memory import AVAILABLE
from aioenv.platform import usable_cpus
from aioenv.process.channel import CHANNELS, check_channel
from aioenv.worker.making import is_native_task

__all__ = ["HELP", "Dimension", "add_arguments", "dimensions", "paste", "run", "verdict"]

HELP = "find the settings that step an env fastest here"

MARGIN = 0.02  # a smaller difference does not count
CONFIRM_ROUNDS = 5
MAX_WORKERS = 64
# The longest time that is said is longer than what is expected, by this factor and so many seconds.
RESERVE, RESERVE_S = 1.1, 3.0

Settings = dict[str, Any]


@dataclass(frozen=True)
class Dimension:
    """A setting, and the values to try.

    Attributes:
        name: an argument of `make_vec`, or "groups" or "loop".
        values: the default, and the alternatives to try.
        natively: whether a vector env in this process has this setting too.
    """

    name: str
    values: tuple[Any, ...]
    natively: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add("env", metavar="ENV", help="an id (module:id imports the module first), or noop, pixels, uneven")
    add("--num-envs", type=positive_int, default=64, help="(default: 64)")
    add("--rounds", type=positive_int, default=3, help="for each setting, at least 2 (default: 3)")
    add("--seconds", type=positive_float, default=0.6, help="with the clock running, a round (default: 0.6)")
    add("--only", nargs="+", metavar="SETTING", help="try only these settings; --list shows them")
    add("--list", action="store_true", help="show what would be tried")
    add("--json", nargs="?", const=STDOUT, type=json_file, metavar="FILE", help=JSON_HELP)


def dimensions(env: str, num_envs: int) -> list[Dimension]:
    """List the settings that can be chosen, in the order in which they are tried."""
    cpus = usable_cpus()
    workers = [min(cpus, num_envs), *(n for n in (1, 2 * cpus, 4 * cpus) if n <= num_envs), min(num_envs, MAX_WORKERS)]
    channel = check_channel("auto")
    native = native_problem(env) is None
    found = [
        Dimension("backend", ("workers", "native") if native else ("workers",)),
        Dimension("num_workers", tuple(dict.fromkeys(workers))),
        Dimension("channel", (channel, *(other for other in CHANNELS if other != channel))),
        Dimension("transport", ("auto", "frames", "shared") if AVAILABLE else ("auto",)),
    ]
    if num_envs > 1:
        found.append(Dimension("groups", (1, 2), natively=native and is_native_task(registered(env))))
    if importlib.util.find_spec("uvloop") is not None:
        found.append(Dimension("loop", ("uvloop", "asyncio"), natively=True))
    found.append(Dimension("copy", (True, False), natively=True))
    return [dimension for dimension in found if len(dimension.values) > 1]


def verdict(ratios: Sequence[float]) -> str:
    """Judge ratios of single rounds: "better" or "worse" if all agree and the difference counts, else "noise"."""
    middle = statistics.median(ratios)
    if min(ratios) > 1 and middle >= 1 + MARGIN:
        return "better"
    if max(ratios) < 1 and middle <= 1 - MARGIN:
        return "worse"
    return "noise"


def paste(env: str, num_envs: int, settings: Settings) -> list[str]:
    """Write lines of Python that use these settings, which are no defaults."""
    what, lines = repr(env), []
    if env in SYNTHETIC:
        what = SYNTHETIC[env].__name__
        lines = [f"from aioenv.cli.arguments import {what}"]
    keywords = "".join(f", {name}={value!r}" for name, value in settings.items() if name not in ("groups", "loop"))
    lines += [f"envs = aioenv.make_vec({what}, num_envs={num_envs}{keywords})"]
    if settings.get("groups", 1) > 1:
        lines.append(f"await envs.rollout(policy, steps, groups={settings['groups']})  # instead of step after step")
    if settings.get("loop") == "asyncio":
        lines.append("asyncio.run(main())  # instead of aioenv.run(main())")
    return lines


def run(args: argparse.Namespace) -> int:
    """Search; 1 if the env can't be stepped with the defaults, or no longer with the best settings so far."""
    if args.rounds < 2:
        return _refuse("--rounds: one round says nothing about noise; expected at least 2")
    if problem := env_problem(args.env):
        return _refuse(problem)
    found = dimensions(args.env, args.num_envs)
    if unknown := [name for name in args.only or () if name not in {dimension.name for dimension in found}]:
        names = [dimension.name for dimension in found]
        close = did_you_mean(closest(unknown[0], names))
        return _refuse(f"--only: nothing to choose for {unknown}; there are {names}{close}")
    found = [dimension for dimension in found if not args.only or dimension.name in args.only]
    if args.list:
        show_table(("", ""), [(one.name, ", ".join(map(_shown, one.values))) for one in found], texts=2)
        return 0
    say(f"{args.env} x {args.num_envs}, {usable_cpus()} CPUs")
    search = _Search(args, found)
    settings: Settings | None = None
    try:
        search.calibrate()
        if (load := foreign_load(1.0) or 0.0) > NOISY_CPUS:
            say(f"NOT idle: others use {load:.2f} CPUs. Expect noise.", "yellow")
        settings = search.confirm(search.run())
        say("\n" + "\n".join(f"    {line}" for line in paste(args.env, args.num_envs, settings)), "bold", wrap=False)
        if settings.get("backend") == "native":
            search.compare_blocking(settings)
    except _BaselineFailed as exc:
        print(f"aioenv tune: {exc}", file=sys.stderr)
        return 1
    finally:  # write the measurements, however the search ends
        if args.json is not None:
            content = {"machine": describe_machine(), "env": args.env, "num_envs": args.num_envs, "best": settings}
            write_json(args.json, {**content, "stages": search.stages})
    for name, note in NOTES.items():
        if name in settings and settings[name] == note[0]:
            say(f"\n{note[1]}")
    print_noise(search.measured)
    return 0


# Printed with a setting that needs an explanation.
NOTES: dict[str, tuple[Any, str]] = {
    "copy": (False, "copy=False: results are views, valid until the second next step (natively: until the next)."),
    "backend": (
        "native",
        (
            'backend="native": the env\'s own vectorised version, which may seed and reset differently. '
            "The policy took no time here: with one that takes as long as a step, try "
            "`envs.rollout(policy, steps, groups=2)`."
        ),
    ),
}


def _refuse(message: str) -> int:
    print(f"aioenv tune: {message}", file=sys.stderr)
    return 2


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _describe(settings: Settings) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in settings.items()) or "the defaults"


class _BaselineFailed(Exception):
    """The candidate that others are compared with can't be measured; the message says with which settings, and why."""


class _Search:
    """One setting after the other, each candidate against the best so far, in the same rounds.

    Args:
        args: of the command.
        found: the settings to try, in order.

    Attributes:
        stages: the measurements, for the file.
        measured: the results of all rounds.
    """

    def __init__(self, args: argparse.Namespace, found: Sequence[Dimension]) -> None:
        self._args = args
        self._found = found
        self.stages: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []
        self._confirm_rounds = max(CONFIRM_ROUNDS, args.rounds)
        self._workers = min(usable_cpus(), args.num_envs)
        self._a_measurement_s = self._a_worker_s = 0.0  # with the default number of workers, and for each more
        self._began = self._end_s = 0.0

    def calibrate(self) -> None:
        """Measure the defaults, and the most workers, once, and say how long the search takes.

        Raises:
            _BaselineFailed: if the defaults can't be measured.
        """
        most = max((max(d.values) for d in self._found if d.name == "num_workers"), default=self._workers)
        taken = []
        with progress(1 + (most > self._workers)) as show:
            for settings in [{}, {"num_workers": most}][: 1 + (most > self._workers)]:
                began = time.perf_counter()
                outcomes: dict[str, Outcome] = {}
                entries = {_describe(settings): ("aioenv", self._workload(settings))}
                contenders.play_rounds(entries, 1, _progress("how long it takes", show), outcomes=outcomes)
                taken.append(time.perf_counter() - began)
                if not settings and (problem := outcomes[_describe(settings)].problem):
                    raise _BaselineFailed(f"with {_describe(settings)}, {self._args.env} {problem}")
        self._a_measurement_s = taken[0]
        if most > self._workers:
            self._a_worker_s = max(0.0, taken[1] - taken[0]) / (most - self._workers)
        least, longest = self._least_and_longest(most)
        self._began = time.perf_counter()
        longest = longest * RESERVE + RESERVE_S
        self._end_s = self._began + longest
        low, high = _duration(least), _duration(longest)
        span = high if low == high else f"{low} to {high}"
        say(f"Takes {span}: one measurement takes {taken[0]:.1f} s, and how many there are depends on what is faster.")

    def _least_and_longest(self, most: int) -> tuple[float, float]:
        """Return how long the search takes if nothing is better than the defaults, and if the slowest to start is."""
        confirmed = 2 * self._confirm_rounds
        by_defaults = sum(self._stage_s(dimension, {}) for dimension in self._found)
        slowest: Settings = {}
        longest = 0.0
        for dimension in self._found:
            longest += self._stage_s(dimension, slowest)
            if dimension.name == "num_workers":
                slowest = {"num_workers": most}
        longest += self._confirm_rounds * (self._measurement_s({}) + self._measurement_s(slowest))
        least = by_defaults
        if any(dimension.name == "backend" and "native" in dimension.values for dimension in self._found):
            natively = sum(self._stage_s(d, {}) for d in self._found if d.natively or d.name == "backend")
            least = min(least, natively + (confirmed + 2 * self._args.rounds) * self._a_measurement_s)
        return least, max(least, longest)

    def _stage_s(self, dimension: Dimension, best: Settings) -> float:
        """Return how long it is expected to take to try a setting."""
        tried = [best, *({**best, dimension.name: value} for value in dimension.values[1:])]
        rounds: int = self._args.rounds
        return rounds * sum(map(self._measurement_s, tried))

    def _measurement_s(self, settings: Settings) -> float:
        """Return how long one measurement is expected to take."""
        more: int = settings.get("num_workers", self._workers) - self._workers
        return self._a_measurement_s + self._a_worker_s * more

    def run(self) -> Settings:
        """Search; returns the best settings, without defaults. A setting that there is no time for is not tried."""
        best: Settings = {}
        late = []
        expected = 0.0
        for dimension in self._found:
            if best.get("backend") == "native" and not dimension.natively:
                continue  # it concerns workers
            stage = self._stage_s(dimension, best)
            now = time.perf_counter()
            slowness = max(1.0, (now - self._began) / expected) if expected else 1.0
            confirm = self._confirm_rounds * (self._measurement_s({}) + self._measurement_s(best))
            if now + slowness * (stage + confirm) > self._end_s:
                late.append(dimension.name)
                continue
            base = dimension.values[0]
            candidates = {_shown(base): best} | {_shown(v): {**best, dimension.name: v} for v in dimension.values[1:]}
            ratios = self._stage(dimension.name, candidates, self._args.rounds)
            expected += stage
            better = {label: statistics.median(r) for label, r in ratios.items() if verdict(r) == "better"}
            if better:
                best = candidates[max(better, key=better.__getitem__)]
        if late:
            say(f"\nNot tried, since the time is up: {', '.join(late)} (--only tries them alone).", "yellow")
        return best

    def confirm(self, best: Settings) -> Settings:
        """Measure the best settings against the defaults once more: the best of many are partly luck.

        Returns:
            The best settings if they are better again, else the defaults.
        """
        if not best:
            say("\nNothing was faster than the defaults, beyond the noise:")
            return {}
        label = _describe(best)
        ratios = self._stage("once more", {"defaults": {}, label: best}, self._confirm_rounds).get(label)
        if ratios is None:
            say("\nThe best settings could not be measured again; the defaults:")
            return {}
        result = (
            f"{statistics.median(ratios):.2f} times the defaults ({min(ratios):.2f} to {max(ratios):.2f} in rounds)"
        )
        if verdict(ratios) == "better":
            say(f"\nBest: {result}:", "bold green")
            return best
        say(f"\nAfter all the difference is noise: {result}. The defaults are as good:")
        return {}

    def compare_blocking(self, best: Settings) -> None:
        """Compare blocking code with these settings: it steps a vector env in this process on its own thread."""
        settings = {name: value for name, value in best.items() if name not in ("groups", "loop")}
        candidates = {"await": best, "aioenv.sync": settings}
        try:
            ratios = self._stage("blocking code", candidates, self._args.rounds, blocking=("aioenv.sync",))
        except _BaselineFailed as exc:
            say(f"\nBlocking code could not be compared: {exc}")
            return
        if ratio := ratios.get("aioenv.sync"):
            said = {"better": "faster", "worse": "slower", "noise": "as fast"}[verdict(ratio)]
            line = paste(self._args.env, self._args.num_envs, settings)[-1].replace(
                "aioenv.make_vec", "aioenv.sync.make_vec"
            )
            say(f"\nBlocking code is {said} ({statistics.median(ratio):.2f} times):\n")
            say(f"    {line}", "bold", wrap=False)

    def _stage(
        self, title: str, candidates: dict[str, Settings], count: int, *, blocking: Collection[str] = ()
    ) -> dict[str, list[float]]:
        """Measure candidates in turn, print them, and compare them with the first.

        Args:
            title: the name of the stage.
            candidates: settings by label.
            count: how many rounds.
            blocking: labels of candidates that are measured through `aioenv.sync`.

        Returns:
            Label → ratios to the first, one a round, of the candidates that could be measured.

        Raises:
            _BaselineFailed: if the first could not.
        """
        names = {label: "aioenv-native-sync" if label in blocking else "aioenv" for label in candidates}
        entries = {label: (names[label], self._workload(settings)) for label, settings in candidates.items()}
        outcomes: dict[str, Outcome] = {}
        try:
            with progress(count * len(entries)) as show:
                contenders.play_rounds(entries, count, _progress(title, show), outcomes=outcomes)
        except BaseException:  # Ctrl-C: keep the measurements so far
            self._keep(title, candidates, outcomes, {})
            raise
        rates = {
            label: [r["env_steps"] / r["seconds"] for r in o.rounds] for label, o in outcomes.items() if not o.problem
        }
        base = next(iter(outcomes))
        others = [label for label in rates if label != base and base in rates]
        ratios = {label: [a / b for a, b in zip(rates[label], rates[base], strict=True)] for label in others}
        self._keep(title, candidates, outcomes, ratios)
        if problem := outcomes[base].problem:
            raise _BaselineFailed(f"with {_describe(candidates[base])}, {self._args.env} {problem}")
        _print_stage(title, outcomes, rates, ratios)
        return ratios

    def _keep(
        self,
        title: str,
        candidates: dict[str, Settings],
        outcomes: dict[str, Outcome],
        ratios: dict[str, list[float]],
    ) -> None:
        self.measured += [result for outcome in outcomes.values() for result in outcome.rounds]
        self.stages.append(
            {
                "setting": title,
                "candidates": [
                    {
                        "label": label,
                        "settings": candidates[label],
                        "problem": outcome.problem,
                        "rounds": outcome.rounds,
                        "ratios": ratios.get(label, []),
                    }
                    for label, outcome in outcomes.items()
                ],
            }
        )

    def _workload(self, settings: Settings) -> Workload:
        keywords = {name: value for name, value in settings.items() if name not in ("channel", "groups", "loop")}
        plain = {name: settings[name] for name in ("channel", "groups", "loop") if name in settings}
        return Workload(self._args.env, self._args.num_envs, self._args.seconds, keywords=keywords, **plain)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} minutes"


def _progress(title: str, show: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: show(f"{title}: {text.partition(', ')[2]}")


def _print_stage(
    title: str, outcomes: dict[str, Outcome], rates: dict[str, list[float]], ratios: dict[str, list[float]]
) -> None:
    rows = []
    for label, outcome in outcomes.items():
        if not outcome.problem:
            own, r = rates[label], ratios.get(label)
            compared = (f"{statistics.median(r):.2f}", f"{min(r):.2f}-{max(r):.2f}", verdict(r)) if r else ("", "", "")
            spread = f"{short_number(min(own))}-{short_number(max(own))}"
            rows.append((label, f"{statistics.median(own):,.0f}", spread, *compared))
    say()
    show_table((title, "env-steps/s", "min-max", "ratio", "min-max", ""), rows)
    for label, outcome in outcomes.items():
        if outcome.problem:
            say(f"{label}: {outcome.problem}", "dim")
