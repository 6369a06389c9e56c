"""Local training: known answers, two engines that agree, and nothing that leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from craft_adapters.errors import OptionError
from craft_adapters.models import CNN, MLP, ResNet
from craft_adapters.simulation import Federation, Job, LocalTraining, Split, load_digits
from craft_adapters.simulation._batches import draw_batches

from .worlds import digits, quadratics


def trained(federation: Federation, start: list[float], **options: Any) -> list[list[float]]:
    state = {"w": torch.tensor(start, dtype=torch.float64)}
    jobs = [Job(k, state) for k in range(len(federation))]
    return [t.state["w"].tolist() for t in federation.train(jobs, round=0, **options)]


@pytest.mark.parametrize("engine", ["loop", "many"])
@pytest.mark.parametrize(
    ("mu", "steps", "expected"),
    [
        (0.5, 1, [0.1, 0.2]),
        (0.5, 2, [0.185, 0.37]),
        (0.5, 3, [0.25725, 0.5145]),
        (0.0, 3, [0.271, 0.542]),
        (0.5, 400, [2 / 3, 4 / 3]),
    ],
)
def test_proximal_steps(engine: str, mu: float, steps: int, expected: list[float]) -> None:
    """FedProx on 1/2 |w - a|^2: the known trajectory, plain SGD at mu = 0, and the minimiser."""
    federation = quadratics([[1.0, 2.0]], lr=0.1, proximal=mu, steps=steps, engine=engine)
    assert trained(federation, [0.0, 0.0])[0] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("engine", ["loop", "many"])
def test_momentum_belongs_to_one_training(engine: str) -> None:  # DIT-08
    options = {"lr": 0.1, "momentum": 0.9, "steps": 2, "engine": engine}
    forwards = trained(quadratics([[1.0], [-1.0]], **options), [0.0])
    backwards = trained(quadratics([[-1.0], [1.0]], **options), [0.0])
    assert forwards == [[pytest.approx(0.28)], [pytest.approx(-0.28)]]
    assert backwards == forwards[::-1]
    federation = quadratics([[1.0], [-1.0]], **options)
    assert trained(federation, [0.0]) == trained(federation, [0.0]), "nor to one round"


@pytest.mark.parametrize("engine", ["loop", "many"])
def test_weight_decay(engine: str) -> None:
    federation = quadratics([[0.0]], lr=0.1, weight_decay=0.5, steps=2, engine=engine)
    assert trained(federation, [1.0])[0] == pytest.approx([0.85**2])


def test_the_rate_decays_as_published() -> None:
    rates = [LocalTraining(lr=0.1, decay=0.999).rate(t) for t in range(4)]
    assert rates == pytest.approx([0.1, 0.1, 0.1 * 0.999, 0.1 * 0.999**2], rel=1e-12)
    federation = quadratics([[1.0]], lr=0.1, decay=0.5)
    state = {"w": torch.zeros(1, dtype=torch.float64)}
    (third,) = federation.train([Job(0, state)], round=3)
    assert third.state["w"].item() == pytest.approx(0.025)


class Halves(nn.Module):
    """Frozen, unused and shared-free parts, as users' models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 16).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.frozen(x.flatten(1)) * self.scale)))
        return out


