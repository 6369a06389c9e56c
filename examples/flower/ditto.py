"""Ditto in Flower: a personal model that stays with its client, and CRAFT on the shared one.

Each client trains two models on the same batches. The shared one is sent, and aggregated by CRAFT.
The personal one is pulled towards the shared model as it was received, and lives in
``Context.state``, which Flower keeps for each node and never sends (Li et al. 2021, Algorithm 1,
https://arxiv.org/abs/2012.04221).
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from task import accuracy, batches, new_model, own_examples, step
from torch import Tensor

from craft_adapters.flower import CraftStrategy

CLIENTS = 3
ROUNDS = 3
LAMBDA = 0.5

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    received = message.content["arrays"].to_torch_state_dict()
    shared, personal = new_model(), new_model()
    shared.load_state_dict(received)
    personal.load_state_dict(own_state(context) or received)
    examples, _ = own_examples(context)
    for batch in batches(examples):
        step(personal, batch, pull=LAMBDA, anchor=received)
        step(shared, batch)
    context.state["personal"] = ArrayRecord(personal.state_dict())
    answer = {
        "arrays": ArrayRecord(shared.state_dict()),
        "metrics": MetricRecord({"num-examples": len(examples.labels)}),
    }
    return Message(RecordDict(answer), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    received = message.content["arrays"].to_torch_state_dict()
    _, held_out = own_examples(context)
    model = new_model()
    metrics: dict[str, float] = {"num-examples": len(held_out.labels)}
    for name, state in (("shared", received), ("personal", own_state(context) or received)):
        model.load_state_dict(state)
        metrics[name] = accuracy(model, held_out)
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def own_state(context: Context) -> dict[str, Tensor] | None:
    """This client's personal model; None if it has not trained one yet."""
    record = context.state.get("personal")
    return None if record is None else dict(record.to_torch_state_dict())


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = CraftStrategy(
        "craft",
        targets="sqrt",
        client_length=1.0,
        scale="steady",
        server_lr=1.0,
        min_train_nodes=CLIENTS,
        min_evaluate_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
    )
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: shared {metrics['shared']:.3f}, personal {metrics['personal']:.3f}")


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
