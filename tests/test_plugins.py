"""The door: discovery survives every kind of broken plug-in and leaves nothing of it behind."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest
import torch

import craft_adapters
from craft_adapters import ClientUpdate, errors
from craft_adapters.errors import OptionError, PluginError
from craft_adapters.plugins import (
    AdapterDescriptor,
    PluginManager,
    available_adapters,
    available_aggregators,
    get_adapter,
    get_aggregator,
    get_plugin_manager,
)

HEADER = """
from __future__ import annotations
from typing import Literal
from craft_adapters import AggregationReport, AggregationResult, Aggregator, hookimpl
from craft_adapters.plugins import AdapterDescriptor

class Rule(Aggregator):
    name = "mine"

    def __init__(self, *, step: float = 1.0, mode: Literal["a", "b"] = "a") -> None:
        super().__init__()
        self.step, self.mode = step, mode

    def aggregate(self, global_state, updates, *, round=None):
        report = AggregationReport(self.name, round or 0, (), (), (), 0.0)
        for observer in self.observers:
            observer(report)
        return AggregationResult(dict(global_state), report)
"""
GOOD = """
@hookimpl
def craft_register_aggregators(register):
    register("mine", Rule)

@hookimpl
def craft_register_adapters(register):
    register(AdapterDescriptor("host", "pluggy", ("1.0",), "mine[host]", "a host", load=dict))
"""
OBSERVER = """
seen = []

@hookimpl
def craft_round_end(report):
    seen.append(report)
"""
BROKEN = {
    "raises on import": ("import nowhere_to_be_found", "import failed: ModuleNotFoundError"),
    "leaves on import": ("raise SystemExit('bye')", "import failed: SystemExit: bye"),
    "is no Python": ("def", "import failed: SyntaxError"),
    "has a hook with a wrong signature": (
        "@hookimpl\ndef craft_register_aggregators(register): register('half', Rule)\n"
        "@hookimpl\ndef craft_round_end(report, weather): ...",
        "check of its hooks failed: PluginValidationError",
    ),
    "has a hook that does not exist": (
        "@hookimpl\ndef craft_register_agregators(register): ...",
        "check of its hooks failed: PluginValidationError",
    ),
    "forgot the marker": (
        "def craft_register_aggregators(register): ...",
        "implements no hook (is @hookimpl missing?)",
    ),
    "raises while it registers": (
        "@hookimpl\ndef craft_register_aggregators(register):\n"
        "    register('half', Rule)\n    raise KeyError('x')",
        "craft_register_aggregators failed: KeyError: 'x'",
    ),
    "raises while it registers adapters": (
        "@hookimpl\ndef craft_register_aggregators(register): register('half', Rule)\n"
        "@hookimpl\ndef craft_register_adapters(register): register(1)",
        "craft_register_adapters failed: an adapter is registered by an AdapterDescriptor, not 1",
    ),
    "takes a name": (
        "@hookimpl\ndef craft_register_aggregators(register):\n"
        "    register('half', Rule)\n    register('mine', Rule)",
        "name 'mine' is taken by plug-in 'good' of a-good-one",
    ),
    "gives a name twice": (
        "@hookimpl\ndef craft_register_aggregators(register):\n"
        "    register('half', Rule)\n    register('half', Rule)",
        "name 'half' is taken by plug-in 'bad' of broken-one",
    ),
    "takes an adapter's name": (
        "@hookimpl\ndef craft_register_aggregators(register): register('half', Rule)\n"
        "@hookimpl\ndef craft_register_adapters(register):\n"
        "    register(AdapterDescriptor('host', None, (), None, '', load=dict))",
        "the adapter name 'host' is taken by plug-in 'good' of a-good-one",
    ),
    "registers what cannot be called": (
        "@hookimpl\ndef craft_register_aggregators(register): register('half', 3)",
        "the factory of rule 'half' is 3, not a callable",
    ),
    "gives a name that is none": (
        "@hookimpl\ndef craft_register_aggregators(register): register('my rule', Rule)",
        "'my rule' is no name",
    ),
}


class Site:
    """A folder like site-packages, with distributions that offer plug-ins."""

    numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, distribution: str, point: str, body: str, *, header: str = HEADER) -> str:
        """One module, one entry point; returns the module's name."""
        module = f"plugin_{next(self.numbers)}"
        (self.folder / f"{module}.py").write_text(header + textwrap.dedent(body))
        self.declare(distribution, f"[craft_adapters]\n{point} = {module}\n")
        return module

    def declare(self, distribution: str, entry_points: str) -> None:
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(entry_points)

    def points(self) -> list[EntryPoint]:
        found = distributions(path=[str(self.folder)])
        return [point for d in found for point in d.entry_points if point.group == "craft_adapters"]

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run code in a fresh process that finds these distributions besides the real ones."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CRAFT_")}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**kept, "PYTHONPATH": str(self.folder), **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CRAFT_ADAPTERS_STRICT", raising=False)
    monkeypatch.delenv("CRAFT_ADAPTERS_PLUGINS", raising=False)
    get_plugin_manager.cache_clear()
    yield Site(tmp_path)
    get_plugin_manager.cache_clear()  # it may have seen the folder


