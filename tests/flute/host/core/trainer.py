import os

import torch
import utils


class ModelUpdater:
    """The server's optimizer."""

    def __init__(self, model, optimizer, anneal_config):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = utils.make_lr_scheduler(anneal_config, optimizer)

    def update_model(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run_lr_scheduler(self, force_run_val=False):
        self.lr_scheduler.step()
        return None, None

    def save(self, model_path, token, config=None):
        state = {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "lr_scheduler_state_dict": self.lr_scheduler.state_dict(),
        }
        torch.save(state, os.path.join(model_path, f"{token}_model.tar"))

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model_state_dict"])
        self.optimizer.load_state_dict(saved["optimizer_state_dict"])
        self.lr_scheduler.load_state_dict(saved["lr_scheduler_state_dict"])


class Trainer:
    """A client's training: whole-batch steps."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def train_desired_samples(self, data, steps):
        x, y = data
        self.model.train()
        loss = torch.zeros(())
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.step += 1
        return loss.item(), len(y) if steps else 0
