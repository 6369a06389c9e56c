"""What a FLUTE config says about the server step: ``strategy`` and ``server_config.craft``.

FLUTE's schema lets ``server_config`` hold more than it knows, and hands on what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from craft_adapters import Aggregator
from craft_adapters._options import coerce, describe
from craft_adapters.errors import OptionError, UnsupportedSetup, nearest
from craft_adapters.plugins import available_aggregators, get_plugin_manager

__all__ = ["CLIENT_ID", "SECTION", "Settings", "chosen"]

SECTION = "craft"
CLIENT_ID = "craft_client_id"
"""Where a client's config says which client it is."""

_OnEmptyRound = Literal["keep", "raise"]

# (section, key): the values that switch it off, and why it cannot be on.
_REFUSED: Mapping[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("server_config", "send_dicts"): (
        (False,),
        "clients then send whole state dicts and FLUTE computes no pseudo-gradient",
    ),
    ("server_config", "fast_aggregation"): (
        (False,),
        "it adds updates up as they arrive, and a rule needs each client's own",
    ),
    ("server_config", "wantRL"): ((False,), "it learns the weights of an average (DGA only)"),
    ("server_config", "stale_prob"): (
        (0,),
        "it holds updates back for a later average (DGA only)",
    ),
    ("client_config", "quant_thresh"): ((), "only FLUTE's DGA quantises what its clients send"),
    ("dp_config", "enable_local_dp"): (
        (False,),
        "only FLUTE's DGA adds the noise, and its accounting is that of an average",
    ),
    ("dp_config", "enable_global_dp"): (
        (False,),
        "FLUTE's noise and accounting are those of an average of clipped updates",
    ),
}


def chosen(config: Mapping[str, Any]) -> bool:
    """Whether the config asks for this adapter."""
    return str(config["strategy"]).lower() == "craft"


def _adapter(*, on_empty_round: _OnEmptyRound = "keep") -> None:
    """The adapter's own options; for its signature."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A rule and its options, and the adapter's.

    Attributes:
        rule: The rule's name.
        options: The rule's options, typed.
        on_empty_round: What a round without a usable client does.
    """

    rule: str
    options: Mapping[str, Any]
    on_empty_round: _OnEmptyRound = "keep"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read FLUTE's config (its own classes, or plain dicts).

        Raises:
            UnsupportedSetup: the config asks for what would not be applied; says what and why.
            OptionError: an unknown rule or option, or a value that it does not take.
        """
        _refuse(config)
        section = config["server_config"].get(SECTION, {})
        if not isinstance(section, Mapping):
            raise OptionError(f"server_config.{SECTION} must be a section, got {section!r}")
        given = dict(section)
        rule = given.pop("aggregator", "craft")
        if not isinstance(rule, str):
            raise OptionError(
                f"server_config.{SECTION}.aggregator must be a rule's name, got {rule!r}"
            )
        factory = get_plugin_manager().aggregator_factory(rule)
        ours = {option.name for option in describe(_adapter)}
        own = {key: given.pop(key) for key in sorted(ours & given.keys())}
        known = {option.name for option in describe(factory)}
        for key in given:
            if key not in known:
                raise OptionError(
                    f"server_config.{SECTION}.{key} is neither an option of rule {rule!r} nor of "
                    f"the adapter; {nearest(key, known | ours | {'aggregator'})}"
                )
        prefix = f"server_config.{SECTION}."
        own = coerce(_adapter, own, owner="the FLUTE adapter", prefix=prefix)
        return cls(rule, coerce(factory, given, owner=f"rule {rule!r}", prefix=prefix), **own)

    def new_rule(self) -> Aggregator:
        """The rule for one server.

        Raises:
            UnsupportedSetup: it needs what FLUTE's clients do not send.
        """
        rule = get_plugin_manager().get_aggregator(self.rule, **self.options)
        if "loss" in rule.requires:
            raise UnsupportedSetup(
                f"rule {rule.name!r} needs loss from every client, that of the model it received; "
                "FLUTE's clients have the loss of their training only; use a rule that runs "
                f"without: {', '.join(available_aggregators(gives={'local_steps'}))}"
            )
        return rule


def _refuse(config: Mapping[str, Any]) -> None:
    for (section, key), (off, why) in _REFUSED.items():
        value = (config.get(section) or {}).get(key)
        if value is not None and value not in off:
            raise UnsupportedSetup(
                f"{section}.{key} is {value!r}, which strategy CRAFT would not apply: {why}; "
                "take it out"
            )
    kind = config["client_config"].get("type")
    if kind != "optimization":
        raise UnsupportedSetup(
            f"client_config.type is {kind!r}, so FLUTE's clients send nothing; set it to "
            "'optimization'"
        )
