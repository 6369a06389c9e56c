"""What the project wants of its numbers, and whether it is so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from timing import Measured

QUANTITIES = {
    "ours_over_floor": ("ours / floor", "at most"),
    "ours_over_fedml": ("ours / FedML mean", "at most"),
    "published_over_ours": ("published / ours", "at least"),
    "torchjd_over_ours": ("TorchJD ConFIG / ours", "above"),
    "conflictfree_over_ours": ("conflictfree / ours", "above"),
    "ours_milliseconds": ("ours, in ms", "at most"),
    "work": ("extra memory that is not kept / (widest group's block + 16 MB)", "at most"),
    "missed": ("target missed by", "at most"),
}
"""What a bar may be set for: what it is called, and how a value has to stand to the bar."""

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "at most": lambda value, bar: value <= bar,
    "at least": lambda value, bar: value >= bar,
    "above": lambda value, bar: value > bar,
    "below": lambda value, bar: value < bar,
}
_WORDS = {True: "met", False: "MISSED", None: "not measured"}


def ratios(times: Measured) -> dict[str, float]:
    """Those that could be measured, of the names in :data:`QUANTITIES`."""
    seconds = {name: time["seconds"] for name, time in times.items() if "seconds" in time}
    found = {}
    for name, other in seconds.items():
        if name in ("floor", "fedml", "mean"):
            found[f"ours_over_{name}"] = seconds["ours"] / other
        elif name != "ours":
            found[f"{name}_over_ours"] = other / seconds["ours"]
    return found


def judge(wanted: Mapping[str, float], values: Mapping[str, float | None]) -> list[Measured]:
    """Each bar with its value, and whether it is met (None: not measured)."""
    found = []
    for quantity, bar in wanted.items():
        what, relation = QUANTITIES[quantity]
        value = values.get(quantity)
        met = None if value is None else _RELATIONS[relation](value, bar)
        found.append({"what": what, "relation": relation, "bar": bar, "value": value, "met": met})
    return found


def lines(results: list[Measured]) -> list[str]:
    """Every bar of every row, as text."""
    return [
        f"{result['name']}, {bar['what']}:{_number(bar['value'])} "
        f"wanted {bar['relation']} {bar['bar']:g}, {_WORDS[bar['met']]}"
        for result in results
        for bar in result["bars"]
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f" {value:.0e}," if value < 1e-3 else f" {value:.2f},"
