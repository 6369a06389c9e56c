"""The wheel, installed by itself, holds every package and finds its plug-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed; nothing of the checkout on its path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CRAFT"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy: building in the checkout would leave build/ and egg-info behind.
    junk = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=junk)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", source, cwd=folder)
    (wheel,) = (source / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # A path line adds the folder's packages, not its editable installs.
    Path(own.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *install, wheel, cwd=folder)
    return python


def test_packages_import_from_the_wheel(python: Path, tmp_path: Path) -> None:
    hosts = ["craft_adapters.ditto", "craft_adapters.fedml"]
    names = ["craft_adapters", *hosts, "craft_adapters.models", "craft_adapters.testing"]
    code = f"import json, {', '.join(names)}\n"
    code += f"print(json.dumps([m.__file__ for m in ({', '.join(names)})]))"
    for file in json.loads(run(python, "-c", code, cwd=tmp_path)):
        assert Path(file).is_relative_to(python.parents[1]), file
        assert ROOT not in Path(file).parents


def test_types_are_marked(python: Path, tmp_path: Path) -> None:
    code = "from importlib.resources import files\n"
    code += "print((files('craft_adapters') / 'py.typed').is_file())"
    assert run(python, "-c", code, cwd=tmp_path).strip() == "True"


def test_plugins_are_listed(python: Path, tmp_path: Path) -> None:
    listed = json.loads(run(python.with_name("craft-adapters"), "list", "--json", cwd=tmp_path))
    assert {"craft", "fedavg"} <= {rule["name"] for rule in listed["aggregators"]}
    assert {"ditto", "fedml"} <= {adapter["name"] for adapter in listed["adapters"]}
    assert listed["broken"] == []
