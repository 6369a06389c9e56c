"""Federated training in a few lines, with CRAFT as the server step."""

import torch
from torch import nn

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.simulation import dirichlet_partition, load_digits

digits = load_digits()
parts = dirichlet_partition(digits.y.numpy(), num_clients=20, alpha=0.1, seed=0)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
global_state = model.state_dict()

aggregator = get_aggregator("craft", server_lr=0.1)
for round in range(10):
    updates = []
    for client, part in enumerate(parts):
        model.load_state_dict(global_state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.from_numpy(part).split(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(digits.x[batch]), digits.y[batch]).backward()
            optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        updates.append(ClientUpdate(client, num_examples=len(part), values=state))
    result = aggregator.aggregate(global_state, updates)
    global_state = result.state
    before, after = result.report.conflicts_before, result.report.conflicts_after
    print(f"round {round}: {before} conflicting pairs, {after} clients pointed against")
