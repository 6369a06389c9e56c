"""Options of a rule, read from the signature and type hints of its factory.

A value may come from Python (already typed), from YAML or from a command line. All three go
through :func:`coerce`, because YAML 1.1 is a trap: it reads ``1e-3`` as text and ``no`` as False.
A stranger's factory with annotated keyword options is treated as the bundled rules are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import OptionError, nearest

__all__ = ["Option", "coerce", "describe"]

_NONE_WORDS = frozenset({"", "none", "null"})
_BOOL_WORDS = {"true": True, "false": False}
_Factory = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword option of a factory.

    Attributes:
        name: The keyword.
        type: The type as text, ``"float | None"``; ``"any"`` if the factory does not say.
        default: The default; ``inspect.Parameter.empty`` if there is none.
        choices: The words (or numbers) of a ``Literal``; empty for other types.
        python_only: Whether no text gives a value: a config can only leave it out (or say none).
    """

    name: str
    type: str
    default: object
    choices: tuple[object, ...] = ()
    python_only: bool = False

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is inspect.Parameter.empty


def describe(factory: _Factory) -> tuple[Option, ...]:
    """The keyword options of a class or function, in the order of its signature.

    Example:
        >>> def rule(*, step: float | None = None, mode: Literal["a", "b"] = "a"): ...
        >>> for option in describe(rule):
        ...     print(option.name, "/", option.type, "/", option.default, "/", option.choices)
        step / float | None / None / ()
        mode / 'a' | 'b' / a / ('a', 'b')
    """
    parameters, _ = _read_signature(factory)
    return tuple(parameter.option for parameter in parameters)


def coerce(
    factory: _Factory,
    raw: Mapping[str, Any],
    *,
    owner: str = "the rule",
    prefix: str = "",
) -> dict[str, Any]:
    """Turn raw option values into the types that the factory's signature asks for.

    Numbers may be text (``"1e-3"``, ``"1_000"``, ``".5"``) and must be finite; an ``int`` takes
    ``1e2`` and refuses ``1.5``; a ``bool`` takes true and false only and is no number; ``""``,
    ``"none"`` and ``"null"`` are None where None is allowed; a ``Literal`` takes its words only;
    functions and objects can be given in Python only. Options without a type hint, and hints that
    are none of these (``list[float]``), pass as they are.

    Args:
        factory: Class or function with keyword options.
        raw: Option name -> value, typed or not. Options that are left out stay out.
        owner: Whose options they are, for error messages.
        prefix: What stands before a name where the user wrote it, for error messages.

    Raises:
        OptionError: an unknown option, one that is missing and has no default, or a value that it
            does not take; names the option, the value and what is allowed.

    Example:
        >>> def rule(*, step: float = 1.0, mode: Literal["a", "b"] = "a"): ...
        >>> coerce(rule, {"step": "1e-3"})
        {'step': 0.001}
        >>> coerce(rule, {"mode": "c"}, owner="rule 'x'", prefix="craft_")
        Traceback (most recent call last):
        craft_adapters.errors.OptionError: rule 'x': craft_mode must be 'a' or 'b', got 'c'
    """
    parameters, takes_any_name = _read_signature(factory)
    known = {parameter.option.name: parameter for parameter in parameters}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            try:
                values[name] = known[name].read(value)
            except _Refused as refused:
                raise OptionError(f"{owner}: {prefix}{name} {refused}") from None
        elif takes_any_name and isinstance(name, str):
            values[name] = value
        else:
            unknown = f"{owner} has no option {f'{prefix}{name}'!r}"
            tail = nearest(f"{prefix}{name}", [prefix + other for other in known])
            raise OptionError(f"{unknown}; {tail if known else 'it has none'}")
    for name, parameter in known.items():
        if parameter.option.required and name not in raw:
            raise OptionError(f"{owner}: {prefix}{name} must be given: {parameter.allowed}")
    return values


# --- One alternative of a type: float, or None, or the words of a Literal ---------------------


