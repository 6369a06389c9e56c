"""Taking times: contestants in turns in one process, so that what else runs hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from memory import limited

T = TypeVar("T")
Measured = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One that is timed.

    Attributes:
        prepare: Does what is not timed, and returns what is.
        repetitions: The best one counts.
        check: Given what the last call returned, how far it is from right.
        columns: Of how many columns it was given the first ones only: its time is a lower bound.
    """

    prepare: Callable[[], Callable[[], Any]]
    repetitions: int = 1
    check: Callable[[Any], float] | None = None
    columns: int | None = None


def timed(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of a call, work that it left on the device included, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def race(
    contestants: Mapping[str, Contestant | str],
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> Measured:
    """Time the contestants in turns.

    Args:
        contestants: By name; for one that is left out, the reason.
        device: Where they work.
        between: Called once in each turn.

    Returns:
        Name -> {"seconds", "all"} and, where there is a check, "missed"; or {"reason"} for one
        that was left out or failed.
    """
    running = {n: c for n, c in contestants.items() if isinstance(c, Contestant)}
    reasons = {n: c for n, c in contestants.items() if isinstance(c, str)}
    times: dict[str, list[float]] = {name: [] for name in running}
    missed: dict[str, float] = {}
    for turn in range(max((c.repetitions for c in running.values()), default=0)):
        between()
        for name, contestant in running.items():
            if name in reasons or turn >= contestant.repetitions:
                continue
            try:
                # The process would be killed for memory that is not there; a card says so itself.
                with limited() if device.type == "cpu" else nullcontext():
                    seconds, result = timed(contestant.prepare(), device)
            except ImportError as error:
                reasons[name] = f"not installed ({error})"
            except (MemoryError, RuntimeError) as error:
                reasons[name] = str(error).partition("\n")[0] or type(error).__name__
            else:
                times[name].append(seconds)
                if contestant.check and turn == contestant.repetitions - 1:
                    missed[name] = contestant.check(result)
                del result
    measured: Measured = {name: {"reason": reason} for name, reason in reasons.items()}
    for name in running.keys() - reasons.keys():
        measured[name] = {"seconds": min(times[name]), "all": times[name]}
        if name in missed:
            measured[name]["missed"] = missed[name]
        if (columns := running[name].columns) is not None:
            measured[name]["first_columns"] = columns
    return {name: measured[name] for name in contestants}
