"""What a FedML config says about the server step: keys that start with ``craft_``.

FedML flattens all sections into one namespace, so every key carries the prefix, and a section may
have any name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from craft_adapters import Aggregator
from craft_adapters._options import coerce, describe
from craft_adapters.errors import OptionError, nearest
from craft_adapters.plugins import get_plugin_manager

__all__ = ["Settings", "enabled", "warn_if_forgotten"]

_PREFIX = "craft_"
_OnEmptyRound = Literal["keep", "raise"]


def enabled(args: Any) -> bool:
    """Whether the config switches the rule on.

    Raises:
        OptionError: ``enable_craft`` is neither true nor false.
    """
    value = getattr(args, "enable_craft", False)
    typed = coerce(_enabling, {"enable_craft": value}, owner="the FedML config")
    return bool(typed["enable_craft"])


def warn_if_forgotten(args: Any) -> None:
    """Say so when a config has ``craft_`` keys that nothing reads."""
    if _given(args) and not hasattr(args, "enable_craft"):
        logging.warning(
            "the config has craft_ keys but no enable_craft: true; FedML's own averaging is used, "
            "unless the script wraps a server aggregator"
        )


def _enabling(*, enable_craft: bool = False) -> None:
    """For its signature."""


def _adapter(
    *,
    state_path: str | None = None,
    model_path: str | None = None,
    report_path: str | None = None,
    on_empty_round: _OnEmptyRound = "keep",
    force: bool = False,
) -> None:
    """The adapter's own keys; for its signature."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A rule, its options, and the adapter's.

    Attributes:
        rule: A rule's name, or the object that the caller of ``wrap`` gave.
        options: The rule's options, typed.
        state_path: Where the rule's state is saved each round, and resumed from.
        model_path: The same for the global model.
        report_path: Where each round's report is appended as a line of JSON.
        on_empty_round: What a round without a usable client does.
        force: Replace an ``aggregate`` that the user's aggregator overrides.
    """

    rule: str | Aggregator
    options: Mapping[str, Any] = field(default_factory=dict)
    state_path: Path | None = None
    model_path: Path | None = None
    report_path: Path | None = None
    on_empty_round: _OnEmptyRound = "keep"
    force: bool = False

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """Read FedML's flat namespace.

        Raises:
            OptionError: an unknown rule or key, with the nearest known one, or a wrong value.
        """
        return cls._of(_given(args))

    @classmethod
    def explicit(
        cls, args: Any, aggregator: str | Aggregator | None, options: Mapping[str, Any]
    ) -> Settings:
        """What the caller of ``wrap`` says, over what the config says.

        A caller who names a rule or brings one gives its options too: those in the config may be
        another rule's. The adapter's own keys are taken from the config either way.

        Raises:
            OptionError: see :meth:`from_args`; also options for a rule that is an object already.
        """
        configured = _given(args)
        if aggregator is not None:
            own = _own_keys()
            configured = {key: value for key, value in configured.items() if key in own}
            configured["aggregator"] = aggregator
        return cls._of({**configured, **options})

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Settings:
        rule = given.get("aggregator", "craft")
        own = _own_keys()
        adapter = {key: value for key, value in given.items() if key in own}
        options = {key: value for key, value in given.items() if key not in {*own, "aggregator"}}
        if isinstance(rule, Aggregator):
            if options:
                raise OptionError(
                    f"the rule is an object that has its options; also given: {sorted(options)}"
                )
        elif isinstance(rule, str):
            options = _rule_options(rule, options, own)
        else:
            raise OptionError(f"craft_aggregator must be a rule's name, got {rule!r}")
        typed = coerce(_adapter, adapter, owner="the FedML adapter", prefix=_PREFIX)
        for key in ("state_path", "model_path", "report_path"):
            if typed.get(key) is not None:
                # Relative to where the run was started, also if the script changes the folder.
                typed[key] = Path(str(typed[key])).expanduser().absolute()
        return cls(rule, options, **typed)

    def new_rule(self) -> Aggregator:
        """The rule for one server."""
        if isinstance(self.rule, Aggregator):
            return self.rule
        return get_plugin_manager().get_aggregator(self.rule, **self.options)


def _own_keys() -> set[str]:
    return {option.name for option in describe(_adapter)}


def _given(args: Any) -> dict[str, Any]:
    """The ``craft_`` keys without their prefix; a section may be called craft_args."""
    return {
        key.removeprefix(_PREFIX): value
        for key, value in vars(args).items()
        if key.startswith(_PREFIX) and key != "craft_args"
    }


def _rule_options(rule: str, options: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    factory = get_plugin_manager().aggregator_factory(rule)
    known = {option.name for option in describe(factory)}
    for key in options:
        if key not in known:
            everything = {_PREFIX + name for name in known | own | {"aggregator"}}
            raise OptionError(
                f"the config key {_PREFIX + key!r} is neither an option of rule {rule!r} nor of "
                f"the adapter; {nearest(_PREFIX + key, everything)}"
            )
    return coerce(factory, options, owner=f"rule {rule!r}", prefix=_PREFIX)
