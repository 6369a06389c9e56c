"""An app of Flower's legacy API, whose clients send lists of arrays: their names are given."""

from __future__ import annotations

from app import CLIENTS, ROUNDS
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from task import accuracy, batches, new_model, own_examples, step
from torch import from_numpy, nn

from craft_adapters.flower import wrap


def get_parameters(model: nn.Module) -> NDArrays:
    return [value.numpy() for value in model.state_dict().values()]


def set_parameters(model: nn.Module, arrays: NDArrays) -> None:
    names = model.state_dict()
    model.load_state_dict(dict(zip(names, map(from_numpy, arrays), strict=True)))


class DigitsClient(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.model = new_model()
        self.examples, self.held_out = own_examples(context)

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        set_parameters(self.model, parameters)
        for batch in batches(self.examples):
            step(self.model, batch)
        return get_parameters(self.model), len(self.examples.labels), {}

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        set_parameters(self.model, parameters)
        wrong = 1 - accuracy(self.model, self.held_out)
        return wrong, len(self.held_out.labels), {}


def client_fn(context: Context) -> Client:
    return DigitsClient(context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    model = new_model()
    strategy = FedAvg(
        min_fit_clients=CLIENTS,
        min_evaluate_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(get_parameters(model)),
    )
    strategy = wrap(strategy, "craft", names=model.state_dict(), server_lr=0.1)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


client_app = ClientApp(client_fn)
server_app = ServerApp(server_fn=server_fn)

if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
