"""The same script with one line more: ``python one_line.py --cf fedml_config.yaml``."""

import digits
import fedml
from fedml import FedMLRunner

import craft_adapters.fedml

if __name__ == "__main__":
    craft_adapters.fedml.install()  # the one line, before fedml.init
    args = fedml.init()
    device = fedml.device.get_device(args)
    dataset, classes = digits.load(args)
    FedMLRunner(args, device, dataset, digits.new_model(classes)).run()
