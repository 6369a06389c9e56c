"""FLUTE's strategy in two halves: what a client sends, and what the server makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from craft_adapters import AggregationReport, ClientUpdate, Layout
from craft_adapters.aggregators import GramRule
from craft_adapters.errors import IncompatibleUpdate, NoUsableUpdates, UnsupportedSetup
from craft_adapters.sinks import JsonlSink

from ._config import CLIENT_ID, Settings

__all__ = ["ClientHalf", "ServerHalf", "craft_strategy"]

_LOG = logging.getLogger(__name__)
_LARGEST = 2**24
"""Whole numbers up to here are exact in float32, which is all that FLUTE's transport sends."""

Payload = Mapping[str, Any]


def craft_strategy(mode: str, config: Any, model_path: str | None = None) -> Any:
    """What ``select_strategy("CRAFT")`` gives; FLUTE calls it as it calls its strategy classes.

    Args:
        mode: ``"client"`` or ``"server"``.
        config: FLUTE's config.
        model_path: Where FLUTE keeps its checkpoints; for the server.
    """
    if mode == "client":
        return ClientHalf(config)
    if mode == "server":
        return ServerHalf(config, Path(model_path or "."))
    raise ValueError(f"a strategy's mode is 'client' or 'server', got {mode!r}")


class ClientHalf:
    """What a client sends: its pseudo-gradient as it is, its count, and who it is.

    FLUTE makes one for every client of every round. Between machines its transport carries one
    number and a list of float32 tensors, so the rest goes into a tensor at the end of the list.
    """

    def __init__(self, config: Any) -> None:
        self._client_id = int(config[CLIENT_ID])
        self._statistics = config["client_config"].get("stats_on_smooth_grad", False)
        self._frozen = config["model_config"].get("freeze_layer")
        if self._client_id > _LARGEST:
            raise UnsupportedSetup(
                f"client {self._client_id}: FLUTE's transport takes no id beyond {_LARGEST}"
            )

    def generate_client_payload(self, trainer: Any) -> dict[str, Any]:
        """The payload of one client.

        Args:
            trainer: FLUTE's, after training. ``p.grad`` holds the pseudo-gradient old - new.

        Returns:
            ``weight``: number of samples. ``gradients``: one CPU tensor for each of
            ``model.named_parameters()``, not multiplied by the weight as FLUTE's FedAvg does it,
            then ``[client id, local steps]``.
        """
        if self._statistics:  # as FLUTE's own strategies do it
            trainer.reset_gradient_power()
            trainer.estimate_sufficient_stats()
        for name, parameter in trainer.model.named_parameters():
            if name == self._frozen:
                parameter.grad = torch.zeros_like(parameter)
        # Copies: an optimizer may write on p.grad when the next client is trained.
        gradients = [
            parameter.grad.detach().to("cpu", copy=True) for parameter in trainer.model.parameters()
        ]
        tag = torch.tensor([self._client_id, trainer.step], dtype=torch.float32)
        return {"weight": trainer.num_samples, "gradients": [*gradients, tag]}


class ServerHalf:
    """Collects a round's payloads, and puts the rule's step where FLUTE's optimizer takes it.

    Raises:
        UnsupportedSetup: see :class:`Settings`.
        OptionError: see :class:`Settings`.
        CheckpointError: the file of the rule's state is not this rule's.
    """

    def __init__(self, config: Any, folder: Path) -> None:
        settings = Settings.from_config(config)
        self.rule = settings.new_rule()
        self._on_empty_round = settings.on_empty_round
        self._state_path = folder / "craft_state.safetensors"
        self._report_path = folder / "craft_report.jsonl"
        self._payloads: list[Payload] = []
        resuming = config["server_config"].get("resume_from_checkpoint", False)
        if resuming and (folder / "latest_model.tar").exists():
            self._resume()

    def process_individual_payload(self, worker_trainer: Any, payload: Payload) -> bool:
        """Keep one client's payload until the round is over; False: FLUTE leaves it out."""
        if payload["weight"] == 0:
            return False
        self._payloads.append(payload)
        return True

    def combine_payloads(
        self,
        worker_trainer: Any,
        curr_iter: int,
        num_clients_curr_iter: int,
        total_clients: int,
        client_stats: Any,
        logger: Callable[..., None] | None = None,
    ) -> Any:
        """The round's server step.

        ``p.grad`` becomes old - new model, and FLUTE's optimizer and schedule do the rest: with
        SGD and learning rate 1 the rule's model is the new one. Without a usable client no
        gradient is set, and FLUTE's optimizer leaves the model as it is.

        Args:
            worker_trainer: FLUTE's ModelUpdater, with the model that the clients started from.
            curr_iter: The round's number.
            num_clients_curr_iter: Not used.
            total_clients: Not used.
            client_stats: Not used.
            logger: Not used.

        Returns:
            FLUTE's losses, of its learning-rate schedule.
        """
        payloads, self._payloads = self._payloads, []
        model: nn.Module = worker_trainer.model
        self._step(model, payloads, curr_iter)
        worker_trainer.update_model()
        return worker_trainer.run_lr_scheduler(force_run_val=False)

    def _step(self, model: nn.Module, payloads: Sequence[Payload], round: int) -> None:
        if isinstance(self.rule, GramRule) and self.rule.layout is None:
            self.rule.layout = Layout.from_model(model, self.rule.granularity)
        state = model.state_dict()
        parameters = dict(model.named_parameters())
        updates = [_update(parameters, payload) for payload in payloads]
        try:
            result = self.rule.aggregate(state, updates, round=round)
        except NoUsableUpdates as error:
            if self._on_empty_round == "raise":
                raise
            _LOG.warning("%s: round %d: %s; the model stays as it is", self.rule.name, round, error)
            self._record({"rule": self.rule.name, "round": round, "skipped": str(error)})
            return
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.grad = state[name] - result.state[name]
        self.rule.save(self._state_path)
        self._record(result.report.to_dict())
        _log(result.report)

    def _resume(self) -> None:
        if not self._state_path.exists():
            _LOG.warning(
                "%s: FLUTE resumes, but %s is not there, so the rule starts afresh",
                self.rule.name,
                self._state_path,
            )
            return
        self.rule.load(self._state_path)
        _LOG.info("%s: resumed from %s", self.rule.name, self._state_path)

    def _record(self, record: Mapping[str, Any]) -> None:
        with JsonlSink(self._report_path) as sink:  # FLUTE does not say when it ends
            sink.write(record)


def _update(parameters: Mapping[str, Tensor], payload: Payload) -> ClientUpdate:
    *gradients, tag = payload["gradients"]
    client, steps = map(int, tag.tolist())
    if len(gradients) != len(parameters):
        pairs = zip(parameters.items(), gradients, strict=False)
        misfits = (name for (name, value), sent in pairs if sent.shape != value.shape)
        first = next(misfits, None)
        raise IncompatibleUpdate(
            f"client {client}: {len(gradients)} tensors came for the model's {len(parameters)} "
            "parameters" + (f"; the first that does not fit is that of {first!r}" if first else "")
        )
    values = dict(zip(parameters, gradients, strict=True))
    return ClientUpdate(client, payload["weight"], values, kind="update", local_steps=steps)


def _log(report: AggregationReport) -> None:
    done, *left_out = report.messages()
    _LOG.info("%s", done)
    for message in left_out:
        _LOG.warning("%s", message)
