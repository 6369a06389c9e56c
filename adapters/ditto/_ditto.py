"""Ditto's round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from craft_adapters import Aggregator
from craft_adapters.errors import OptionError
from craft_adapters.metrics import ClientScores
from craft_adapters.simulation import (
    ClientStore,
    Federation,
    IndexArray,
    Job,
    Method,
    Trained,
    hold_out,
)

from ._shared import chooser
from ._strength import Strength

__all__ = ["Ditto"]

# Streams of random numbers: the shared model's training has 0.
_SHARED, _PERSONAL = 0, 1
# The authors' fallback: with fewer examples to validate on, lambda is not picked.
_FEWEST = 4
_FALLBACK = 1.0


class Ditto(Method):
    """A shared model, and for each client a personal one that stays near it and never leaves.

    Client k's personal model v_k minimises ``F_k(v) + lam/2 |v - w_t|^2`` with w_t the model it
    *received* in this round: ``v -= lr (grad F_k(v) + lam (v - w_t))`` (Li et al., "Ditto: Fair
    and robust federated learning through personalization", ICML 2021, Algorithm 1,
    https://arxiv.org/abs/2012.04221). The shared model is trained as without Ditto, and its
    averaging (Algorithm 2, line 8) is ``aggregator``, whatever that is: no v_k influences it.
    With CRAFT there, it is the paper's Ditto + CRAFT.

    A client that joins late starts its personal model from the shared model that it first
    receives, not from the initial one: that is the only model it has ever seen.

    Args:
        aggregator: The rule of the shared model: a registered name or an object.
        lam: Lambda: one number, a mapping from client to number, or a set ``[0.1, 1, 2]``. Of a
            set each client takes, in each round, the one with the best accuracy of the personal
            model on a part of its training examples that is held out from both models (of equals
            the first); with fewer than 4 such examples lambda is 1 and nothing is held out.
            ``lam=0`` is local training; ``lr * lam >= 2`` diverges.
        mode: "interleaved": both models are trained on the same batches, as in the authors' code,
            where one batch takes a step of the personal model and then one of the shared one
            (neither sees the other's step, so it does not matter which is trained first).
            "epochwise": the personal model is trained on batches of its own.
        personal_epochs: Epochs of the personal model, with "epochwise" only; None: as many as of
            the shared one.
        personal_lr: Learning rate of the personal model; None: that of the shared one. It decays
            with the rounds in the same way.
        shared: Which entries of the model are shared: a regular expression that matches their
            whole name (``r"(?!head).*"``: all but the head), or a function of the name. A client
            keeps the others in its personal model; they start there, are never sent, and lambda
            does not pull them. None: all are shared.
        validation: Share of a client's training examples that is held out where lambda is picked.
        store: Where personal models of clients that are away are kept: "cpu" or "disk".

    Raises:
        OptionError: an unknown rule, or a value that cannot be.

    Example:
        >>> from craft_adapters.simulation import Run, read_config
        >>> import tempfile
        >>> config = read_config({"method": "ditto", "partition": {"clients": 20}}, ["rounds=1"])
        >>> done = list(Run(config, tempfile.mkdtemp()))
        >>> [record["model"] for record in done[-1].metrics]
        ['global', 'personal']
    """

    def __init__(
        self,
        aggregator: str | Aggregator = "fedavg",
        *,
        lam: float | Mapping[int, float] | Sequence[float] = 1.0,
        mode: Literal["interleaved", "epochwise"] = "interleaved",
        personal_epochs: int | None = None,
        personal_lr: float | None = None,
        shared: str | Callable[[str], bool] | None = None,
        validation: float = 0.1,
        store: Literal["cpu", "disk"] = "cpu",
    ) -> None:
        super().__init__(aggregator)
        if mode not in ("interleaved", "epochwise"):
            raise OptionError(f"mode must be 'interleaved' or 'epochwise', got {mode!r}")
        if personal_epochs is not None and mode == "interleaved":
            raise OptionError(
                "personal_epochs has a meaning with mode='epochwise' only: interleaved, both "
                "models take the same batches"
            )
        if personal_epochs is not None and personal_epochs < 1:
            raise OptionError(f"personal_epochs must be at least 1, got {personal_epochs}")
        if personal_lr is not None and not (math.isfinite(personal_lr) and personal_lr > 0):
            raise OptionError(f"personal_lr must be a finite number > 0, got {personal_lr}")
        if store not in ("cpu", "disk"):
            raise OptionError(f"store must be 'cpu' or 'disk', got {store!r}")
        if not 0 < validation < 1:
            raise OptionError(f"validation must be between 0 and 1, got {validation}")
        self.lam = Strength(lam)
        self.mode = mode
        self.personal_epochs, self.personal_lr = personal_epochs, personal_lr
        self.validation = validation
        self._shared = chooser(shared)
        self._store = store
        self.personal = ClientStore(store)

    def train(
        self,
        federation: Federation,
        state: Mapping[str, Tensor],
        clients: Sequence[int],
        number: int,
    ) -> list[Trained]:
        """Train both models of each client; what is returned, and sent, is the shared one's."""
        names = self._shared(state)
        anchor = {name: state[name] for name in names}
        received = {client: self.received(state, client) for client in clients}
        own = {client: self.personal.get(client) or received[client] for client in clients}
        parts = {client: self._parts(federation, client) for client in clients}
        sent = federation.train(
            [Job(client, received[client], parts[client][0]) for client in clients],
            round=number,
            anchor=anchor,
            stream=_SHARED,
        )
        for job in self._personalise(federation, own, parts, anchor, number):
            self.personal.put(job.client, job.state)
        return [t._replace(state={name: t.state[name] for name in names}) for t in sent]

    def received(self, state: Mapping[str, Tensor], client: int) -> Mapping[str, Tensor]:
        """The global model, with what is not shared from the client's personal one."""
        names = self._shared(state)
        own = None if len(names) == len(state) else self.personal.get(client)
        if own is None:
            return state
        return {**own, **{name: state[name] for name in names}}

    def evaluate(
        self, federation: Federation, state: Mapping[str, Tensor]
    ) -> dict[str, ClientScores]:
        """Scores of the global model and of the personal ones.

        A client that has not taken part yet has no personal model; the global one stands in.
        """
        shared_all = len(self._shared(state)) == len(state)
        return {
            "global": federation.evaluate(
                state if shared_all else lambda client: self.received(state, client)
            ),
            "personal": federation.evaluate(lambda client: self.personal.get(client) or state),
        }

    def keep_in(self, folder: Path) -> None:
        """Keep personal models in this folder."""
        self.personal = ClientStore(self._store, folder)

    def commit(self) -> dict[str, Any]:
        """Write personal models that are not written; say which files are theirs."""
        return self.personal.commit()

    def prune(self) -> None:
        """Delete files of earlier personal models."""
        self.personal.prune()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to the personal models of a commit."""
        self.personal.restore(saved)

    def _personalise(
        self,
        federation: Federation,
        own: Mapping[int, Mapping[str, Tensor]],
        parts: Mapping[int, tuple[IndexArray, IndexArray]],
        anchor: Mapping[str, Tensor],
        number: int,
    ) -> list[Trained]:
        """The clients' personal models after this round."""
        training = replace(
            federation.training,
            lr=self.personal_lr or federation.training.lr,
            epochs=self.personal_epochs or federation.training.epochs,
            steps=None if self.personal_epochs else federation.training.steps,
        )

        def train(strengths: Mapping[int, float]) -> list[Trained]:
            return federation.train(
                [
                    Job(client, own[client], parts[client][0], proximal=lam)
                    for client, lam in strengths.items()
                ],
                round=number,
                anchor=anchor,
                stream=_SHARED if self.mode == "interleaved" else _PERSONAL,
                training=training,
            )

        if not self.lam.choices:
            return train({client: self.lam.of(client) for client in own})
        held = {client: part for client, (_, part) in parts.items() if len(part)}
        best = train({client: _FALLBACK for client in own if client not in held})
        tried: dict[int, tuple[float, Trained]] = {}
        for lam in self.lam.choices:
            candidates = {t.client: t for t in train(dict.fromkeys(held, lam))}
            states = {client: t.state for client, t in candidates.items()}
            scores = federation.evaluate(states.__getitem__, held)
            for client, candidate in candidates.items():
                # A model that went to infinity still "predicts" the first class.
                loss = scores.loss[client]
                finite = loss is not None and math.isfinite(loss)
                accuracy = (scores.accuracy[client] or 0.0) if finite else -1.0
                if client not in tried or accuracy > tried[client][0]:
                    tried[client] = accuracy, candidate
        return best + [candidate for _, candidate in tried.values()]

    def _parts(self, federation: Federation, client: int) -> tuple[IndexArray, IndexArray]:
        """What a client trains on, and what it picks lambda by."""
        examples = federation.split.train[client]
        if self.lam.choices:
            kept, held = hold_out(examples, self.validation, client=client, seed=federation.seed)
            if len(held) >= _FEWEST:
                return kept, held
        return examples, examples[:0]
