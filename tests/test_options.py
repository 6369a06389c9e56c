"""Options from YAML, a command line or Python, by the signature of the factory."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import numpy as np
import pytest

from craft_adapters._options import Option, coerce, describe
from craft_adapters.errors import OptionError

if TYPE_CHECKING:
    from somewhere import Missing

Targets = Literal["examples", "uniform", "sqrt"] | Callable[[Any], Any]


class Rule:
    def __init__(
        self,
        *,
        server_lr: float | None = None,
        threshold: float = 1e-6,
        rounds: int = 1,
        verbose: bool = False,
        reference: Literal["previous", "zero", "ema"] = "previous",
        targets: Targets = "examples",
        device: str = "auto",
        layout: Fraction | None = None,  # an object that only Python can give
        anything=None,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name != "self"}


def one(name: str, value: object) -> object:
    return coerce(Rule, {name: value})[name]


def refuse(factory: Callable[..., object], raw: Mapping[str, object], **names: str) -> str:
    with pytest.raises(OptionError) as caught:
        coerce(factory, raw, **names)
    return str(caught.value)


# --- Numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("1e-3", 1e-3),  # what YAML 1.1 makes of 1e-3
        ("1e2", 100.0),
        (".5", 0.5),
        ("-2", -2.0),
        (" 3 ", 3.0),
        ("1_000", 1000.0),  # as PyYAML reads it without quotes
        (3, 3.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(4), 4.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_float(value: object, number: float) -> None:
    read = one("threshold", value)
    assert type(read) is float
    assert read == number


@pytest.mark.parametrize(
    "value",
    [
        *("abc", "", "nan", "inf", "-inf", "1e400", "1,5", "0x10", "none", None, True, False),
        *(math.nan, math.inf, 10**400, [1.0], {}, 1j, np.float32("nan"), np.bool_(True)),
    ],
    ids=repr,
)
def test_not_a_float(value: object) -> None:
    assert "threshold must be a finite number, got" in refuse(Rule, {"threshold": value})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *(("1e2", 100), ("7", 7), ("1_000", 1000), ("100.0", 100), (1e2, 100), (np.int32(3), 3)),
        ("9007199254740993", 9007199254740993),  # no float
    ],
)
def test_int(value: object, number: int) -> None:
    read = one("rounds", value)
    assert type(read) is int
    assert read == number


@pytest.mark.parametrize(
    "value",
    [
        *("1.5", 1.5, True, "true", "nan", "inf", math.inf, "1e999999999", None, "", "two"),
        *("0.1e-400", "9007199254740992.5"),  # whole as floats
    ],
    ids=repr,
)
def test_not_an_int(value: object) -> None:
    assert "rounds must be a whole number, got" in refuse(Rule, {"rounds": value})


def test_an_int_or_a_float_is_what_it_looks_like() -> None:
    def rule(*, clients: int | float = 1) -> None: ...

    for value, typed in {"1": 1, "1.0": 1.0, "1e2": 100.0}.items():
        read = coerce(rule, {"clients": value})["clients"]
        assert type(read) is type(typed) and read == typed
    assert type(coerce(rule, {"clients": 1.0})["clients"]) is float
    assert type(coerce(rule, {"clients": 1})["clients"]) is int
    assert "a whole number or a finite number, got True" in refuse(rule, {"clients": True})


# --- true, false and none ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_true(value: object) -> None:
    assert one("verbose", value) is True


def test_false() -> None:
    assert one("verbose", False) is one("verbose", "false") is False


@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", "no", "1", "", None], ids=repr)
def test_not_a_bool(value: object) -> None:
    message = refuse(Rule, {"verbose": value})
    assert f"verbose must be true or false, got {value!r}" in message


@pytest.mark.parametrize("value", [None, "none", "None", "null", "", " "], ids=repr)
def test_none(value: object) -> None:
    assert one("server_lr", value) is None
    assert one("layout", value) is None


def test_none_where_it_is_not_allowed() -> None:
    message = refuse(Rule, {"threshold": None})
    assert message.endswith("got None; leave the option out for its default")


def test_the_default_none_is_allowed_without_a_hint_that_says_so() -> None:
    def rule(*, steps: int = None) -> None: ...  # type: ignore[assignment] # noqa: RUF013

    assert coerce(rule, {"steps": None}) == {"steps": None}
    assert describe(rule)[0].type == "int | None"


# --- Words ------------------------------------------------------------------------------------


def test_choice() -> None:
    assert one("reference", "zero") == "zero"
    assert refuse(Rule, {"reference": "zreo"}) == (
        "the rule: reference must be 'previous', 'zero' or 'ema', got 'zreo'; did you mean 'zero'?"
    )


def test_yaml_reads_no_and_off_as_false() -> None:
    def rule(*, clipping: Literal["no", "norm"] = "no") -> None: ...

    for factory, name in [(rule, "clipping"), (Rule, "device")]:
        message = refuse(factory, {name: False})
        assert "got False; YAML reads an unquoted yes, no, on or off as true or false" in message
        assert "put the text in quotes" in message


def test_numbers_among_the_choices() -> None:
    def rule(*, norm: Literal[1, 2, "inf", True] = 2) -> None: ...

    assert coerce(rule, {"norm": "2"}) == {"norm": 2}
    assert coerce(rule, {"norm": "inf"}) == {"norm": "inf"}
    assert coerce(rule, {"norm": True})["norm"] is True
    assert type(coerce(rule, {"norm": 1})["norm"]) is int
    refuse(rule, {"norm": 3})
    refuse(rule, {"norm": False})


def test_a_choice_called_none_is_the_word() -> None:
    def rule(*, clipping: Literal["none", "norm"] | None = None) -> None: ...

    assert coerce(rule, {"clipping": "none"}) == {"clipping": "none"}
    assert coerce(rule, {"clipping": ""}) == {"clipping": None}


def test_none_among_the_choices() -> None:
    def rule(*, clipping: Literal["norm", None] = None, nothing: Literal[None] = None) -> None: ...

    assert [option.type for option in describe(rule)] == ["'norm' | None", "None"]
    assert coerce(rule, {"clipping": "null", "nothing": ""}) == {"clipping": None, "nothing": None}
    assert "clipping must be 'norm' or none, got 'x'" in refuse(rule, {"clipping": "x"})


def test_true_among_the_choices_is_not_one() -> None:
    def rule(*, clip: Literal[True, "auto"] = "auto", depth: Literal[1, 2] = 1) -> None: ...

    assert coerce(rule, {"clip": True})["clip"] is True
    for value in (1, 1.0, False, np.ones(2)):
        refuse(rule, {"clip": value})
    for value in (True, 1.0, "1.0"):
        refuse(rule, {"depth": value})


def test_text() -> None:
    assert one("device", "cuda:0") == "cuda:0"
    assert one("device", "none") == "none"
    assert "put a number that is meant as text in quotes" in refuse(Rule, {"device": 0})


# --- What only Python can give ----------------------------------------------------------------


def test_a_callable_beside_words() -> None:
    assert one("targets", "sqrt") == "sqrt"
    assert one("targets", len) is len
    assert refuse(Rule, {"targets": "len"}).endswith(
        "must be 'examples', 'uniform', 'sqrt' or a function (in Python only), got 'len'"
    )


def test_an_object() -> None:
    layout = Fraction(1, 2)
    assert one("layout", layout) is layout
    message = refuse(Rule, {"layout": "x"})
    assert "layout must be a fractions.Fraction object (in Python only) or none, got 'x'" in message
    refuse(Rule, {"layout": Fraction})


def test_values_that_are_too_long_to_show_are_cut() -> None:
    assert len(refuse(Rule, {"threshold": "x" * 10_000})) < 300
    assert len(refuse(Rule, {"threshold": np.zeros(10_000)})) < 300


# --- Names ------------------------------------------------------------------------------------


def test_unknown_name() -> None:
    message = refuse(Rule, {"referense": "zero"}, owner="rule 'craft'", prefix="craft_")
    assert message.startswith(
        "rule 'craft' has no option 'craft_referense'; did you mean 'craft_reference'? Known: "
    )
    assert refuse(lambda: None, {"x": 1}) == "the rule has no option 'x'; it has none"


def test_yaml_reads_a_key_called_no_as_false() -> None:
    assert "has no option 'False'" in refuse(Rule, {False: 1})  # type: ignore[dict-item]


def test_a_wrong_value_is_named_as_the_user_wrote_it() -> None:
    message = refuse(Rule, {"threshold": "tiny"}, owner="rule 'craft'", prefix="craft_")
    assert message == "rule 'craft': craft_threshold must be a finite number, got 'tiny'"


def test_an_option_without_a_default() -> None:
    def rule(*, alpha: float, beta: float = 0.0) -> None: ...

    assert "alpha must be given: a finite number" in refuse(rule, {"beta": 1})
    assert coerce(rule, {"alpha": 1}) == {"alpha": 1.0}
    assert [option.required for option in describe(rule)] == [True, False]


def test_nothing_is_added() -> None:
    assert coerce(Rule, {}) == {}


# --- Strangers' factories ---------------------------------------------------------------------


def test_options_without_a_hint_pass_as_they_are() -> None:
    value = object()
    assert one("anything", value) is value
    assert one("anything", "1e-3") == "1e-3"


def test_hints_that_are_not_understood_pass() -> None:
    def rule(
        *, betas: tuple[float, float] = (0.9, 0.99), path: list[Path] | None = None
    ) -> None: ...

    assert coerce(rule, {"betas": [0.9, 0.5]}) == {"betas": [0.9, 0.5]}
    assert [option.type for option in describe(rule)] == [
        "tuple[float, float]",
        "list[pathlib.Path] | None",
    ]


def test_a_hint_for_type_checkers_only_does_not_spoil_the_others() -> None:
    def rule(*, what: Missing | None = None, step: float = 1.0) -> None: ...

    assert coerce(rule, {"what": "x", "step": "1e-3"}) == {"what": "x", "step": 1e-3}
    assert describe(rule)[0].type == "Missing | None"


def test_a_class_that_its_package_does_not_show_is_listed_by_its_own_name() -> None:
    class Inner: ...

    def rule(*, inner=None) -> None: ...

    rule.__annotations__["inner"] = Inner
    assert describe(rule)[0].type == "Inner | None"


def test_hints_that_cannot_be_read_at_all() -> None:
    def rule(*, a=1, b=2.0) -> None: ...

    rule.__annotations__ = {"a": "no such ( hint", "b": "1 / 0"}
    assert coerce(rule, {"a": "x", "b": "y"}) == {"a": "x", "b": "y"}
    assert [option.type for option in describe(rule)] == ["no such ( hint", "1 / 0"]


def test_keyword_arguments_of_any_name() -> None:
    def rule(*, step: float = 1.0, **others: object) -> None: ...

    assert coerce(rule, {"step": "2", "other": "2"}) == {"step": 2.0, "other": "2"}


def test_positional_options_and_the_ones_that_have_no_name() -> None:
    def rule(first: int, /, step: float = 1.0, *rest: int, mode: str = "a") -> None: ...

    assert [option.name for option in describe(rule)] == ["step", "mode"]


@dataclass
class Data:
    step: float = 1.0
    mode: Literal["a", "b"] = "a"


class Made:
    def __new__(cls, *, step: float = 1.0, mode: Literal["a", "b"] = "a") -> Made:
        return object.__new__(cls)


class Child(Data):
    @classmethod
    def other(cls, *, step: float = 1.0, mode: Literal["a", "b"] = "a") -> Child:
        return cls(step, mode)


class Called:
    def __call__(self, *, step: float = 1.0, mode: Literal["a", "b"] = "a") -> None: ...


def plain(*, step: float = 1.0, mode: Literal["a", "b"] = "a", seed: Optional[int] = None) -> None:  # noqa: UP045
    ...


@functools.wraps(plain)
def wrapped(**options: Any) -> None:
    return plain(**options)


@pytest.mark.parametrize(
    "factory",
    [Data, Made, Child, Child.other, Called(), plain, wrapped, functools.partial(plain, mode="b")],
    ids=["dataclass", "class", "child", "classmethod", "object", "function", "wrapped", "partial"],
)
def test_all_kinds_of_factories(factory: Callable[..., object]) -> None:
    assert coerce(factory, {"step": "1e-3", "mode": "b"}) == {"step": 1e-3, "mode": "b"}
    assert "'a' or 'b', got 'c'" in refuse(factory, {"mode": "c"})
    factory(**coerce(factory, {"step": "2"}))


def test_a_factory_that_does_not_tell() -> None:
    assert describe(dict) == ()
    assert coerce(dict, {"x": "1"}) == {"x": "1"}


def test_describe() -> None:
    options = {option.name: option for option in describe(Rule)}
    assert options["server_lr"] == Option("server_lr", "float | None", None)
    assert options["threshold"] == Option("threshold", "float", 1e-6)
    assert options["targets"] == Option(
        "targets",
        "'examples' | 'uniform' | 'sqrt' | function",
        "examples",
        ("examples", "uniform", "sqrt"),
    )
    assert options["layout"] == Option(
        "layout", "fractions.Fraction | None", None, python_only=True
    )
    assert [o.name for o in options.values() if o.python_only] == ["layout"]
    assert options["anything"].type == "any"
    assert inspect.Parameter.empty not in [option.default for option in options.values()]


def test_craft() -> None:
    from craft_adapters.aggregators.craft import Craft

    raw: dict[str, object] = {"server_lr": "1e-1", "targets": "uniform", "client_length": "none"}
    assert coerce(Craft, raw) == {"server_lr": 0.1, "targets": "uniform", "client_length": None}
    options = {option.name: option for option in describe(Craft)}
    assert options["device"].type == "str | torch.device"
    assert options["layout"].type == "craft_adapters.Layout | None"
    assert options["process_group"].type == "ProcessGroup | None"
    python_only = [o.name for o in options.values() if o.python_only]
    assert python_only == ["layout", "process_group"]
    assert "process_group must be a ProcessGroup object (in Python only)" in refuse(
        Craft, {"process_group": "world"}
    )
    assert "did you mean 'steady'" in refuse(Craft, {"scale": "stedy"})
