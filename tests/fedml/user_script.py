"""A FedML user's script, with witnesses: what each client started from, what the rule was given.

``--witness FOLDER`` writes one JSON line for each local training (fingerprint of the model it
started from) and each aggregation (fingerprints of the global model given and returned). The
adapter is not touched; FedML's trainer and the rule's ``aggregate`` are watched from outside.

Environment: ``CRAFT_TEST_FAIL=rule`` makes the rule raise, ``=training`` the clients;
``CRAFT_TEST_KILL=K`` kills the server with SIGKILL when it comes to aggregate for the K-th time
(from 0).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import fedml
import numpy as np
import torch
from fedml import FedMLRunner
from fedml.ml.trainer.fedprox_trainer import FedProxModelTrainer
from fedml.ml.trainer.my_model_trainer_classification import ModelTrainerCLS
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def fingerprint(state: dict[str, Any]) -> str:
    """Equal for models that are equal to the bit."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def watch(folder: Path) -> None:
    """Note what happens in this process."""
    from craft_adapters.aggregators import GramRule

    path = folder / f"{os.getpid()}.jsonl"

    def note(**event: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def watched_train(train: Any) -> Any:
        @functools.wraps(train)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(event="train", start=fingerprint(self.get_model_params()))
            if os.environ.get("CRAFT_TEST_FAIL") == "training":
                raise RuntimeError("the training fails on purpose")
            return train(self, *args, **kwargs)

        return wrapper

    def watched_aggregate(aggregate: Any) -> Any:
        @functools.wraps(aggregate)
        def wrapper(self: Any, state: Any, updates: Any, **kwargs: Any) -> Any:
            given = fingerprint(state)
            updates = list(updates)
            if os.environ.get("CRAFT_TEST_FAIL") == "rule":
                raise RuntimeError("the rule fails on purpose")
            if os.environ.get("CRAFT_TEST_KILL") == str(kwargs["round"]):
                os.kill(os.getpid(), signal.SIGKILL)
            result = aggregate(self, state, updates, **kwargs)
            note(
                event="aggregate",
                round=kwargs["round"],
                clients=[update.client_id for update in updates],
                examples=[update.num_examples for update in updates],
                given=given,
                returned=fingerprint(result.state),
                dtypes=sorted({str(value.dtype) for value in result.state.values()}),
            )
            return result

        return wrapper

    for trainer in (ModelTrainerCLS, FedProxModelTrainer):
        trainer.train = watched_train(trainer.train)
    GramRule.aggregate = watched_aggregate(GramRule.aggregate)


def dataset(args: Any) -> list[Any]:
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable")[::4]
    features, labels = torch.tensor(x[order] / 16).float(), torch.tensor(y[order])

    def loader(indices: torch.Tensor) -> DataLoader:
        return DataLoader(TensorDataset(features[indices], labels[indices]), args.batch_size)

    everything = torch.arange(len(labels))
    # Client k has 40 + 20 k examples, which tells the clients apart on the server.
    sizes = torch.arange(args.client_num_in_total) * 20 + 40
    parts = dict(enumerate(everything.tensor_split(sizes.cumsum(0))[:-1]))
    loaders = {k: loader(part) for k, part in parts.items()}
    counts = {k: len(part) for k, part in parts.items()}
    whole = loader(everything)
    return [len(labels), len(labels), whole, whole, counts, loaders, dict(loaders), 10]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--witness", type=Path)
    parser.add_argument("--final", type=Path, help="where to note the model's final fingerprint")
    parser.add_argument("--init-only", action="store_true")
    parser.add_argument("--serving", action="store_true")
    parser.add_argument("--one-liner", action="store_true")
    parser.add_argument("--own-aggregate", action="store_true")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    torch.set_num_threads(1)
    if own.witness:
        watch(own.witness)
    if own.one_liner:
        fedml.data.load = lambda args: (dataset(args), 10)  # FedML has no digits
        fedml.model.create = lambda args, classes: model()
        fedml.run_simulation()
        return
    args = fedml.init()
    if own.init_only:
        return
    if own.serving:
        serve(args)
        return
    device = fedml.device.get_device(args)
    net = model()
    server = own_aggregator(net, args) if own.own_aggregate and args.rank == 0 else None
    FedMLRunner(args, device, dataset(args), net, server_aggregator=server).run()
    if own.final:
        own.final.write_text(fingerprint(net.state_dict()))


def own_aggregator(net: nn.Module, args: Any) -> Any:
    from fedml.ml.aggregator.default_aggregator import DefaultServerAggregator

    class Mine(DefaultServerAggregator):
        def aggregate(self, raw_client_model_or_grad_list: Any) -> Any:
            return super().aggregate(raw_client_model_or_grad_list)

    return Mine(net, args)


def serve(args: Any) -> None:
    from fedml import serving

    args.comm = None  # FedML 0.9.6 forgets it for serving, and each client's own id
    if args.role == "client":
        args.client_id_list = f"[{args.rank}]"
    cpu = torch.device("cpu")
    side = serving.Server if args.role == "server" else serving.Client
    side(args, "endpoint", "digits", "v1", device=cpu, dataset=dataset(args), model=model()).run()


if __name__ == "__main__":
    main()
