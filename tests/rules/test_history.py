"""The memory of last updates: its window, its bound, its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from craft_adapters import CheckpointError, OptionError, get_aggregator
from craft_adapters.aggregators import FedFV, FedLF
from craft_adapters.aggregators._history import HistoryRule

from .federations import replies, same, start

FADE: list[list[int | str]] = [[0, 1, 2], [3, "0"], [0, 3], [4], [1, 2, 5], [0, "0"]]


def rule_for(name: str, device: torch.device, **options: Any) -> HistoryRule:
    rule = get_aggregator(name, device=device, **options)
    assert isinstance(rule, HistoryRule)
    return rule


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def play(rule: HistoryRule, theta: dict[str, Tensor], rounds: range) -> list[Mapping[str, Tensor]]:
    """The models of some rounds."""
    models = []
    for number in rounds:
        theta = rule.aggregate(theta, replies(theta, number, FADE[number])).state
        models.append(theta)
    return models


def remembered(rule: HistoryRule) -> list[Any]:
    return list(rule._updates)


@pytest.mark.parametrize("options", [{"tau": 1}, {"tau": 2}, {"tau": 2, "variant": "code"}])
def test_fedfv_forgets_what_is_too_long_ago(options: dict[str, Any], device: torch.device) -> None:
    rule, theta = rule_for("fedfv", device, **options), start(device)
    last: dict[int | str, int] = {}
    window = options["tau"] - ("variant" in options)
    for number, clients in enumerate(FADE):
        play(rule, theta, range(number, number + 1))
        last.update(dict.fromkeys(clients, number))
        assert set(remembered(rule)) == {c for c, t in last.items() if number + 1 - t <= window}


def test_fedfv_code_with_tau_1_remembers_nothing(device: torch.device) -> None:
    rule = FedFV(variant="code", device=device)
    play(rule, start(device), range(4))
    assert rule.state_dict()["updates"] == {}


def test_fedlf_remembers_everybody(device: torch.device) -> None:
    rule = FedLF(device=device)
    play(rule, start(device), range(6))
    assert set(remembered(rule)) == {0, 1, 2, 3, 4, 5, "0"}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_limit_keeps_the_latest(limit: int, device: torch.device) -> None:
    rule = FedLF(history_limit=limit, device=device)
    play(rule, start(device), range(6))
    assert remembered(rule) == [0, "0", 1][:limit]
    assert rule.window(2) == 3  # that they were seen is known of all
    with pytest.raises(OptionError, match="history_limit"):
        FedLF(history_limit=-1)


def test_last_updates_are_differences_of_their_own(device: torch.device) -> None:
    """Not of the model they are used with, and not shared with what was given."""
    rule, theta = FedLF(device=device), start(device)
    clients = replies(theta, 0, ["a", "b"])
    kept = {c.client_id: theta["head.weight"] - c.values["head.weight"] for c in clients}
    rule.aggregate(theta, clients)
    for client in clients:
        client.values["head.weight"].zero_()
    theta["head.weight"].zero_()
    for client, values in rule._updates.items():
        assert torch.equal(values["head.weight"], kept[client].cpu())
        assert values["head.weight"].device.type == "cpu"
        assert set(values) == {n for n in theta if "running" not in n and "num" not in n}


@pytest.mark.parametrize("entries", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_types_of_last_updates(entries: torch.dtype, device: torch.device) -> None:
    rule = FedLF(device=device)
    play(rule, start(device, entries), range(3))
    wanted = torch.float64 if entries == torch.float64 else torch.float32
    assert {v.dtype for values in rule._updates.values() for v in values.values()} == {wanted}


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("name", "options"), [("fedfv", {"tau": 2}), ("fedlf", {})])
def test_files_change_nothing(
    name: str,
    options: dict[str, Any],
    entries: torch.dtype,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """But that what is read from files is always computed in float64."""
    inside = rule_for(name, device, **options)
    outside = rule_for(name, device, history_folder=str(tmp_path / "new" / "folder"), **options)
    theta = start(device, entries)
    for number in range(6):
        clients = replies(theta, number, FADE[number])
        one, two = inside.aggregate(theta, clients), outside.aggregate(theta, clients)
        for entry in theta:
            torch.testing.assert_close(one.state[entry], two.state[entry], rtol=1e-3, atol=1e-5)
        theta = one.state
    assert remembered(inside) == remembered(outside)
    # One file a client, and of those that the last round replaced.
    count = len(remembered(outside))
    assert count <= len(files(tmp_path / "new" / "folder")) <= count + len(FADE[5]) + 3
    state = outside.state_dict()
    assert "updates" not in state
    assert len(state["files"]) == count


def test_files_without_saved_states_do_not_pile_up(device: torch.device, tmp_path: Path) -> None:
    rule = FedLF(history_folder=str(tmp_path), device=device)
    theta = start(device)
    for number in range(12):
        rule.aggregate(theta, replies(theta, number, range(4)))
        assert len(files(tmp_path)) <= 8


def test_files_of_saved_states_are_kept(device: torch.device, tmp_path: Path) -> None:
    """Whichever of the last two saved states one goes back to."""

    def new() -> FedLF:
        return FedLF(history_folder=str(tmp_path / "files"), device=device)

    rule, theta = new(), start(device)
    for number in range(6):
        rule.aggregate(theta, replies(theta, number, FADE[number]))
        rule.save(tmp_path / f"state{number}")
    rule.aggregate(theta, replies(theta, 6, range(6)))
    rule.aggregate(theta, replies(theta, 7, range(6)))
    for number in (4, 5):
        again, memory = new(), FedLF(device=device)
        for earlier in range(number + 1):
            memory.aggregate(theta, replies(theta, earlier, FADE[earlier]))
        again.load(tmp_path / f"state{number}")
        assert remembered(again) == remembered(memory)
        for client, values in again._updates.items():
            for name in values:
                assert torch.equal(values[name], memory._updates[client][name])
    with pytest.raises(CheckpointError, match="last update of client"):
        new().load(tmp_path / "state1")


def test_a_file_that_was_changed_is_refused(device: torch.device, tmp_path: Path) -> None:
    rule, theta = FedLF(history_folder=str(tmp_path), device=device), start(device)
    rule.aggregate(theta, replies(theta, 0))
    state = rule.state_dict()
    path = next(tmp_path.iterdir())
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fresh = FedLF(history_folder=str(tmp_path), device=device)
    before = fresh.state_dict()
    with pytest.raises(CheckpointError, match=path.name):
        fresh.load_state_dict(state)
    assert same(before, fresh.state_dict())
    with pytest.raises(CheckpointError, match="history_folder"):
        FedLF(device=device).load_state_dict(state)
    path.write_bytes(data)
    fresh.load_state_dict(state)
    assert remembered(fresh) == remembered(rule)


def test_a_state_in_memory_can_go_on_in_files(device: torch.device, tmp_path: Path) -> None:
    rule, theta = FedLF(device=device), start(device)
    play(rule, theta, range(3))
    other = FedLF(history_folder=str(tmp_path), device=device)
    other.load_state_dict(rule.state_dict())
    assert len(files(tmp_path)) == len(remembered(rule))
    clients = replies(theta, 3, FADE[3])
    one, two = rule.aggregate(theta, clients), other.aggregate(theta, clients)
    for entry in theta:
        torch.testing.assert_close(one.state[entry], two.state[entry], rtol=1e-5, atol=1e-6)


def test_names_of_clients_are_no_paths(device: torch.device, tmp_path: Path) -> None:
    names = ["../../up", "a/b", "", ".", "a\0b", "Straße", 7, "7", -7]
    rule = FedLF(history_folder=str(tmp_path / "in" / "here"), device=device)
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0, names))
    assert len(files(tmp_path / "in" / "here")) == len(names)
    assert files(tmp_path) == ["in"] and files(tmp_path / "in") == ["here"]
    again = FedLF(history_folder=str(tmp_path / "in" / "here"), device=device)
    again.load_state_dict(rule.state_dict())
    assert set(remembered(again)) == set(names)


def test_a_round_that_an_observer_refuses_keeps_its_files(
    device: torch.device, tmp_path: Path
) -> None:
    rule, theta = FedLF(history_folder=str(tmp_path), device=device), start(device)
    play(rule, theta, range(2))

    def refuse(report: Any) -> None:
        raise RuntimeError("no")

    before = rule.state_dict()
    rule.observers.append(refuse)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            rule.aggregate(theta, replies(theta, 2, range(6)))
        assert same(before, rule.state_dict())
    rule.observers.clear()
    plain = FedLF(device=device)
    play(plain, theta, range(2))
    clients = replies(theta, 2, FADE[2])
    one, two = rule.aggregate(theta, clients), plain.aggregate(theta, clients)
    for entry in theta:
        torch.testing.assert_close(one.state[entry], two.state[entry], rtol=1e-5, atol=1e-6)


# -- models that change ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_files", [False, True])
def test_another_model_is_refused(in_files: bool, device: torch.device, tmp_path: Path) -> None:
    options = {"history_folder": str(tmp_path)} if in_files else {}
    rule, theta = rule_for("fedlf", device, **options), start(device)
    rule.aggregate(theta, replies(theta, 0, [0, 1, 2]))
    before = rule.state_dict()
    smaller = {n: v for n, v in theta.items() if n != "head.bias"}
    wider = {**theta, "head.bias": torch.zeros(6, device=device)}
    for other in (smaller, wider):
        with pytest.raises(CheckpointError, match=r"client 2 .*head\.bias|head\.bias"):
            rule.aggregate(other, replies(other, 1, [0, 1]))
        assert same(before, rule.state_dict())


@pytest.mark.parametrize("in_files", [False, True])
def test_entries_that_an_absent_client_did_not_send_count_as_zero(
    in_files: bool, device: torch.device, tmp_path: Path
) -> None:
    options = {"history_folder": str(tmp_path)} if in_files else {}
    partial, full = rule_for("fedlf", device, **options), rule_for("fedlf", device)
    theta = start(device, torch.float64)
    head = [
        replace(c, values={n: v for n, v in c.values.items() if "head" in n})
        for c in replies(theta, 0, [5, 6, 7])
    ]
    still = [replace(c, values={**theta, **c.values}) for c in head]
    partial.aggregate(theta, head)
    full.aggregate(theta, still)
    clients = replies(theta, 1, [0, 1])
    one, two = partial.aggregate(theta, clients), full.aggregate(theta, clients)
    for entry in theta:
        torch.testing.assert_close(one.state[entry], two.state[entry], rtol=1e-9, atol=1e-12)
