"""The models: sizes, shapes, order of the state dict, seeds, messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from craft_adapters.models import CNN, MLP, ResNet, available_models, get_model

RESNETS = ("resnet20", "resnet56", "resnet110")
RESNET_PARAMETERS = {"resnet20": 269_722, "resnet56": 853_018, "resnet110": 1_727_962}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layer_groups(model: nn.Module) -> list[list[str]]:
    """Modules with parameters, in order; a norm right after a sibling convolution joins it."""
    groups: list[list[str]] = []
    previous: tuple[str, nn.Module] | None = None
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        joins = (
            isinstance(module, (nn.GroupNorm, nn.BatchNorm2d))
            and previous is not None
            and isinstance(previous[1], nn.Conv2d)
            and previous[0].rpartition(".")[0] == name.rpartition(".")[0]
        )
        if joins:
            groups[-1].append(name)
        else:
            groups.append([name])
        previous = name, module
    return groups


def test_available_models_are_all_buildable() -> None:
    assert available_models() == ("mlp", "cnn", *RESNETS)
    kinds = [type(get_model(name)) for name in available_models()]
    assert kinds == [MLP, CNN, ResNet, ResNet, ResNet]


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", RESNETS)
def test_resnet_parameter_counts(name: str, norm: str) -> None:
    assert count(get_model(name, norm=norm)) == RESNET_PARAMETERS[name]


def test_cnn_parameter_counts_by_module() -> None:
    sizes = {name: count(child) for name, child in get_model("cnn").named_children()}
    assert {name: size for name, size in sizes.items() if size} == {
        "conv1": 4_864,
        "conv2": 102_464,
        "fc1": 614_784,
        "fc2": 73_920,
        "fc3": 1_930,
    }


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        ((200, 200), 199_210),
        ((32,), 784 * 32 + 32 + 32 * 10 + 10),
        ((), 784 * 10 + 10),
    ],
)
def test_mlp_hidden_sizes(hidden: tuple[int, ...], expected: int) -> None:
    assert count(MLP(input_shape=(1, 28, 28), hidden=hidden)) == expected


@pytest.mark.parametrize(
    ("name", "groups"),
    [("mlp", 3), ("cnn", 5), ("resnet20", 20), ("resnet56", 56), ("resnet110", 110)],
)
def test_number_of_layer_groups(name: str, groups: int) -> None:
    assert len(layer_groups(get_model(name))) == groups


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", ["resnet20", "resnet56"])
def test_each_convolution_is_followed_by_its_norm(name: str, norm: str) -> None:
    names = list(get_model(name, norm=norm).state_dict())
    statistics = ["running_mean", "running_var", "num_batches_tracked"] if norm == "batch" else []
    convolutions = [i for i, entry in enumerate(names) if "conv" in entry]
    assert len(convolutions) == {"resnet20": 19, "resnet56": 55}[name]
    for i in convolutions:
        layer = names[i].removesuffix(".weight").replace("conv", "norm")
        entries = [f"{layer}.{entry}" for entry in ["weight", "bias", *statistics]]
        assert names[i + 1 : i + 1 + len(entries)] == entries
    assert len(names) == len(convolutions) * (3 + len(statistics)) + 2


def test_state_dict_starts_and_ends_as_documented() -> None:
    names = list(get_model("resnet20").state_dict())
    assert names[:6] == [
        "conv1.weight",
        "norm1.weight",
        "norm1.bias",
        "layer1.0.conv1.weight",
        "layer1.0.norm1.weight",
        "layer1.0.norm1.bias",
    ]
    assert names[-2:] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (3, 32, 32)),
        ("mlp", (784,)),
        ("mlp", (2, 3, 4, 5)),
        ("cnn", (3, 32, 32)),
        ("cnn", (1, 28, 28)),
        ("cnn", (1, 16, 16)),
        ("cnn", (3, 20, 33)),
        ("resnet20", (3, 32, 32)),
        ("resnet20", (1, 28, 28)),
        ("resnet20", (2, 7, 13)),
        ("resnet20", (1, 1, 1)),
        ("resnet56", (3, 32, 32)),
        ("resnet110", (1, 28, 28)),
    ],
)
def test_forward_shapes(name: str, shape: tuple[int, ...]) -> None:
    model = get_model(name, num_classes=7, input_shape=shape, seed=0)
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 7)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_every_resnet_parameter_gets_a_gradient(norm: str) -> None:
    model = get_model("resnet20", norm=norm, seed=0)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(x), torch.arange(4))
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        assert gradient.any(), name


def test_resnet_shortcut_subsamples_and_pads_channels_with_zeros() -> None:
    block = ResNet(8).layer2[0]
    x = torch.rand(2, 16, 5, 6)
    with torch.no_grad():
        # Silences the convolutions, so that only the shortcut is left.
        block.get_parameter("norm2.weight").zero_()
        out: torch.Tensor = block.forward(x)
    assert out.shape == (2, 32, 3, 3)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


def test_resnet_has_he_initialisation() -> None:
    model = get_model("resnet20", seed=0)
    weight = model.get_parameter("layer3.1.conv1.weight")
    expected = (2 / (64 * 9)) ** 0.5
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    # A normal has kurtosis 3, the uniform that torch starts from 1.8.
    assert (weight / weight.std()).pow(4).mean().item() == pytest.approx(3, rel=0.05)
    assert not model.get_parameter("fc.bias").any()


def test_group_norm_variant_has_no_buffers_and_one_group_per_layer() -> None:
    model = get_model("resnet20")
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 19
    assert all(norm.num_groups == 1 for norm in norms)
    assert not list(model.buffers())


def test_batch_norm_variant_tracks_statistics() -> None:
    model = get_model("resnet20", norm="batch")
    buffers = dict(model.named_buffers())
    assert len(buffers) == 3 * 19
    assert buffers["norm1.running_mean"].shape == (16,)
    assert buffers["norm1.num_batches_tracked"].dtype == torch.int64
    model(torch.randn(2, 3, 8, 8))
    assert all(
        value.item() == 1 for name, value in buffers.items() if name.endswith("batches_tracked")
    )
    assert buffers["layer3.2.norm2.running_mean"].any()


def test_cnn_dropout_acts_in_training_only() -> None:
    model = get_model("cnn", seed=0)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2, 0.5]
    x = torch.ones(1, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_seed_decides_the_weights(name: str) -> None:
    first, again, other = (get_model(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = [key for key, value in first.items() if value.ndim > 1]
    assert not any(torch.equal(first[key], other[key]) for key in weights)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_seed_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    get_model(name, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_failed_seeded_build_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="16 x 16"):
        get_model("cnn", input_shape=(3, 8, 8), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_seed_the_global_generator_is_used() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first, second = get_model("mlp").state_dict(), get_model("mlp").state_dict()
        torch.manual_seed(5)
        again = get_model("mlp").state_dict()
    assert torch.equal(first["head.weight"], again["head.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_seeded_model_lands_on_the_default_device() -> None:
    with torch.device("meta"):
        model = get_model("resnet20", seed=0)
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_seed_gives_the_same_weights_on_a_gpu_and_leaves_its_generator_alone() -> None:
    before = torch.cuda.get_rng_state()
    with torch.device("cuda"):
        model = get_model("resnet20", seed=0)
    on_cpu = get_model("resnet20", seed=0).state_dict()
    for key, value in model.state_dict().items():
        assert value.is_cuda
        assert torch.equal(value.cpu(), on_cpu[key])
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("resnet-20", "resnet20"), ("ResNet56", "resnet56"), ("CNN", "cnn"), ("mpl", "mlp")],
)
def test_unknown_name_lists_the_names_and_suggests(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="unknown model") as caught:
        get_model(name)
    assert all(known in str(caught.value) for known in available_models())
    assert f"did you mean {nearest!r}?" in str(caught.value)


def test_unknown_name_far_from_all_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match=r"resnet110$"):
        get_model("transformer-xl")


@pytest.mark.parametrize("name", ["mlp", "resnet20"])
def test_unknown_norm(name: str) -> None:
    with pytest.raises(ValueError, match="'group', 'batch'; got 'layer'"):
        get_model(name, norm="layer")


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_norm_for_a_model_without_norm_layers(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' has no norm layers"):
        get_model(name, norm="batch")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cnn", (3, 15, 32), r"at least 16 x 16.*got 15 x 32"),
        ("cnn", (1, 28, 2), r"at least 16 x 16.*got 28 x 2"),
        ("cnn", (28, 28), r"\(channels, height, width\), got \(28, 28\)"),
        ("cnn", (0, 28, 28), r"each at least 1; got \(0, 28, 28\)"),
        ("resnet20", (28, 28), r"\(channels, height, width\), got \(28, 28\)"),
        ("resnet20", (3, 32, -1), r"each at least 1; got \(3, 32, -1\)"),
        ("mlp", (), r"got \(\)"),
    ],
)
def test_bad_input_shape(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_model(name, input_shape=shape)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_no_classes(name: str) -> None:
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        get_model(name, num_classes=0)


@pytest.mark.parametrize("depth", [2, 18, 21, -4])
def test_bad_depth(depth: int) -> None:
    with pytest.raises(ValueError, match=f"6n \\+ 2.*got {depth}"):
        ResNet(depth)


def test_bad_hidden_width() -> None:
    with pytest.raises(ValueError, match=r"got \(10, 0\)"):
        MLP(hidden=(10, 0))
