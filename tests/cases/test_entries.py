"""Entries that are missing, prefixed, reordered, misshapen, empty, 0-d, frozen or of odd types."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from craft_adapters import Aggregator, ClientUpdate, IncompatibleUpdate
from craft_adapters.aggregators import FedAvg

from .oracle import after, near, numbers, put, replies, rule, same_bits, with_previous

FULL: dict[str, Any] = {"w": [1.0, 1.0], "b": [1.0], "bn.running_mean": [1.0, 1.0]}
ZERO: dict[str, Any] = {"w": [0.0, 0.0], "b": [0.0], "bn.running_mean": [0.0, 0.0]}


@pytest.mark.parametrize("missing", ["b", "w", "bn.running_mean"])
def test_a_client_omits_one_entry(missing: str, device: torch.device, dtype: torch.dtype) -> None:
    """The server intersects key sets, drops it for everybody, and the strict load fails later.

    https://github.com/NVIDIA/NVFlare/pull/4875
    https://github.com/ultralytics/ultralytics/issues/14535
    """
    part = {name: value for name, value in FULL.items() if name != missing}
    updates = ClientUpdate.join(
        {"p": put(FULL, device, dtype), "q": put(part, device, dtype)}, {"p": 1, "q": 1}
    )
    aggregator = rule(device)
    with pytest.raises(IncompatibleUpdate, match=f"client 'q': entry '{missing}' is missing") as e:
        aggregator.aggregate(put(ZERO, device, dtype), updates)
    assert isinstance(e.value, ValueError)
    assert aggregator.state_dict()["reference"] == {}


def test_a_client_sends_an_entry_too_many(device: torch.device, dtype: torch.dtype) -> None:
    """The other way round: an entry that the global model lacks.

    https://github.com/ultralytics/ultralytics/issues/14535
    """
    updates = ClientUpdate.join(
        {"p": put(FULL, device, dtype), "q": put({**FULL, "c": [1.0]}, device, dtype)},
        {"p": 1, "q": 1},
    )
    with pytest.raises(IncompatibleUpdate, match=r"client 'q': entry 'c'"):
        rule(device).aggregate(put(ZERO, device, dtype), updates)


@pytest.mark.parametrize("missing", ["b", "w"])
def test_all_clients_agree_on_a_part(
    missing: str, device: torch.device, dtype: torch.dtype
) -> None:
    """DESIGN.md: a part that all agree on is allowed; the output has the global's entries still.

    https://github.com/NVIDIA/NVFlare/pull/4875
    """
    part = {name: value for name, value in FULL.items() if name != missing}
    start = put(ZERO, device, dtype)
    result = rule(device).aggregate(start, replies([part, part], [1, 1], device, dtype)).state
    assert list(result) == list(start)
    assert torch.equal(result[missing], start[missing])
    assert result[missing].data_ptr() != start[missing].data_ptr()
    sent = "w" if missing == "b" else "b"
    assert near(result[sent], after(ZERO[sent], [FULL[sent]] * 2, [1, 1]))


def _named(prefix: str, value: float) -> dict[str, Any]:
    """``module.scale`` is a genuine submodule's name."""
    return {
        f"{prefix}fc.weight": [value, value],
        f"{prefix}fc.bias": [value],
        f"{prefix}module.scale": [value],
    }


@pytest.mark.parametrize("own", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "theirs",
    [["", "module.", "_orig_mod.module.", "_module."], ["module._orig_mod."] * 4],
    ids=["mixed", "stacked"],
)
def test_wrapper_prefixes(
    own: str, theirs: list[str], device: torch.device, dtype: torch.dtype
) -> None:
    """Clients wrapped by DDP, torch.compile or Opacus send prefixed keys, so nothing matches.

    https://github.com/NVIDIA/apex/issues/647
    https://github.com/pytorch/pytorch/pull/53224
    https://github.com/FareedKhan-dev/train-llm-from-scratch/issues/36
    https://github.com/meta-pytorch/opacus/pull/429
    """
    start = put(_named(own, 0.0), device, dtype)
    clients = [_named(prefix, 1.0) for prefix in theirs]
    result = rule(device).aggregate(start, replies(clients, [1] * 4, device, dtype)).state
    assert list(result) == [f"{own}fc.weight", f"{own}fc.bias", f"{own}module.scale"]
    # One group of weight and bias, of 3 coordinates.
    assert near(result[f"{own}fc.weight"], [0.1443375673] * 2)
    assert near(result[f"{own}fc.bias"], [0.1443375673])
    assert near(result[f"{own}module.scale"], [0.25])
    plain = rule(device).aggregate(
        put(_named("", 0.0), device, dtype),
        replies([_named("", 1.0)] * 4, [1] * 4, device, dtype),
    )
    for got, wanted in zip(result.values(), plain.state.values(), strict=True):
        assert torch.equal(got, wanted)


