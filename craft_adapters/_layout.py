"""Which entries of a state dict are projected, which are buffers, and which belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from .errors import IncompatibleUpdate, OptionError

__all__ = ["Granularity", "Group", "Layout"]

Granularity = Literal["layer", "model", "tensor"] | Callable[[str], str]

_MODEL_GROUP = "model"
_COUNTERS = ("num_batches_tracked",)
_STATISTICS = ("running_mean", "running_var")
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True, slots=True)
class Group:
    """Entries that are projected together: one layer of the model, as a rule."""

    name: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What happens to each entry of a state dict.

    Attributes:
        groups: Layer groups; the rule acts on these.
        averaged: Float buffers (running statistics): weighted mean of the clients.
        counted: Integer buffers (batch counters): maximum over the clients.
        kept: Everything else (booleans, non-tensors): the global model's value.
        tied: Entry -> the entry whose storage it shares, which alone is in ``groups``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
        >>> layout = Layout.infer(model.state_dict())
        >>> layout.groups
        (Group(name='0', entries=('0.weight', '0.bias', '1.weight', '1.bias')),)
        >>> layout.averaged, layout.counted
        (('1.running_mean', '1.running_var'), ('1.num_batches_tracked',))
        >>> layout == Layout.from_model(model)
        True
    """

    groups: tuple[Group, ...]
    averaged: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def infer(cls, state: Mapping[str, Any], granularity: Granularity = "layer") -> Layout:
        """Read the layout off names, shapes, dtypes and shared storage.

        ``running_mean``, ``running_var``, ``num_batches_tracked`` and integers are buffers; a 1-d
        weight directly after a convolution under the same parent is its norm layer's. Exact for
        the layers of torch.nn; a float buffer of another name is taken for a parameter.

        Args:
            state: Entry name -> tensor, as ``module.state_dict()`` gives.
            granularity: ``"layer"``: weight and bias of a module together, a norm layer joins the
                convolution before it. ``"model"``: one group. ``"tensor"``: one group an entry.
                A callable: entry name -> group name.

        Raises:
            IncompatibleUpdate: a sparse or quantised entry, by name.
            OptionError: an unknown granularity.
        """

        def follows_convolution(module: str, convolution: str) -> bool:
            weight = state.get(_join(module, "weight"))
            before = state.get(_join(convolution, "weight"))
            if not isinstance(weight, torch.Tensor) or not isinstance(before, torch.Tensor):
                return False
            return weight.ndim == 1 and before.ndim >= 3

        return _build(
            state,
            granularity,
            is_buffer=lambda name: _leaf(name) in _STATISTICS + _COUNTERS,
            follows_convolution=follows_convolution,
        )

    @classmethod
    def from_model(cls, model: nn.Module, granularity: Granularity = "layer") -> Layout:
        """Read the layout off a model: parameters, buffers and module types are exact.

        Args:
            model: The model whose ``state_dict()`` will be aggregated.
            granularity: As in :meth:`infer`.
        """
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        modules = dict(model.named_modules(remove_duplicate=False))

        def follows_convolution(module: str, convolution: str) -> bool:
            return isinstance(modules.get(module), _NORMS) and isinstance(
                modules.get(convolution), _CONVOLUTIONS
            )

        return _build(
            model.state_dict(),
            granularity,
            is_buffer=lambda name: name not in parameters,
            follows_convolution=follows_convolution,
        )

    def restrict(self, names: Iterable[str]) -> Layout:
        """The layout of a payload that holds some of the entries only (LoRA, heads)."""
        chosen = set(names)
        # Of entries that share storage, clients may send any: the sent one stands for the others.
        stands = {first: name for name, first in self.tied.items() if name in chosen}
        stands.update({first: first for first in self.tied.values() if first in chosen})
        tied = {name: stands[first] for name, first in self.tied.items() if first in stands}
        tied.update({first: name for first, name in stands.items()})

        def pick(entries: Sequence[str]) -> tuple[str, ...]:
            sent = (stands.get(entry, entry) for entry in entries)
            return tuple(entry for entry in sent if entry in chosen)

        groups = (Group(group.name, pick(group.entries)) for group in self.groups)
        return Layout(
            groups=tuple(group for group in groups if group.entries),
            averaged=pick(self.averaged),
            counted=pick(self.counted),
            kept=pick(self.kept),
            tied={name: first for name, first in tied.items() if name != first},
        )

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise OptionError unless each entry of ``state`` has exactly one place."""
        places = [entry for group in self.groups for entry in group.entries]
        places += [*self.averaged, *self.counted, *self.kept, *self.tied]
        counts = Counter(places)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise OptionError(f"layout: entries in two places: {', '.join(twice)}")
        if missing := [name for name in state if name not in counts]:
            raise OptionError(f"layout: no place for entries: {', '.join(missing)}")
        if foreign := sorted(counts.keys() - state.keys()):
            raise OptionError(f"layout: entries that the model lacks: {', '.join(foreign)}")


def _build(
    state: Mapping[str, Any],
    granularity: Granularity,
    *,
    is_buffer: Callable[[str], bool],
    follows_convolution: Callable[[str, str], bool],
) -> Layout:
    projected: list[str] = []
    averaged: list[str] = []
    counted: list[str] = []
    kept: list[str] = []
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
            kept.append(name)
            continue
        if value.layout != torch.strided or value.is_quantized:
            raise IncompatibleUpdate(
                f"entry {name!r}: sparse and quantised tensors cannot be aggregated; "
                "send a dense floating-point tensor"
            )
        if value.numel() and value.device.type != "meta":
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if (first := owners.setdefault(place, name)) != name:
                tied[name] = first
                continue
        if _leaf(name) in _COUNTERS or not (value.is_floating_point() or value.is_complex()):
            counted.append(name)
        elif is_buffer(name):
            averaged.append(name)
        else:
            projected.append(name)
    grouped: dict[str, list[str]] = {}
    for name, key in zip(
        projected, _keys(projected, granularity, follows_convolution), strict=True
    ):
        grouped.setdefault(key, []).append(name)
    return Layout(
        groups=tuple(Group(key, tuple(names)) for key, names in grouped.items()),
        averaged=tuple(averaged),
        counted=tuple(counted),
        kept=tuple(kept),
        tied=tied,
    )


def _keys(
    names: Sequence[str],
    granularity: Granularity,
    follows_convolution: Callable[[str, str], bool],
) -> Iterable[str]:
    if callable(granularity):
        return [granularity(name) for name in names]
    if granularity == "model":
        return [_MODEL_GROUP] * len(names)
    if granularity == "tensor":
        return list(names)
    if granularity != "layer":
        raise OptionError(
            "granularity must be 'layer', 'model', 'tensor' or a callable from entry name to "
            f"group name, got {granularity!r}"
        )
    return _layer_keys(names, follows_convolution)


def _layer_keys(
    names: Sequence[str], follows_convolution: Callable[[str, str], bool]
) -> Iterable[str]:
    """Key per name: its module, or the convolution directly before it under the same parent.

    The published code does the same for GroupNorm and LayerNorm; here BatchNorm joins too, since
    its running statistics are no longer in the projection.
    """
    previous = None  # the module of the entry before
    home = ""  # the key of `previous`
    for name in names:
        module, leaf = name.rpartition(".")[::2]
        if leaf not in ("weight", "bias"):
            previous = None
            yield name
            continue
        if module != previous:
            joins = (
                previous is not None
                and leaf == "weight"
                and _parent(module) == _parent(previous)
                and home == previous  # a second norm in a row stands alone
                and follows_convolution(module, previous)
            )
            home = home if joins else module
            previous = module
        yield home


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _join(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf
