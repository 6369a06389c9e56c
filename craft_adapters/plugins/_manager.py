"""Load plug-ins, and hand out what they registered."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from .._options import coerce
from ..errors import OptionError, PluginError, nearest
from . import _specs
from ._discovery import BrokenPlugin, Found, arrange
from ._registry import Origin, Registry
from ._specs import PROJECT, AdapterDescriptor

if TYPE_CHECKING:
    from .._contract import AggregationReport, Aggregator

__all__ = [
    "PluginManager",
    "available_adapters",
    "available_aggregators",
    "get_adapter",
    "get_aggregator",
    "get_plugin_manager",
]

STRICT = "CRAFT_ADAPTERS_STRICT"
ONLY = "CRAFT_ADAPTERS_PLUGINS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Plugin:
    """A plug-in that works, in a pluggy manager of its own.

    One manager for all would stop at the first observer that raises, and would keep half of a
    plug-in whose second hook has a wrong signature.
    """

    origin: Origin
    hooks: pluggy.HookRelay


class PluginManager:
    """The plug-ins of this process and what they registered.

    Loads them when it is made. One that fails is recorded in ``broken`` and leaves nothing in the
    registries.

    Args:
        entry_points: What to load; None: every installed entry point of ``craft_adapters``.
        only: Names of the entry points to load, or one comma-separated text; None: what
            ``CRAFT_ADAPTERS_PLUGINS`` lists (comma-separated), or all if that is empty.
        strict: Raise instead of recording; None: whether ``CRAFT_ADAPTERS_STRICT`` is set (not 0).

    Attributes:
        aggregators: Rule name -> factory.
        adapters: Adapter name -> descriptor.
        broken: The plug-ins that were left out.

    Raises:
        OptionError: ``only`` names a plug-in that is not installed.
        PluginError: a plug-in is broken, in strict mode.

    Example:
        >>> manager = PluginManager(entry_points=[])
        >>> list(manager.aggregators), manager.broken
        ([], [])
    """

    def __init__(
        self,
        entry_points: Iterable[EntryPoint] | None = None,
        *,
        only: str | Iterable[str] | None = None,
        strict: bool | None = None,
    ) -> None:
        self.strict = os.environ.get(STRICT, "") not in ("", "0") if strict is None else strict
        self.aggregators: Registry[Callable[..., Aggregator]] = Registry("rule")
        self.adapters: Registry[AdapterDescriptor] = Registry("adapter")
        self.broken: list[BrokenPlugin] = []
        self._plugins: list[_Plugin] = []
        self._warned: set[Origin] = set()
        found = arrange(installed(group=PROJECT) if entry_points is None else entry_points)
        source = "the list of plug-ins to load"
        if only is None and (listed := os.environ.get(ONLY, "").strip()):
            only, source = listed, ONLY
        if only is not None:
            found = _select(found, only, source)
        for plugin in found:
            self._load(plugin)

    def get_aggregator(self, name: str, /, **options: Any) -> Aggregator:
        """As :func:`get_aggregator`, of these plug-ins."""
        from .._contract import Aggregator

        factory = self.aggregator_factory(name)
        aggregator = factory(**coerce(factory, options, owner=f"rule {name!r}"))
        who = f"rule {name!r} ({self.aggregators.origin(name)})"
        if not isinstance(aggregator, Aggregator):
            raise PluginError(
                f"{who} makes a {type(aggregator).__name__}, which does not derive from "
                "craft_adapters.Aggregator"
            )
        if not hasattr(aggregator, "observers"):
            raise PluginError(
                f"{who}: {type(aggregator).__name__}.__init__ must call super().__init__()"
            )
        aggregator.observers.append(self.round_end)
        return aggregator

    def aggregator_factory(self, name: str) -> Callable[..., Aggregator]:
        """What makes the rule of a name, for :func:`craft_adapters._options.coerce`.

        Raises:
            OptionError: no rule has this name; names the nearest.
        """
        return self._find(self.aggregators, name)

    def get_adapter(self, name: str) -> AdapterDescriptor:
        """As :func:`get_adapter`, of these plug-ins."""
        return self._find(self.adapters, name)

    def round_end(self, report: AggregationReport) -> None:
        """Tell every plug-in's ``craft_round_end`` of a round.

        One that raises is warned about once, and the others are still told.

        Raises:
            PluginError: one raised, in strict mode.
        """
        for plugin in self._plugins:
            try:
                plugin.hooks.craft_round_end(report=report)
            except Exception as error:
                message = f"craft_round_end of {plugin.origin} failed: {_line(error)}"
                if self.strict:
                    raise PluginError(message) from error
                if plugin.origin not in self._warned:
                    self._warned.add(plugin.origin)
                    warnings.warn(
                        f"{message}; the run goes on, and this is not shown again",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    # Aggregators hold on to round_end, and are copied and pickled. Modules cannot be, and one
    # process has one set of plug-ins: a copy shares this manager, another process has its own.
    def __deepcopy__(self, memo: dict[int, Any]) -> PluginManager:
        return self

    def __reduce__(self) -> tuple[Callable[[], PluginManager], tuple[()]]:
        return get_plugin_manager, ()

    def _load(self, found: Found) -> None:
        """Load one plug-in: everything it registers, or nothing of it."""
        origin = found.origin
        aggregators, adapters = self.aggregators.copy(), self.adapters.copy()
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(_specs)
        stage = "import"
        try:
            plugin = found.entry_point.load()
            stage = "check of its hooks"
            manager.register(plugin, name=origin.plugin)
            manager.check_pending()
            if not manager.get_hookcallers(plugin):
                raise PluginError(
                    f"{found.entry_point.value} implements no hook (is @hookimpl missing?)"
                )
            stage = "craft_register_aggregators"
            manager.hook.craft_register_aggregators(register=_rules_into(aggregators, origin))
            stage = "craft_register_adapters"
            manager.hook.craft_register_adapters(register=_adapters_into(adapters, origin))
        except (Exception, SystemExit) as error:  # a stranger's module may even call sys.exit
            reason = f"{stage} failed: {_line(error)}"
            if self.strict:
                raise PluginError(f"{origin}: {reason}") from error
            self.broken.append(BrokenPlugin(origin.plugin, origin.distribution, reason))
            return
        self.aggregators, self.adapters = aggregators, adapters
        self._plugins.append(_Plugin(origin, manager.hook))

    def _find(self, registry: Registry[T], name: str) -> T:
        try:
            return registry.find(name)
        except OptionError as error:
            hint = ""
            if self.broken:
                reasons = (f"{plugin.name}: {plugin.reason}" for plugin in self.broken)
                hint = f". Broken plug-ins: {'; '.join(reasons)}"
            elif not self._plugins:
                hint = (
                    ". No plug-in was found: they are found by the metadata of installed "
                    "distributions, a checkout on the path is not enough"
                )
            raise OptionError(f"{error}{hint}") from None


def _select(found: list[Found], only: str | Iterable[str], source: str) -> list[Found]:
    if isinstance(only, str):
        only = [name.strip() for name in only.split(",") if name.strip()]
    wanted = set(only)
    known = {plugin.origin.plugin for plugin in found}
    for name in sorted(wanted - known):
        tail = nearest(name, known) if known else "none is installed"
        raise OptionError(f"no plug-in is named {name!r} (in {source}); {tail}")
    return [plugin for plugin in found if plugin.origin.plugin in wanted]


def _rules_into(
    registry: Registry[Callable[..., Aggregator]], origin: Origin
) -> Callable[[str, Callable[..., Aggregator]], None]:
    def register(name: str, factory: Callable[..., Aggregator]) -> None:
        if not callable(factory):
            raise PluginError(f"the factory of rule {name!r} is {factory!r}, not a callable")
        registry.add(name, factory, origin)

    return register


def _adapters_into(
    registry: Registry[AdapterDescriptor], origin: Origin
) -> Callable[[AdapterDescriptor], None]:
    def register(descriptor: AdapterDescriptor) -> None:
        if not isinstance(descriptor, AdapterDescriptor):
            raise PluginError(
                f"an adapter is registered by an AdapterDescriptor, not {descriptor!r}"
            )
        registry.add(descriptor.name, descriptor, origin)

    return register


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"


@functools.cache
def get_plugin_manager() -> PluginManager:
    """The plug-ins of this process, loaded at the first call.

    The environment is read then and not again; ``get_plugin_manager.cache_clear()`` forgets them.

    Raises:
        OptionError: ``CRAFT_ADAPTERS_PLUGINS`` names a plug-in that is not installed.
        PluginError: a plug-in is broken, with ``CRAFT_ADAPTERS_STRICT=1``.
    """
    return PluginManager()


def get_aggregator(name: str, /, **options: Any) -> Aggregator:
    """A new rule by its registered name; the plug-ins' ``craft_round_end`` observe it.

    Args:
        name: ``"craft"``, ``"fedavg"``, or what a plug-in brings: :func:`available_aggregators`.
        **options: The rule's own options (``craft-adapters list`` shows them). Values may be text,
            as from YAML or a command line.

    Raises:
        OptionError: an unknown name or option, with the nearest known one, or a value that the
            option does not take.
        PluginError: the plug-in makes something that is no aggregator.

    Example:
        >>> get_aggregator("craft", server_lr=0.1).name
        'craft'
        >>> get_aggregator("craft", sever_lr=0.1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        craft_adapters.errors.OptionError: rule 'craft' has no option 'sever_lr'; did you mean ...
    """
    return get_plugin_manager().get_aggregator(name, **options)


def available_aggregators(gives: Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the registered rules, sorted.

    Args:
        gives: Only rules that need no more of each client, beside its model and its number of
            examples: "loss", "local_steps".

    Example:
        >>> set(available_aggregators()) >= {"craft", "fedavg", "afl"}
        True
        >>> "afl" in available_aggregators(gives={"local_steps"})
        False
    """
    rules = get_plugin_manager().aggregators
    if gives is None:
        return tuple(rules)
    given = set(gives)
    return tuple(
        name for name, rule in rules.items() if given >= set(getattr(rule, "requires", ()))
    )


def get_adapter(name: str) -> AdapterDescriptor:
    """The descriptor of a host adapter; its ``load()`` imports the adapter.

    Raises:
        OptionError: no adapter has this name; names the nearest.
    """
    return get_plugin_manager().get_adapter(name)


def available_adapters() -> tuple[str, ...]:
    """Names of the registered host adapters, sorted."""
    return tuple(get_plugin_manager().adapters)