class _Refused(Exception):
    """This does not take the value."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One alternative of an option's type.

    ``label`` is the type in a listing, ``allowed`` are the values in an error message. ``read``
    returns the typed value or raises :class:`_Refused`. Of the alternatives of a union, the one
    with the smallest ``rank`` is asked first: a Literal's words before None, None before text.
    """

    rank: int
    label: str
    allowed: tuple[str, ...]
    read: Callable[[object], object]
    choices: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class _Parameter:
    option: Option
    forms: tuple[_Form, ...]

    @property
    def allowed(self) -> str:
        words = [word for form in self.forms for word in form.allowed]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

    def read(self, value: object) -> object:
        for form in sorted(self.forms, key=lambda form: form.rank):
            try:
                return form.read(value)
            except _Refused:
                continue
        raise _Refused(f"must be {self.allowed}, got {_repr(value)}{self._hint(value)}")

    def _hint(self, value: object) -> str:
        words = [choice for choice in self.option.choices if isinstance(choice, str)]
        takes_text = bool(words) or any(form.read is _read_str for form in self.forms)
        if isinstance(value, bool) and takes_text:
            return (
                "; YAML reads an unquoted yes, no, on or off as true or false: "
                "put the text in quotes"
            )
        if value is None and not self.option.required:
            return "; leave the option out for its default"
        if isinstance(value, str) and (close := get_close_matches(value, words, n=1)):
            return f"; did you mean {close[0]!r}?"
        if isinstance(value, numbers.Real) and takes_text:
            return "; put a number that is meant as text in quotes"
        return ""


def _read_any(value: object) -> object:
    return value


def _read_none(value: object) -> None:
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE_WORDS):
        return
    raise _Refused


def _read_bool(value: object) -> bool:
    if isinstance(value, str):
        value = _BOOL_WORDS.get(value.strip().lower())
    if isinstance(value, bool):
        return value
    raise _Refused


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        raise _Refused
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _Refused from None
    if not math.isfinite(number):
        raise _Refused
    return number


def _read_int(value: object) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    number = _read_float(value)  # also keeps "1e999999999" from becoming a huge int below
    if not number.is_integer():
        raise _Refused
    if not isinstance(value, str):
        return int(number)
    try:
        exact = Decimal(value)  # float("9007199254740993") is another number
    except InvalidOperation:
        raise _Refused from None
    if exact != int(exact):
        raise _Refused
    return int(exact)


