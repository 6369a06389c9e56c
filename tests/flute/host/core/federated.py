import os
import threading

import torch
import torch.distributed as dist

from core.client import Client

UPDATE, TRAIN, TERMINATE = 0, 1, 10
MESSAGE = None


def rank():
    return int(os.environ["RANK"])


def size():
    return int(os.environ["WORLD_SIZE"])


def _send(numbers, dst):
    dist.send(torch.tensor(numbers, dtype=torch.float32), dst)


def _recv(count, src):
    buffer = torch.zeros(count)
    dist.recv(buffer, src)
    return buffer.tolist()


def _send_gradients(tensors, dst):
    _send([len(tensors)], dst)
    for tensor in tensors:
        _send([tensor.dim()], dst)
        _send([float(length) for length in tensor.shape], dst)
        dist.send(tensor.contiguous(), dst)


def _recv_gradients(src):
    (count,) = _recv(1, src)
    tensors = []
    for _ in range(int(count)):
        (dimensions,) = _recv(1, src)
        shape = [int(length) for length in _recv(int(dimensions), src)]
        tensors.append(torch.zeros(shape))  # float32, whatever was sent
        dist.recv(tensors[-1], src)
    return tensors


class Server:
    @staticmethod
    def process_clients(clients, server_data, single_worker):
        global MESSAGE
        lr, parameters, number = server_data
        if size() == 1:
            for client in clients:
                MESSAGE = lr, parameters, number, client
                thread = threading.Thread(target=single_worker.trigger_train)
                thread.start()
                thread.join()
                yield MESSAGE
            return
        for worker in range(1, size()):
            _send([UPDATE], worker)
            _send([lr, float(number)], worker)
            _send_gradients(parameters, worker)
        queue = clients.copy()
        while queue:  # from its end: results do not come in the order of the clients
            busy = range(1, min(size(), len(queue) + 1))
            for worker in busy:
                _send([TRAIN], worker)
                _send([float(queue.pop())], worker)
            for worker in busy:
                loss, samples, weight = _recv(3, worker)
                payload = {"weight": weight, "gradients": _recv_gradients(worker)}
                yield {"tl": loss, "ns": int(samples), "pl": payload}

    @staticmethod
    def terminate_workers():
        for worker in range(1, size()):
            _send([TERMINATE], worker)


class Worker:
    def __init__(self, model=None, data_path=None, config=None):
        self.model = model
        self.data_path = data_path
        self.config = config

    def _process(self, client, server_data):
        sends = self.config["client_config"]["type"] == "optimization"
        made = Client([client], self.config, sends)
        return made.process_round(made.get_client_data(), server_data, self.model, self.data_path)

    def run(self):
        while size() > 1:
            (command,) = _recv(1, 0)
            if command == UPDATE:
                lr, number = _recv(2, 0)
                server_data = lr, _recv_gradients(0), int(number)
            elif command == TRAIN:
                output = self._process(int(_recv(1, 0)[0]), server_data)
                _send([output["tl"], float(output["ns"]), float(output["pl"]["weight"])], 0)
                _send_gradients(output["pl"]["gradients"], 0)
            else:
                return

    def trigger_train(self):
        global MESSAGE
        lr, parameters, number, client = MESSAGE
        MESSAGE = self._process(client, (lr, parameters, number))
