"""The other rules' aggregate() beside published implementations, on the same clients.

    python benchmarks/rules.py [--quick] [--rows NAME ...] [--out DIR]

Each goes from what its framework hands it, models in memory, to the new model. FLGo 0.4.4's own
servers are driven, with shims for the rest of FLGo: they get the clients as FLGo models, which is
not timed. TorchJD's rules get the matrix of updates; making it is timed, as ours makes its own. No
package has FedLF: it stands beside TorchJD's MGDA on each layer, which is a part of its work.
Rivals that are not installed are named.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import bars
import report
import torch
from federations import Federation, federation, layers, model
from oracle import flat
from rivals import Call, State
from timing import Contestant, Measured, race
from torch import Tensor, nn

from craft_adapters import get_aggregator

CPU = torch.device("cpu")
# Half of all pairs of clients are in conflict, so that FedFV has something to do.
COSINE = 0.0
BAR, WIDE_BAR = 1.0, 10.0
"""Times as fast as each rival: everywhere, and on wide layers."""

Rival = Callable[[Federation], Call]


@dataclass(frozen=True, slots=True)
class Row:
    """A federation.

    Attributes:
        name: What ``--rows`` calls it.
        model: Makes the global model.
        clients: Number of clients.
        repetitions: The best one counts.
        slow: Whether rivals run once.
        bar: How many times as fast as a rival ours should be.
        quick: Whether it runs with ``--quick``.
        default: Whether it runs without ``--rows``.
    """

    name: str
    model: Callable[[], State]
    clients: int
    repetitions: int = 5
    slow: bool = False
    bar: float = BAR
    quick: bool = False
    default: bool = True


_narrow, _wide = partial(layers, 1, 10_000), partial(layers, 1, 1_000_000)
_resnet20 = partial(model, "resnet20")
ROWS = (
    Row("tinyx4", partial(layers, 2, 30), 4, repetitions=1, quick=True, default=False),
    Row("narrowx10", _narrow, 10, quick=True),
    Row("narrowx100", _narrow, 100, slow=True),
    Row("widex10", _wide, 10, bar=WIDE_BAR),
    Row("widex100", _wide, 100, repetitions=2, slow=True, bar=WIDE_BAR),
    Row("resnet20x10", _resnet20, 10, quick=True),
    Row("resnet20x100", _resnet20, 100, repetitions=2, slow=True),
)


def flgo_fedfv(given: Federation) -> Call:
    """FLGo's FedFV: ``iterate``, with the clients' answers at hand."""
    fedfv = _flgo("fedfv")
    models, positions = _modules(given), list(range(len(given.updates)))
    answers = {"model": models[1:], "loss": [update.loss for update in given.updates]}
    server = object.__new__(fedfv.Server)
    vars(server).update(
        model=models[0],
        alpha=0.1,
        tau=1,
        current_round=1,
        num_clients=len(positions),
        received_clients=positions,
        client_last_sample_round=[-1] * len(positions),
        client_grads_history=[0] * len(positions),
        sample=lambda: positions,
        communicate=lambda selected: answers,
    )

    def call() -> State:
        server.iterate()
        return _entries(given, server.model)

    return call


def flgo_fedmgda(given: Federation) -> Call:
    """FLGo's FedMGDA+: ``aggregate``."""
    fedmgda = _flgo("fedmgda")
    fedmgda.cvxopt.solvers.options["show_progress"] = False
    models = _modules(given)
    server = object.__new__(fedmgda.Server)
    vars(server).update(
        model=models[0],
        eta=1,
        epsilon=0.1,
        clients=[SimpleNamespace(train_data=range(int(u.num_examples))) for u in given.updates],
        received_clients=range(len(given.updates)),
    )
    return lambda: _entries(given, server.aggregate(models[1:]))


def torchjd_config(given: Federation) -> Call:
    """TorchJD's ConFIG of the whole model."""
    from torchjd.aggregation import ConFIG

    return partial(_by_groups, given, [given.entries], ConFIG())


def torchjd_mgda(given: Federation) -> Call:
    """TorchJD's MGDA of the whole model's unit updates."""
    from torchjd.aggregation import MGDA

    mgda = MGDA()
    return partial(
        _by_groups, given, [given.entries], lambda rows: mgda(rows / rows.norm(dim=1, keepdim=True))
    )


def torchjd_mgda_by_layer(given: Federation) -> Call:
    """TorchJD's MGDA of each layer's updates."""
    from torchjd.aggregation import MGDA

    return partial(_by_groups, given, [list(g.entries) for g in given.layout.groups], MGDA())


@dataclass(frozen=True, slots=True)
class Match:
    """A rule of ours, its options, and who does the same."""

    title: str
    rule: str
    options: Mapping[str, Any]
    rival_title: str
    rival: Rival
    same: bool = True  # whether the two should come to the same model


MATCHES = (
    # FLGo's FedFV is the published code's variant.
    Match("FedFV", "fedfv", {"variant": "code"}, "FLGo", flgo_fedfv),
    Match("FedMGDA+", "fedmgda", {}, "FLGo", flgo_fedmgda),
    Match("FedMGDA+, free", "fedmgda", {"epsilon": 1.0}, "TorchJD MGDA", torchjd_mgda),
    Match("ConFIG", "config", {}, "TorchJD", torchjd_config),
    Match("FedLF", "fedlf", {}, "TorchJD MGDA", torchjd_mgda_by_layer, same=False),
)


