import json
import os
import random
from types import SimpleNamespace

import core.federated as federated

from .strategies import select_strategy
from .trainer import ModelUpdater


class OptimizationServer(federated.Server):
    def __init__(
        self,
        num_clients,
        model,
        optimizer,
        ss_scheduler,
        data_path,
        model_path,
        server_train_dataloader,
        config,
        idx_val_clients,
        idx_test_clients,
        single_worker,
    ):
        server_config = config["server_config"]
        self.client_idx_list = list(range(num_clients))
        self.config = config
        self.num_clients_per_iteration = [server_config["num_clients_per_iteration"]]
        self.max_iteration = server_config["max_iteration"]
        self.single_worker = single_worker
        self.evaluation = SimpleNamespace(run=lambda modes, metrics, metric_logger: metrics)
        self.metrics = {}
        self.model_path = model_path
        self.log_path = os.path.join(model_path, "status_log.json")
        self.cur_iter_no = 0
        self.worker_trainer = ModelUpdater(model, optimizer, server_config["annealing_config"])
        if server_config.get("resume_from_checkpoint", False):
            self.load_saved_status()
        self.strategy = select_strategy(config["strategy"])("server", config, model_path)

    def load_saved_status(self):
        latest = os.path.join(self.model_path, "latest_model.tar")
        if os.path.exists(latest):
            self.worker_trainer.load(latest)
        if os.path.exists(self.log_path):
            with open(self.log_path) as file:
                self.cur_iter_no = json.load(file)["i"]

    def train(self):
        trainer = self.worker_trainer
        try:
            trainer.save(self.model_path, "latest")
            for i in range(self.cur_iter_no, self.max_iteration):
                trainer.model.zero_grad()
                parameters = [p.data.to("cpu") for p in trainer.model.parameters()]
                lr = self.config["server_config"]["initial_lr_client"]
                number = self.num_clients_per_iteration[0]
                chosen = random.sample(self.client_idx_list, number)
                trainer.model.zero_grad()
                for output in self.process_clients(chosen, (lr, parameters, i), self.single_worker):
                    if not self.strategy.process_individual_payload(trainer, output["pl"]):
                        number -= 1
                self.strategy.combine_payloads(
                    worker_trainer=trainer,
                    curr_iter=i,
                    num_clients_curr_iter=number,
                    total_clients=len(self.client_idx_list),
                    client_stats=None,
                    logger=lambda name, value: None,
                )
                self.metrics = self.evaluation.run([], self.metrics, metric_logger=print)
                trainer.save(self.model_path, "latest")
                trainer.save(self.model_path, f"epoch{i}")
                with open(self.log_path, "w") as file:
                    json.dump({"i": i + 1}, file)
        finally:
            self.terminate_workers()
