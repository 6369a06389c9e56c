"""A site of job.py: notes what it received and sent; its third answer has no weight."""

import sys
from pathlib import Path

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from safetensors.torch import save_file

if __name__ == "__main__":
    flare.init()
    site = flare.get_site_name()
    number = int(site.removeprefix("site-"))
    for round in range(3):
        start = flare.receive().params
        generator = torch.Generator().manual_seed(10 * round + number)
        params = {
            name: value + torch.randn(value.shape, generator=generator).to(value.dtype)
            for name, value in start.items()
        }
        difference = {name: value - start[name] for name, value in params.items()}
        save_file(start, Path(sys.argv[1]) / f"{site}-received-{round}.safetensors")
        save_file(difference, Path(sys.argv[1]) / f"{site}-sent-{round}.safetensors")
        meta = {"examples": 10 * number} if round < 2 else {}
        flare.send(FLModel(params=params, meta=meta))
