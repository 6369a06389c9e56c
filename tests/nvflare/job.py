"""A job by hand, for test_simulator: python job.py FOLDER.

The aggregator is named by its path, so nothing of the package is copied into the job. Clients send
differences, as tensors.
"""

import sys
from pathlib import Path

from model import Line
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.job_config.base_fed_job import BaseFedJob
from nvflare.job_config.script_runner import ScriptRunner

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job = BaseFedJob(name="differences", min_clients=2)
    ids = job.to_server(PTModel(Line(), allow_numpy_conversion=False), id="persistor")
    aggregator = {
        "path": "craft_adapters.nvflare.CraftAggregator",
        "args": {
            "aggregator": "craft",
            "options": {"server_lr": 0.5},
            "weight_key": "examples",
            "state_path": str(folder / "kept" / "rule.safetensors"),
        },
    }
    job.to_server(
        FedAvg(
            num_clients=2,
            num_rounds=3,
            persistor_id=ids["persistor_id"],
            aggregator=aggregator,
        )
    )
    job.to_clients(
        ScriptRunner(
            script="client.py",
            script_args=str(folder),
            server_expected_format=ExchangeFormat.PYTORCH,
            params_transfer_type=TransferType.DIFF,
        )
    )
    sys.exit(job.simulator_run(str(folder / "workspace"), n_clients=2))
