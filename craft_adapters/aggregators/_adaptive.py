"""FedOpt: adaptive server optimisers (Reddi et al. 2021, arXiv 2003.00295)."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._contract import State
from .._intake import real
from ..errors import CheckpointError, OptionError
from ._common import plain_step, within
from ._entries import cloned, read_count, read_entries, read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams

__all__ = ["AdaptiveRule", "DecayingRule"]


class AdaptiveRule(GramRule):
    """theta <- theta + eta m / (sqrt v + tau), m and v from the mean change Delta and its square.

    Element by element, with Delta = sum_i p_i (theta_i - theta) and the data shares p_i of the
    round; m <- beta1 m + (1 - beta1) Delta from zero, v <- second(v, Delta^2) from
    ``initial_accumulator``. Both are kept per entry, in float32 (float64 where values are
    float64). Buffers are averaged.

    Args:
        server_lr: eta.
        beta1: Weight of the past in m.
        tau: Keeps the division sound; of the size of the updates that should count as small.
        initial_accumulator: v before the first round; None: tau^2.
        **options: See :class:`GramRule`.
    """

    def __init__(
        self,
        *,
        server_lr: float,
        beta1: float,
        tau: float,
        initial_accumulator: float | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        within("server_lr", server_lr, 0, math.inf, ends="()")
        within("beta1", beta1, 0, 1, ends="[)")
        within("tau", tau, 0, math.inf, ends="()")
        if initial_accumulator is None:
            initial_accumulator = tau**2
        within("initial_accumulator", initial_accumulator, 0, math.inf, ends="[)")
        self.server_lr = server_lr
        self.beta1 = beta1
        self.tau = tau
        self.initial_accumulator = initial_accumulator
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        self._steps = 0
        # Of the round that is being computed; taken over when it has succeeded.
        self._next: dict[str, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v."""

    def correction(self, step: int) -> float:
        """Factor on eta in the server's step of a number, from 1."""
        return 1.0

    def kept(self) -> Mapping[str, Tensor]:
        """M per entry."""
        return self._first

    def combine(self, grams: Grams) -> Combination:
        """The mean update, each coordinate rescaled."""
        self._next = {}

        def turn(entry: str, place: slice, step: Tensor) -> None:
            if entry not in self._next:
                size = real(grams.intake.state[entry]).numel()
                self._next[entry] = (step.new_empty(size), step.new_empty(size))
            first, second = (part[place] for part in self._next[entry])
            m, v = torch.zeros_like(step), torch.full_like(step, self.initial_accumulator)
            if entry in self._first:
                m, v = self._first[entry][place].to(step), self._second[entry][place].to(step)
            # m has the sign of an update: it is -m of the paper.
            torch.lerp(step, m, self.beta1, out=first)
            second.copy_(self.second(v, step.square()))
            torch.div(first, second.sqrt() + self.tau, out=step)

        rate = self.server_lr * self.correction(self._steps + 1)
        return dataclasses.replace(plain_step(grams, grams.shares, rate=rate), turn=turn)

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Take over m and v."""
        self._first = {**self._first, **{entry: m for entry, (m, _) in self._next.items()}}
        self._second = {**self._second, **{entry: v for entry, (_, v) in self._next.items()}}
        self._next = {}
        self._steps += 1

    def state_dict(self) -> State:
        """Round counter, number of steps, m and v per entry (m of the sign of an update)."""
        return {
            "round": self._round,
            "steps": self._steps,
            "m": cloned(self._first),
            "v": cloned(self._second),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`."""
        number = read_round(self.name, state, {"round", "steps", "m", "v"})
        steps = read_count(self.name, state, "steps")
        first = read_entries(self.name, state, "m", self._first, device=self.device)
        second = read_entries(self.name, state, "v", self._second, device=self.device, least=0.0)
        if {n: t.numel() for n, t in first.items()} != {n: t.numel() for n, t in second.items()}:
            raise CheckpointError(f"not a state of rule {self.name!r}: m and v have other entries")
        self._round, self._steps, self._first, self._second = number, steps, first, second


class DecayingRule(AdaptiveRule):
    """One whose v forgets, and may be corrected for having started at zero: FedAdam, FedYogi.

    Args:
        beta2: Weight of the past in v.
        bias_correction: One of :attr:`corrections`; see :class:`FedAdam`.
        initial_accumulator: v before the first round; None: tau^2, or 0 with a correction.
        **options: See :class:`AdaptiveRule`.

    Attributes:
        corrections: What the rule takes; the first is none (class attribute).
    """

    corrections: ClassVar[tuple[str, ...]] = ("none", "keras")

    def __init__(
        self,
        *,
        beta2: float,
        bias_correction: str,
        initial_accumulator: float | None,
        **options: Any,
    ) -> None:
        if bias_correction not in self.corrections:
            names = ", ".join(map(repr, self.corrections))
            raise OptionError(f"bias_correction must be one of {names}, got {bias_correction!r}")
        if initial_accumulator is None and bias_correction != "none":
            initial_accumulator = 0.0
        super().__init__(initial_accumulator=initial_accumulator, **options)
        within("beta2", beta2, 0, 1, ends="[)")
        self.beta2 = beta2
        self.bias_correction = bias_correction

    def correction(self, step: int) -> float:
        """sqrt(1 - beta2^t) / (1 - beta1^t)."""
        if self.bias_correction == "none":
            return 1.0
        if self.bias_correction == "flower":
            step += 1
        return math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