def main(argv: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only rows whose name starts so")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if row.default and (row.quick or not options.quick)]
    if options.rows:
        exact = {row.name for row in ROWS} & set(options.rows)  # widex10 is not widex100 as well
        starts = tuple(name for name in options.rows if name not in exact)
        rows = [row for row in ROWS if row.name in exact or row.name.startswith(starts)]
    if not rows:
        print(f"no such row; there are: {', '.join(row.name for row in ROWS)}", file=sys.stderr)
        return 2
    about = {**report.about(CPU), "quick": options.quick, "cosine": COSINE}
    results = []
    for row in rows:
        given = federation(row.model(), row.clients, cosine=COSINE)
        for match in MATCHES:
            report.progress(f"{row.name}, {match.title}")
            results.append(_measure(row, given, match))
    about["load_after"] = report.load()
    text = "\n".join([_table(results), "", *_footnotes(about, results)])
    report.publish("rules", text, {"about": about, "rows": results}, options.out)
    return 0


def _measure(row: Row, given: Federation, match: Match) -> Measured:
    """Ours in a second round, so that what it keeps is there, and the rival."""
    rule = get_aggregator(match.rule, device=CPU, **match.options)
    rule.aggregate(given.state, given.updates[:3])
    before = rule.state_dict()
    made: State = {}

    def prepare() -> Call:
        rule.load_state_dict(before)
        return ours

    def ours() -> None:
        made.update(rule.aggregate(given.state, given.updates).state)

    def apart(state: State) -> float:
        """How far the rival's step is from ours, which ran just before, over its length."""
        one, other, base = (flat(s, given.entries) for s in (made, state, given.state))
        return float((one - other).norm() / (one - base).norm())

    times = race(
        {
            "ours": Contestant(prepare, row.repetitions),
            "rival": Contestant(
                partial(match.rival, given),
                1 if row.slow else row.repetitions,
                apart if match.same else None,
            ),
        },
        CPU,
    )
    seconds = {name: time.get("seconds") for name, time in times.items()}
    ratio = None if seconds["rival"] is None else seconds["rival"] / seconds["ours"]
    return {
        "name": f"{row.name}, {match.title}",
        "row": row.name,
        "rule": match.title,
        "rival": match.rival_title,
        "clients": row.clients,
        "parameters": sum(given.widths),
        "groups": len(given.widths),
        "times": times,
        "ratio": ratio,
        "bars": [
            {
                "what": f"{match.rival_title} / ours",
                "relation": "at least",
                "bar": row.bar,
                "value": ratio,
                "met": None if ratio is None else ratio >= row.bar,
            }
        ],
    }


HEADER = (
    "model x clients",
    "columns",
    "groups",
    "rule",
    "ours",
    "published",
    "published / ours",
    "steps apart",
)


def _table(results: list[Measured]) -> str:
    return report.table(HEADER, [_cells(result) for result in results])


def _cells(result: Measured) -> tuple[str, ...]:
    ours, rival = result["times"]["ours"], result["times"]["rival"]
    name, _, clients = result["row"].rpartition("x")
    return (
        f"{name} x {clients}",
        f"{result['parameters']:,}",
        str(result["groups"]),
        result["rule"],
        report.cell(ours),
        f"{result['rival']} {report.cell(rival)}" if "seconds" in rival else "none (1)",
        "-" if result["ratio"] is None else f"{result['ratio']:.1f}",
        f"{rival['missed']:.0e}" if "missed" in rival else "-",
    )


def _footnotes(about: Measured, results: list[Measured]) -> list[str]:
    lines = [
        f"All in one process, in turns. Clients' cosine {about['cosine']}: half of the pairs are "
        "in conflict.",
        "Steps apart: |ours - theirs| / |ours|. TorchJD's MGDA stops before it has converged.",
        report.machine(about),
    ]
    for result in results:
        for who, time in result["times"].items():
            if "reason" in time:
                lines.append(f"(1) {result['name']}, {who}: {time['reason']}")
    return lines + bars.lines(results)


def _flgo(name: str) -> Any:
    """A module of FLGo's algorithms; what it warns of on the way is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"flgo.algorithm.{name}")


def _modules(given: Federation) -> list[Any]:
    """The global model and the clients', as FLGo has them: its operators copy and combine them."""
    from flgo.utils.fmodule import FModule

    values = given.state.values()

    class Flat(FModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for position, value in enumerate(values):
                parameter = nn.Parameter(torch.empty_like(value), requires_grad=False)
                self.register_parameter(str(position), parameter)

    modules = []
    for state in (given.state, *(update.values for update in given.updates)):
        module = Flat()
        for parameter, entry in zip(module.parameters(), given.state, strict=True):
            parameter.copy_(state[entry])
        modules.append(module)
    return modules


def _entries(given: Federation, module: Any) -> State:
    return dict(zip(given.state, (p.detach() for p in module.parameters()), strict=True))


def _by_groups(
    given: Federation, groups: list[list[str]], rule: Callable[[Tensor], Tensor]
) -> State:
    """A rule on the matrix of updates of each group, and the new model."""
    new: State = {}
    for entries in groups:
        base = flat(given.state, entries)
        rows = torch.stack([base - flat(update.values, entries) for update in given.updates])
        moved = (base - rule(rows)).split([given.state[entry].numel() for entry in entries])
        for entry, part in zip(entries, moved, strict=True):
            new[entry] = part.view(given.state[entry].shape)
    return new


if __name__ == "__main__":
    sys.exit(main())
