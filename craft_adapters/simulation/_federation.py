"""Clients with their data, and what a server can ask of them: train, and be evaluated."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._contract import ClientId
from ..errors import OptionError
from ..metrics import ClientScores, per_client_accuracy
from ._batches import draw_batches
from ._datasets import Dataset
from ._dropout import hold_dropout
from ._engines import Loss, Task, Trained, Workshop, train_loop, train_many, why_not_many
from ._partition import IndexArray, Split
from ._settings import LocalTraining
from ._streams import DROPOUT, torch_seed

__all__ = ["Federation", "Job", "cross_entropy"]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each example, shape (b,)."""
    return F.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One model to train on one client's examples.

    Attributes:
        client: The client's position.
        start: The state to start from, complete; not changed.
        examples: What to train on; None: all of the client's training examples.
        proximal: Strength of the pull to the anchor; None: that of the federation's training.
    """

    client: int
    start: Mapping[str, Tensor]
    examples: IndexArray | None = None
    proximal: float | None = None


class Federation:
    """Clients, their data, one kind of model, and how it is trained.

    A client is its position in the split. Batches, augmentation and dropout of a training depend
    on the seed, the round, the client and the stream only: not on other clients, on what was
    trained before, or on the engine. So a run that is resumed meets the same numbers.

    Args:
        dataset: The examples. Training happens on the device of ``dataset.x``.
        split: Each client's training and test examples.
        model: Any classifier; copied, its weights do not matter.
        training: How clients train.
        seed: Non-negative.
        loss: Loss per example; cross-entropy unless given.

    Attributes:
        engine: "loop" or "many"; with ``training.engine="auto"`` None until the first training.

    Raises:
        OptionError: ``training.engine="many"`` with a model that does not allow it; says why.

    Example:
        >>> from craft_adapters.simulation import iid_partition, load_digits, train_test_split
        >>> digits = load_digits()
        >>> split = train_test_split(iid_partition(len(digits), num_clients=9, seed=0), seed=0)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> federation = Federation(digits, split, model, LocalTraining(engine="many"), seed=0)
        >>> jobs = [Job(client, model.state_dict()) for client in (2, 5)]
        >>> [(t.client, t.steps) for t in federation.train(jobs, round=0)]
        [(2, 8), (5, 8)]
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        model: nn.Module,
        training: LocalTraining | None = None,
        *,
        seed: int,
        loss: Loss = cross_entropy,
    ) -> None:
        self.dataset, self.split, self.seed = dataset, split, seed
        self.training = training if training is not None else LocalTraining()
        device = dataset.x.device
        copied = copy.deepcopy(model).to(device)
        dtype = next(copied.parameters()).dtype
        example = dataset.inputs(torch.zeros(1, dtype=torch.int64, device=device))
        masks = hold_dropout(copied, example.to(dtype) if example.is_floating_point() else example)
        self._shop = Workshop(copied, dataset, self.training, loss, masks)
        self._obstacle = why_not_many(copied)
        self.engine: Literal["loop", "many"] | None = None
        if self.training.engine == "many" and self._obstacle:
            raise OptionError(f"engine 'many' cannot train this model: {self._obstacle}")
        if self.training.engine != "auto":
            self.engine = self.training.engine
        elif self._obstacle:
            self.engine = "loop"

    def __len__(self) -> int:
        return len(self.split.train)

    @property
    def device(self) -> torch.device:
        """Where training happens."""
        return self._shop.device

    def num_examples(self, client: int) -> int:
        """Number of a client's training examples."""
        return len(self.split.train[client])

    def train(
        self,
        jobs: Sequence[Job],
        *,
        round: int,
        anchor: Mapping[str, Tensor] | None = None,
        stream: int = 0,
        training: LocalTraining | None = None,
    ) -> list[Trained]:
        """Train models on clients' examples.

        Args:
            jobs: What to train. States as ``model.state_dict()`` has them; they are not changed.
            round: The round's number: picks the learning rate and the random numbers.
            anchor: What the proximal term pulls to, by entry; entries it lacks are not pulled.
                None: each entry to the first job's start.
            stream: Another number gives other batches, for a second model in the same round.
            training: How to train this time; None: as always. The engine stays.

        Returns:
            In the order of ``jobs``. A client without examples gets its start back, after zero
            steps.
        """
        if not jobs:
            return []
        shop = self._shop if training is None else replace(self._shop, training=training)
        tasks = [self._task(job, shop.training, round, stream) for job in jobs]
        reference = jobs[0].start if anchor is None else anchor
        reference = {name: value.to(self.device) for name, value in reference.items()}
        lr = shop.training.rate(round)
        if self.engine is None:
            self.engine = self._fastest(tasks, reference, lr)
        work = train_loop if self.engine == "loop" else train_many
        idle = [Trained(t.client, dict(t.start), 0, 0) for t in tasks if not len(t.batches)]
        done = work(shop, [task for task in tasks if len(task.batches)], reference, lr)
        waiting = {False: iter(idle), True: iter(done)}
        return [next(waiting[len(task.batches) > 0]) for task in tasks]

    def losses(
        self,
        state: Mapping[str, Tensor] | Callable[[int], Mapping[str, Tensor]],
        clients: Sequence[int],
    ) -> dict[int, float]:
        """Loss on each client's training examples, without augmentation or dropout.

        Args:
            state: One model for all, or a function from client to its model.
            clients: Whose examples.

        Returns:
            Client -> mean loss; NaN for a client without examples.
        """
        shared = None if callable(state) else self.load(state)

        def mean(client: int) -> float:
            examples = self.split.train[client]
            model = self.load(state(client)) if callable(state) else shared
            assert model is not None
            parts = torch.split(torch.from_numpy(examples).to(self.device), _EVALUATION_BATCH)
            batches = (self._shop.batch(part, None, None) for part in parts)
            losses = [self._shop.loss(model(x), y).double() for x, y in batches]
            return float(torch.cat(losses).mean()) if len(examples) else float("nan")

        with torch.no_grad():
            return {client: mean(client) for client in clients}

    def evaluate(
        self,
        state: Mapping[str, Tensor] | Callable[[int], Mapping[str, Tensor]],
        examples: Mapping[int, IndexArray] | None = None,
    ) -> ClientScores:
        """Accuracy and loss on each client's own test examples.

        Args:
            state: One model for all, or a function from client to its model.
            examples: What to test on instead, by client.
        """
        test = dict(enumerate(self.split.test)) if examples is None else examples
        parts: dict[ClientId, IndexArray] = {client: part for client, part in test.items()}
        x, y = self.dataset.x, self.dataset.y

        def score(model: nn.Module, parts: dict[ClientId, IndexArray]) -> ClientScores:
            dtype = next(model.parameters()).dtype
            return per_client_accuracy(
                model, x, y, parts, read=lambda batch: self.dataset.inputs(batch).to(dtype)
            )

        if not callable(state):
            return score(self.load(state), parts)
        scores = ClientScores({}, {}, {})
        for client, part in test.items():
            one = score(self.load(state(client)), {client: part})
            for whole, piece in zip(_fields(scores), _fields(one), strict=True):
                whole.update(piece)
        return scores

    def load(self, state: Mapping[str, Tensor]) -> nn.Module:
        """The federation's own model with this state, in eval mode; valid until the next call."""
        self._shop.model.load_state_dict(state)
        return self._shop.model.eval()

    def _task(self, job: Job, training: LocalTraining, round: int, stream: int) -> Task:
        examples = self.split.train[job.client] if job.examples is None else job.examples
        return Task(
            client=job.client,
            start={name: value.to(self.device) for name, value in job.start.items()},
            batches=draw_batches(
                examples,
                training,
                seed=self.seed,
                round=round,
                client=job.client,
                stream=stream,
            ),
            proximal=training.proximal if job.proximal is None else job.proximal,
            seed=torch_seed(self.seed, DROPOUT, stream, round, job.client),
            examples=len(examples),
        )

    def _fastest(
        self, tasks: Sequence[Task], anchor: Mapping[str, Tensor], lr: float
    ) -> Literal["loop", "many"]:
        """Time one step of the clients on both engines, after one to warm up."""
        sample = [task for task in tasks if len(task.batches)][: min(self._shop.width, _SAMPLE)]
        if not sample:
            return "loop"
        sample = [replace(task, batches=task.batches.head(1)) for task in sample]
        times: dict[Any, float] = {}
        for name, work in (("loop", train_loop), ("many", train_many)):
            try:
                for _ in range(2):  # the first one pays for what is made once
                    self._synchronise()
                    start = time.perf_counter()
                    work(self._shop, sample, anchor, lr)
                    self._synchronise()
                    times[name] = time.perf_counter() - start
            except RuntimeError:
                # torch.func says no to what it cannot vectorise; the loop trains anything, and
                # what is really wrong with a model shows there.
                if name == "loop":
                    raise
                times[name] = float("inf")
        return "many" if times["many"] < times["loop"] else "loop"

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_SAMPLE = 64
_EVALUATION_BATCH = 1024


def _fields(scores: ClientScores) -> tuple[dict[Any, Any], ...]:
    return scores.accuracy, scores.loss, scores.num_examples
