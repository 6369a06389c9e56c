"""Which entries of a model are shared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from craft_adapters.errors import OptionError

__all__ = ["Pattern", "chooser"]

Pattern = str | Callable[[str], bool]


def chooser(pattern: Pattern | None) -> Callable[[Iterable[str]], list[str]]:
    """From entry names to those that are shared.

    Args:
        pattern: A regular expression that matches the whole name of a shared entry, or a function
            that says so; None: all are shared.

    Raises:
        OptionError: no regular expression. What is returned raises it if nothing is shared.

    Example:
        >>> chooser(r"(?!head).*")(["body.weight", "head.weight"])
        ['body.weight']
    """
    if pattern is None:
        return list
    test: Callable[[str], object]
    if callable(pattern):
        test = pattern
    else:
        try:
            test = re.compile(pattern).fullmatch
        except (re.error, TypeError) as error:
            raise OptionError(f"shared: {pattern!r} is no regular expression ({error})") from None

    def choose(names: Iterable[str]) -> list[str]:
        known = list(names)
        chosen = [name for name in known if test(name)]
        if not chosen:
            raise OptionError(
                f"shared: {pattern!r} matches no entry of the model; it has {', '.join(known)}"
            )
        return chosen

    return choose
