"""An app that has a strategy: one line gives it CRAFT, a few more let it go on after a stop."""

from __future__ import annotations

from pathlib import Path

from app import CLIENTS, ROUNDS, client_app
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file, save_file
from task import new_model

from craft_adapters.flower import wrap

MODEL = Path("model.safetensors")

server_app = ServerApp()


def worst(replies: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """What the mean over the clients hides."""
    return MetricRecord({"worst": min(reply["metrics"]["accuracy"] for reply in replies)})


def save(server_round: int, arrays: ArrayRecord) -> None:
    save_file(arrays.to_torch_state_dict(), MODEL)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        min_train_nodes=CLIENTS,
        min_evaluate_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
        evaluate_metrics_aggr_fn=worst,
    )
    strategy = wrap(strategy, "craft", server_lr=0.1, state_path="craft.safetensors")

    state = load_file(MODEL) if MODEL.exists() else new_model().state_dict()
    result = strategy.start(grid, ArrayRecord(state), num_rounds=ROUNDS, evaluate_fn=save)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: worst accuracy {metrics['worst']:.3f}")


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
