"""The report, its verdict, the command and the pytest class, around the checks themselves."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from craft_adapters.cli import main
from craft_adapters.errors import OptionError, PluginError
from craft_adapters.plugins import CAPABILITIES, AdapterDescriptor, get_plugin_manager
from craft_adapters.plugins._registry import Origin
from craft_adapters.testing import CHECKS, AdapterTests, CheckResult, Report, check_adapter
from craft_adapters.testing.toy.adapter import Adapter
from craft_adapters.testing.toy.harness import ToyHarness
from craft_adapters.testing.toy.plugin import ADAPTER

from .packages import command, run
from .toys import AlwaysFour, NeedsAReply

QUICK = ("weights", "result", "round-numbers", "state-kept", "rule-error", "load")


def report(*statuses: str) -> Report:
    checks = [
        CheckResult(f"c{number}", group, status)  # type: ignore[arg-type]
        for number, (group, _, status) in enumerate(each.partition(":") for each in statuses)
    ]
    return Report("toy", None, None, (), (), tuple(checks))


# --- The descriptor ----------------------------------------------------------------------------


def test_gives() -> None:
    assert ADAPTER.gives == set(CAPABILITIES)
    with pytest.raises(PluginError, match="gives 'losses', which is no capability; did you mean"):
        dataclasses.replace(ADAPTER, gives=frozenset({"losses"}))
    plain = AdapterDescriptor("x", None, (), None, "", load=dict)
    assert plain.gives == {"updates"} and plain.harness is None


# --- The verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "verdict", "empty"),
    [
        ((), "incomplete", ()),
        (("a:passed",), "pass", ()),
        (("a:passed", "a:skipped", "a:expected failure"), "pass", ()),
        (("a:passed", "b:skipped"), "incomplete", ("b",)),
        (("a:passed", "b:expected failure"), "incomplete", ("b",)),
        (("a:passed", "a:failed"), "fail", ()),
        (("a:passed", "b:failed", "c:skipped"), "fail", ("b", "c")),
    ],
)
def test_verdict(statuses: tuple[str, ...], verdict: str, empty: tuple[str, ...]) -> None:
    made = report(*statuses)
    assert (made.verdict, made.empty_groups) == (verdict, empty)
    assert made.passed == (verdict == "pass")
    assert json.loads(made.to_json())["verdict"] == verdict
    if verdict == "pass":
        made.raise_unless_passed()
    else:
        with pytest.raises(AssertionError, match=verdict):
            made.raise_unless_passed()


def test_what_was_not_run_is_no_pass() -> None:
    made = check_adapter(ADAPTER, only=QUICK[:3])
    assert made.verdict == "incomplete"
    assert made.empty_groups == ("state", "errors", "import")
    assert made.counts["passed"] == 3
    assert made["restart"].reason == "not selected"
    assert [check.name for check in made.checks] == list(CHECKS)
    assert check_adapter(ADAPTER, only=QUICK).verdict == "pass"


def test_what_the_host_does_not_give_is_skipped_by_name() -> None:
    bare = dataclasses.replace(ADAPTER, gives=frozenset({"updates"}))
    made = check_adapter(bare, only=("client-ids", "loss", "local-steps", "restart"))
    assert [made[name].reason for name in ("client-ids", "loss", "local-steps", "restart")] == [
        "the host does not give client_ids",
        "the host does not give loss",
        "the host does not give local_steps",
        "the host does not give server_state",
    ]
    nothing = check_adapter(dataclasses.replace(ADAPTER, gives=frozenset()), only=QUICK)
    assert nothing.verdict == "incomplete"
    assert nothing.empty_groups == ("updates", "model", "rounds", "state", "errors")


def test_expected_failures() -> None:
    names = ("changing-number", "weights")
    expected = {"changing-number": "it is built for four"}
    made = check_adapter(ADAPTER, ToyHarness(AlwaysFour), only=names, expected_failures=expected)
    assert made["changing-number"].status == "expected failure"
    assert made["changing-number"].reason.startswith("it is built for four (IndexError in toys.py:")
    assert made.verdict == "incomplete"
    made = check_adapter(ADAPTER, ToyHarness(Adapter), only=names, expected_failures=expected)
    assert made.verdict == "fail"
    assert "take it out of expected_failures" in made["changing-number"].reason
    with pytest.raises(OptionError, match="no check 'weight'; did you mean 'weights'"):
        check_adapter(ADAPTER, expected_failures={"weight": ""})
    with pytest.raises(OptionError, match="no check 'x'"):
        check_adapter(ADAPTER, only=["x"])


def test_a_host_that_ends_the_process_is_a_failure() -> None:
    class Leaves(Adapter):
        def __call__(self, *given: Any) -> Any:
            raise SystemExit("bye")

    made = check_adapter(ADAPTER, ToyHarness(Leaves), only=["weights"])
    assert made["weights"].status == "failed"
    assert "SystemExit" in made["weights"].reason and "bye" in made["weights"].reason


def test_a_host_of_unknown_modules_is_not_taken_for_one_that_is_imported_late() -> None:
    harness = type("Unknown", (ToyHarness,), {"host_modules": ()})()
    made = check_adapter(ADAPTER, harness, only=["lazy-import"])
    assert made["lazy-import"].status == "failed"
    assert "set host_modules on the harness" in made["lazy-import"].reason


def test_the_probe_is_gone_afterwards() -> None:
    before = list(get_plugin_manager().aggregators)
    check_adapter(ADAPTER, only=["weights"])
    assert list(get_plugin_manager().aggregators) == before


def test_without_harness_or_host() -> None:
    with pytest.raises(PluginError, match="adapter 'toy' has no harness: set harness="):
        check_adapter(dataclasses.replace(ADAPTER, harness=None))
    with pytest.raises(PluginError, match=r"is \{\}, which is no craft_adapters.testing.Harness"):
        check_adapter(dataclasses.replace(ADAPTER, harness=dict))
    absent = dataclasses.replace(ADAPTER, distribution="no-such-host", extra="toys")
    with pytest.raises(ImportError, match=r"pip install 'craft-adapters\[toys\]'"):
        check_adapter(absent)


# --- The command -------------------------------------------------------------------------------


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters in the registry of this process."""
    manager = get_plugin_manager()
    adapters = manager.adapters.copy()
    broken = dataclasses.replace(ADAPTER, name="broken", harness=lambda: ToyHarness(NeedsAReply))
    absent = dataclasses.replace(ADAPTER, name="absent", distribution="no-such-host")
    for adapter in (ADAPTER, broken, absent, dataclasses.replace(ADAPTER, name="n", harness=None)):
        adapters.add(adapter.name, adapter, Origin("toys", "tests"))
    monkeypatch.setattr(manager, "adapters", adapters)


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["check", *words])