def test_a_prefix_that_not_all_names_have_is_left_alone(
    device: torch.device, dtype: torch.dtype
) -> None:
    """A half-prefixed state is refused, showing one name received and one expected.

    https://github.com/FareedKhan-dev/train-llm-from-scratch/issues/36
    """
    half = {"module.fc.weight": [1.0, 1.0], "fc.bias": [1.0], "module.scale": [1.0]}
    clients = [_named("", 1.0), half]
    with pytest.raises(IncompatibleUpdate, match=r"client 1: .*'module\.fc\.weight'.*'fc\.weight'"):
        rule(device).aggregate(
            put(_named("", 0.0), device, dtype), replies(clients, [1, 1], device, dtype)
        )


def test_entries_are_matched_by_name_not_position(device: torch.device, dtype: torch.dtype) -> None:
    """A client whose dict has another insertion order gets its layers swapped, silently.

    https://github.com/flwrlabs/flower/pull/7757
    https://github.com/VectorInstitute/FL4Health/pull/37
    https://github.com/VectorInstitute/FL4Health/pull/234
    """
    start = put(OrderedDict([("enc", [0.0, 0.0]), ("dec", [0.0, 0.0])]), device, dtype)
    one = OrderedDict([("enc", [1.0, 0.0]), ("dec", [0.0, 5.0])])
    other = OrderedDict([("dec", [0.0, 5.0]), ("enc", [1.0, 0.0])])
    result = rule(device).aggregate(start, replies([one, other], [1, 1], device, dtype)).state
    assert list(result) == ["enc", "dec"]
    assert near(result["enc"], [0.5, 0.0]) and near(result["dec"], [0.0, 0.5])
    same = rule(device).aggregate(start, replies([one, one], [1, 1], device, dtype)).state
    assert same_bits(result, same)


def test_a_previous_update_in_another_order(device: torch.device, dtype: torch.dtype) -> None:
    """The same for what the rule remembers, within one group too.

    https://github.com/flwrlabs/flower/pull/7757
    """
    start = put({"fc.weight": [0.0, 0.0], "fc.bias": [0.0, 0.0]}, device, dtype)
    clients: list[dict[str, Any]] = [{"fc.bias": [0.0, 1.0], "fc.weight": [1.0, 0.0]}] * 2
    previous = put({"fc.bias": [0.0, 1.0], "fc.weight": [0.0, 2.0]}, device, dtype)
    result = with_previous(device, previous).aggregate(
        start, replies(clients, [1, 1], device, dtype)
    )
    wanted = after([0, 0, 0, 0], [[1, 0, 0, 1]] * 2, [1, 1], [0, 2, 0, 1])
    assert near(torch.cat([result.state["fc.weight"], result.state["fc.bias"]]), wanted)


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("entry", ["b", "bn.running_mean", "bn.num_batches_tracked"])
@pytest.mark.parametrize("shape", [(3, 1), (1,), (), (1, 3), (4,), (0,)], ids=str)
def test_shapes_that_would_broadcast(
    shape: tuple[int, ...], entry: str, kind: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """(3,) against (3, 1) or (1,) turns into a larger or repeated tensor instead of an error.

    https://github.com/TheAlgorithms/Python/pull/13615
    https://github.com/flwrlabs/flower/issues/1427
    """
    if entry.endswith("tracked"):
        dtype = torch.int64
    start = {entry: torch.zeros(3, dtype=dtype, device=device)}
    good = {entry: torch.ones(3, dtype=dtype, device=device)}
    bad = {entry: torch.ones(shape, dtype=dtype, device=device)}
    with pytest.raises(IncompatibleUpdate) as caught:
        rule(device).aggregate(
            start, [ClientUpdate("good", 1, good, kind), ClientUpdate("bad", 1, bad, kind)]
        )
    message = str(caught.value)
    for part in ("client 'bad'", f"entry '{entry}'", "(3,)", str(shape)):
        assert part in message


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int64, torch.complex64])
def test_entries_without_elements(
    kind: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    """Norm, max or SVD code has no identity for an empty array.

    https://github.com/jax-ml/jax/issues/5331
    https://github.com/numpy/numpy/issues/30915
    https://github.com/pytorch/pytorch/pull/51109
    """

    def state(w: list[float]) -> dict[str, Any]:
        return {
            "w": w,
            "empty": torch.empty(0, 5, dtype=kind),
            "also_empty": torch.empty(0, dtype=kind),
            "bn.running_var": torch.empty(0, dtype=dtype),
        }

    start = put(state([0.0, 0.0]), device, dtype)
    both: list[Aggregator] = [rule(device), FedAvg(device=device)]
    for aggregator in both:
        updates = replies([state([1.0, 0.0]), state([0.0, 1.0])], [1, 1], device, dtype)
        for _ in range(2):  # the second round has a reference
            result = aggregator.aggregate(start, updates).state
        assert result["empty"].shape == (0, 5) and result["empty"].dtype == kind
        assert result["also_empty"].shape == (0,) and result["also_empty"].dtype == kind
        assert result["bn.running_var"].shape == (0,)
    first = rule(device).aggregate(start, updates).state
    assert near(first["w"], [0.5, 0.5])


def test_nothing_but_entries_without_elements(device: torch.device, dtype: torch.dtype) -> None:
    """The same where a group, and the whole model, has no element.

    https://github.com/jax-ml/jax/issues/5331
    """
    state = {"fc.weight": torch.empty(0, 3, dtype=dtype), "fc.bias": torch.empty(0, dtype=dtype)}
    result = rule(device).aggregate(
        put(state, device, dtype), replies([state, state], [1, 1], device, dtype)
    )
    assert result.state["fc.weight"].shape == (0, 3)
    assert result.report.groups[0].clients == ()


@pytest.mark.parametrize(
    ("deltas", "wanted"),
    [
        ([0.2, -0.1, 0.4], 1.1111111),
        ([0.2], 2.0),
        ([0.5, -0.5], 1.0),
        ([-0.1, -0.2, 0.0], 0.5),
    ],
    ids=str,
)
def test_0d_parameter(
    deltas: list[float], wanted: float, device: torch.device, dtype: torch.dtype
) -> None:
    """It cannot be stacked as a row, and is the smallest over-determined system there is.

    https://github.com/SimplexLab/TorchJD/pull/223
    https://github.com/flwrlabs/flower/issues/4344
    """
    clients: list[dict[str, Any]] = [{"logit_scale": 1.0 + delta} for delta in deltas]
    result = rule(device).aggregate(
        put({"logit_scale": 1.0}, device, dtype),
        replies(clients, [1] * len(deltas), device, dtype),
    )
    assert result.state["logit_scale"].shape == ()
    assert near(result.state["logit_scale"], [wanted])
    assert near(
        result.state["logit_scale"],
        after([1.0], [[1.0 + delta] for delta in deltas], [1] * len(deltas)),
    )


def test_frozen_entries_do_not_drift(device: torch.device, dtype: torch.dtype) -> None:
    """Averaging equal values in float32 drifts by an ulp per round.

    https://github.com/oval-group/dfw/pull/5
    https://github.com/MichiganCOG/ViP/issues/7
    https://github.com/OpenMined/PySyft/issues/3180
    https://github.com/microsoft/msrflute/blob/6430cbf708d659e51b8c749ae5b6e118794a282c/core/strategies/fedavg.py

    Payloads that hold None are the FLUTE adapter's part.
    """
    frozen = [0.1, 0.7, -0.3]
    clients: list[dict[str, Any]] = [
        {"frozen": frozen, "bn.running_mean": frozen, "w": w}
        for w in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    ]
    start = put({"frozen": frozen, "bn.running_mean": frozen, "w": [0.0, 0.0]}, device, dtype)
    both: list[Aggregator] = [rule(device), FedAvg(device=device)]
    for aggregator in both:
        state: Mapping[str, Any] = start
        for number in range(10):
            result = aggregator.aggregate(state, replies(clients, [1, 1, 1], device, dtype))
            state = result.state
            if number == 0 and aggregator.name == "craft":
                assert near(state["w"], [0.28451780, 0.28451780])
            for entry in ("frozen", "bn.running_mean"):
                assert same_bits({entry: state[entry]}, {entry: start[entry]})


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.complex64])
def test_frozen_entries_of_other_types_do_not_drift(
    kind: torch.dtype, device: torch.device
) -> None:
    """The same for half and complex types, which are widened and narrowed again.

    https://github.com/MichiganCOG/ViP/issues/7
    """
    frozen = torch.tensor([0.1, 0.7, -0.3], device=device).to(kind)
    start = {"frozen": frozen, "w": torch.zeros(2, device=device)}
    updates = [
        ClientUpdate(i, i + 1, {"frozen": frozen.clone(), "w": torch.eye(2, device=device)[i]})
        for i in range(2)
    ]
    aggregator, state = rule(device), start
    for _ in range(5):
        state = aggregator.aggregate(state, updates).state
        assert torch.equal(state["frozen"], frozen) and state["frozen"].dtype == kind


def test_numpy_arrays_are_accepted(device: torch.device, dtype: torch.dtype) -> None:
    """A reply is no clean dict of tensors: NumPy arrays come back as torch.

    https://github.com/tum-pbs/ConFIG/issues/4
    https://github.com/flwrlabs/flower/pull/4666
    """
    start = put({"w": [0.0, 0.0], "b": [0.0]}, device, dtype)
    clients: list[dict[str, Any]] = [
        {"w": np.array([1.0, 0.0], dtype=np.float32), "b": [1.0]},
        {"w": [0.0, 1.0], "b": np.array([1.0], dtype=np.float32)},
    ]
    result = rule(device).aggregate(start, replies(clients, [1, 1], device, dtype)).state
    assert near(result["w"], [0.5, 0.5]) and near(result["b"], [0.5])
    for value in result.values():
        assert isinstance(value, Tensor)
        assert value.device.type == device.type and value.dtype == dtype


ARRAYS = {
    "read-only": np.frombuffer(np.array([1.0, 0.0], np.float32).tobytes(), np.float32),
    "reversed": np.array([0.0, 1.0], np.float32)[::-1],
    "strided": np.array([1.0, 7.0, 0.0, 7.0], np.float32)[::2],
    "float16": np.array([1.0, 0.0], np.float16),
    "float64": np.array([1.0, 0.0]),
    "int64": np.array([1, 0]),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_numpy_arrays_of_any_memory_layout(
    form: str, device: torch.device, dtype: torch.dtype
) -> None:
    """The same for arrays as hosts hand them on: from a received buffer, or as views.

    https://github.com/flwrlabs/flower/pull/4666

    Warnings are errors here: torch warns when it shares the memory of a read-only array.
    """
    start = put({"w": [0.0, 0.0], "b": [0.0]}, device, dtype)
    clients: list[dict[str, Any]] = [{"w": ARRAYS[form], "b": [1.0]}, {"w": [0.0, 1.0], "b": [1.0]}]
    result = rule(device).aggregate(start, replies(clients, [1, 1], device, dtype)).state
    assert near(result["w"], [0.5, 0.5])


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [1.0, 0.0],
        "1,0",
        1.0,
        {"nested": 1},
        np.array(["1", "0"]),
        np.array([1.0, None], dtype=object),
    ],
    ids=["None", "list", "str", "float", "dict", "str array", "object array"],
)
@pytest.mark.parametrize("entry", ["w", "bn.running_mean", "bn.num_batches_tracked"])
def test_values_that_are_no_tensors(
    bad: Any, entry: str, device: torch.device, dtype: torch.dtype
) -> None:
    """An entry is None, a Python float, a list or a string: no AttributeError deep inside.

    https://github.com/tum-pbs/ConFIG/issues/4
    https://github.com/flwrlabs/flower/pull/4666
    """
    kind = torch.int64 if entry.endswith("tracked") else dtype
    start = {entry: torch.zeros(2, dtype=kind, device=device), "b": torch.zeros(1, device=device)}
    good = {"b": torch.ones(1, device=device)}
    updates = [
        ClientUpdate("good", 1, {entry: torch.ones(2, dtype=kind, device=device), **good}),
        ClientUpdate("bad", 1, {entry: bad, **good}),
    ]
    with pytest.raises((TypeError, ValueError)) as caught:
        rule(device).aggregate(start, updates)
    assert "'bad'" in str(caught.value) and f"'{entry}'" in str(caught.value)


@pytest.mark.parametrize("values", [torch.tensor([1.0]), None, [("w", torch.zeros(2))], "w"])
def test_replies_that_are_no_mappings(values: Any) -> None:
    """The whole reply is a tensor or None.

    https://github.com/tum-pbs/ConFIG/issues/4
    """
    with pytest.raises((TypeError, ValueError), match=r"client 'bad': values must map"):
        ClientUpdate("bad", 1, values)


@pytest.mark.parametrize("bare", [{"w": [1.0]}, (1, {"w": [1.0]})], ids=["dict", "tuple"])
def test_replies_that_are_not_wrapped(bare: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Bare state dicts, or FedML's pairs of a count and one."""
    start = put({"w": [0.0]}, device, dtype)
    updates: list[Any] = [ClientUpdate("p", 1, start), bare]
    expected = (
        rf"^updates\[1\] is a {type(bare).__name__}, not a ClientUpdate; "
        r"wrap it: ClientUpdate\(client_id, num_examples, values\)$"
    )
    with pytest.raises(TypeError, match=expected):
        rule(device).aggregate(start, updates)


def test_a_module_is_no_global_model(device: torch.device) -> None:
    model: Any = torch.nn.Linear(1, 1).to(device)
    updates = [ClientUpdate("p", 1, model.state_dict())]
    expected = r"^global_state must be a state dict, got a Linear; pass model\.state_dict\(\)$"
    with pytest.raises(TypeError, match=expected):
        rule(device).aggregate(model, updates)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_types(kind: torch.dtype, device: torch.device) -> None:
    """SVD and pinv do not exist for float16 and bfloat16, and NumPy cannot hold bfloat16.

    https://github.com/pytorch/pytorch/issues/98308
    https://github.com/arcee-ai/mergekit/issues/304
    https://github.com/huggingface/peft/issues/1052
    https://github.com/CalculatedContent/WeightWatcher/issues/221
    """
    clients: list[dict[str, Any]] = [{"w": [0.5, 0.0]}, {"w": [0.0, 0.5]}]
    result = rule(device).aggregate(
        put({"w": [0.0, 0.0]}, device, kind), replies(clients, [1, 1], device, kind)
    )
    assert result.state["w"].dtype == kind
    assert result.state["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_types_beside_others(kind: torch.dtype, device: torch.device) -> None:
    """The same in a group of two types, with a client that sends yet another.

    https://github.com/arcee-ai/mergekit/issues/304
    """
    start = {"fc.weight": torch.zeros(2, dtype=kind), "fc.bias": torch.zeros(1)}
    clients: list[dict[str, Any]] = [
        {"fc.weight": torch.tensor([0.5, 0.0], dtype=kind), "fc.bias": torch.zeros(1)},
        {"fc.weight": torch.tensor([0.0, 0.5]), "fc.bias": torch.zeros(1, dtype=torch.float64)},
    ]
    result = rule(device).aggregate(
        put(start, device, kind), replies(clients, [1, 3], device, kind)
    )
    assert result.state["fc.weight"].dtype == kind
    assert result.state["fc.weight"].tolist() == [0.25, 0.75]
    assert result.state["fc.bias"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_parameters(kind: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    """Products without conjugation or a cast to float drop the imaginary part with a warning.

    https://github.com/pytorch/pytorch/pull/48399
    """
    start = {"w": torch.zeros(2, dtype=kind)}
    clients = [
        {"w": torch.tensor([3 + 4j, 0], dtype=kind)},
        {"w": torch.tensor([0, -5j], dtype=kind).conj()},  # a lazy conjugate
    ]
    aggregator = rule(device)
    result = aggregator.aggregate(
        put(start, device, dtype), replies(clients, [1, 1], device, dtype)
    )
    assert result.state["w"].dtype == kind
    assert near(torch.view_as_real(result.state["w"]), [0.3, 0.4, 0.0, 0.5])
    # The next round has a complex reference.
    further = aggregator.aggregate(
        put(start, device, dtype), replies(clients[:1], [1], device, dtype)
    )
    wanted = after([0] * 4, [[3, 4, 0, 0]], [1], [-0.3, -0.4, 0, -0.5])
    assert near(torch.view_as_real(further.state["w"]), wanted)


@pytest.mark.parametrize("swap", [False, True])
def test_complex_and_real_do_not_mix(swap: bool, device: torch.device) -> None:
    """A complex value for a real entry, or the other way round, is refused by name.

    https://github.com/pytorch/pytorch/pull/48399
    """
    kinds = [torch.float32, torch.complex64]
    mine, theirs = kinds[::-1] if swap else kinds
    start = {"w": torch.zeros(2, dtype=mine, device=device)}
    values = {"w": torch.ones(2, dtype=theirs, device=device)}
    with pytest.raises(IncompatibleUpdate, match=r"client 7, entry 'w'.*complex64"):
        rule(device).aggregate(start, [ClientUpdate(7, 1, values)])


def test_non_contiguous_tensors(device: torch.device, dtype: torch.dtype) -> None:
    """Transposed, channels_last and expanded tensors break .view(-1) or are written twice.

    https://github.com/pytorch/examples/issues/836
    https://github.com/SMILELab-FL/FedLab/issues/231
    """
    base = torch.arange(6.0, dtype=dtype, device=device).reshape(2, 3)
    conv = torch.arange(16.0, dtype=dtype, device=device).reshape(1, 4, 2, 2)
    one = torch.ones(1, dtype=dtype, device=device)
    start = {
        "t": torch.zeros(3, 2, dtype=dtype, device=device),
        "c": torch.zeros(1, 4, 2, 2, dtype=dtype, device=device),
        "e": torch.zeros(1, dtype=dtype, device=device).expand(4),
    }
    clients = [
        {"t": base.t(), "c": conv.to(memory_format=torch.channels_last), "e": one.expand(4)},
        {"t": base.t().contiguous(), "c": conv.clone(), "e": one.repeat(4)},
    ]
    result = rule(device).aggregate(start, replies(clients, [1, 1], device, dtype))
    t, c = numbers(base.t()), numbers(conv)
    assert near(result.state["t"], after([0.0] * 6, [t, t], [1, 1]))
    assert near(
        result.state["t"],
        [0.0, 0.2022599587, 0.0674199862, 0.2696799450, 0.1348399725, 0.3370999312],
    )
    assert near(result.state["c"], after([0.0] * 16, [c, c], [1, 1]))
    assert near(result.state["c"][0, 0], [0.0, 0.0141990459, 0.0283980917, 0.0425971376])
    assert near(result.state["e"], [0.25] * 4)
    assert result.report.conflicts_before == 0
    assert [group.rank for group in result.report.groups] == [1, 1, 1]
    assert near(base, list(range(6))) and near(conv, list(range(16))) and near(one, [1])


@pytest.mark.parametrize("global_too", [False, True])
def test_non_contiguous_global_and_slices(
    global_too: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """The same for a transposed global model and for views into one larger buffer.

    https://github.com/SMILELab-FL/FedLab/issues/231
    """
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(4, 6, 5, generator=generator).to(device, dtype)
    theta = buffer[0, :3, :4]
    clients = [buffer[1, ::2, 1:], buffer[2, 3:, :4].flip(0), buffer[3].t()[:3, :4]]
    given = theta if global_too else theta.contiguous()
    result = rule(device).aggregate(
        {"w": given}, [ClientUpdate(i, 1, {"w": value}) for i, value in enumerate(clients)]
    )
    wanted = after(numbers(theta), [numbers(client) for client in clients], [1, 1, 1])
    assert near(result.state["w"], wanted)
    assert result.state["w"].shape == (3, 4)
