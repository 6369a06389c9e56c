"""What each site runs. Nothing in it knows of the rule."""

import nvflare.client as flare
import torch
from model import Net
from nvflare.app_common.abstract.fl_model import FLModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from craft_adapters.simulation import dirichlet_partition, load_digits


def data_of(site):
    """A site's data: here a part of the bundled digits."""
    digits = load_digits()
    parts = dirichlet_partition(digits.y.numpy(), num_clients=2, alpha=0.5, seed=0)
    part = parts[int(site.removeprefix("site-")) - 1]
    return TensorDataset(digits.x[part], digits.y[part])


def accuracy(model, data):
    x, y = data.tensors
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def train(model, data):
    """One epoch."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=32, drop_last=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main():
    flare.init()
    data = data_of(flare.get_site_name())
    model = Net()
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        metrics = {"accuracy": accuracy(model, data)}  # of the model received
        train(model, data)
        # The site's weight, under NVFlare's key: its number of examples.
        meta = {"NUM_STEPS_CURRENT_ROUND": len(data)}
        flare.send(FLModel(params=model.state_dict(), metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
