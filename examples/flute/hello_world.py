"""FLUTE's own hello world for ECG, with CRAFT as its strategy, on a few made-up recordings.

    python hello_world.py /path/to/msrflute /tmp/hello [--processes 3]

Needs what FLUTE needs: easydict, cerberus, psutil, pyyaml, scipy and h5py besides torch. azureml is
not needed: FLUTE gets the stand-in from offline/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import yaml

OFFLINE = Path(__file__).parent / "offline"
CLIENTS, LENGTH, CLASSES = 6, 187, 5


def write_recordings(path: Path, seed: int) -> None:
    """In the form that FLUTE's task ecg_cnn reads: a class is a frequency, a client has two."""
    random = np.random.default_rng(seed)
    time = np.linspace(0, 6, LENGTH)
    users = [f"{client:04d}" for client in range(CLIENTS)]
    counts = [10 + 2 * client for client in range(CLIENTS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["users"], file["num_samples"] = users, counts
        for client, (user, count) in enumerate(zip(users, counts, strict=True)):
            labels = (client + random.integers(0, 2, count)) % CLASSES
            waves = np.sin(time * (1 + labels[:, None])) + 0.1 * random.normal(size=(count, LENGTH))
            file[f"user_data/{user}/x"] = waves
            file[f"user_data_label/{user}"] = labels


def with_craft(flute: Path, resume: bool, rounds: int) -> dict[str, Any]:
    """FLUTE's config with the strategy changed, and the rule's options added."""
    config: dict[str, Any] = yaml.safe_load(
        (flute / "testing" / "hello_world_ecg_cnn.yaml").read_text()
    )
    config["strategy"] = "CRAFT"
    config["server_config"]["craft"] = {"aggregator": "craft", "server_lr": 0.1}
    config["server_config"]["resume_from_checkpoint"] = resume
    config["server_config"]["max_iteration"] = rounds
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("flute", type=Path, help="a checkout of microsoft/msrflute")
    parser.add_argument("folder", type=Path, help="for data, config and results")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for seed, name in enumerate(("train", "test")):
        write_recordings(folder / "data" / "ecg_cnn" / f"{name}_data.hdf5", seed)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(with_craft(args.flute, args.resume, args.rounds)))
    environment = dict(os.environ)
    if importlib.util.find_spec("azureml") is None:
        paths = [str(OFFLINE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc_per_node={args.processes}", "-m", "craft_adapters.flute"]
    flags = {
        "-config": config,
        "-dataPath": folder,
        "-outputPath": folder / "out",
        "-task": "ecg_cnn",
        "-backend": "gloo",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    command = [*launch, "e2e_trainer.py", *words]
    sys.exit(subprocess.run(command, cwd=args.flute, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
