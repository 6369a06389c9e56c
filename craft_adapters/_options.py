"""A rule's options, read off the signature of what makes it.

A stranger's factory with annotated keyword arguments gets the same checks, listing and reading
from text as the bundled rules.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from .errors import OptionError, nearest

__all__ = ["Option", "check", "coerce", "describe"]

Factory = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword argument of a factory.

    Attributes:
        name: Its name.
        kinds: The alternatives of its annotation: types, ``Literal`` members' types left out.
        choices: Members of its ``Literal``, if any.
        default: Its default, or ``inspect.Parameter.empty``.
    """

    name: str
    kinds: tuple[Any, ...]
    choices: tuple[Any, ...]
    default: Any

    @property
    def allowed(self) -> str:
        """What it takes, in words."""
        parts = [repr(choice) for choice in self.choices]
        parts += [_NAMES.get(kind, getattr(kind, "__name__", str(kind))) for kind in self.kinds]
        return " or ".join(parts) if parts else "anything"

    def accepts(self, value: Any) -> bool:
        """Whether a Python value is of its type."""
        if not self.kinds and not self.choices:
            return True
        if any(value is choice or value == choice for choice in self.choices):
            return not isinstance(value, bool) or True in self.choices or False in self.choices
        return any(_is_of(value, kind) for kind in self.kinds)


_NAMES = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    type(None): "none",
    Callable: "a function (in Python)",
}


def describe(factory: Factory) -> tuple[Option, ...]:
    """The keyword options of a class or function.

    Example:
        >>> def rule(*, lr: float | None = None, mode: Literal["a", "b"] = "a"): ...
        >>> [(option.name, option.allowed) for option in describe(rule)]
        [('lr', 'a number or none'), ('mode', "'a' or 'b'")]
    """
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that only a type checker can read
        hints = {}
    options = []
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            kinds, choices = _alternatives(hints.get(parameter.name))
            options.append(Option(parameter.name, kinds, choices, parameter.default))
    return tuple(options)


def check(factory: Factory, options: Mapping[str, Any], *, owner: str) -> None:
    """Refuse unknown options and values of a wrong type.

    Raises:
        OptionError: names the option, the value, and what is allowed.
    """
    for name, value in options.items():
        option = _find(factory, name, owner=owner, prefix="")
        if option is not None and not option.accepts(value):
            raise OptionError(f"{owner}: {name} must be {option.allowed}, got {value!r}")


def coerce(
    factory: Factory, raw: Mapping[str, Any], *, owner: str = "the rule", prefix: str = ""
) -> dict[str, Any]:
    """Options as a configuration file or a command line has them, as the factory wants them.

    YAML reads ``1e-3`` as text and ``no`` as False; a command line reads everything as text.

    Args:
        factory: What the options are for.
        raw: Option name -> value, without the prefix.
        owner: Whose options they are, for messages.
        prefix: What precedes names in the configuration, for messages.

    Raises:
        OptionError: an unknown name, with the nearest known one; a value that does not fit.

    Example:
        >>> def rule(*, lr: float | None = 0.1, steps: int = 1): ...
        >>> coerce(rule, {"lr": "1e-3", "steps": "1e2"})
        {'lr': 0.001, 'steps': 100}
    """
    options = {}
    for name, value in raw.items():
        option = _find(factory, name, owner=owner, prefix=prefix)
        options[name] = value if option is None else _read(option, value, prefix + name)
    return options


def _find(factory: Factory, name: str, *, owner: str, prefix: str) -> Option | None:
    """The option of that name; None if the factory takes any keyword."""
    known = {option.name: option for option in describe(factory)}
    if name in known:
        return known[name]
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    hint = nearest(prefix + name, [prefix + other for other in known])
    raise OptionError(f"{owner} has no option {prefix + name!r}; {hint}")


def _read(option: Option, value: Any, key: str) -> Any:
    if isinstance(value, str):
        for read in (_as_choice, _as_none, _as_bool, _as_number):
            result = read(option, value)
            if result is not _UNREAD:
                return result
        if str in option.kinds or not (option.kinds or option.choices):
            return value
    elif option.accepts(value):
        if int in option.kinds and float not in option.kinds and isinstance(value, float):
            return int(value)
        return value
    elif int in option.kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    hint = ""
    if isinstance(value, bool) and option.choices:
        hint = "; YAML reads yes, no, on and off as true and false: put quotes around the word"
    elif isinstance(value, str) and option.choices:
        hint = "; " + nearest(value, [str(choice) for choice in option.choices])
    raise OptionError(f"{key} must be {option.allowed}, got {value!r}{hint}")


_UNREAD = object()


def _as_choice(option: Option, text: str) -> Any:
    return text if text in option.choices else _UNREAD


def _as_none(option: Option, text: str) -> Any:
    wanted = text.strip().lower() in ("", "none", "null", "~")
    return None if wanted and type(None) in option.kinds else _UNREAD


def _as_bool(option: Option, text: str) -> Any:
    words = {"true": True, "false": False}
    return words.get(text.strip().lower(), _UNREAD) if bool in option.kinds else _UNREAD


def _as_number(option: Option, text: str) -> Any:
    if float not in option.kinds and int not in option.kinds:
        return _UNREAD
    try:
        number = float(text)
    except ValueError:
        return _UNREAD
    if not math.isfinite(number):
        return _UNREAD
    if float in option.kinds:
        return number
    return int(number) if number.is_integer() else _UNREAD


def _alternatives(hint: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The types and the literal choices of an annotation."""
    if hint is None or hint is Any:
        return (), ()
    origin = get_origin(hint)
    if origin is Literal:
        return (), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds: list[Any] = []
        choices: list[Any] = []
        for alternative in get_args(hint):
            inner_kinds, inner_choices = _alternatives(alternative)
            kinds += inner_kinds
            choices += inner_choices
        return tuple(kinds), tuple(choices)
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return (Callable,), ()
    return (origin or hint,), ()


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Callable:
        return callable(value)
    if kind in (float, int):
        if isinstance(value, bool):
            return False
        number = isinstance(value, int | float if kind is float else int)
        return number and math.isfinite(value)
    return not isinstance(kind, type) or isinstance(value, kind)
