"""What the adapter says and does where FedML is not; runs with and without FedML."""

from __future__ import annotations

import subprocess
import sys
import types
from collections import namedtuple

import pytest

from craft_adapters.fedml._host import require_fedml

VersionInfo = namedtuple("VersionInfo", "major minor micro releaselevel serial")


def test_missing_host_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedml", None)
    monkeypatch.setattr(sys, "version_info", VersionInfo(3, 11, 9, "final", 0))
    with pytest.raises(ImportError, match=r"craft-adapters\[fedml\]") as raised:
        require_fedml()
    assert "3.12" not in str(raised.value)


def test_missing_host_on_new_python_says_where_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedml", None)
    monkeypatch.setattr(sys, "version_info", VersionInfo(3, 13, 1, "final", 0))
    with pytest.raises(ImportError, match=r"Python 3\.13, and FedML 0\.9\.6 stops at 3\.11"):
        require_fedml()


def test_a_folder_of_the_hosts_name_is_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedml", types.ModuleType("fedml"))
    with pytest.raises(ImportError, match="not installed"):
        require_fedml()


def test_half_a_host_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pkg_resources'", name="pkg_resources")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ImportError, match=r"pkg_resources.*setuptools<82"):
        require_fedml()


def test_an_untested_release_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = types.ModuleType("fedml")
    other.__version__ = "0.8.30"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fedml", other)
    require_fedml()
    assert "0.8.30" in caplog.text
    assert "tested with 0.9.6" in caplog.text


def test_importing_the_adapter_imports_neither_host_nor_torch() -> None:
    script = (
        "import sys, craft_adapters.fedml, craft_adapters.fedml._plugin\n"
        "heavy = {'fedml', 'torch', 'mpi4py', 'grpc'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert {'install', 'uninstall', 'wrap', 'run_script'} <= set(dir(craft_adapters.fedml))\n"
        "craft_adapters.fedml.install, craft_adapters.fedml.wrap\n"
        "assert not {'fedml', 'mpi4py', 'grpc'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_missing_script_is_named() -> None:
    from craft_adapters.fedml import run_script

    with pytest.raises(FileNotFoundError, match=r"no such script: nowhere\.py"):
        run_script("nowhere.py")
