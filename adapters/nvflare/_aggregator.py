"""NVFlare's ModelAggregator around a rule.

A recipe copies this file alone into the job. So it imports from ``craft_adapters`` itself only,
absolutely, and the package has to be installed on the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from craft_adapters import (
    CheckpointError,
    ClientUpdate,
    IncompatibleUpdate,
    NoUsableUpdates,
    OptionError,
    UnsupportedSetup,
    available_aggregators,
    get_aggregator,
)
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, MetaKey, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import (
    WeightedAggregationHelper,
    filter_aggregatable_metrics,
)
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

__all__ = ["CraftAggregator"]


class CraftAggregator(ModelAggregator):  # type: ignore[misc]  # without NVFlare it is unknown
    """A rule in the place of NVFlare's weighted average: ``FedAvgRecipe(aggregator=...)``.

    Clients may send full models or differences (``ParamsType.FULL``, ``DIFF``), as numpy arrays or
    tensors, in memory or offloaded to disk; the new model is a full one, of the kinds and dtypes
    that the clients were sent. A client's id is its site's name. The model that the clients
    started from is the one that the controller sent them (the event BEFORE_TRAIN_TASK).

    All arguments are plain values, because NVFlare writes them into the job's configuration.

    Args:
        aggregator: A registered rule's name.
        options: The rule's options.
        weight_key: Where in ``FLModel.meta`` a client's weight stands: ``num_examples`` of the
            rule. NVFlare's own key is NUM_STEPS_CURRENT_ROUND, whose number is the weight in its
            average: clients may put their number of examples under it, or send it under a key of
            their own that is named here. None: all clients weigh the same.
        loss_key: Under which key of ``FLModel.metrics`` a client reports the loss of the model
            that it received, for rules that need it.
        steps_key: Where in ``FLModel.meta`` the number of local optimiser steps stands, for rules
            that need it.
        state_path: Where the rule's state is saved each round, and resumed from if it is there: a
            path in the job's run directory on the server, or an absolute one. None: nowhere.
        on_empty_round: What a round without a usable client does: "keep" the model, or "raise".

    Raises:
        OptionError: an unknown rule or option, or a value that it does not take.
        UnsupportedSetup: the rule needs what no key is given for.

    Example:
        >>> aggregator = CraftAggregator("craft", {"server_lr": 0.1}, weight_key="examples")
        >>> aggregator.rule.name
        'craft'
    """

    def __init__(
        self,
        aggregator: str = "craft",
        options: dict[str, Any] | None = None,
        *,
        weight_key: str | None = MetaKey.NUM_STEPS_CURRENT_ROUND,
        loss_key: str | None = None,
        steps_key: str | None = None,
        state_path: str | None = "craft_state.safetensors",
        on_empty_round: Literal["keep", "raise"] = "keep",
    ) -> None:
        super().__init__()
        if on_empty_round not in ("keep", "raise"):
            raise OptionError(f"on_empty_round must be 'keep' or 'raise', got {on_empty_round!r}")
        self.rule = get_aggregator(aggregator, **(options or {}))
        keys = {"loss": loss_key, "local_steps": steps_key}
        gives = {need for need, key in keys.items() if key is not None}
        for need, where in (
            ("loss", "loss_key, and have the clients put it into FLModel.metrics"),
            ("local_steps", "steps_key, and have the clients put it into FLModel.meta"),
        ):
            if need in self.rule.requires - gives:
                raise UnsupportedSetup(
                    f"rule {aggregator!r} needs {need} from every client; name its key as {where}"
                    f"; or use a rule that runs without: {', '.join(available_aggregators(gives))}"
                )
        # Under the names of the arguments: NVFlare reads the job's configuration off them.
        self.aggregator = aggregator
        self.options = options
        self.weight_key = weight_key
        self.loss_key = loss_key
        self.steps_key = steps_key
        self.state_path = state_path
        self.on_empty_round = on_empty_round
        self._state_file: Path | None = None
        self._sent: FLModel | None = None
        self._received: list[FLModel] = []

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """At the run's start the rule's state is loaded; a model that is sent is noted."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN and self.state_path is not None:
            folder = fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())
            self._state_file = Path(folder) / self.state_path
            try:
                self._state_file.parent.mkdir(parents=True, exist_ok=True)
                if self._state_file.exists():
                    self.rule.load(self._state_file)
            except (CheckpointError, OSError) as error:
                # NVFlare swallows what an event handler raises.
                self.system_panic(str(error), fl_ctx)
        elif event_type == AppEventType.BEFORE_TRAIN_TASK:
            self._sent = FLModelUtils.from_shareable(fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE))

    def accept_model(self, model: FLModel) -> None:
        """Keep a client's model until the round ends.

        It is looked at in :meth:`aggregate_model` only: NVFlare logs what is raised here, and goes
        on without the client.
        """
        self._received.append(model)

    def reset_stats(self) -> None:
        """Forget this round's models; the rule's state stays."""
        self._received = []

    def aggregate_model(self) -> FLModel:
        """The rule's new model, and the clients' metrics averaged as NVFlare does it.

        Raises:
            CraftError: see the rule's ``aggregate``. NVFlare ends the run with it.
        """
        try:
            return self._aggregate()
        finally:
            self.reset_stats()

    def _aggregate(self) -> FLModel:
        if self._sent is None:
            raise UnsupportedSetup(
                "the model that the clients started from is not known: the controller fired no "
                f"{AppEventType.BEFORE_TRAIN_TASK}; use the FedAvg controller, in a job's "
                "configuration"
            )
        start = self._sent.params
        received = sorted(self._received, key=_site)
        updates = [self._update(model) for model in received]
        try:
            result = self.rule.aggregate(_tensors(start), updates, round=self._sent.current_round)
        except NoUsableUpdates as error:
            if self.on_empty_round == "raise":
                raise
            self.warning(f"rule {self.aggregator!r}: {error}; the model stays as it is")
            new = start
        else:
            if self._state_file is not None:
                self.rule.save(self._state_file)
            for client in result.report.dropped:
                self.warning(
                    f"rule {self.aggregator!r}: {client.client_id} left out: {client.reason}"
                )
            new = {name: _like(value, start[name]) for name, value in result.state.items()}
        return FLModel(
            params=new,
            params_type=ParamsType.FULL,
            metrics=_averaged(received, updates),
            current_round=self._sent.current_round,
        )

    def _update(self, model: FLModel) -> ClientUpdate:
        site = _site(model)
        if not isinstance(model.params, Mapping):
            raise IncompatibleUpdate(
                f"{site}: FLModel.params must map names to arrays, got "
                f"{type(model.params).__name__}"
            )
        weight = 1 if self.weight_key is None else _number(model.meta, self.weight_key, site)
        loss = None if self.loss_key is None else _number(model.metrics, self.loss_key, site)
        steps = None if self.steps_key is None else _number(model.meta, self.steps_key, site)
        difference = model.params_type == ParamsType.DIFF
        return ClientUpdate(
            site,
            weight,
            _Values(model.params, negated=difference),
            kind="update" if difference else "state",
            loss=loss,
            local_steps=None if steps is None else int(steps),
        )


