"""Drives NVFlare's FedAvg controller, on replies without clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness

__all__ = ["NVFlareHarness"]


class NVFlareHarness(Harness):
    """FedAvg as ``FedAvgRecipe(aggregator=...)`` configures it.

    Args:
        arrays: Whether models travel as numpy arrays, NVFlare's default, or as tensors.
        differences: Whether clients send differences.
    """

    host_modules: ClassVar[tuple[str, ...]] = ("nvflare",)

    def __init__(self, *, arrays: bool = False, differences: bool = False) -> None:
        self.arrays, self.differences = arrays, differences

    def start(self, rule: str, model: nn.Module, folder: Path) -> _Server:
        """A controller in a job."""
        from ._aggregator import CraftAggregator

        aggregator = CraftAggregator(rule, loss_key="loss", steps_key="steps")
        return _Server(aggregator, model.state_dict(), folder, self)


class _Server:
    def __init__(
        self, aggregator: Any, state: Mapping[str, Any], folder: Path, harness: NVFlareHarness
    ) -> None:
        from nvflare.apis.event_type import EventType
        from nvflare.apis.fl_context import FLContextManager

        self.harness = harness
        self.model = self._travelling(state)
        self.number = 0
        self.reason: str | None = None
        self.aggregator = aggregator
        engine = SimpleNamespace(
            fire_event=self._fire_event,
            get_workspace=lambda: SimpleNamespace(get_run_dir=lambda job: str(folder)),
        )
        self.contexts = FLContextManager(engine, identity_name="server", job_id="job")
        self.controller = _controller(aggregator)
        self.controller.start_controller(self.contexts.new_context())
        self.controller.fire_event(EventType.START_RUN, self.contexts.new_context())
        self._raise_if_panicked()

    def _fire_event(self, event_type: str, context: Any) -> None:
        from nvflare.apis.event_type import EventType
        from nvflare.apis.fl_constant import FLContextKey

        if event_type == EventType.FATAL_SYSTEM_ERROR:  # a panic: NVFlare ends the run
            self.reason = context.get_prop(FLContextKey.EVENT_DATA)
        self.aggregator.handle_event(event_type, context)

    def _raise_if_panicked(self) -> None:
        if self.reason is not None:
            reason, self.reason = self.reason, None
            raise RuntimeError(reason)

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """One round of the controller's ``run``."""
        return self.play([self._reply(reply) for reply in replies])

    def play(self, replies: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
        """The same, with NVFlare's own messages: (site, FLModel)."""
        from nvflare.apis.signal import Signal
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.abstract.model import ModelLearnableKey
        from nvflare.app_common.app_constant import AppConstants

        self.controller.model = FLModel(params=dict(self.model))
        self.controller.start_round = self.number
        self.controller.replies = replies
        context = self.contexts.new_context()
        self.controller.control_flow(Signal(), context)
        self._raise_if_panicked()
        self.number += 1
        self.model = context.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        return self.model

    def _reply(self, reply: ClientUpdate) -> tuple[str, Any]:
        from nvflare.app_common.abstract.fl_model import FLModel, MetaKey, ParamsType

        values = self._travelling(reply.values)
        if self.harness.differences:
            values = {name: self._difference(name, value) for name, value in values.items()}
        return f"site-{reply.client_id}", FLModel(
            params=values,
            params_type=ParamsType.DIFF if self.harness.differences else ParamsType.FULL,
            metrics={"loss": reply.loss},
            meta={
                MetaKey.NUM_STEPS_CURRENT_ROUND: reply.num_examples,
                "steps": reply.local_steps,
            },
        )

    def _difference(self, name: str, value: Any) -> Any:
        sent = self.model.get(name)
        if sent is None or sent.shape != value.shape or "bool" in str(value.dtype):
            return value
        return value - sent

    def _travelling(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if not self.harness.arrays:
            return dict(values)
        return {
            name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }


def _controller(aggregator: Any) -> Any:
    """FedAvg, whose clients have answered before they are asked."""
    from nvflare.apis.client import Client
    from nvflare.apis.controller_spec import ClientTask
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
    from nvflare.app_common.workflows.fedavg import FedAvg

    class Answered(FedAvg):  # type: ignore[misc]  # without NVFlare its type is unknown
        replies: Sequence[tuple[str, Any]] = ()

        def sample_clients(self, num_clients: int | None = None) -> list[str]:
            return [site for site, _ in self.replies]

        def send_model(self, task_name: str, targets: Any, data: Any, callback: Any) -> None:
            self.set_fl_context(data)
            task = self._prepare_task(data, task_name, 0, callback)
            # The task is fetched by a client that then does not answer.
            for site, model in [*self.replies, ("site-late", None)]:
                client_task = ClientTask(Client(site, ""), task)
                self._prepare_task_data(client_task, self.fl_ctx)
                if model is not None:
                    client_task.result = FLModelUtils.to_shareable(model)
                    self._process_result(client_task, self.fl_ctx)

        def get_num_standing_tasks(self) -> int:
            return 0

    return Answered(num_rounds=1, persistor_id="", save_filename="", aggregator=aggregator)
