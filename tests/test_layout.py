"""Which entries are projected, which are buffers, and which belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from craft_adapters import ClientUpdate, IncompatibleUpdate, Layout, OptionError
from craft_adapters._layout import Group
from craft_adapters.aggregators import Craft, FedAvg
from craft_adapters.models import get_model


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Scaled(nn.Module):
    """Parameters of the module itself, a buffer of its own name, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.body = nn.Linear(4, 4)
        self.register_buffer("mean_of_inputs", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def names(layout: Layout) -> dict[str, list[str]]:
    return {group.name: list(group.entries) for group in layout.groups}


CONV_BN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 2))

MODELS: list[tuple[str, nn.Module, dict[str, list[str]]]] = [
    (
        "conv + batch norm",
        CONV_BN,
        {"0": ["0.weight", "0.bias", "1.weight", "1.bias"], "3": ["3.weight", "3.bias"]},
    ),
    (
        "conv without bias + group norm, twice",
        nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.GroupNorm(1, 4),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.GroupNorm(2, 4),
        ),
        {"0": ["0.weight", "1.weight", "1.bias"], "2": ["2.weight", "3.weight", "3.bias"]},
    ),
    (
        "conv 1d and 3d, transposed conv",
        nn.Sequential(
            nn.Conv1d(2, 3, 3),
            nn.BatchNorm1d(3),
            nn.ConvTranspose3d(3, 2, 3),
            nn.BatchNorm3d(2),
        ),
        {
            "0": ["0.weight", "0.bias", "1.weight", "1.bias"],
            "2": ["2.weight", "2.bias", "3.weight", "3.bias"],
        },
    ),
    (
        "conv + two norms: the second stands alone",
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(1, 4), nn.GroupNorm(1, 4)),
        {"0": ["0.weight", "0.bias", "1.weight", "1.bias"], "2": ["2.weight", "2.bias"]},
    ),
    (
        "conv + norm without weights",
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1), nn.PReLU()
        ),
        {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]},
    ),
    (
        "norm under another parent",
        nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.GroupNorm(1, 4), nn.Flatten())
        ),
        {"0.0": ["0.0.weight", "0.0.bias"], "1.0": ["1.0.weight", "1.0.bias"]},
    ),
    (
        "linear + layer norm: apart",
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        {
            "0": ["0.weight", "0.bias"],
            "1": ["1.weight", "1.bias"],
            "2": ["2.weight", "2.bias"],
        },
    ),
    (
        "attention",
        nn.MultiheadAttention(4, 2),
        {
            "in_proj_weight": ["in_proj_weight"],
            "in_proj_bias": ["in_proj_bias"],
            "out_proj": ["out_proj.weight", "out_proj.bias"],
        },
    ),
    (
        "transformer layer",
        nn.TransformerEncoderLayer(4, 2, 8),
        {
            "self_attn.in_proj_weight": ["self_attn.in_proj_weight"],
            "self_attn.in_proj_bias": ["self_attn.in_proj_bias"],
            "self_attn.out_proj": ["self_attn.out_proj.weight", "self_attn.out_proj.bias"],
            "linear1": ["linear1.weight", "linear1.bias"],
            "linear2": ["linear2.weight", "linear2.bias"],
            "norm1": ["norm1.weight", "norm1.bias"],
            "norm2": ["norm2.weight", "norm2.bias"],
        },
    ),
    (
        "embedding",
        nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)),
        {"0": ["0.weight"], "1": ["1.weight", "1.bias"]},
    ),
    ("tied weights", Tied(), {"embed": ["embed.weight"], "body": ["body.weight", "body.bias"]}),
    ("one layer, no prefix", nn.Linear(3, 2), {"": ["weight", "bias"]}),
    (
        "lstm",
        nn.LSTM(3, 2),
        {n: [n] for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")},
    ),
]


