"""The server step: what all ways in and all platforms come to.

FedML's list of (number of examples, state dict) and the global model go in, an OrderedDict comes
out. Around the rule stand the files: its state, the reports, the global model.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from craft_adapters import AggregationReport, ClientUpdate
from craft_adapters._contract import ClientId
from craft_adapters.errors import NoUsableUpdates
from craft_adapters.sinks import JsonlSink

from ._config import Settings
from ._layouts import give_layout
from ._model_file import read_model, write_model
from ._refusals import refuse_requirements

__all__ = ["ServerStep", "Upload", "identify"]

Upload = tuple[Any, Mapping[str, Any]]
"""What FedML has for each client in its lists: number of examples, state dict."""


class ServerStep:
    """One server's rule and its files.

    Args:
        settings: What the config or the caller of ``wrap`` asks for.
        model: The server's model, for an exact layout of its entries; None if there is none.

    Raises:
        UnsupportedSetup: the rule needs more than FedML's clients send.
        OptionError: the rule or an option is not known, or an option has a wrong value.
        CheckpointError: the state file is there but is not this rule's.
    """

    def __init__(self, settings: Settings, model: Any = None) -> None:
        self._settings = settings
        self.rule = settings.new_rule()
        refuse_requirements(self.rule.name, self.rule.requires)
        self._model = model
        for path in (settings.state_path, settings.model_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if settings.report_path:
            JsonlSink(settings.report_path).close()  # a path that cannot be written is found now
        self._resume()

    def __call__(
        self,
        global_state: Mapping[str, Any],
        uploads: Sequence[Upload],
        clients: Sequence[ClientId],
        round: int | None,
    ) -> OrderedDict[str, Any]:
        """One round.

        Args:
            global_state: The model that the clients started from. Not changed.
            uploads: FedML's list, after its own hooks. Not changed, nor are the state dicts.
            clients: The client of each upload.
            round: The round's number, for the report; counted by the rule if None.

        Returns:
            The new global model, entry by entry on the device of the first upload (where FedML's
            averaging leaves it). An OrderedDict: FedML takes a plain dict for one model a client.

        Raises:
            CraftError: see :meth:`craft_adapters.Aggregator.aggregate`.
        """
        give_layout(self.rule, self._model, global_state)
        updates = [
            ClientUpdate(client, count, values)
            for client, (count, values) in zip(clients, uploads, strict=True)
        ]
        try:
            result = self.rule.aggregate(global_state, updates, round=round)
        except NoUsableUpdates as error:
            if self._settings.on_empty_round == "raise":
                raise
            logging.warning(
                "%s: round %s: %s; the global model stays as it is", self.rule.name, round, error
            )
            self._record({"rule": self.rule.name, "round": round, "skipped": str(error)})
            return _on_devices_of(uploads, deepcopy(OrderedDict(global_state)))
        if self._settings.state_path:
            self.rule.save(self._settings.state_path)
        self._record(result.report.to_dict())
        _log(result.report)
        return _on_devices_of(uploads, OrderedDict(result.state))

    def starting_model(self, current: Mapping[str, Any]) -> OrderedDict[str, Any] | None:
        """The saved global model to go on from, or None to start from the script's own.

        Args:
            current: The server's model, which the file must fit.

        Raises:
            CheckpointError: the file is not readable, or is of another model.
            OptionError: ``craft_model_path`` is set and the model holds what it cannot take.
        """
        path = self._settings.model_path
        if path is None:
            return None
        saved = read_model(path, current)
        if saved is not None:
            logging.info("%s: the global model goes on from %s", self.rule.name, path)
        return saved

    def keep_model(self, state: Mapping[str, Any]) -> None:
        """Save the global model of a finished round, if ``craft_model_path`` is set."""
        if self._settings.model_path:
            write_model(self._settings.model_path, state)

    def _resume(self) -> None:
        path = self._settings.state_path
        if path is None or not path.exists():
            return
        self.rule.load(path)
        logging.info(
            "%s: resumed from %s; FedML counts its rounds from 0 again", self.rule.name, path
        )
        model_path = self._settings.model_path
        if model_path is None or not model_path.exists():
            logging.warning(
                "%s: the rule's state is resumed but no global model is (no craft_model_path, or "
                "no file there): unless your script loads one, training starts afresh with the "
                "old reference",
                self.rule.name,
            )

    def _record(self, record: Mapping[str, Any]) -> None:
        if self._settings.report_path:
            with JsonlSink(self._settings.report_path) as sink:  # FedML does not say when it ends
                sink.write(record)


def identify(
    uploads: Sequence[Upload], received: Sequence[tuple[ClientId, Mapping[str, Any]]]
) -> list[ClientId]:
    """Whose model is whose, after hooks that drop, reorder or rebuild the list.

    FedML's defences say nothing about whom they left out. They hand on the very same dicts (Krum,
    3sigma), or rebuild all of them in order (norm clipping).

    Args:
        uploads: The list that reached the aggregation.
        received: (client, state dict) as they came in.
    """
    owners = {id(values): client for client, values in received}
    if all(id(values) in owners for _, values in uploads):
        return [owners[id(values)] for _, values in uploads]
    if len(uploads) == len(received):
        return [client for client, _ in received]
    logging.warning(
        "craft-adapters: a defence or attack replaced and dropped models, so this round's reports "
        "name uploads by their position, not by client"
    )
    return [f"upload-{position}" for position in range(len(uploads))]


def _on_devices_of(
    uploads: Sequence[Upload], state: OrderedDict[str, Any]
) -> OrderedDict[str, Any]:
    if uploads:
        first = uploads[0][1]
        for name, value in state.items():
            like = first.get(name)
            if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
                state[name] = value.to(like.device)
    return state


def _log(report: AggregationReport) -> None:
    # On the root logger at the time of the call: fedml.init puts another one in its place, and
    # what other loggers say at level INFO is lost.
    done, *left_out = report.messages()
    logging.info("%s", done)
    for message in left_out:
        logging.warning("%s", message)