def _read_exact_int(value: object) -> int:
    """An int beside a float in one union: there ``1.0`` is the float."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _Refused from None
    if isinstance(value, numbers.Integral):
        return _read_int(value)
    raise _Refused


def _read_str(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _Refused


def _read_callable(value: object) -> object:
    if callable(value):
        return value
    raise _Refused


def _read_choice(choices: tuple[object, ...], value: object) -> object:
    for choice in choices:
        # By type too: an array compares entry by entry. True and False are single: True == 1.
        if value is choice or (
            isinstance(value, type(choice)) and not isinstance(value, bool) and value == choice
        ):
            return choice
    for choice in choices:  # the text of a number, "2" for Literal[2]
        if isinstance(value, str) and not isinstance(choice, str) and str(choice) == value.strip():
            return choice
    raise _Refused


def _read_instance(cls: type, value: object) -> object:
    try:
        fits = isinstance(value, cls)
    except TypeError:  # a protocol that cannot be checked at run time
        fits = True
    if fits:
        return value
    raise _Refused


_ANY = _Form(8, "any", ("anything",), _read_any)
_NONE = _Form(1, "None", ("none",), _read_none)
_SIMPLE = {
    bool: _Form(2, "bool", ("true", "false"), _read_bool),
    int: _Form(3, "int", ("a whole number",), _read_int),
    float: _Form(4, "float", ("a finite number",), _read_float),
    str: _Form(7, "str", ("text",), _read_str),
}
_EXACT_INT = _Form(3, "int", ("a whole number",), _read_exact_int)
_FUNCTION = _Form(6, "function", ("a function (in Python only)",), _read_callable)
_INSTANCE_RANK = 5
_PYTHON_ONLY = frozenset({_INSTANCE_RANK, _FUNCTION.rank})


def _form(hint: Any) -> _Form:
    """The form of one alternative; what is not understood takes anything."""
    if hint is Any or hint is object or hint is inspect.Parameter.empty:
        return _ANY
    if hint is None or hint is type(None):
        return _NONE
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        words = tuple(map(repr, choices))
        read = functools.partial(_read_choice, choices)
        return _Form(0, " | ".join(words), words, read, choices)
    if hint is Callable or origin is Callable:
        return _FUNCTION
    # list[float] passes for a type on Python 3.10, but not for isinstance.
    if origin is None and isinstance(hint, type):
        if hint in _SIMPLE:
            return _SIMPLE[hint]
        name = _import_name(hint)
        allowed = (f"a {name} object (in Python only)",)
        return _Form(_INSTANCE_RANK, name, allowed, functools.partial(_read_instance, hint))
    label = str(getattr(hint, "__forward_arg__", hint)).removeprefix("typing.")
    return _Form(8, label, ("anything",), _read_any)


def _import_name(cls: type) -> str:
    """``torch.device``: where a user imports it from, not the private module that holds it."""
    package = cls.__module__.partition(".")[0]
    with contextlib.suppress(Exception):  # a stranger's package may have its own __getattr__
        if package != "builtins" and getattr(sys.modules[package], cls.__name__) is cls:
            return f"{package}.{cls.__name__}"
    return cls.__name__


def _alternatives(hint: Any) -> Iterable[Any]:
    if type(hint).__name__ == "TypeAliasType":  # `type X = ...`, Python 3.12
        hint = hint.__value__
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    elif get_origin(hint) is Literal and None in get_args(hint):
        if words := tuple(word for word in get_args(hint) if word is not None):
            yield Literal[words]
        yield None
    else:
        yield hint


# --- The signature ----------------------------------------------------------------------------


def _read_signature(factory: _Factory) -> tuple[tuple[_Parameter, ...], bool]:
    """The keyword options, and whether the factory takes any other name too (``**kwargs``)."""
    try:
        signature = _signature(factory)
    except (TypeError, ValueError):  # a factory written in C that does not tell
        return (), True
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    namespace = _namespace(factory)
    parameters = tuple(
        _parameter(parameter, namespace)
        for parameter in signature.parameters.values()
        if parameter.kind in by_keyword
    )
    takes_any_name = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )
    return parameters, takes_any_name


def _signature(factory: _Factory) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # annotations are evaluated late there, names may be missing
        from annotationlib import Format

        return inspect.signature(factory, annotation_format=Format.FORWARDREF)
    return inspect.signature(factory)


def _parameter(parameter: inspect.Parameter, namespace: dict[str, Any]) -> _Parameter:
    forms = [_form(part) for part in _alternatives(_resolve(parameter.annotation, namespace))]
    if _SIMPLE[float] in forms:
        forms = [_EXACT_INT if form is _SIMPLE[int] else form for form in forms]
    # `x: int = None`; a hint that could not be read takes None anyway.
    if parameter.default is None and all(
        form.rank not in (_NONE.rank, _ANY.rank) for form in forms
    ):
        forms.append(_NONE)
    option = Option(
        name=parameter.name,
        type=" | ".join(form.label for form in forms),
        default=parameter.default,
        choices=tuple(choice for form in forms for choice in form.choices),
        python_only={form.rank for form in forms} - {_NONE.rank} <= _PYTHON_ONLY,
    )
    return _Parameter(option, tuple(forms))


def _resolve(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Evaluate one annotation; one that cannot be (imported for type checkers only) stays text.

    One at a time, since ``get_type_hints`` gives up on all of them where one name is missing.
    """

    def carrier() -> None: ...

    carrier.__annotations__ = {"hint": annotation}
    try:
        return get_type_hints(carrier, globalns=namespace)["hint"]
    except Exception:  # whatever a stranger's annotation raises
        return annotation


def _namespace(factory: Any) -> dict[str, Any]:
    """The globals of the function whose signature counts."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, type):
        own = (vars(base).get(name) for base in factory.__mro__ for name in _CONSTRUCTORS)
        functions = (getattr(found, "__func__", found) for found in own)  # __new__ is static
        factory = next(filter(inspect.isfunction, functions), factory)
    elif not inspect.isroutine(factory):
        factory = type(factory).__call__
    namespace = getattr(inspect.unwrap(factory), "__globals__", {})
    return namespace if isinstance(namespace, dict) else {}


_CONSTRUCTORS = ("__init__", "__new__")


def _repr(value: object) -> str:
    """Short: a whole tensor or a YAML block does not help in an error message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)