# --- A plug-in that works ---------------------------------------------------------------------


def test_good(site: Site) -> None:
    site.add("a-good-one", "good", GOOD)
    manager = PluginManager(site.points())
    assert list(manager.aggregators) == ["mine"]
    assert str(manager.aggregators.origin("mine")) == "plug-in 'good' of a-good-one"
    assert manager.broken == []
    rule = manager.get_aggregator("mine", step="1e-2", mode="b")
    assert (rule.step, rule.mode) == (0.01, "b")  # type: ignore[attr-defined]
    adapter = manager.get_adapter("host")
    assert adapter.found is not None and adapter.load() == {}


def test_a_host_that_is_not_installed() -> None:
    assert AdapterDescriptor("x", "no-such-distribution", (), None, "", load=dict).found is None
    assert AdapterDescriptor("x", None, (), None, "", load=dict).found is None


def test_unknown_names(site: Site) -> None:
    site.add("a-good-one", "good", GOOD)
    manager = PluginManager(site.points())
    with pytest.raises(OptionError, match="no rule is named 'mnie'; did you mean 'mine'"):
        manager.get_aggregator("mnie")
    with pytest.raises(OptionError, match="rule 'mine' has no option 'stp'; did you mean 'step'"):
        manager.get_aggregator("mine", stp=1)
    with pytest.raises(OptionError, match="rule 'mine': step must be a finite number, got True"):
        manager.get_aggregator("mine", step=True)
    with pytest.raises(OptionError, match="no adapter is named 'hots'; did you mean 'host'"):
        manager.get_adapter("hots")
    with pytest.raises(OptionError, match="No plug-in was found"):
        PluginManager([]).get_aggregator("craft")


def test_what_is_no_aggregator(site: Site) -> None:
    site.add(
        "a",
        "a",
        """
        class Forgot(Rule):
            def __init__(self): ...

        @hookimpl
        def craft_register_aggregators(register):
            register("none", lambda: 1)
            register("forgot", Forgot)
        """,
    )
    manager = PluginManager(site.points())
    with pytest.raises(PluginError, match=r"rule 'none' \(plug-in 'a' of a\) makes a int"):
        manager.get_aggregator("none")
    with pytest.raises(PluginError, match=r"Forgot.__init__ must call super\(\).__init__\(\)"):
        manager.get_aggregator("forgot")


def test_an_option_may_be_called_name(site: Site) -> None:
    site.add(
        "a",
        "a",
        """
        class Named(Rule):
            def __init__(self, *, name: str = "") -> None:
                super().__init__()
                self.given = name

        @hookimpl
        def craft_register_aggregators(register): register("named", Named)
        """,
    )
    assert PluginManager(site.points()).get_aggregator("named", name="x").given == "x"  # type: ignore[attr-defined]


# --- Plug-ins that are broken -----------------------------------------------------------------


