"""A FedML user's script: digits over many clients, an MLP, FedML's own simulator.

    craft-adapters fedml federation.py --cf fedml_config.yaml

Nothing here knows an aggregation rule: the config's ``craft_args`` choose it. What is added to a
plain FedML script is the evaluation: FedML reports sums over all clients, and the question here is
how each client fares, so its test is replaced by one that writes every client's accuracy.
"""

from __future__ import annotations

from typing import Any

import fedml
import numpy as np
import torch
from fedml import FedMLRunner
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI
from torch.utils.data import DataLoader, TensorDataset

from craft_adapters.metrics import fairness, per_client_accuracy
from craft_adapters.models import MLP
from craft_adapters.simulation import Split, dirichlet_partition, load_digits, train_test_split
from craft_adapters.sinks import JsonlSink


def split_digits(args: Any) -> tuple[torch.Tensor, torch.Tensor, Split]:
    """All digits, and who holds which: a Dirichlet draw per class, 80/20 within each client."""
    digits = load_digits()
    parts = dirichlet_partition(
        digits.y.numpy(),
        num_clients=args.client_num_in_total,
        alpha=args.partition_alpha,
        min_size=10,
        seed=args.random_seed,
    )
    return digits.x, digits.y, train_test_split(parts, test_fraction=0.2, seed=args.random_seed)


def as_fedml_dataset(args: Any, x: torch.Tensor, y: torch.Tensor, split: Split) -> list[Any]:
    """FedML's list of eight: counts, loaders, and the same per client."""

    def loader(indices: np.ndarray) -> DataLoader:
        chosen = torch.from_numpy(np.asarray(indices))
        generator = torch.Generator().manual_seed(args.random_seed)
        data = TensorDataset(x[chosen], y[chosen])
        return DataLoader(data, args.batch_size, shuffle=True, generator=generator)

    train = {client: loader(part) for client, part in enumerate(split.train)}
    test = {client: loader(part) for client, part in enumerate(split.test)}
    counts = {client: len(part) for client, part in enumerate(split.train)}
    all_train, all_test = np.concatenate(split.train), np.concatenate(split.test)
    return [
        len(all_train),
        len(all_test),
        loader(all_train),
        loader(all_test),
        counts,
        train,
        test,
        10,
    ]


def write_every_clients_accuracy(
    path: str, x: torch.Tensor, y: torch.Tensor, test: list[np.ndarray]
) -> None:
    """Let FedML's test write a line of JSON: round, accuracy per client, their summary."""
    sink = JsonlSink(path)

    def evaluate(api: Any, round: int) -> None:
        model = api.model_trainer.model
        scores = per_client_accuracy(model, x, y, test)
        summary = fairness(scores.accuracy, scores.num_examples)
        sink.write(
            {
                "round": round,
                "mean": summary.mean_unweighted,
                "worst10": summary.worst10,
                "best10": summary.best10,
                "std": summary.std_unweighted,
                "accuracy": scores.accuracy,
            }
        )

    FedAvgAPI._local_test_on_all_clients = evaluate


def main() -> None:
    args = fedml.init()
    device = fedml.device.get_device(args)
    x, y, split = split_digits(args)
    write_every_clients_accuracy(args.metrics_path, x, y, split.test)
    torch.manual_seed(args.random_seed)
    model = MLP(num_classes=10, input_shape=(1, 8, 8), hidden=(128, 128))
    FedMLRunner(args, device, as_fedml_dataset(args, x, y, split), model).run()


if __name__ == "__main__":
    main()
