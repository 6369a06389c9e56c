import argparse
import json
import os
import random

import torch.distributed as dist
from core import federated
from core.server import OptimizationServer
from utils import make_model, make_optimizer

CLIENTS = 7


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("-config")
    parser.add_argument("-outputPath")
    args = parser.parse_args(arguments)
    with open(args.config) as file:
        config = json.load(file)
    model_path = os.path.join(args.outputPath, "models")
    os.makedirs(model_path, exist_ok=True)
    random.seed(0)
    rank, size = federated.rank(), federated.size()
    if size > 1:
        dist.init_process_group("gloo", init_method=None, rank=rank, world_size=size)
    model = make_model()
    if rank > 0:
        federated.Worker(model=model, config=config).run()
        return
    single_worker = federated.Worker(model=model, config=config) if size == 1 else None
    server = OptimizationServer(
        num_clients=CLIENTS,
        model=model,
        optimizer=make_optimizer(config["server_config"]["optimizer_config"], model),
        ss_scheduler=None,
        data_path=None,
        model_path=model_path,
        server_train_dataloader=None,
        config=config,
        idx_val_clients=[],
        idx_test_clients=[],
        single_worker=single_worker,
    )
    server.train()


if __name__ == "__main__":
    main()
