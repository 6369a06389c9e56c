"""How a client trains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import OptionError

__all__ = ["LocalTraining"]


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """A client's local training: minibatch SGD.

    A step is ``p -= lr_t (grad + proximal (p - p_t) + weight_decay p)``, with p_t the model that
    the client received and ``lr_t = lr * decay ** max(t - 1, 0)`` in round t = 0, 1, ..., as in
    CRAFT's published experiments (its rounds 0 and 1 have the same rate). ``proximal`` is FedProx's
    mu: the penalty is mu/2 times the *squared* distance. With ``momentum`` every training starts
    with a buffer of its own, so nothing leaks from client to client or from round to round.

    Attributes:
        lr: Learning rate, > 0.
        decay: Factor per round, in (0, 1].
        batch_size: Examples per step, at least 1; the last batch of an epoch may be smaller.
        epochs: Passes over the client's examples, at least 1.
        steps: Number of steps instead of epochs, at least 1; None: by epochs.
        proximal: Strength of the pull to the received model, >= 0.
        momentum: In [0, 1).
        weight_decay: >= 0.
        augment: "crop_flip" shifts images by up to 4 pixels and mirrors half of them.
        engine: "loop" trains one client after the other, "many" many at once; the results are the
            same to rounding. "auto" measures both on the first round and keeps the faster.
        parallel: How many clients "many" trains at once; bounds its memory. None: 64 on an
            accelerator; on a CPU, where it is the memory that slows a step down, as many as keep
            their models within 7 MB, and at least 2.

    Raises:
        OptionError: a value out of its range.

    Example:
        >>> LocalTraining(lr=0.1, decay=0.5).rate(3)
        0.025
    """

    lr: float = 0.1
    decay: float = 1.0
    batch_size: int = 20
    epochs: int = 1
    steps: int | None = None
    proximal: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    augment: Literal["none", "crop_flip"] = "none"
    engine: Literal["auto", "loop", "many"] = "auto"
    parallel: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, allowed: str, fits: bool) -> None:
            if not fits:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        check("lr", "a finite number > 0", math.isfinite(self.lr) and self.lr > 0)
        check("decay", "above 0 and at most 1", 0 < self.decay <= 1)
        for name in ("batch_size", "epochs"):
            check(name, "at least 1", getattr(self, name) >= 1)
        for name in ("steps", "parallel"):
            value = getattr(self, name)
            check(name, "at least 1, or none", value is None or value >= 1)
        for name in ("proximal", "weight_decay"):
            value = getattr(self, name)
            check(name, "a finite number >= 0", math.isfinite(value) and value >= 0)
        check("momentum", "at least 0 and below 1", 0 <= self.momentum < 1)
        check("augment", "'none' or 'crop_flip'", self.augment in ("none", "crop_flip"))
        check("engine", "'auto', 'loop' or 'many'", self.engine in ("auto", "loop", "many"))

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return float(self.lr * self.decay ** max(round - 1, 0))
