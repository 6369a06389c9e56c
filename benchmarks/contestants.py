"""Who takes part in a race over one federation."""

from __future__ import annotations

from functools import partial

import rivals
import torch
from federations import Federation, after_first_round
from memory import available
from oracle import miss
from timing import Contestant

from craft_adapters import AggregationResult, get_aggregator

TITLES = {
    "ours": "ours",
    "floor": "floor",
    "fedml": "FedML mean",
    "mean": "plain mean",
    "published": "published",
    "torchjd": "TorchJD ConFIG",
    "conflictfree": "conflictfree",
}
"""All that are timed, by their names in the numbers."""

SLOW = ("published", "torchjd", "conflictfree")
"""Those that take an SVD or a least-squares solution of the updates."""

# What the published rule takes, in blocks of m x d, at its peak: the rows, and what torch's SVD and
# the product after it hold: 5.0 measured at 5,000,000 x 100. The clients' own values come on top.
_PUBLISHED_BLOCKS = 6
# The rules that take the whole model as one matrix are given the first columns only, so many
# numbers in all, unless asked: 10 s at 100 clients.
_WHOLE_MODEL_NUMBERS = 50_000_000


def fast(given: Federation, device: torch.device, repetitions: int) -> dict[str, Contestant | str]:
    """Ours, working on ``device``, and the averages, which work where the clients are."""
    aggregator = after_first_round(get_aggregator("craft", device=device), given.state)
    before = aggregator.state_dict()

    def check(_: AggregationResult) -> float:
        return miss(given, aggregator.state_dict()["reference"])

    def prepare() -> rivals.Call:
        aggregator.load_state_dict(before)
        return rivals.ours(given, aggregator)

    return {
        "ours": Contestant(prepare, repetitions, check),
        "fedml": Contestant(partial(rivals.fedml, given), repetitions),
        "mean": Contestant(partial(rivals.mean, given), repetitions),
    }


def slow(
    given: Federation, repetitions: int = 1, *, whole: bool = True
) -> dict[str, Contestant | str]:
    """The published rule; TorchJD and conflictfree once, if not ``whole`` on the first columns."""
    aggregator = after_first_round(get_aggregator("craft", device=given.device), given.state)
    reference = aggregator.state_dict()["reference"]
    found: dict[str, Contestant | str] = {
        "published": Contestant(
            partial(rivals.published, given, reference),
            repetitions,
            check=lambda result: miss(given, result[1]),
        )
    }
    needed, free = _PUBLISHED_BLOCKS * given.largest_block, available()
    if given.device.type == "cpu" and free is not None and needed > free:
        found["published"] = f"needs about {needed / 1e9:.0f} GB more, {free / 1e9:.0f} GB are free"
    all_columns = sum(given.widths)
    columns = all_columns if whole else _WHOLE_MODEL_NUMBERS // len(given.updates)
    for name, rival in (("torchjd", rivals.torchjd), ("conflictfree", rivals.conflictfree)):
        first = columns if columns < all_columns else None
        found[name] = Contestant(partial(rival, given, first), columns=first)
    return found