MODELS = {
    "mlp": lambda: MLP(input_shape=(1, 8, 8), hidden=(16,)),
    "dropout": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(32, 10),
    ),
    "resnet": lambda: ResNet(8, input_shape=(1, 8, 8)),
    "halves": Halves,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "training",
    [
        {"epochs": 2, "batch_size": 16},
        {"steps": 5, "batch_size": 16, "proximal": 0.3, "augment": "crop_flip"},
        {"momentum": 0.9, "weight_decay": 0.01, "batch_size": 500, "lr": 0.01},
    ],
    ids=["epochs", "steps", "full-batch"],
)
def test_both_engines_agree(name: str, training: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    if name == "resnet":  # slow in float64
        training = {**training, "steps": 2, "batch_size": min(8, training["batch_size"])}
    results = []
    for engine in ("loop", "many"):
        federation = digits(model, device=device, engine=engine, parallel=5, **training)
        jobs = [Job(k, start) for k in (3, 0, 11, 7, 8, 1)]
        results.append(federation.train(jobs, round=2))
    for one, other in zip(*results, strict=True):
        assert one[::2] == other[::2], "client and steps"
        assert one.state.keys() == other.state.keys() == start.keys()
        for entry, value in one.state.items():
            torch.testing.assert_close(value, other.state[entry], rtol=1e-9, atol=1e-11)
    moved = [entry for entry in start if not torch.equal(start[entry], model.state_dict()[entry])]
    assert not moved, "nothing given is changed"
    changed = {e for e in start if not torch.equal(results[0][0].state[e].cpu(), start[e])}
    pulled = {"unused.weight", "unused.bias"} if training.get("weight_decay") else set()
    expected = {e for e, p in model.named_parameters() if p.requires_grad and "unused" not in e}
    assert changed == expected | (pulled & start.keys())


def test_the_paper_s_cnn_agrees_with_its_dropout() -> None:
    torch.manual_seed(0)
    data = load_digits()
    data = type(data)("big", data.x[:60].repeat(1, 1, 2, 2), data.y[:60], 10)
    parts = [np.arange(25), np.arange(25, 60)]
    split = Split(parts, [np.array([], np.int64)] * 2)
    model = CNN(input_shape=(1, 16, 16))
    both = []
    for engine in ("loop", "many"):
        federation = Federation(data, split, model, LocalTraining(engine=engine), seed=0)
        both.append(federation.train([Job(k, model.state_dict()) for k in (0, 1)], round=0))
    for one, other in zip(*both, strict=True):
        for entry, value in one.state.items():
            torch.testing.assert_close(value, other.state[entry], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "many"])
def test_a_training_depends_on_its_own_client_only(engine: str) -> None:
    torch.manual_seed(0)
    model = MODELS["dropout"]()
    federation = digits(model, engine=engine, augment="crop_flip")
    start = model.state_dict()

    def states(clients: list[int], **where: int) -> dict[int, Tensor]:
        done = federation.train([Job(k, start) for k in clients], **{"round": 1, **where})
        return {t.client: t.state["1.weight"] for t in done}

    together, alone = states([4, 2, 9]), states([2])
    torch.testing.assert_close(together[2], alone[2])
    assert not torch.allclose(states([2], round=0)[2], alone[2])
    assert not torch.allclose(states([2], stream=1)[2], alone[2])
    before = torch.get_rng_state()
    states([2])
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 50),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 12),
)
def test_batches_hold_each_example_once_an_epoch(
    count: int, batch: int, epochs: int, steps: int | None
) -> None:
    examples = np.arange(100, 100 + count)
    training = LocalTraining(batch_size=batch, epochs=epochs, steps=steps)
    got = draw_batches(examples, training, seed=0, round=0, client=0)
    per_epoch = -(-count // batch)
    assert len(got) == (epochs * per_epoch if steps is None else steps)
    sizes = got.counts.tolist()
    used = [row[:n].tolist() for row, n in zip(got.indices, sizes, strict=True)]
    for first in range(0, len(got), per_epoch):
        epoch = [index for row in used[first : first + per_epoch] for index in row]
        assert len(set(epoch)) == len(epoch)
        if len(used[first : first + per_epoch]) == per_epoch:
            assert sorted(epoch) == examples.tolist()
    assert set(got.indices.flat) <= set(examples.tolist()), "padding is the client's own"


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10)
    )


def test_a_batch_of_one_does_not_stop_batch_norm() -> None:  # DIT-01
    """Its statistics stand still for that batch; the example is used all the same."""
    torch.manual_seed(0)
    data = load_digits()
    parts = [np.arange(9), np.array([20]), np.array([], np.int64)]
    split = Split(parts, [np.array([], np.int64)] * 3)
    model = batch_norm()
    start = model.state_dict()
    federation = Federation(data, split, model, LocalTraining(batch_size=4), seed=0)
    nine, single, none = federation.train([Job(k, start) for k in range(3)], round=0)
    assert federation.engine == "loop", "running statistics rule the other one out"
    assert (nine.steps, single.steps, none.steps) == (3, 1, 0)
    assert nine.state["2.num_batches_tracked"] == 2
    assert torch.equal(single.state["2.running_mean"], start["2.running_mean"])
    assert not torch.equal(single.state["4.weight"], start["4.weight"]), "but it is trained"
    assert all(torch.equal(none.state[entry], start[entry]) for entry in start)


def test_engines_that_cannot_train_a_model_say_why() -> None:
    with pytest.raises(OptionError, match="layer '2' \\(BatchNorm1d\\) updates running statistics"):
        digits(batch_norm(), engine="many")
    noisy = nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.1), nn.Linear(64, 10))
    with pytest.raises(OptionError, match=r"layer '1' \(AlphaDropout\) draws its own"):
        digits(noisy, engine="many")
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    tied[1].weight = tied[2].weight
    with pytest.raises(OptionError, match="tied"):
        digits(tied, engine="many")


def test_random_layers_of_other_kinds_repeat_in_the_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.3), nn.Linear(64, 10))
    federation = digits(model, engine="auto")
    job = [Job(0, model.state_dict())]
    one, again = (federation.train(job, round=0)[0].state["2.weight"] for _ in range(2))
    assert torch.equal(one, again)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1))
        return out if bool(out.sum() > 0) else 2 * out


def test_auto_measures_and_keeps_to_what_works() -> None:
    torch.manual_seed(0)
    federation = digits(MODELS["mlp"](), engine="auto")
    assert federation.engine is None
    state = federation.load(MODELS["mlp"]().state_dict()).state_dict()
    before = {name: value.clone() for name, value in state.items()}
    federation.train([Job(0, before)], round=0)
    assert federation.engine in ("loop", "many")
    branching = Branching()
    federation = digits(branching, engine="auto")
    federation.train([Job(0, branching.state_dict())], round=0)
    assert federation.engine == "loop", "torch.func cannot vectorise an if"


def test_measuring_does_not_change_what_is_trained() -> None:
    torch.manual_seed(0)
    model = MODELS["dropout"]()
    jobs = [Job(k, model.state_dict()) for k in (1, 2)]
    measured = digits(model, engine="auto")
    one = measured.train(jobs, round=0)
    told = digits(model, engine=str(measured.engine)).train(jobs, round=0)
    for a, b in zip(one, told, strict=True):
        assert all(torch.equal(a.state[entry], b.state[entry]) for entry in a.state)


def test_losses_are_those_of_the_model_that_was_sent() -> None:
    torch.manual_seed(0)
    model = MODELS["dropout"]()
    federation = digits(model, augment="crop_flip")
    got = federation.losses(model.state_dict(), [0, 5])
    data = load_digits()
    for client, loss in got.items():
        part = torch.from_numpy(federation.split.train[client])
        expected = nn.functional.cross_entropy(model.eval()(data.x[part]), data.y[part])
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_a_client_without_examples_is_missing() -> None:
    none = np.array([], np.int64)
    model = MODELS["mlp"]()
    federation = Federation(load_digits(), Split([none], [none]), model, seed=0)
    assert np.isnan(federation.losses(model.state_dict(), [0])[0])


def test_evaluation_of_one_model_and_of_one_for_each() -> None:
    torch.manual_seed(0)
    one, two = MODELS["mlp"]().state_dict(), MODELS["mlp"]().state_dict()
    federation = digits(MODELS["mlp"]())
    shared = federation.evaluate(one)
    each = federation.evaluate(lambda client: two if client == 3 else one)
    assert shared.num_examples == each.num_examples
    for client, loss in shared.loss.items():
        if client == 3:
            assert each.loss[client] != pytest.approx(loss)
        else:
            assert each.loss[client] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be a finite number > 0, got 0.0"),
        ({"decay": 1.1}, "decay must be above 0 and at most 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"steps": 0}, "steps must be at least 1, or none"),
        ({"proximal": -1.0}, "proximal must be a finite number >= 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"augment": "flip"}, "augment must be 'none' or 'crop_flip'"),
        ({"engine": "fast"}, "engine must be 'auto', 'loop' or 'many'"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LocalTraining(**options)
