"""Ditto: known answers, whichever rule averages, and whose model is whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from craft_adapters import Aggregator, get_aggregator
from craft_adapters.ditto import Ditto
from craft_adapters.errors import OptionError
from craft_adapters.plugins import get_adapter
from craft_adapters.simulation import Federation, LocalTraining, Method

from ..federation.worlds import digits, quadratics


def vector(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def personal(ditto: Ditto, client: int) -> Any:
    state = ditto.personal.get(client)
    assert state is not None
    return state["w"].tolist()


def play(ditto: Ditto, federation: Federation, state: Any, rounds: int, first: int = 0) -> Any:
    clients = range(len(federation))
    for number in range(first, first + rounds):
        result = ditto.round(federation, state, clients, number)
        assert result is not None
        state = result.state
    return state


@pytest.mark.parametrize("engine", ["loop", "many"])
@pytest.mark.parametrize("mode", ["interleaved", "epochwise"])
def test_one_round_of_algorithm_1(engine: str, mode: Any) -> None:  # ditto_one_round_alg1
    federation = quadratics([[1.0, 0.0], [0.0, 2.0]], lr=0.1, steps=2, engine=engine)
    ditto = Ditto("fedavg", lam=1.0, mode=mode)
    ditto.personal.put(0, vector(0.0, 0.0))
    ditto.personal.put(1, vector(1.0, 1.0))
    state = vector(0.0, 0.0)
    sent = ditto.train(federation, state, [0, 1], 0)
    assert [t.state["w"].tolist() for t in sent] == [
        pytest.approx([0.19, 0.0]),
        pytest.approx([0.0, 0.38]),
    ], "minus the g of the known answer"
    assert personal(ditto, 0) == pytest.approx([0.18, 0.0], abs=1e-10)
    assert personal(ditto, 1) == pytest.approx([0.64, 1.0], abs=1e-10)
    ditto.personal.put(0, vector(0.0, 0.0))
    after = play(ditto, federation, state, 1)
    assert after["w"].tolist() == pytest.approx([0.095, 0.19], abs=1e-10)


def test_lambda_0_is_local_training() -> None:  # ditto_lambda0_is_local
    federation = quadratics([[1.0, 0.0], [0.0, 2.0]], lr=0.1, steps=2)
    ditto = Ditto(lam=0)
    ditto.personal.put(0, vector(0.0, 0.0))
    ditto.personal.put(1, vector(1.0, 1.0))
    play(ditto, federation, vector(0.0, 0.0), 1)
    assert personal(ditto, 0) == pytest.approx([0.19, 0.0], abs=1e-10)
    assert personal(ditto, 1) == pytest.approx([0.81, 1.19], abs=1e-10)


@pytest.mark.parametrize(
    ("lam", "steps", "expected"),
    [
        (0.5, 1, 0.35),
        (0.5, 2, 0.6475),
        (0.5, 3, 0.900375),
        (0.5, 500, 7 / 3),
        (0.0, 3, 0.813),
        (9.0, 500, (3 + 9) / 10),
    ],
)
def test_the_pull_has_the_right_sign_and_size(  # DIT-03
    lam: float, steps: int, expected: float
) -> None:
    federation = quadratics([[3.0]], lr=0.1, steps=steps)
    ditto = Ditto(lam=lam)
    ditto.personal.put(0, vector(0.0))
    ditto.train(federation, vector(1.0), [0], 0)
    assert personal(ditto, 0) == pytest.approx([expected], abs=1e-6)


def test_the_anchor_is_the_model_that_was_received() -> None:  # DIT-04
    """0.40 would be a pull to the freshly trained copy. FedProx's pull stays the shared one's."""
    federation = quadratics([[3.0]], lr=0.1, proximal=7.0)
    ditto = Ditto(lam=0.5)
    ditto.personal.put(0, vector(0.0))
    received = vector(1.0)
    ditto.train(federation, received, [0], 0)
    assert personal(ditto, 0) == pytest.approx([0.35])
    assert received["w"].item() == 1.0


@pytest.mark.parametrize("keep", ["cpu", "disk"])
def test_personal_models_belong_to_clients(keep: Any, tmp_path: Path) -> None:  # DIT-06
    federation = quadratics([[1.0], [2.0], [3.0]], lr=0.1)
    ditto = Ditto(store=keep)
    ditto.keep_in(tmp_path)
    for client in range(3):
        ditto.personal.put(client, vector(0.0))
    for number, drawn in enumerate([[0, 1], [1, 2], [2, 0]]):
        ditto.train(federation, vector(0.0), drawn, number)
        saved = ditto.commit()
        ditto.prune()
        again = Ditto(store=keep)  # stopped, and started in a new process
        again.keep_in(tmp_path)
        again.restore(saved)
        ditto = again
    values = [personal(ditto, client)[0] for client in range(3)]
    assert values == pytest.approx([0.18, 0.36, 0.54])
    assert len(list(tmp_path.iterdir())) == 3, "one file a client, however many rounds"


def test_a_client_that_joins_late_starts_from_what_it_receives() -> None:  # DIT-07
    federation = quadratics([[3.0], [3.0]], lr=0.1)
    ditto = Ditto(lam=0.5)
    ditto.train(federation, vector(1.0), [0], 0)
    ditto.train(federation, vector(4.0), [1], 3)
    assert personal(ditto, 1) == pytest.approx([3.9])
    assert list(ditto.personal) == [0, 1]


def test_lambda_per_client() -> None:
    federation = quadratics([[3.0], [3.0]], lr=0.1)
    ditto = Ditto(lam={0: 0.5, 1: 0.0})
    for client in (0, 1):
        ditto.personal.put(client, vector(0.0))
    ditto.train(federation, vector(1.0), [0, 1], 0)
    assert [personal(ditto, 0)[0], personal(ditto, 1)[0]] == pytest.approx([0.35, 0.3])
    with pytest.raises(OptionError, match="lam: no value for client 1"):
        Ditto(lam={0: 1.0}).train(federation, vector(1.0), [0, 1], 0)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    return nn.Sequential(body, nn.Linear(16, 10))


def states_differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rule", ["fedavg", "craft", get_aggregator("fedavg")])
def test_the_shared_model_does_not_know_of_ditto(rule: str | Aggregator) -> None:
    """Whatever averages: w is, to the bit, what it is without personal models."""
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    name = rule if isinstance(rule, str) else rule.name
    plain, ditto = Method(name), Ditto(rule, lam=0.3)
    one = other = model.state_dict()
    for number in range(3):
        drawn = [number, number + 4, number + 7]
        first = plain.round(federation, one, drawn, number)
        second = ditto.round(federation, other, drawn, number)
        assert first is not None
        assert second is not None
        one, other = first.state, second.state
    assert not states_differ(one, other)
    assert states_differ(one, model.state_dict())


def test_the_rule_reaches_personal_models_one_round_later() -> None:
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    one, other = Ditto("fedavg"), Ditto("craft")
    states = [model.state_dict()] * 2
    for number, expected in enumerate([False, True]):
        for i, ditto in enumerate((one, other)):
            states[i] = play(ditto, federation, states[i], 1, number)
        a, b = one.personal.get(3), other.personal.get(3)
        assert a is not None
        assert b is not None
        assert states_differ(a, b) == expected


def test_interleaved_takes_the_shared_model_s_batches() -> None:
    """With lambda 0 both models start together and take the same steps; epochwise they do not."""
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    for mode, same in (("interleaved", True), ("epochwise", False)):
        ditto = Ditto(lam=0, mode=mode)  # type: ignore[arg-type]
        (sent,) = ditto.train(federation, model.state_dict(), [2], 0)
        own = ditto.personal.get(2)
        assert own is not None
        assert states_differ(own, sent.state) != same


def test_personal_epochs_and_rate() -> None:
    federation = quadratics([[1.0]], lr=0.1)
    ditto = Ditto(lam=0, mode="epochwise", personal_epochs=3, personal_lr=0.5)
    ditto.train(federation, vector(0.0), [0], 0)
    assert personal(ditto, 0) == pytest.approx([1 - 0.5**3])


def test_personal_heads_never_leave() -> None:
    """A pattern says which entries are shared; lambda pulls these only."""
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    initial = model.state_dict()
    head = [name for name in initial if name.startswith("1.")]
    for pattern in (r"0\..*", lambda name: name.startswith("0.")):
        ditto = Ditto("craft", lam=0.5, shared=pattern)
        sent = ditto.train(federation, initial, [1, 4], 0)
        assert all(t.state.keys() == initial.keys() - set(head) for t in sent)
        after = play(ditto, federation, initial, 2)
        assert all(torch.equal(after[name], initial[name]) for name in head)
        assert not torch.equal(after["0.1.weight"], initial["0.1.weight"])
        own = ditto.personal.get(1)
        assert own is not None
        received = ditto.received(after, 1)
        assert all(torch.equal(received[name], own[name]) for name in head)
        assert torch.equal(received["0.1.weight"], after["0.1.weight"])
    federation = quadratics([[3.0]], lr=0.1)
    ditto = Ditto(lam=100.0, shared=lambda name: name == "w")
    ditto.train(federation, vector(1.0), [0], 0)
    with pytest.raises(OptionError, match=r"shared: 'nothing' matches no entry .* it has w"):
        Ditto(shared="nothing").train(federation, vector(1.0), [0], 0)


def test_unshared_entries_are_not_pulled() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.head = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.body, self.head]).expand(len(x), 2)

    plain = quadratics([[3.0, 3.0]], lr=0.1)
    training = LocalTraining(engine="loop", lr=0.1, steps=2)
    federation = Federation(
        plain.dataset, plain.split, Two(), training, seed=0, loss=plain._shop.loss
    )
    state = {name: torch.zeros(1, dtype=torch.float64) for name in ("body", "head")}
    ditto = Ditto(lam=0.5, shared="body")
    ditto.train(federation, state, [0], 0)
    own = ditto.personal.get(0)
    assert own is not None
    assert own["body"].item() == pytest.approx(0.3 + 0.1 * (2.7 - 0.15))
    assert own["head"].item() == pytest.approx(0.57), "as without lambda"


def test_lambda_is_picked_on_examples_that_neither_model_is_trained_on() -> None:
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    sizes = [federation.num_examples(k) for k in range(12)]
    choices = [0.0, 30.0]  # at this rate the second throws models about, and helps a few
    ditto = Ditto(lam=choices, validation=0.25)
    sent = ditto.train(federation, model.state_dict(), range(12), 0)
    picked = set()
    for t, size in zip(sent, sizes, strict=True):
        kept, held = ditto._parts(federation, t.client)
        assert len(held) == (size // 4 if size // 4 >= 4 else 0)
        assert t.examples == len(kept) == size - len(held)
        assert not set(kept) & set(held)
        federation.split.train[t.client] = kept
        own = ditto.personal.get(t.client)
        assert own is not None
        by_lambda: dict[float, Any] = {}
        for lam in choices if len(held) else [1.0]:
            fixed = Ditto(lam=lam)
            fixed.train(federation, model.state_dict(), [t.client], 0)
            by_lambda[lam] = fixed.personal.get(t.client)
        score = {
            lam: federation.evaluate(state, {t.client: held}).accuracy[t.client] or 0.0
            for lam, state in by_lambda.items()
        }
        best = max(score, key=lambda lam: score[lam])  # of equals the first
        picked.add(best)
        assert not states_differ(own, by_lambda[best])
    assert picked == {0.0, 1.0, 30.0}, "all kinds of clients are in the test"


def test_evaluation_labels_both_models() -> None:
    model = mlp()
    federation = digits(model, engine="loop", batch_size=16)
    ditto = Ditto(lam=0.1)
    state = model.state_dict()
    before = ditto.evaluate(federation, state)
    assert list(before) == ["global", "personal"]
    assert before["global"].accuracy == before["personal"].accuracy, "nobody has one of its own"
    state = play(ditto, federation, state, 3)
    after = ditto.evaluate(federation, state)
    assert np.mean([a or 0 for a in after["personal"].accuracy.values()]) > np.mean(
        [a or 0 for a in after["global"].accuracy.values()]
    )


def test_it_is_found_by_name() -> None:
    adapter = get_adapter("ditto")
    assert adapter.distribution is None
    assert adapter.load().federation_method is Ditto


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": -1.0}, "lam must be a finite number >= 0, got -1.0"),
        ({"lam": float("nan")}, "lam must be a finite number >= 0"),
        ({"lam": []}, "the set to pick from is empty"),
        ({"lam": [1.0, "x"]}, "lam must be a finite number >= 0, got 'x'"),
        ({"lam": {"a": 1.0}}, "a client is its position"),
        ({"lam": {0: -2}}, "lam of client 0 must be"),
        ({"mode": "both"}, "mode must be 'interleaved' or 'epochwise'"),
        ({"store": "gpu"}, "store must be 'cpu' or 'disk'"),
        ({"validation": 1.0}, "validation must be between 0 and 1"),
        ({"shared": "("}, "is no regular expression"),
        ({"personal_epochs": 2}, "with mode='epochwise' only"),
        ({"mode": "epochwise", "personal_epochs": 0}, "personal_epochs must be at least 1"),
        ({"personal_lr": 0.0}, "personal_lr must be a finite number > 0"),
        ({"aggregator": "fedvag"}, "did you mean 'fedavg'"),
        ({"aggregator": 3}, "must be the name of a rule or an Aggregator"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Ditto(**options)


def test_text_from_a_configuration_is_read() -> None:
    assert Ditto(lam={"3": "0.5"}).lam.of(3) == 0.5  # type: ignore[dict-item]
    choices: Sequence[Any] = ["0.1", "1", "2"]
    assert Ditto(lam=choices).lam.choices == (0.1, 1.0, 2.0)
