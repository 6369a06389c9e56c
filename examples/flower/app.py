"""A Flower app whose server step is CRAFT.

``python app.py`` runs it in Flower's simulation. For ``flwr run``, name ``app:server_app`` and
``app:client_app`` as components in the ``pyproject.toml`` of your app.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from task import accuracy, batches, new_model, own_examples, step

from craft_adapters.flower import CraftStrategy

CLIENTS = 3
ROUNDS = 3

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    examples, _ = own_examples(context)
    for batch in batches(examples):
        step(model, batch)
    answer = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(examples.labels)}),
    }
    return Message(RecordDict(answer), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, held_out = own_examples(context)
    metrics = {"num-examples": len(held_out.labels), "accuracy": accuracy(model, held_out)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = CraftStrategy(
        "craft",
        # For few clients that are all present; the defaults are for many with few a round.
        targets="sqrt",
        client_length=1.0,
        scale="steady",
        server_lr=1.0,
        # Otherwise the first round takes the first two clients that have come.
        min_train_nodes=CLIENTS,
        min_evaluate_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
    )
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
