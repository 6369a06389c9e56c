"""FedML setups in which the server step cannot be replaced, each with its reason.

Everything here is known from the config alone, so it is said before training: by ``fedml.init``
and again when a runner, simulator or server is built (scripts change ``args`` in between).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from craft_adapters.errors import UnsupportedSetup
from craft_adapters.plugins import available_aggregators

__all__ = [
    "refuse_algorithm_flow",
    "refuse_cross_cloud",
    "refuse_overridden",
    "refuse_requirements",
    "refuse_setup",
]

_SUMS = (
    "its workers multiply each model by its weight and send the sum over several clients, so that "
    "the server never sees a client's model"
)
_CORRECTIONS = (
    "what its clients send is not their models (normalised gradients, control variates, momenta), "
    "and its server step belongs to it"
)
_OTHER = "its server does not average client models"
_OPTIMIZERS = {
    "FedAvg_seq": _SUMS,
    "FedOpt_seq": _SUMS,
    "FedOpt": "it has a server optimizer of its own, which would be a second server step",
    "FedNova": _CORRECTIONS,
    "SCAFFOLD": _CORRECTIONS,
    "Mime": _CORRECTIONS,
    "FedDyn": _CORRECTIONS,
    "Async_FedAvg": "it merges each model as it arrives; there is no round to aggregate",
    "HierarchicalFL": "its groups average first; the server sees group models, not client models",
    "turbo_aggregate": "its clients exchange shares of their models; the server sees none",
    "LSA": "LightSecAgg uploads are masked and can be unmasked only as a sum",
    "SA": "SecAgg uploads are masked and can be unmasked only as a sum",
}
_DEFENCES = {
    "cclip": "it sends differences to a random guess to the aggregation, and adds the guess later",
    "rfa": "it replaces the aggregation by a geometric median",
    "geo_median": "it replaces the aggregation by a geometric median",
    "wise_median": "it replaces the aggregation by a coordinate-wise median",
}
_WORKS = "use simulation (sp, MPI), cross_silo (horizontal), or fedml.serving.Server directly"
_KEPT_DEFENCES = (
    "norm_diff_clipping, krum, multikrum, trimmed_mean, slsgd, crfl, foolsgold, 3sigma, "
    "3sigma_foolsgold, anomaly_detection"
)


def refuse_setup(args: Any) -> None:
    """Raise unless FedML's arguments describe a run whose server step can be replaced.

    Args:
        args: FedML's flat namespace. What it lacks is left for FedML to complain about.

    Raises:
        UnsupportedSetup: says what, why, and what would work.
    """
    _refuse_platform(args)
    _refuse_optimizer(args)
    engine = getattr(args, "ml_engine", None)
    if engine not in (None, "torch"):
        raise UnsupportedSetup(
            f"ml_engine {engine!r}: rules work on torch tensors; use ml_engine: torch"
        )
    if getattr(args, "enable_fhe", False):
        raise UnsupportedSetup(
            "enable_fhe: the server adds up ciphertexts and never sees a client's model; "
            "use enable_fhe: false"
        )
    _refuse_defence(args)


def refuse_algorithm_flow() -> None:
    """FedMLRunner with an algorithm flow: FedML hands over to the user's executors."""
    raise UnsupportedSetup(
        "algorithm_flow: its executors decide what the server does, FedML does not aggregate; "
        "use a FedMLRunner without algorithm_flow"
    )


def refuse_cross_cloud() -> None:
    """Cross-cloud, by its config or by its classes used directly."""
    raise UnsupportedSetup(
        "training_type 'cross_cloud': FedML 0.9.6 needs the vendor's cloud to get past the first "
        f"round, so it could not be tested; {_WORKS}"
    )


def refuse_overridden(server_aggregator: Any) -> None:
    """Raise if the user's ServerAggregator has an ``aggregate`` of its own."""
    from fedml.core.alg_frame.server_aggregator import ServerAggregator

    cls = type(server_aggregator)
    if getattr(cls, "aggregate", None) is ServerAggregator.aggregate and "aggregate" not in vars(
        server_aggregator
    ):
        return
    raise UnsupportedSetup(
        f"{cls.__module__}.{cls.__qualname__} overrides aggregate(), which would never be called; "
        "remove the override, or set craft_force: true to have the rule run instead of it"
    )


def refuse_requirements(rule: str, requires: Iterable[str]) -> None:
    """Raise if a rule needs what FedML's clients do not report."""
    if needed := sorted(requires):
        raise UnsupportedSetup(
            f"rule {rule!r} needs {' and '.join(needed)} from every client, and FedML's clients "
            "send only their model and its number of examples; use a rule that needs no more: "
            f"{', '.join(available_aggregators(gives=()))}"
        )


def _refuse_platform(args: Any) -> None:
    platform = getattr(args, "training_type", None)
    backend = getattr(args, "backend", None)
    if platform == "simulation" and backend not in (None, "sp", "MPI"):
        reason = (
            "FedML 0.9.6 comes without this backend, and its workers would send weighted sums, no "
            "client's model"
            if backend == "NCCL"
            else "FedML has no such simulator"
        )
        raise UnsupportedSetup(f"simulation with backend {backend!r}: {reason}; use sp or MPI")
    if platform == "cross_device":
        raise UnsupportedSetup(
            "training_type 'cross_device': its models are MNN files, which FedML 0.9.6 reads as "
            f"empty with the MNN releases to be had today; {_WORKS}"
        )
    if platform == "cross_cloud":
        refuse_cross_cloud()
    if platform not in (None, "simulation", "cross_silo", "fedml_serving"):
        raise UnsupportedSetup(f"training_type {platform!r}: not known to this adapter; {_WORKS}")
    scenario = getattr(args, "scenario", None)
    if platform == "cross_silo" and scenario not in (None, "horizontal"):
        raise UnsupportedSetup(
            f"cross_silo scenario {scenario!r}: fedml.init of FedML 0.9.6 ends the process there; "
            "use scenario: horizontal"
        )


def _refuse_optimizer(args: Any) -> None:
    optimizer = getattr(args, "federated_optimizer", None)
    sp = getattr(args, "training_type", None) == "simulation" and (
        getattr(args, "backend", None) == "sp"
    )
    if optimizer in (None, "FedAvg") or (sp and optimizer == "FedProx"):
        return
    works = 'use federated_optimizer: "FedAvg"' + (' or "FedProx"' if sp else "")
    if optimizer == "FedProx":
        reason = "outside the sp simulator, FedML 0.9.6 refuses it or stops at its first test"
    else:
        reason = _OPTIMIZERS.get(optimizer, _OTHER)
    raise UnsupportedSetup(
        f"federated_optimizer {optimizer!r}: {reason}; {works} (the rule is chosen by "
        "craft_aggregator)"
    )


def _refuse_defence(args: Any) -> None:
    if not getattr(args, "enable_defense", False):
        return
    defence = str(getattr(args, "defense_type", "")).strip()
    if reason := _DEFENCES.get(defence):
        raise UnsupportedSetup(
            f"defense_type {defence!r}: {reason}, so that the rule would not see the clients' "
            f"models; use one of {_KEPT_DEFENCES}"
        )
    if getattr(args, "training_type", None) == "simulation" and (
        getattr(args, "backend", None) == "MPI"
    ):
        raise UnsupportedSetup(
            f"defense_type {defence!r} in the MPI simulation: FedML 0.9.6 calls a method that its "
            "defences do not have (FedMLDefender.defend), or leaves the aggregation out; use "
            "cross_silo, or enable_defense: false"
        )
