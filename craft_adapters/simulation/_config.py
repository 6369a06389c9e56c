"""The configuration of a run: read, checked, and complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .._contract import Aggregator
from .._options import coerce, describe
from ..errors import CraftError, OptionError, nearest
from ..plugins import get_plugin_manager
from ._accord import RATE, agreed
from ._datasets import Dataset, optional_import
from ._method import Method
from ._partition import (
    Split,
    count_clients,
    dirichlet_partition,
    iid_partition,
    train_test_split,
    writer_partition,
)
from ._settings import LocalTraining
from ._sources import SOURCES
from ._split_file import load_split

__all__ = [
    "RUN_KEYS",
    "SWEEP_KEYS",
    "RunConfig",
    "combine",
    "load_file",
    "override",
    "read_config",
    "settled",
]


@dataclass(frozen=True, slots=True)
class _General:
    """The keys at the top."""

    rounds: int = 100
    clients_per_round: int | float = 10
    drop_rate: float = 0.0
    seed: int = 0
    evaluate_every: int = 10
    checkpoint_every: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("evaluate_every", 1), ("checkpoint_every", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.seed < 0:
            raise OptionError(f"seed must be at least 0, got {self.seed}")
        if not 0 <= self.drop_rate < 1:
            raise OptionError(f"drop_rate must be at least 0 and below 1, got {self.drop_rate}")
        wanted = self.clients_per_round
        if wanted <= 0 or (isinstance(wanted, float) and wanted > 1):
            raise OptionError(
                "clients_per_round must be a number of clients (10) or a share of them, above 0 "
                f"and at most 1.0; got {wanted}"
            )


# --- Partitions by name -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dirichlet:
    clients: int = 100
    alpha: float = 0.1
    min_size: int = 20
    test_fraction: float = 0.2

    def split(self, dataset: Dataset, seed: int) -> Split:
        parts = dirichlet_partition(
            dataset.y,
            num_clients=self.clients,
            alpha=self.alpha,
            min_size=self.min_size,
            seed=seed,
        )
        return train_test_split(parts, test_fraction=self.test_fraction, seed=seed)


@dataclass(frozen=True, slots=True)
class _Iid:
    clients: int = 100
    test_fraction: float = 0.2

    def split(self, dataset: Dataset, seed: int) -> Split:
        parts = iid_partition(len(dataset), num_clients=self.clients, seed=seed)
        return train_test_split(parts, test_fraction=self.test_fraction, seed=seed)


@dataclass(frozen=True, slots=True)
class _Writer:
    clients: int | None = None
    test_fraction: float = 0.2

    def split(self, dataset: Dataset, seed: int) -> Split:
        if dataset.writers is None:
            raise OptionError(f"data set {dataset.name!r} does not say who wrote what")
        parts = writer_partition(dataset.writers, num_clients=self.clients, seed=seed)
        return train_test_split(parts, test_fraction=self.test_fraction, seed=seed)


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    test_fraction: float = 0.2

    def split(self, dataset: Dataset, seed: int) -> Split:
        return load_split(self.path, len(dataset), test_fraction=self.test_fraction, seed=seed)


_PARTITIONS = {"dirichlet": _Dirichlet, "iid": _Iid, "writer": _Writer, "file": _File}


# --- Models by name ---------------------------------------------------------------------------


def _mlp(*, hidden: Any = (200, 200)) -> Callable[[Dataset, int], nn.Module]:
    widths = _whole_numbers("hidden", hidden)

    def build(dataset: Dataset, seed: int) -> nn.Module:
        from ..models import MLP

        # As get_model does, which has no widths to choose.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return MLP(num_classes=dataset.num_classes, input_shape=dataset.shape, hidden=widths)

    return build


def _named(name: str, norm: str = "group") -> Callable[[Dataset, int], nn.Module]:
    def build(dataset: Dataset, seed: int) -> nn.Module:
        from ..models import get_model

        return get_model(
            name,
            num_classes=dataset.num_classes,
            input_shape=dataset.shape,
            norm=norm,
            seed=seed,
        )

    return build


def _cnn() -> Callable[[Dataset, int], nn.Module]:
    return _named("cnn")


def _resnet(depth: int) -> Callable[..., Callable[[Dataset, int], nn.Module]]:
    def resnet(*, norm: Literal["group", "batch"] = "group") -> Callable[[Dataset, int], nn.Module]:
        return _named(f"resnet{depth}", norm)

    return resnet


_MODELS: dict[str, Callable[..., Callable[[Dataset, int], nn.Module]]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet20": _resnet(20),
    "resnet56": _resnet(56),
    "resnet110": _resnet(110),
}


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """``[128, 64]`` from YAML, whose numbers come as text, or "128,64" from a command line."""
    words = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(int(word) for word in words if str(word).strip())
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} must be whole numbers, [128, 64] or 128,64; got {value!r}"
        ) from None


# --- The whole ---------------------------------------------------------------------------------

# Section -> its name where the config gives none; "training" has no kinds to choose from.
_SECTIONS = {
    "data": "digits",
    "partition": "dirichlet",
    "model": "mlp",
    "training": "",
    "aggregator": "fedavg",
    "method": "shared",
}

RUN_KEYS = (*(option.name for option in describe(_General)), *_SECTIONS)
"""What the file of a run may have at its top."""
SWEEP_KEYS = ("base", "seeds", "select", "rules")
"""The same for a sweep."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A checked configuration; :func:`read_config` makes one.

    Attributes:
        source: Where it came from, for error messages.
        general: The keys at the top, typed.
        sections: Section -> its options, typed, without its name.
        names: Section -> what was chosen: the rule's name, ...
    """

    source: str
    general: _General
    sections: Mapping[str, Mapping[str, Any]]
    names: Mapping[str, str]

    def resolved(self) -> dict[str, Any]:
        """The whole configuration with every default filled in, ready for JSON."""
        whole: dict[str, Any] = asdict(self.general)
        for section, options in self.sections.items():
            name = self.names[section]
            filled = {
                option.name: option.default
                for option in describe(self._factory(section))
                if not option.required and not option.python_only
            }
            if section == "method":
                filled.pop("aggregator")  # a section of its own
            entries: dict[str, Any] = {"name": name} if name else {}
            for key, value in (filled | dict(options)).items():
                if _is_plain(value):
                    entries[key] = value
            whole[section] = entries
        return settled(whole)

    def with_seed(self, seed: int) -> RunConfig:
        """The same with another seed."""
        return replace(self, general=replace(self.general, seed=seed))

    def dataset(self) -> Dataset:
        """Load the data, on the device."""
        data: Dataset = self._make("data")
        return data.to(self.device)

    def split(self, dataset: Dataset) -> Split:
        """Who holds which examples."""
        partition = self._make("partition")

        def made() -> Split:
            try:
                return partition.split(dataset, self.general.seed)  # type: ignore[no-any-return]
            except ValueError as error:  # in the words of a function's arguments
                text = str(error).replace("num_clients", "partition.clients")
                raise ValueError(text.replace("min_size", "partition.min_size")) from error

        split: Split = self._within("partition", made)
        return split

    def model(self, dataset: Dataset) -> nn.Module:
        """The initial model, of the seed."""
        build = self._make("model")
        module: nn.Module = self._within("model", build, dataset, self.general.seed)
        return module

    @property
    def training(self) -> LocalTraining:
        """How clients train."""
        settings: LocalTraining = self._make("training")
        return settings

    def method(self) -> Method:
        """The method with its aggregator."""
        name = self.names["aggregator"]
        rule: Aggregator = self._within(
            "aggregator",
            lambda: get_plugin_manager().get_aggregator(name, **self.sections["aggregator"]),
        )
        method: Method = self._within(
            "method", lambda: self._factory("method")(rule, **self.sections["method"])
        )
        return method

    @property
    def device(self) -> torch.device:
        """Where training happens."""
        name = self.general.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise OptionError(f"{self.source}: device: {str(error).splitlines()[0]}") from None

    def participants(self, num_clients: int) -> int:
        """How many clients are drawn for a round."""
        wanted = self.general.clients_per_round
        count: int = self._within("clients_per_round", count_clients, num_clients, wanted)
        return count

    def _factory(self, section: str) -> Callable[..., Any]:
        return _factory(section, self.names[section])

    def _make(self, section: str) -> Any:
        return self._within(section, lambda: self._factory(section)(**self.sections[section]))

    def _within(self, section: str, call: Callable[..., Any], *args: Any) -> Any:
        """Say in which section it was that something could not be."""
        try:
            return call(*args)
        except FileNotFoundError:
            raise
        except (ValueError, TypeError) as error:
            raise OptionError(f"{self.source}: {section}: {error}") from error


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    *,
    source: str | None = None,
) -> RunConfig:
    """Read and check a configuration.

    Every scalar of a file is read as text and then turned into the type that the option has, so
    the traps of YAML 1.1 (1e-3 is text, ``no`` is false, 010 is eight) are none.

    Args:
        config: A YAML or JSON file, or a mapping; None: all defaults.
        overrides: "key=value" or "section.key=value"; they win over the file.
        source: Where a mapping came from, for error messages.

    Raises:
        OptionError: an unknown key, a value of the wrong type, or one that cannot be: names the
            place, what is there, and what is allowed.

    Example:
        >>> config = read_config({"aggregator": "craft"}, ["rounds=5", "training.lr=1e-2"])
        >>> config.general.rounds, config.training.lr, config.names["aggregator"]
        (5, 0.01, 'craft')
        >>> read_config({"traning": {}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        craft_adapters.errors.OptionError: config: no key 'traning'; did you mean 'training'? ...
    """
    if source is None:
        source = "config" if config is None or isinstance(config, Mapping) else os.fspath(config)
    raw = config if isinstance(config, Mapping) else {} if config is None else load_file(config)
    whole = combine({}, raw, source)
    for text in overrides:
        override(whole, text)
    for key in whole:
        if key not in RUN_KEYS:
            tail = _meant(whole, str(key))
            if "rules" in whole and raw is not config:
                tail = f"this is a sweep: craft-adapters sweep {source}"
            raise OptionError(f"{source}: no key {key!r}; {tail}")
    scalars = {key: value for key, value in whole.items() if key not in _SECTIONS}
    general = _checked(source, lambda: _General(**coerce(_General, scalars, owner=source)))
    sections: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for section, default in _SECTIONS.items():
        options = dict(whole.get(section, {}))
        names[section] = str(options.pop("name", default)) if default else ""
        try:
            factory = _factory(section, names[section])
        except OptionError as error:
            raise OptionError(f"{source}: {section}: {error}") from None
        if section == "method" and "aggregator" in options:
            raise OptionError(f"{source}: method.aggregator: the section aggregator says it")
        # A rule that wants to know the clients' learning rate: nobody writes it twice.
        if section == "aggregator" and RATE in (option.name for option in describe(factory)):
            options.setdefault(RATE, sections["training"].get("lr", LocalTraining().lr))
        sections[section] = coerce(factory, options, owner=source, prefix=f"{section}.")
    read = RunConfig(source, general, sections, names)
    # Values that cannot be, before anything is loaded.
    for section in ("training", "model"):
        read._make(section)
    rule = read.method().aggregator
    read._within("training", lambda: agreed(rule, read.training))
    return read


def _meant(whole: Mapping[str, Any], key: str) -> str:
    """The tail of an error message about a key: the section that has such an option."""
    for section, default in _SECTIONS.items():
        name = str(whole.get(section, {}).get("name", default))
        with suppress(OptionError, ImportError):  # of what is named there
            if key in (option.name for option in describe(_factory(section, name))):
                return f"did you mean '{section}.{key}'?"
    return nearest(key, RUN_KEYS)


_KINDS: Mapping[str, Mapping[str, Any]] = {
    "data": SOURCES,
    "partition": _PARTITIONS,
    "model": _MODELS,
}


def _factory(section: str, name: str) -> Callable[..., Any]:
    if section == "training":
        return LocalTraining
    if section == "aggregator":
        return get_plugin_manager().aggregator_factory(name)
    if section == "method":
        return _method(name)
    kinds = _KINDS[section]
    if name not in kinds:
        raise OptionError(f"none is named {name!r}; {nearest(name, kinds)}")
    return kinds[name]  # type: ignore[no-any-return]


def _method(name: str) -> Callable[..., Method]:
    """The method of this name: the plain one, or what a registered adapter brings."""
    if name == "shared":
        return Method
    manager = get_plugin_manager()
    if name not in manager.adapters:
        text = f"none is named {name!r}; {nearest(name, _methods())}"
        if name in manager.aggregators:
            text += f" ({name} is a rule: aggregator={name})"
        if manager.broken:
            broken = (f"{plugin.name}: {plugin.reason}" for plugin in manager.broken)
            text += f". Broken plug-ins: {'; '.join(broken)}"
        raise OptionError(text)
    method = getattr(manager.adapters[name].load(), "federation_method", None)
    if method is None:
        raise OptionError(f"adapter {name!r} brings no method for this federation")
    return method  # type: ignore[no-any-return]


def _methods() -> list[str]:
    """The names of the methods, as far as no host has to be imported for it."""
    names = ["shared"]
    for name, adapter in get_plugin_manager().adapters.items():
        with suppress(Exception):  # whatever a stranger's module raises
            if adapter.distribution is None and hasattr(adapter.load(), "federation_method"):
                names.append(name)
    return names


def load_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """What a YAML file holds, with every scalar as text, or a JSON file."""
    path = Path(file)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read ({error})") from error
    try:
        raw = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise OptionError(f"{path}: {' '.join(str(error).split())}") from error
    if raw in (None, ""):
        return {}
    if not isinstance(raw, dict):
        raise OptionError(f"{path}: expected keys and values, got {type(raw).__name__}")
    return raw


def _yaml(text: str) -> Any:
    """Mappings, lists and text, nothing else."""
    yaml = optional_import("yaml", "PyYAML", "run")

    class Loader(yaml.BaseLoader):  # type: ignore[name-defined,misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if twice := [str(key) for key in keys if keys.count(key) > 1]:
                raise ValueError(f"key {twice[0]!r} comes twice{node.start_mark}")
            found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return found

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from error


def _section(source: str, key: str, value: Any) -> dict[str, Any]:
    """A section's options; a name alone stands for the defaults of that name."""
    if isinstance(value, Mapping):
        return dict(value)
    if value is None or value == "":
        return {}
    if isinstance(value, str) and _SECTIONS[key]:
        return {"name": value}
    raise OptionError(f"{source}: {key} must be a section of options, got {value!r}")


def combine(
    base: Mapping[str, Any], changes: Mapping[str, Any], source: str = "config"
) -> dict[str, Any]:
    """A configuration with another one over it, option by option.

    A section that names another rule (model, ...) than before begins anew: the old one's options
    mean nothing to it. Where nothing is named it is the default's.

    >>> base = {"aggregator": {"name": "craft", "server_lr": 0.3}, "training": {"epochs": 2}}
    >>> combine(base, {"aggregator": "fedavg", "training": {"lr": 0.5}})
    {'aggregator': {'name': 'fedavg'}, 'training': {'epochs': 2, 'lr': 0.5}}
    """
    whole = dict(base)
    for key, value in changes.items():
        if key not in _SECTIONS:
            whole[key] = value
            continue
        options = _section(source, key, value)
        before = _section(source, key, whole.get(key))
        name = before.get("name", _SECTIONS[key])
        same = options.get("name", name) == name
        whole[key] = {**before, **options} if same else options
    return whole


def override(whole: dict[str, Any], text: str) -> None:
    """Put "key=value" or "section.key=value" into a configuration of :func:`combine`."""
    key, equals, value = text.partition("=")
    section, dot, option = key.strip().partition(".")
    if not equals or not section or (dot and not option):
        raise OptionError(f"--set {text}: expected key=value or section.key=value")
    if not dot:
        whole |= combine(whole, {section: value}, "--set")
        return
    if section not in _SECTIONS:
        raise OptionError(f"--set {text}: no section {section!r}; {nearest(section, _SECTIONS)}")
    whole |= combine(whole, {section: {option: value}})


def settled(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration, with what the rule takes where an option of it is None.

    So runs are the same whether that is said or left out, also where an older config.json has None.

    >>> settled({"aggregator": {"name": "craft", "server_lr": None}})
    {'aggregator': {'name': 'craft', 'server_lr': 0.1}}
    """
    options = dict(resolved.get("aggregator", {}))
    open_ones = [key for key, value in options.items() if value is None]
    if not open_ones:
        return dict(resolved)
    given = {key: value for key, value in options.items() if key != "name"}
    try:
        rule = get_plugin_manager().get_aggregator(options.get("name", ""), **given)
    except Exception:  # a report shows runs of rules, too, that cannot be made here
        return dict(resolved)
    taken = {key: getattr(rule, key, None) for key in open_ones}
    return {**resolved, "aggregator": options | {k: v for k, v in taken.items() if _is_plain(v)}}


def _checked(source: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CraftError as error:
        text = str(error)
        raise OptionError(text if text.startswith(source) else f"{source}: {text}") from None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(k, str | int) and _is_plain(v) for k, v in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
