"""Adapters for the toy host with one defect each.

``DEFECTS``: name of a check -> the adapter that it must catch, and the other checks that this
defect cannot but fail as well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import craft_adapters.testing.toy.host  # noqa: F401  the defect that lazy-import is for
from craft_adapters import Aggregator, ClientUpdate, get_aggregator
from craft_adapters.testing.toy.adapter import Adapter
from craft_adapters.testing.toy.host import Reply

State = Mapping[str, Any]

DEFECTS: dict[str, tuple[type[Adapter], frozenset[str]]] = {}


def defect(check: str, *also: str) -> Callable[[type[Adapter]], type[Adapter]]:
    def add(toy: type[Adapter]) -> type[Adapter]:
        DEFECTS[check] = (toy, frozenset(also))
        return toy

    return add


def parameters(values: State) -> list[str]:
    return [name for name, value in values.items() if name.endswith((".weight", ".bias"))]


# --- What reaches the rule ---------------------------------------------------------------------


class Differences(Adapter):
    """No defect: sends differences."""

    factor = 1.0

    def base(self, model: State) -> State:
        return model

    def translate(self, model: State, reply: Reply) -> ClientUpdate:
        given = super().translate(model, reply)
        base, values = self.base(model), {}
        for name, value in given.values.items():
            fits = value.dtype != torch.bool and value.shape == base[name].shape
            values[name] = base[name] - value if fits else value
        for name in parameters(values):
            values[name] = self.factor * values[name]
        return dataclasses.replace(given, values=values, kind="update")


@defect("update-sign")
class WrongSign(Differences):
    factor = -1.0


@defect("update-scale")
class MultipliesByTheCount(Differences):
    def translate(self, model: State, reply: Reply) -> ClientUpdate:
        self.factor = float(reply.examples)
        return super().translate(model, reply)


@defect("update-entries")
class TurnsAnEntryRound(Adapter):
    def translate(self, model: State, reply: Reply) -> ClientUpdate:
        given = super().translate(model, reply)
        values = {**given.values}
        values["head.bias"] = values["head.bias"].flip(0)
        return dataclasses.replace(given, values=values)


class ChangesUpdates(Adapter):
    """For defects in the list of updates."""

    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        raise NotImplementedError

    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        rule = self.rule

        class Changed:
            save = rule.save

            @staticmethod
            def aggregate(model: State, updates: list[ClientUpdate], *, round: int) -> Any:
                return rule.aggregate(model, self.change(updates), round=round)

        self.rule = Changed()  # type: ignore[assignment]
        try:
            return super().__call__(model, replies, round)
        finally:
            self.rule = rule


@defect("weights")
class SwapsWeights(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        updates = sorted(updates, key=lambda update: update.client_id)
        if len(updates) > 1:
            a, b, *rest = updates
            return [
                dataclasses.replace(a, num_examples=b.num_examples),
                dataclasses.replace(b, num_examples=a.num_examples),
                *rest,
            ]
        return updates


@defect("every-client-once", "partial-participation", "changing-number")
class DropsAClient(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        updates = sorted(updates, key=lambda update: update.client_id)
        return updates[:-1] if len(updates) > 1 else updates


@defect("client-ids", "order")
class NumbersClientsByArrival(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        return [dataclasses.replace(u, client_id=place) for place, u in enumerate(updates)]


@defect("order")
class SortsCountsApart(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        counts = sorted(update.num_examples for update in updates)
        return [
            dataclasses.replace(update, num_examples=count)
            for update, count in zip(updates, counts, strict=True)
        ]


@defect("loss")
class OneLossForAll(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        return [dataclasses.replace(update, loss=0.5) for update in updates]


@defect("local-steps")
class OneCountOfStepsForAll(ChangesUpdates):
    def change(self, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        return [dataclasses.replace(update, local_steps=2) for update in updates]


@defect("unmet-requirements")
class MakesLossesUp(OneLossForAll):
    """With a descriptor that gives no losses."""


@defect("inputs-unchanged")
class ChangesInputs(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        state = super().__call__(model, replies, round)
        for reply in replies:
            for value in reply.model.values():
                value.zero_()
        return state


# --- The global model --------------------------------------------------------------------------


@defect("global-model", "restart")
class StaleGlobal(Differences):
    """Takes differences from the model of the round before."""

    before: State | None = None

    def base(self, model: State) -> State:
        return {**model, **{name: (self.before or model)[name] for name in parameters(model)}}

    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        try:
            return super().__call__(model, replies, round)
        finally:
            self.before = dict(model)


class ChangesResult(Adapter):
    """For defects in what goes back to the host."""

    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        raise NotImplementedError

    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        state = dict(super().__call__(model, replies, round))
        if replies and all(reply.examples for reply in replies):
            self.change(model, replies, state)
        return state


@defect("result")
class KeepsAnOldEntry(ChangesResult):
    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        state["head.bias"] = model["head.bias"]


@defect("buffers")
class AveragesBuffers(ChangesResult):
    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        name = "features.1.num_batches_tracked"
        all_of_them = torch.stack([reply.model[name] for reply in replies])
        state[name] = all_of_them.double().mean().to(all_of_them.dtype)


@defect("dtypes", "restart")
class TurnsCountersIntoFloats(ChangesResult):
    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        name = "features.1.num_batches_tracked"
        state[name] = state[name].double()


@defect("bfloat16")
class CannotCarryBfloat16(ChangesResult):
    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        for name, value in state.items():
            if value.dtype == torch.bfloat16:
                state[name] = value.float()


@defect("own-copy")
class SharesMemory(ChangesResult):
    def change(self, model: State, replies: Sequence[Any], state: dict[str, Any]) -> None:
        state["mask"] = replies[0].model["mask"]


# --- Rounds ------------------------------------------------------------------------------------


@defect("once-a-round")
class TriesTheRoundFirst(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        if replies:
            updates = [self.translate(model, reply) for reply in replies if reply.examples]
            if updates:
                copy.deepcopy(self.rule).aggregate(model, updates, round=round)
        return super().__call__(model, replies, round)


@defect("round-numbers")
class AlwaysRoundZero(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        return super().__call__(model, replies, 0)


@defect("partial-participation", "changing-number")
class KeepsFormerClients(Adapter):
    def __init__(self, rule: Aggregator, folder: Path) -> None:
        super().__init__(rule, folder)
        self.known: dict[int, Any] = {}

    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        for reply in replies:
            if reply.examples:
                self.known[reply.client] = reply
        waiting = list(self.known.values())
        return super().__call__(model, waiting if replies else [], round)


@defect("changing-number")
class AlwaysFour(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        if replies and len(replies) != 4:
            raise IndexError("there are four clients")
        return super().__call__(model, replies, round)


@defect("empty-round")
class DividesByTheExamples(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        if replies:
            1 / sum(reply.examples for reply in replies)
        return super().__call__(model, replies, round)


@defect("no-replies")
class NeedsAReply(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        replies[0]
        return super().__call__(model, replies, round)


@defect("nan-client")
class StopsAtNan(Adapter):
    def translate(self, model: State, reply: Reply) -> ClientUpdate:
        for name in parameters(reply.model):
            if not reply.model[name].isfinite().all():
                raise FloatingPointError(name)
        return super().translate(model, reply)


# --- State -------------------------------------------------------------------------------------


@defect("state-kept", "restart")
class NewRuleEachRound(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        try:
            return super().__call__(model, replies, round)
        finally:
            self.rule = get_aggregator(self.rule.name)


@defect("restart")
class DoesNotResume(Adapter):
    def __init__(self, rule: Aggregator, folder: Path) -> None:
        (folder / "rule.safetensors").unlink(missing_ok=True)
        super().__init__(rule, folder)


@defect("one-rule-per-server", "restart")
class SharesTheRule(Adapter):
    """Between the servers of one check, or no other check could be passed."""

    rules: ClassVar[dict[tuple[Path, str], Aggregator]] = {}

    def __init__(self, rule: Aggregator, folder: Path) -> None:
        super().__init__(self.rules.setdefault((folder.parent, rule.name), rule), folder)


# --- Errors ------------------------------------------------------------------------------------


@defect("rule-error")
class SwallowsErrors(Adapter):
    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        try:
            return super().__call__(model, replies, round)
        except RuntimeError:
            return model


@defect("round-after-error")
class ForgetsToForget(Adapter):
    def __init__(self, rule: Aggregator, folder: Path) -> None:
        super().__init__(rule, folder)
        self.waiting: list[Any] = []

    def __call__(self, model: State, replies: Sequence[Any], round: int) -> State:
        self.waiting += replies
        state = super().__call__(model, self.waiting, round)
        self.waiting = []
        return state


class MendsReplies(Adapter):
    """For adapters that hide what does not fit."""

    def mend(self, model: State, values: State) -> State:
        raise NotImplementedError

    def translate(self, model: State, reply: Reply) -> ClientUpdate:
        given = super().translate(model, reply)
        return dataclasses.replace(given, values=self.mend(model, given.values))


@defect("missing-entry")
class FillsUp(MendsReplies):
    def mend(self, model: State, values: State) -> State:
        return {**{name: model[name] for name in model if name not in values}, **values}


@defect("extra-entry")
class LeavesOut(MendsReplies):
    def mend(self, model: State, values: State) -> State:
        return {name: value for name, value in values.items() if name in model}


@defect("misshapen-entry")
class CutsToFit(MendsReplies):
    def mend(self, model: State, values: State) -> State:
        return {
            name: value
            if name not in model or value.shape == model[name].shape
            else torch.as_tensor(model[name]).clone()
            for name, value in values.items()
        }


def early_load() -> Any:
    """Of a module that imports the host at its top."""
    return Adapter