@pytest.mark.parametrize("kind", BROKEN)
def test_broken(site: Site, kind: str) -> None:
    body, reason = BROKEN[kind]
    site.add("a-good-one", "good", GOOD)
    site.add("broken-one", "bad", body)
    manager = PluginManager(site.points())
    assert [(broken.name, broken.distribution) for broken in manager.broken] == [
        ("bad", "broken-one")
    ]
    assert reason in manager.broken[0].reason
    assert "\n" not in manager.broken[0].reason
    assert (list(manager.aggregators), list(manager.adapters)) == (["mine"], ["host"])
    manager.get_aggregator("mine").aggregate({}, [])  # no half of it observes
    with pytest.raises(OptionError, match="Broken plug-ins: bad: "):
        manager.get_aggregator("half")
    with pytest.raises(PluginError, match="plug-in 'bad' of broken-one: "):
        PluginManager(site.points(), strict=True)


def test_a_target_that_is_not_there(site: Site) -> None:
    site.declare("a", "[craft_adapters]\na = json:nothing\nb = no such module\n")
    reasons = [broken.reason for broken in PluginManager(site.points()).broken]
    assert all(reason.startswith("import failed: ") for reason in reasons)
    assert len(reasons) == 2


def test_strict_from_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("broken-one", "bad", "1 / 0")
    monkeypatch.setenv("CRAFT_ADAPTERS_STRICT", "0")
    PluginManager(site.points())
    monkeypatch.setenv("CRAFT_ADAPTERS_STRICT", "1")
    with pytest.raises(PluginError, match="division") as caught:
        PluginManager(site.points())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- Whose names are whose --------------------------------------------------------------------


def test_bundled_names_cannot_be_taken(site: Site) -> None:
    site.add("aaa", "aaa", GOOD)
    module = site.add("Craft_Adapters", "zzz", GOOD)
    manager = PluginManager(site.points())
    assert manager.aggregators["mine"].__module__ == module
    assert [broken.name for broken in manager.broken] == ["aaa"]


def test_a_distribution_that_is_on_the_path_twice_counts_once(site: Site, tmp_path: Path) -> None:
    site.add("a-good-one", "good", GOOD)
    twin = Site(tmp_path / "twin")
    twin.folder.mkdir()
    twin.declare("A.Good_One", "[craft_adapters]\ngood = older.place\n")
    manager = PluginManager([*site.points(), *twin.points()])
    assert manager.broken == [] and list(manager.aggregators) == ["mine"]


def test_two_distributions_may_name_their_entry_points_alike(site: Site) -> None:
    site.add("a", "plugin", GOOD)
    site.add("b", "plugin", OBSERVER)
    assert PluginManager(site.points()).broken == []


# --- Only the named ones ----------------------------------------------------------------------


def test_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("a-good-one", "good", GOOD)
    module = site.add("broken-one", "bad", "1 / 0")
    for manager in (
        PluginManager(site.points(), only=["good"]),
        PluginManager(site.points(), only=" good,"),
    ):
        assert list(manager.aggregators) == ["mine"]
        assert manager.broken == []
    assert module not in sys.modules
    monkeypatch.setenv("CRAFT_ADAPTERS_PLUGINS", "good")
    assert PluginManager(site.points(), strict=True).broken == []
    assert len(PluginManager(site.points(), only="good,bad").broken) == 1  # argument first
    monkeypatch.setenv("CRAFT_ADAPTERS_PLUGINS", "")
    assert len(PluginManager(site.points()).broken) == 1