@pytest.mark.parametrize(("model", "groups"), [pytest.param(m, g, id=i) for i, m, g in MODELS])
def test_groups(model: nn.Module, groups: dict[str, list[str]]) -> None:
    layout = Layout.from_model(model)
    # The prelu's 1-d weight follows a convolution: by names alone it looks like a norm's.
    parameters = {name for name, _ in model.named_parameters()}
    placed = [entry for group in layout.groups for entry in group.entries]
    assert {k: v for k, v in names(layout).items() if k in groups} == groups
    assert sorted(placed) == sorted(parameters)
    layout.check(model.state_dict())
    if not any(isinstance(module, nn.PReLU) for module in model.modules()):
        assert Layout.infer(model.state_dict()) == layout
        assert names(layout) == groups


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("name", "count"), [("resnet20", 20), ("resnet56", 56), ("resnet110", 110)]
)
def test_resnets(name: str, count: int, norm: str) -> None:
    model = get_model(name, norm=norm)
    layout = Layout.from_model(model)
    assert Layout.infer(model.state_dict()) == layout
    assert len(layout.groups) == count
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    placed = [entry for group in layout.groups for entry in group.entries]
    assert placed == list(sizes)
    if norm == "group":
        assert layout.averaged == layout.counted == ()
    else:
        norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        assert len(layout.averaged) == 2 * norms
        assert len(layout.counted) == norms


@pytest.mark.parametrize(("name", "count"), [("mlp", 3), ("cnn", 5)])
def test_models_without_norms(name: str, count: int) -> None:
    model = get_model(name)
    layout = Layout.from_model(model)
    assert Layout.infer(model.state_dict()) == layout
    assert len(layout.groups) == count
    assert layout.averaged == layout.counted == layout.kept == ()
    if name == "cnn":
        state = model.state_dict()
        widths = [sum(state[entry].numel() for entry in group.entries) for group in layout.groups]
        assert widths == [4_864, 102_464, 614_784, 73_920, 1_930]


def test_buffers_of_batch_norm() -> None:
    layout = Layout.infer(CONV_BN.state_dict())
    assert layout.averaged == ("1.running_mean", "1.running_var")
    assert layout.counted == ("1.num_batches_tracked",)


def test_a_model_knows_what_names_do_not_tell() -> None:
    model = Scaled()
    exact, inferred = Layout.from_model(model), Layout.infer(model.state_dict())
    parameters = {
        "temperature": ["temperature"],
        "cls_token": ["cls_token"],
        "body": ["body.weight", "body.bias"],
    }
    assert names(exact) == parameters
    assert exact.averaged == ("mean_of_inputs",)
    # Documented: a float buffer of another name is taken for a parameter.
    assert names(inferred) == {**parameters, "mean_of_inputs": ["mean_of_inputs"]}
    for layout in (exact, inferred):
        assert layout.counted == ("steps",)
        assert set(layout.kept) == {"mask", "_extra_state"}
        layout.check(model.state_dict())


def test_tied_weights_are_projected_once() -> None:
    model = Tied()
    for layout in (Layout.from_model(model), Layout.infer(model.state_dict())):
        assert layout.tied == {"head.weight": "embed.weight"}
    theta = model.state_dict()
    clients = []
    for i in range(2):
        local = Tied()
        clients.append(ClientUpdate(i, 5, local.state_dict()))
    state = Craft(server_lr=1.0).aggregate(theta, clients).state
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert state["head.weight"].data_ptr() != state["embed.weight"].data_ptr()
    assert not torch.equal(state["head.weight"], theta["head.weight"])
    model.load_state_dict(state)


def test_equal_shapes_side_by_side_in_one_storage_are_not_tied() -> None:
    flat = torch.zeros(8)
    views = {"a": flat[:4], "b": flat[4:], "c": flat.view(2, 4), "d": flat[:4].view(2, 2)}
    assert Layout.infer(views).tied == {}
    assert Layout.infer({"a": flat[:4], "b": flat[:4]}).tied == {"b": "a"}


def test_dtypes_decide_about_buffers() -> None:
    state: Mapping[str, Any] = {
        "w": torch.zeros(2, dtype=torch.complex64),
        "half": torch.zeros(2, dtype=torch.float16),
        "table": torch.zeros(2, dtype=torch.int32),
        "bytes": torch.zeros(2, dtype=torch.uint8),
        "flags": torch.zeros(2, dtype=torch.bool),
        "bn.running_mean": torch.zeros(2),
        # Some hosts turn every entry into a float.
        "bn.num_batches_tracked": torch.tensor(3.0),
        "note": "text",
        "nothing": None,
    }
    layout = Layout.infer(state)
    assert names(layout) == {"w": ["w"], "half": ["half"]}
    assert layout.averaged == ("bn.running_mean",)
    assert layout.counted == ("table", "bytes", "bn.num_batches_tracked")
    assert layout.kept == ("flags", "note", "nothing")


