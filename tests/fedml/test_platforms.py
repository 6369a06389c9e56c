"""On each platform, real FedML: the rule runs once a round, on what clients really started from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from .conftest import CROSS_SILO, MPI_SIMULATION, Federation

ROUNDS = 3


def check_rounds(federation: Federation, clients_per_round: int) -> None:
    """Once a round; given what clients started from; what came out went out; by stable names."""
    rounds = federation.events("aggregate")
    assert [event["round"] for event in rounds] == list(range(ROUNDS))
    starts = Counter(event["start"] for event in federation.events("train"))
    assert starts == Counter({event["given"]: clients_per_round for event in rounds})
    for before, after in pairwise(rounds):
        assert after["given"] == before["returned"]
    for event in rounds:
        assert len(event["clients"]) == clients_per_round
        assert event["examples"] == [40 + 20 * client for client in event["clients"]]
        assert event["dtypes"] == ["torch.float32", "torch.int64"]


@pytest.mark.parametrize("optimizer", ["FedAvg", "FedProx"])
def test_single_process_simulation(federation: Federation, optimizer: str) -> None:
    federation.write(
        train_args={
            "federated_optimizer": optimizer,
            "client_num_in_total": 5,
            "client_num_per_round": 3,
            "fedprox_mu": 0.1,
        }
    )
    assert federation.run(*federation.script()) == 0, federation.log()[-3000:]
    check_rounds(federation, 3)


def test_mpi_simulation(federation: Federation, mpiexec: Callable[[int], list[str]]) -> None:
    federation.write(train_args={"client_num_in_total": 4}, **MPI_SIMULATION)
    assert federation.run(*mpiexec(3), *federation.script()) == 0, federation.log()[-3000:]
    check_rounds(federation, 2)


def test_cross_silo_over_mpi(federation: Federation, mpiexec: Callable[[int], list[str]]) -> None:
    federation.write(
        common_args=CROSS_SILO,
        comm_args={"backend": "MPI"},
        train_args={"client_num_in_total": 4},
    )
    assert federation.run(*mpiexec(3), *federation.script()) == 0, federation.log()[-3000:]
    check_rounds(federation, 2)


def test_cross_silo_over_grpc(federation: Federation) -> None:
    federation.write(common_args=CROSS_SILO)
    assert federation.run_grpc() == [0, 0, 0], federation.log("server")[-3000:]
    check_rounds(federation, 2)


def test_serving_used_directly(federation: Federation) -> None:
    federation.write(
        common_args={"training_type": "fedml_serving", "scenario": "horizontal"},
        train_args={"client_id_list": "[1, 2]"},
    )
    assert federation.run_grpc("--serving") == [0, 0, 0], federation.log("server")[-3000:]
    check_rounds(federation, 2)


def test_one_liner(federation: Federation) -> None:
    federation.write()
    assert federation.run(*federation.script("--one-liner")) == 0, federation.log()[-3000:]
    check_rounds(federation, 2)