@pytest.mark.usefixtures("toys")
def test_the_exit_code_is_the_verdict() -> None:
    done = call("toy", "--only", ",".join(QUICK))
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "toy: pass (6 passed, 28 skipped)"
    done = call("toy", "--only", "weights", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["verdict"] == "incomplete"
    done = call("broken", "--only", "no-replies,weights")
    assert done.exit_code == 1
    assert "no-replies             failed: IndexError in toys.py:" in done.output


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("toi",), "no adapter is named 'toi'; did you mean 'toy'"),
        (("absent",), "the host 'no-such-host' of adapter 'absent' is not installed"),
        (("n",), "adapter 'n' has no harness"),
        (("toy", "--only", "wieghts"), "no check 'wieghts'; did you mean 'weights'"),
    ],
)
def test_what_cannot_be_run(words: tuple[str, ...], message: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_nothing_heavy_is_imported_early() -> None:
    code = "import sys; print([n for n in ('torch', 'craft_adapters.testing') if n in sys.modules])"
    for words in ("import craft_adapters.cli", "import craft_adapters, craft_adapters.plugins"):
        assert run("-c", f"{words}; {code}").stdout == "[]\n"
    every = "from craft_adapters.plugins import *; get_aggregator('craft'); available_adapters()"
    assert run("-c", f"{every}; {code}").stdout == "['torch']\n"
    for name in ("check", "new-adapter"):
        assert command(name, "--help").returncode == 0


def test_the_kit_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; from craft_adapters.testing import Harness"
    assert run("-c", code).returncode == 0


# --- The pytest class --------------------------------------------------------------------------


def test_the_tests_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match=r"Mine replaces test_check: .* expected_failures"):
        type("Mine", (AdapterTests,), {"test_check": None})
    with pytest.raises(TypeError, match="replaces test_verdict"):
        type("Mine", (type("Fine", (AdapterTests,), {}),), {"test_verdict": lambda self: None})
    mixin = type("Mixin", (), {"test_check": lambda self, name: None})
    with pytest.raises(TypeError, match="replaces test_check"):
        type("Mine", (mixin, AdapterTests), {})


def test_an_override_that_comes_later_fails_the_verdict() -> None:
    mine = type("Mine", (AdapterTests,), {"adapter": ADAPTER})
    mine.test_check = lambda self, name: None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        mine().test_verdict()


@pytest.mark.slow
def test_as_pytest_runs_it(tmp_path: Path) -> None:
    text = """
        import dataclasses
        from craft_adapters.testing import AdapterTests
        from craft_adapters.testing.toy.harness import ToyHarness
        from craft_adapters.testing.toy.plugin import ADAPTER
        from tests.kit.toys import AlwaysFour, SwapsWeights

        class TestSound(AdapterTests):
            adapter = dataclasses.replace(ADAPTER, gives=ADAPTER.gives - {"client_ids"})
            harness = ToyHarness(AlwaysFour)
            expected_failures = {"changing-number": "four"}

        class TestDefect(AdapterTests):
            adapter = ADAPTER
            harness = ToyHarness(SwapsWeights)
    """
    (tmp_path / "test_toys.py").write_text(textwrap.dedent(text))
    words = ("-q", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAILED")]
    assert len(failures) == 2, done.stdout
    assert "TestDefect::test_check[weights]" in failures[0]
    assert "TestDefect::test_verdict" in failures[1]
    assert sum(line.startswith("XFAIL") for line in lines) == 1
    passed = 2 * (len(CHECKS) + 1) - 2 - 3 - 1
    assert f"2 failed, {passed} passed, 3 skipped, 1 xfailed" in lines[-1]