def test_only_with_an_unknown_name(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("a-good-one", "good", GOOD)
    with pytest.raises(OptionError, match=r"no plug-in is named 'godo' .*; did you mean 'good'"):
        PluginManager(site.points(), only=["godo"])
    monkeypatch.setenv("CRAFT_ADAPTERS_PLUGINS", "good,other")
    with pytest.raises(OptionError, match=r"'other' \(in CRAFT_ADAPTERS_PLUGINS\); known: good"):
        PluginManager(site.points())
    with pytest.raises(OptionError, match="none is installed"):
        PluginManager([], only=["good"])


# --- Observers --------------------------------------------------------------------------------


def test_observers_get_the_report(site: Site) -> None:
    site.add("a-good-one", "good", GOOD)
    module = site.add("b", "b", OBSERVER)
    site.add("c", "c", "@hookimpl\ndef craft_round_end(): ...")  # fewer arguments are fine
    rule = PluginManager(site.points()).get_aggregator("mine")
    result = rule.aggregate({}, [], round=3)
    assert sys.modules[module].seen == [result.report]


def test_an_observer_that_raises_is_warned_about_once(site: Site) -> None:
    site.add("a-good-one", "good", GOOD)
    site.add("bad-one", "bad", "@hookimpl\ndef craft_round_end(report):\n    raise OSError('full')")
    module = site.add("b", "b", OBSERVER)
    manager = PluginManager(site.points())
    rule, other = manager.get_aggregator("mine"), manager.get_aggregator("mine")
    with pytest.warns(
        RuntimeWarning, match="craft_round_end of plug-in 'bad' of bad-one failed: OSError: full"
    ) as caught:
        rule.aggregate({}, [])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule.aggregate({}, [])
        other.aggregate({}, [])
    assert len(sys.modules[module].seen) == 3
    strict = PluginManager(site.points(), strict=True).get_aggregator("mine")
    with pytest.raises(PluginError, match="OSError: full") as raised:
        strict.aggregate({}, [])
    assert isinstance(raised.value.__cause__, OSError)


def test_a_rule_with_observers_can_be_copied_and_pickled(site: Site) -> None:
    site.add("a-good-one", "good", GOOD)
    module = site.add("b", "b", OBSERVER)
    rule = PluginManager(site.points()).get_aggregator("mine", step=0.5)
    twin = copy.deepcopy(rule)
    twin.aggregate({}, [])
    assert twin.step == 0.5 and len(sys.modules[module].seen) == 1  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(get_aggregator("craft")))  # noqa: S301
    assert again.observers == [get_plugin_manager().round_end]


# --- The real ones ----------------------------------------------------------------------------


def test_bundled() -> None:
    assert {"craft", "fedavg"} <= set(available_aggregators())
    assert "fedml" in available_adapters()
    assert get_adapter("fedml").distribution == "fedml"
    assert [b for b in get_plugin_manager().broken if b.distribution == "craft-adapters"] == []
    assert get_plugin_manager() is get_plugin_manager()