class _Values(Mapping[str, Any]):
    """A client's entries, read when they are asked for.

    NVFlare's difference is client minus global model, a rule's global minus client.
    """

    def __init__(self, params: Mapping[str, Any], *, negated: bool) -> None:
        self._params = params
        self._negated = negated

    def __getitem__(self, name: str) -> Any:
        value = self._params[name]
        if hasattr(value, "materialize"):  # offloaded to disk
            value = value.materialize()
        array = isinstance(value, np.ndarray | np.generic | torch.Tensor)
        if array and self._negated and value.dtype not in (np.bool_, torch.bool):
            value = -value
        # What numpy makes of a 0-d array's difference is no array any more.
        return np.asarray(value) if isinstance(value, np.generic) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _site(model: FLModel) -> str:
    site = model.meta.get("client_name")
    if not isinstance(site, str):
        raise UnsupportedSetup(
            "a model came without the site's name (meta['client_name']), which the FedAvg "
            "controller sets"
        )
    return site


def _number(numbers: Mapping[str, Any] | None, key: str, site: str) -> Any:
    if key not in (numbers or {}):
        raise IncompatibleUpdate(
            f"{site}: {key!r} is needed with every model, got {sorted(numbers or {})}; send "
            f"FLModel(params=..., meta={{{MetaKey.NUM_STEPS_CURRENT_ROUND!r}: ...}}, metrics=...)"
        )
    return (numbers or {})[key]


def _tensors(params: Mapping[str, Any]) -> dict[str, Any]:
    """The global model as the rules want it."""
    state = {}
    for name, value in params.items():
        if isinstance(value, list | tuple | Mapping):
            raise UnsupportedSetup(
                f"entry {name!r} of the global model is a {type(value).__name__}; a rule needs one "
                "array or tensor an entry"
            )
        if isinstance(value, np.ndarray | np.generic):
            value = torch.from_numpy(np.array(value))  # a copy: a received array is read-only
        state[name] = value
    return state


def _like(value: Any, sent: Any) -> Any:
    """An array where the clients were sent one."""
    return value.numpy() if isinstance(sent, np.ndarray | np.generic) else value


def _averaged(received: list[FLModel], updates: list[ClientUpdate]) -> dict[str, Any] | None:
    """As FedAvg does it: early stopping and the choice of the best model look at them."""
    helper = WeightedAggregationHelper()
    for model, update in zip(received, updates, strict=True):
        if model.metrics is None:
            return None
        if update.num_examples > 0:
            helper.add(
                data=filter_aggregatable_metrics(model.metrics),
                weight=update.num_examples,
                contributor_name=update.client_id,
                contribution_round=model.current_round,
            )
    return helper.get_result() or None
