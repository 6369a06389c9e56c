import torch
from torch import nn


def make_optimizer(config, model):
    options = dict(config)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[options.pop("type")]
    return kind(model.parameters() if isinstance(model, nn.Module) else model, **options)


def make_lr_scheduler(config, optimizer):
    options = {key: config[key] for key in ("step_size", "gamma")}
    return torch.optim.lr_scheduler.StepLR(optimizer, **options)


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[3].bias.requires_grad_(False)
    return model


def data(client):
    generator = torch.Generator().manual_seed(client)
    count = 8 + 3 * client
    return torch.randn(count, 4, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )
