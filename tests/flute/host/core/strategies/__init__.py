import torch


class FedAvg:
    """Pseudo-gradients multiplied by the number of samples, summed, divided by the total."""

    def __init__(self, mode, config, model_path=None):
        self.gradients, self.weights = [], []

    def generate_client_payload(self, trainer):
        weight = trainer.num_samples
        gradients = [weight * p.grad for p in trainer.model.parameters()]
        return {"weight": weight, "gradients": gradients}

    def process_individual_payload(self, worker_trainer, payload):
        if payload["weight"] == 0.0:
            return False
        self.gradients.append(payload["gradients"])
        self.weights.append(payload["weight"])
        return True

    def combine_payloads(
        self,
        worker_trainer,
        curr_iter,
        num_clients_curr_iter,
        total_clients,
        client_stats,
        logger=None,
    ):
        for position, p in enumerate(worker_trainer.model.parameters()):
            total = torch.stack([each[position] for each in self.gradients]).sum(0)
            total = total if p.grad is None else p.grad + total
            p.grad = total / sum(self.weights)
        self.gradients, self.weights = [], []
        worker_trainer.update_model()
        return worker_trainer.run_lr_scheduler(force_run_val=False)


def select_strategy(strategy):
    if strategy.lower() == "fedavg":
        return FedAvg
    raise ValueError(f"cannot use strategy {strategy}")
