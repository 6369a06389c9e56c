"""NVFlare's own simulator: a server and two sites, each a process, offline."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from craft_adapters import ClientUpdate, get_aggregator

pytest.importorskip("nvflare", reason="NVFlare is not installed (extra nvflare)")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "nvflare"
JOB = Path(__file__).parent
SITES = ("site-1", "site-2")

pytestmark = pytest.mark.slow


def run(
    script: Path, folder: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a copy of a job script and of what stands beside it; all files go into the folder."""
    for file in script.parent.glob("*.py"):
        shutil.copy(file, folder)
    # Of its own, since the name of a socket has 108 characters at most.
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ,
            "HOME": str(folder),
            "TMPDIR": temporary,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        done = subprocess.run(
            [sys.executable, script.name, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert not left_running(folder), "processes were left running"
    return done


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that have to do with the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:  # it has just ended
            continue
        if str(folder).encode() in words:
            found.append(words.decode().replace("\0", " "))
    return found


def installed(folder: Path) -> str:
    """The package as a wheel lays it out: a recipe copies no class out of an editable install."""
    junk = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "craft_adapters", folder / "craft_adapters", ignore=junk)
    shutil.copytree(ROOT / "models", folder / "craft_adapters" / "models", ignore=junk)
    for adapter in (ROOT / "adapters").iterdir():
        if adapter.is_dir():
            shutil.copytree(adapter, folder / "craft_adapters" / adapter.name, ignore=junk)
    return str(folder)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def final_model(server: Path) -> dict[str, Any]:
    saved = torch.load(server / "app_server" / "FL_global_model.pt", weights_only=True)
    model: dict[str, Any] = saved["model"]
    return model


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The example's modules: client, model."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("client", "model")
    for name in names:
        sys.modules.pop(name, None)
    client, model = map(importlib.import_module, names)
    yield client, model
    for name in names:
        del sys.modules[name]


def test_the_example_ends_where_the_rule_says(tmp_path: Path, example: tuple[Any, Any]) -> None:
    workspace = tmp_path / "workspace"
    done = run(
        EXAMPLE / "job.py",
        tmp_path,
        NVFLARE_SIMULATOR_WORKSPACE_ROOT=str(workspace),
        PYTHONPATH=installed(tmp_path / "site"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    server = workspace / "craft-digits" / "server" / "simulate_job"
    assert (server / "craft_state.safetensors").is_file()
    copied = (server / "app_server" / "custom").rglob("*.py")
    assert {file.name for file in copied} == {"_aggregator.py", "client.py", "model.py"}

    client, model = example
    rule, state = get_aggregator("craft", server_lr=0.1), model.Net().state_dict()
    for _round in range(2):
        updates = []
        for site in SITES:
            net, data = model.Net(), client.data_of(site)
            net.load_state_dict(state)
            client.train(net, data)
            updates.append(ClientUpdate(site, len(data), net.state_dict()))
        state = rule.aggregate(state, updates).state
    # Training is not the same to the bit in another process; the other test compares bits.
    torch.testing.assert_close(dict(final_model(server)), state, rtol=1e-4, atol=1e-5)


def test_differences_a_named_path_and_an_error(tmp_path: Path) -> None:
    done = run(JOB / "job.py", tmp_path, str(tmp_path))
    output = done.stdout + done.stderr
    assert "site-1: 'examples' is needed with every model" in output
    assert "Aborting current RUN due to FATAL_SYSTEM_ERROR" in output
    assert done.returncode != 0

    rule = get_aggregator("craft", server_lr=0.5)
    for round in range(2):
        received = [load_file(tmp_path / f"{site}-received-{round}.safetensors") for site in SITES]
        assert same(received[0], received[1])
        updates = []
        for number, site in enumerate(SITES, start=1):
            sent = load_file(tmp_path / f"{site}-sent-{round}.safetensors")
            # NVFlare's differences are client minus global model.
            update = {name: -value for name, value in sent.items()}
            updates.append(ClientUpdate(site, 10 * number, update, kind="update"))
        state = rule.aggregate(received[0], updates).state
        assert state["weight"].dtype == torch.bfloat16
        assert same(load_file(tmp_path / f"site-2-received-{round + 1}.safetensors"), state)

    server = tmp_path / "workspace" / "server" / "simulate_job"
    assert same(final_model(server), state)  # the round that failed changed nothing
    assert (tmp_path / "kept" / "rule.safetensors").is_file()
    config = json.loads((server / "app_server" / "config" / "config_fed_server.json").read_text())
    named = config["workflows"][0]["args"]["aggregator"]["path"]
    assert named == "craft_adapters.nvflare.CraftAggregator"
    assert not list(server.rglob("craft_adapters"))
