"""The server step: what both of Flower's strategy APIs come to."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from craft_adapters import Aggregator, ClientUpdate, get_aggregator
from craft_adapters._contract import ClientId, State
from craft_adapters.errors import (
    IncompatibleUpdate,
    NoUsableUpdates,
    OptionError,
    UnsupportedSetup,
)
from craft_adapters.plugins import available_aggregators

from ._arrays import checked_names

__all__ = ["LOG", "ServerStep", "number", "options_and_step"]

LOG = logging.getLogger("flwr")
_OPTIONS = {"loss": "loss_key", "local_steps": "steps_key"}


class ServerStep:
    """One strategy's rule, its file, and what it reads from a reply beside the arrays.

    Args:
        rule: See :func:`craft_adapters.flower.wrap`, like the others.
        names: Names of the arrays.
        state_path: The file of the rule's state.
        loss_key: Where a reply's metrics have the loss.
        steps_key: Where they have the number of local steps.
        on_empty_round: What a round without a usable reply does.
        **options: The rule's.

    Attributes:
        rule: The rule.
        names: Names of the arrays, in their order; None if the host has them.

    Raises:
        UnsupportedSetup: the rule needs what no key is given for; names the rules that run.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the file is there, but is not this rule's.
    """

    def __init__(
        self,
        rule: str | Aggregator = "craft",
        *,
        names: Iterable[str] | None = None,
        state_path: str | os.PathLike[str] | None = None,
        loss_key: str | None = None,
        steps_key: str | None = None,
        on_empty_round: Literal["keep", "raise"] = "keep",
        **options: Any,
    ) -> None:
        if on_empty_round not in ("keep", "raise"):
            raise OptionError(f"on_empty_round must be 'keep' or 'raise', got {on_empty_round!r}")
        if isinstance(rule, str):
            rule = get_aggregator(rule, **options)
        elif not isinstance(rule, Aggregator):
            raise OptionError(f"the rule must be a rule's name or an Aggregator, got {rule!r}")
        elif options:
            raise OptionError(
                f"the rule is an object that has its options; also given: {sorted(options)}"
            )
        self.rule = rule
        self.names = None if names is None else checked_names(names)
        self._keys = {"loss": loss_key, "local_steps": steps_key}
        self._refuse_requirements()
        self._keeps = on_empty_round == "keep"
        # Relative to where it is made, also if the app changes the folder.
        self._path = None if state_path is None else Path(state_path).expanduser().absolute()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                rule.load(self._path)
                LOG.info("%s: resumed from %s", rule.name, self._path)

    def update(
        self,
        client: ClientId,
        num_examples: float,
        values: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> ClientUpdate:
        """One client's reply, with what the metrics have under the keys that were given.

        Raises:
            IncompatibleUpdate: they have no number there.
        """
        found = {
            what: number(metrics, key, client)
            for what, key in self._keys.items()
            if key is not None
        }
        steps = found.get("local_steps")
        return ClientUpdate(
            client,
            num_examples,
            values,
            loss=found.get("loss"),
            local_steps=None if steps is None else int(steps),
        )

    def aggregate(
        self,
        server_round: int,
        state: Mapping[str, Any],
        updates: Sequence[ClientUpdate],
    ) -> State | None:
        """One round: the new model, or None where the old one stays.

        Raises:
            CraftError: see :meth:`craft_adapters.Aggregator.aggregate`.
        """
        try:
            result = self.rule.aggregate(state, updates, round=server_round)
        except NoUsableUpdates as error:
            if not self._keeps:
                raise
            LOG.warning(
                "%s: round %d: %s; the model stays as it is", self.rule.name, server_round, error
            )
            return None
        if self._path is not None:
            self.rule.save(self._path)
        done, *left_out = result.report.messages()
        LOG.info("%s", done)
        for message in left_out:
            LOG.warning("%s", message)
        return result.state

    def failed(self, server_round: int, client: ClientId | None, reason: str) -> None:
        """Say whose reply is none; None: Flower does not tell whose it is."""
        LOG.warning(
            "%s: round %d: %s left out: %s",
            self.rule.name,
            server_round,
            "a client" if client is None else f"client {client}",
            reason,
        )

    def _refuse_requirements(self) -> None:
        given = {what for what, key in self._keys.items() if key is not None}
        for need in sorted(self.rule.requires - given):
            raise UnsupportedSetup(
                f"rule {self.rule.name!r} needs {need} from every client: have the clients put it "
                f"into their metrics, and give its key as {_OPTIONS.get(need, need)}; or use a "
                f"rule that runs without: {', '.join(available_aggregators(given))}"
            )


def number(metrics: Mapping[str, Any], key: str, client: ClientId) -> float:
    """A number that a client reports.

    Raises:
        IncompatibleUpdate: it does not, or something else.

    Example:
        >>> number({"num-examples": 3}, "num-examples", 0)
        3.0
    """
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise IncompatibleUpdate(
            f"client {client!r}: its metrics have {sorted(metrics)}, and {key!r} is needed as a "
            "number"
        )
    return float(value)


def options_and_step(
    rule: str | Aggregator, options: Mapping[str, Any], base: Callable[..., Any]
) -> tuple[dict[str, Any], ServerStep]:
    """Those of the options that Flower's ``base`` takes, and the step that the others make.

    Raises:
        OptionError: as :class:`ServerStep`; for an option that neither takes, with the nearest of
            ``base``.

    Example:
        >>> def base(fraction): ...
        >>> theirs, step = options_and_step("craft", {"fraction": 0.5, "server_lr": 1.0}, base)
        >>> theirs, step.rule.name
        ({'fraction': 0.5}, 'craft')
    """
    known = inspect.signature(base).parameters
    theirs = {key: value for key, value in options.items() if key in known}
    ours = {key: value for key, value in options.items() if key not in known}
    try:
        return theirs, ServerStep(rule, **ours)
    except OptionError as error:
        for key in ours:
            close = get_close_matches(key, known, n=1)
            if close and repr(key) in str(error):
                hint = f"did you mean {close[0]!r} of Flower's {base.__name__}?"
                raise OptionError(f"{error}; {hint}") from error
        raise