@pytest.mark.parametrize("name", ["craft", "fedavg"])
def test_bundled_rules_are_observed(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    module = site.add("b", "b", OBSERVER)
    ours = [p for d in distributions(name="craft-adapters") for p in d.entry_points]
    manager = PluginManager([*(p for p in ours if p.group == "craft_adapters"), *site.points()])
    rule = manager.get_aggregator(name)
    state = {"w": torch.zeros(3)}
    updates = [ClientUpdate(i, 1, {"w": torch.eye(3)[i]}) for i in range(2)]
    result = rule.aggregate(state, updates)
    assert sys.modules[module].seen == [result.report]


def test_the_top_of_the_package() -> None:
    mine = vars(errors).values()
    raised = {e.__name__ for e in mine if isinstance(e, type) and issubclass(e, errors.CraftError)}
    assert raised <= set(craft_adapters.__all__)
    for name in craft_adapters.__all__:
        assert name in dir(craft_adapters)
        assert getattr(craft_adapters, name) is not None
    assert craft_adapters.__version__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = craft_adapters.nothing


def test_everything_at_once_on_a_real_path(site: Site, tmp_path: Path) -> None:
    """Found as installed distributions are, in a fresh process, beside the bundled ones."""
    for number, (body, _) in enumerate(BROKEN.values()):
        site.add(f"broken-{number:02}", f"bad_{number:02}", body)
    site.add("a-good-one", "good", GOOD)
    site.add("a-late-one", "late", GOOD)
    takes = "@hookimpl\ndef craft_register_aggregators(register): register('craft', Rule)"
    site.add("aaa-thief", "thief", takes)
    twin = Site(tmp_path / "twin")
    twin.folder.mkdir()
    twin.declare("A.Good_One", "[craft_adapters]\ngood = older.place\nolder = older.place\n")
    body = "@hookimpl\ndef craft_round_end(report): print('told', report.rule, report.round)"
    site.add("watcher", "watcher", body)
    site.add("watcher-bad", "watcher_bad", "@hookimpl\ndef craft_round_end(report): 1 / 0")
    code = """
        import json, torch, warnings
        from craft_adapters import ClientUpdate, get_aggregator
        from craft_adapters.plugins import get_plugin_manager

        rule = get_aggregator("craft")
        updates = [ClientUpdate(i, 1, {"w": torch.eye(3)[i]}) for i in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for round in range(2):
                rule.aggregate({"w": torch.zeros(3)}, updates)
        manager = get_plugin_manager()
        broken = {plugin.name: plugin.reason for plugin in manager.broken}
        print(json.dumps([
            type(rule).__module__, list(manager.aggregators), broken,
            [str(warning.message) for warning in caught],
        ]))
    """
    path = os.pathsep.join([str(site.folder), str(twin.folder)])
    done = site.run(textwrap.dedent(code), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    assert told == ["told craft 0", "told craft 1"]
    module, rules, broken, warned = json.loads(last)
    assert module == "craft_adapters.aggregators.craft"
    assert {"craft", "fedavg", "mine"} <= set(rules) and "half" not in rules
    reasons = {f"bad_{number:02}": reason for number, (_, reason) in enumerate(BROKEN.values())}
    reasons |= {
        "late": "the rule name 'mine' is taken by plug-in 'good' of a-good-one",
        "thief": "the rule name 'craft' is taken by plug-in 'craft' of craft-adapters",
    }
    for name, reason in reasons.items():  # whose name a broken one takes, another test says
        assert reason.replace("broken-one", "").split("'bad'")[0] in broken[name]
    assert not {"older", "good", "watcher"} & set(broken)
    (message,) = warned
    assert message.startswith(
        "craft_round_end of plug-in 'watcher_bad' of watcher-bad failed: Zero"
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"CRAFT_ADAPTERS_STRICT": "1", "CRAFT_ADAPTERS_PLUGINS": "good,bad"},
            "PluginError: plug-in 'bad' of broken-one: import failed: ZeroDivisionError: division",
        ),
        (
            {"CRAFT_ADAPTERS_PLUGINS": "goood"},
            "OptionError: no plug-in is named 'goood' (in CRAFT_ADAPTERS_PLUGINS); did you mean",
        ),
        ({"CRAFT_ADAPTERS_STRICT": "1", "CRAFT_ADAPTERS_PLUGINS": "good"}, ""),
    ],
)
def test_the_switches_on_a_real_path(variables: dict[str, str], expected: str, site: Site) -> None:
    site.add("a-good-one", "good", GOOD, header="from craft_adapters.plugins import *\nRule = dict")
    site.add("broken-one", "bad", "1 / 0", header="")
    code = "from craft_adapters.plugins import *\nprint(available_aggregators())"
    done = site.run(code, **variables)
    if expected:
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"craft_adapters.errors.{expected}")
    else:
        assert (done.stdout, done.stderr) == ("('mine',)\n", "")


def imported(site: Site, code: str) -> Mapping[str, bool]:
    names = "'torch', 'numpy', 'fedml', 'flwr', 'nvflare', 'click', 'rich'"
    done = site.run(
        f"import json, sys\n{code}\nprint(json.dumps({{n: n in sys.modules for n in ({names})}}))"
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, bool] = json.loads(done.stdout)
    return found


def test_importing_the_package_imports_next_to_nothing(site: Site) -> None:
    code = "import craft_adapters, craft_adapters.plugins\nfrom craft_adapters import hookimpl"
    assert not any(imported(site, f"{code}\ncraft_adapters.OptionError").values())


def test_discovery_imports_no_host(site: Site) -> None:
    """Even where it could be imported: a stand-in that is first on the path would be seen."""
    (site.folder / "fedml.py").write_text("")
    code = (
        "from craft_adapters.plugins import *\nget_aggregator('craft')\nget_adapter('fedml').found"
    )
    found = imported(site, code)
    assert found["torch"] and not any(found[name] for name in ("fedml", "flwr", "nvflare"))
