import copy
import time

import utils

from .strategies import select_strategy
from .trainer import Trainer


class Client:
    """Lives for one client of one round."""

    def __init__(self, client_id, config, send_gradients):
        self.client_id = client_id
        self.config = copy.deepcopy(config)
        self.send_gradients = send_gradients

    def get_client_data(self):
        return self.client_id, utils.data(self.client_id[0]), self.config, self.send_gradients

    @staticmethod
    def process_round(client_data, server_data, model, data_path):
        client_id, data, config, send_gradients = client_data
        lr, model_parameters, _ = server_data
        strategy = select_strategy(config["strategy"])("client", config)
        for p, value in zip(model.parameters(), model_parameters, strict=True):
            p.data = value.detach().clone()
        trained = [p for p in model.parameters() if p.requires_grad]
        trainer = Trainer(model, utils.make_optimizer({"type": "sgd", "lr": lr}, trained))
        idle = client_id[0] in config["client_config"].get("idle", ())
        loss, samples = trainer.train_desired_samples(data, 0 if idle else 1 + client_id[0] % 3)
        trainer.train_loss, trainer.num_samples = loss, samples
        for p, value in zip(model.parameters(), model_parameters, strict=True):
            p.grad = value - p.data
        payload = strategy.generate_client_payload(trainer) if send_gradients else None
        return {"tl": loss, "ns": samples, "pl": payload, "ts": time.time()}