@pytest.mark.parametrize("build", [Layout.infer, Layout.from_model])
def test_granularity(build: Any) -> None:
    source = CONV_BN.state_dict() if build == Layout.infer else CONV_BN
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert names(build(source, "model")) == {"model": weights}
    assert names(build(source, "tensor")) == {name: [name] for name in weights}
    by_leaf = build(source, lambda name: name.rpartition(".")[2])
    assert names(by_leaf) == {"weight": weights[::2], "bias": weights[1::2]}
    for layout in (build(source, "model"), build(source, "tensor"), by_leaf):
        assert layout.averaged == ("1.running_mean", "1.running_var")
        layout.check(CONV_BN.state_dict())
    with pytest.raises(OptionError, match="granularity"):
        build(source, "block")


def test_restrict() -> None:
    layout = Layout.from_model(Tied())
    head = layout.restrict(["body.bias", "head.weight", "unknown"])
    # Of two tied entries the one that was sent stands for both.
    assert names(head) == {"embed": ["head.weight"], "body": ["body.bias"]}
    assert head.tied == {"embed.weight": "head.weight"}
    batch = Layout.infer(CONV_BN.state_dict())
    part = batch.restrict(iter(["1.bias", "0.weight", "1.running_var"]))
    assert names(part) == {"0": ["0.weight", "1.bias"]}  # in the model's order
    assert part.averaged == ("1.running_var",)
    assert part.counted == ()
    assert batch.restrict([]) == Layout(groups=())
    assert batch.restrict(CONV_BN.state_dict()) == batch


@pytest.mark.parametrize("sent", ["embed.weight", "head.weight"])
def test_payload_with_one_name_of_a_tied_weight(sent: str) -> None:
    """``named_parameters`` gives a tied weight once: the other name must follow."""
    model = Tied()
    theta = model.state_dict()
    rows = [torch.randn(7, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    clients = [ClientUpdate(i, 5, {sent: row}, "update") for i, row in enumerate(rows)]
    state = FedAvg().aggregate(theta, clients).state
    wanted = theta[sent] - (rows[0] + rows[1]) / 2
    torch.testing.assert_close(state["embed.weight"], wanted)
    torch.testing.assert_close(state["head.weight"], wanted)


def test_check() -> None:
    state = CONV_BN.state_dict()
    layout = Layout.infer(state)
    layout.check(state)
    with pytest.raises(OptionError, match=r"no place for entries: extra"):
        layout.check({**state, "extra": torch.zeros(1)})
    smaller = {name: value for name, value in state.items() if name != "0.bias"}
    with pytest.raises(OptionError, match=r"entries that the model lacks: 0\.bias"):
        layout.check(smaller)
    twice = Layout(
        groups=(*layout.groups, Group("again", ("3.weight", "1.running_mean"))),
        averaged=layout.averaged,
        counted=layout.counted,
    )
    with pytest.raises(OptionError, match=r"in two places: 1\.running_mean, 3\.weight"):
        twice.check(state)


def test_a_layout_by_hand_is_used_and_checked() -> None:
    theta = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2)}
    layout = Layout(groups=(Group("both", ("a", "c")),), averaged=("b",))
    clients = [
        ClientUpdate(i, 5, {name: torch.randn_like(v) for name, v in theta.items()}, "update")
        for i in range(2)
    ]
    result = Craft(server_lr=1.0, layout=layout).aggregate(theta, clients)
    (group,) = result.report.groups
    assert (group.name, group.width) == ("both", 5)
    mean = (clients[0].values["b"] + clients[1].values["b"]) / 2
    torch.testing.assert_close(result.state["b"], -mean)
    with pytest.raises(OptionError, match="no place for entries: d"):
        Craft(layout=layout).aggregate({**theta, "d": torch.zeros(1)}, clients)


def _sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def test_sparse_entries_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleUpdate, match="emb"):
        Layout.infer({"w": torch.zeros(2), "emb": _sparse()})


def test_a_bias_alone_before_a_norm_like_layer() -> None:
    state = {"a.bias": torch.zeros(3), "b.weight": torch.zeros(3), "b.bias": torch.zeros(3)}
    names = [group.name for group in Layout.infer(state).groups]
    assert names == ["a", "b"]
