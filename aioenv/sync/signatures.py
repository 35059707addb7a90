"""Arguments that are passed on as they are: type checkers, `help` and notebooks see whose they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["like_function", "like_method", "signed"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def signed(theirs: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function or method that passes all of its arguments on; type checkers are told otherwise."""

    def decorate(ours: F) -> F:
        own = inspect.signature(ours)
        signature = inspect.signature(theirs).replace(return_annotation=own.return_annotation)
        ours.__signature__ = signature  # type: ignore[attr-defined]
        return ours

    return decorate


def like_function(theirs: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorates a function that passes all of its arguments on to another one."""
    return signed(theirs)


def like_method(
    theirs: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorates a method that passes all of its arguments on to one of another class."""
    return signed(theirs)
