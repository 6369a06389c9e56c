"""Discovery that survives a broken plug-in, and the two registries that it fills."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from .._options import check
from ..errors import OptionError, PluginError, nearest
from . import _specs
from ._specs import PROJECT, AdapterDescriptor

if TYPE_CHECKING:
    from .._contract import AggregationReport, Aggregator

STRICT = "CRAFT_ADAPTERS_STRICT"
ONLY = "CRAFT_ADAPTERS_PLUGINS"
_BUNDLED = "craft-adapters"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plug-in that could not be used; it left nothing in the registries."""

    name: str
    distribution: str
    reason: str


class PluginManager:
    """Loads plug-ins and holds what they registered.

    Args:
        entry_points: What to load; by default every entry point of the group ``craft_adapters``.
        only: Names of the entry points to load, if not all.
        strict: Raise on the first broken plug-in instead of recording it.

    Attributes:
        aggregators: Rule name -> factory.
        adapters: Adapter name -> descriptor.
        broken: Plug-ins that could not be used.

    Raises:
        PluginError: in strict mode.
        OptionError: a name in ``only`` that no entry point has.
    """

    def __init__(
        self,
        entry_points: Iterable[metadata.EntryPoint] | None = None,
        *,
        only: Collection[str] | None = None,
        strict: bool = False,
    ) -> None:
        self.aggregators: dict[str, Callable[..., Aggregator]] = {}
        self.adapters: dict[str, AdapterDescriptor] = {}
        self.broken: list[BrokenPlugin] = []
        self._strict = strict
        self._silenced: set[str] = set()
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(_specs)
        found = _distinct(
            metadata.entry_points(group=PROJECT) if entry_points is None else entry_points
        )
        if only is not None:
            names = {point.name for point in found}
            for name in only:
                if name not in names:
                    raise OptionError(f"no plug-in is named {name!r}; {nearest(name, names)}")
            found = [point for point in found if point.name in only]
        for point in found:
            self._load(point)

    def round_end(self, report: AggregationReport) -> None:
        """Tell every observer; one that raises is warned of once and never stops a round."""
        for implementation in self._pluggy.hook.craft_round_end.get_hookimpls():
            try:
                implementation.function(report)
            except Exception as error:
                if self._strict:
                    raise
                if implementation.plugin_name not in self._silenced:
                    self._silenced.add(implementation.plugin_name)
                    warnings.warn(
                        f"observer of plug-in {implementation.plugin_name!r} failed and will not "
                        f"be heard of again: {_describe(error)}",
                        stacklevel=2,
                    )

    def get_aggregator(self, name: str, **options: Any) -> Aggregator:
        """See :func:`craft_adapters.get_aggregator`."""
        factory = self.aggregator_factory(name)
        check(factory, options, owner=f"rule {name!r}")
        aggregator = factory(**options)
        aggregator.observers.append(self.round_end)
        return aggregator

    def aggregator_factory(self, name: str) -> Callable[..., Aggregator]:
        """What makes the rule of that name. Raises OptionError for an unknown one."""
        if name not in self.aggregators:
            raise OptionError(
                f"no aggregation rule is named {name!r}; {nearest(name, self.aggregators)}"
                + self._hint()
            )
        return self.aggregators[name]

    def get_adapter(self, name: str) -> AdapterDescriptor:
        """The descriptor of that name. Raises OptionError for an unknown one."""
        if name not in self.adapters:
            raise OptionError(
                f"no adapter is named {name!r}; {nearest(name, self.adapters)}" + self._hint()
            )
        return self.adapters[name]

    def _hint(self) -> str:
        names = ", ".join(plugin.name for plugin in self.broken)
        return f" (broken plug-ins: {names}; see `craft-adapters list`)" if names else ""

    def _load(self, point: metadata.EntryPoint) -> None:
        """All of a plug-in or nothing of it."""
        aggregators: dict[str, Callable[..., Aggregator]] = {}
        adapters: dict[str, AdapterDescriptor] = {}
        label = f"{_distribution(point)}:{point.name}"
        try:
            plugin = point.load()
            self._pluggy.register(plugin, name=label)
            self._call(label, "craft_register_aggregators", _into(aggregators, self.aggregators))
            self._call(
                label,
                "craft_register_adapters",
                lambda descriptor: _into(adapters, self.adapters)(descriptor.name, descriptor),
            )
        except Exception as error:
            if self._pluggy.has_plugin(label):
                self._pluggy.unregister(name=label)
            if self._strict:
                raise PluginError(f"plug-in {label}: {_describe(error)}") from error
            self.broken.append(BrokenPlugin(point.name, _distribution(point), _describe(error)))
            return
        self.aggregators.update(aggregators)
        self.adapters.update(adapters)

    def _call(self, label: str, hook: str, register: Callable[..., None]) -> None:
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            if implementation.plugin_name == label:
                implementation.function(register)


def _into(fresh: dict[str, Any], taken: Mapping[str, Any]) -> Callable[[str, Any], None]:
    def register(name: str, thing: Any) -> None:
        if name in taken or name in fresh:
            raise PluginError(f"the name {name!r} is taken")
        fresh[name] = thing

    return register


def _distinct(points: Iterable[metadata.EntryPoint]) -> list[metadata.EntryPoint]:
    """One of each, the bundled first, so that nobody takes their names; then by name.

    A distribution that is on the path twice (an editable install beside a wheel) counts once.
    """
    unique = {(_distribution(point), point.name): point for point in reversed(list(points))}
    return sorted(
        unique.values(),
        key=lambda point: (_distribution(point) != _BUNDLED, _distribution(point), point.name),
    )


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@functools.cache
def get_plugin_manager() -> PluginManager:
    """The manager of this process, made on first use.

    ``CRAFT_ADAPTERS_STRICT=1`` makes a broken plug-in an error; ``CRAFT_ADAPTERS_PLUGINS=a,b``
    loads the named plug-ins only. ``get_plugin_manager.cache_clear()`` forgets it.
    """
    only = os.environ.get(ONLY)
    return PluginManager(
        only=None if only is None else [name.strip() for name in only.split(",") if name.strip()],
        strict=os.environ.get(STRICT, "0") not in ("", "0"),
    )


def get_aggregator(name: str, **options: Any) -> Aggregator:
    """A new rule by its registered name.

    Args:
        name: ``"craft"``, ``"fedavg"``, or what a plug-in brings; see ``available_aggregators``.
        **options: The rule's own options.

    Raises:
        OptionError: an unknown name or option, with the nearest known one, or a value that the
            option does not take.

    Example:
        >>> get_aggregator("craft", server_lr=0.1).name
        'craft'
        >>> get_aggregator("craft", sever_lr=0.1)
        Traceback (most recent call last):
        craft_adapters.errors.OptionError: rule 'craft' has no option 'sever_lr'; did you mean...
    """
    return get_plugin_manager().get_aggregator(name, **options)


def available_aggregators() -> tuple[str, ...]:
    """Names of the registered rules, sorted.

    >>> set(available_aggregators()) >= {"craft", "fedavg"}
    True
    """
    return tuple(sorted(get_plugin_manager().aggregators))


def available_adapters() -> tuple[str, ...]:
    """Names of the registered host adapters, sorted."""
    return tuple(sorted(get_plugin_manager().adapters))


def get_adapter(name: str) -> AdapterDescriptor:
    """The descriptor of a host adapter; its ``load()`` imports it.

    Raises:
        OptionError: an unknown name, with the nearest known one.
    """
    return get_plugin_manager().get_adapter(name)
