"""Every registered rule with its options, and small federations to try them on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from craft_adapters import Aggregator, ClientUpdate, get_aggregator

Kind = Literal["state", "update"]
F64 = torch.float64

# Label -> name of the rule and options. Rules of which variants do other things stand here twice.
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "afl": ("afl", {}),
    "config": ("config", {}),
    "config by layer": ("config", {"granularity": "layer"}),
    "craft": ("craft", {}),
    "craft balanced": (
        "craft",
        {"targets": "sqrt", "client_length": 1.0, "scale": "steady"},
    ),
    "craft_balanced": ("craft_balanced", {}),
    "fedadagrad": ("fedadagrad", {}),
    "fedadagrad with momentum": ("fedadagrad", {"beta1": 0.9}),
    "fedadam": ("fedadam", {}),
    "fedadam keras": ("fedadam", {"bias_correction": "keras"}),
    "fedavg": ("fedavg", {}),
    "fedavgm": ("fedavgm", {}),
    "fedfv": ("fedfv", {}),
    "fedfv code": ("fedfv", {"variant": "code", "tau": 3}),
    "fedfv in files": ("fedfv", {"tau": 2, "history_folder": "files"}),
    "fedlf": ("fedlf", {}),
    "fedlf code": ("fedlf", {"variant": "code", "granularity": "tensor"}),
    "fedlf in files": ("fedlf", {"history_folder": "files", "history_limit": 3}),
    "fedmgda": ("fedmgda", {}),
    "fedmgda free": ("fedmgda", {"epsilon": 1.0, "lr_decay": 0.9}),
    "fednova": ("fednova", {}),
    "fednova with everything": (
        "fednova",
        {"server_momentum": 0.5, "client_momentum": 0.9, "mu": 0.1, "client_lr": 0.1},
    ),
    "fedprox": ("fedprox", {}),
    "fedyogi": ("fedyogi", {}),
    "qfedavg": ("qfedavg", {"client_lr": 0.1}),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 3, 2, 2),
    "conv.bias": (4,),
    "bn.weight": (4,),
    "bn.running_mean": (4,),
    "bn.running_var": (4,),
    "head.weight": (5, 4),
    "head.bias": (5,),
}
TRAINED = [name for name in SHAPES if "running" not in name]


def make(label: str, device: torch.device, folder: Path | None = None, **more: Any) -> Aggregator:
    """The rule of a label; ``folder`` is where it may put files."""
    name, options = RULES[label]
    options = {**options, **more}
    if "history_folder" in options:
        assert folder is not None
        options["history_folder"] = str(folder / options["history_folder"])
    return get_aggregator(name, device=device, **options)


def start(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A global model that is not zero, with a counter."""
    generator = torch.Generator().manual_seed(1)
    theta = {
        name: torch.randn(shape, generator=generator, dtype=F64).to(device, dtype)
        for name, shape in SHAPES.items()
    }
    return {**theta, "bn.num_batches_tracked": torch.tensor(7, device=device)}


def replies(
    theta: Mapping[str, Tensor],
    round: int,
    clients: Iterable[int | str] = range(5),
    kind: Kind = "state",
    size: float = 0.1,
) -> list[ClientUpdate]:
    """What clients send in a round: each its own, the same whoever else is there."""
    return [reply(theta, round, client, kind, size) for client in clients]


def reply(
    theta: Mapping[str, Tensor],
    round: int,
    client: int | str,
    kind: Kind = "state",
    size: float = 0.1,
) -> ClientUpdate:
    number = client if isinstance(client, int) else 100 + sum(map(ord, client))
    generator = torch.Generator().manual_seed(1000 * round + number)

    def local(value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value + number % 5
        wide = torch.complex128 if value.is_complex() else F64
        change = size * torch.randn(value.shape, generator=generator, dtype=wide)
        change = change.to(value.device, value.dtype)
        return value - change if kind == "state" else change

    return ClientUpdate(
        client,
        5 + number % 7,
        {name: local(value) for name, value in theta.items()},
        kind,
        loss=0.5 + (3 * number + round) % 4 / 2,
        local_steps=1 + number % 3,
    )


def changed(update: ClientUpdate, **values: Any) -> ClientUpdate:
    """With other values of some entries, whose dots are written as double underscores."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return replace(update, values={**update.values, **named})


def flat(entries: Mapping[str, Any], names: Iterable[str] = TRAINED) -> Tensor:
    return torch.cat([entries[name].detach().cpu().to(F64).reshape(-1) for name in names])


def same(one: Any, two: Any) -> bool:
    """Equal bit for bit, down through dicts."""
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return bool(type(one) is type(two) and one == two)
