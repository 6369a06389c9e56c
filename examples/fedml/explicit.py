"""The same with a rule made in Python: ``python explicit.py --cf fedml_config.yaml``."""

import digits
import fedml
from fedml import FedMLRunner
from fedml.ml.aggregator.aggregator_creator import create_server_aggregator

import craft_adapters.fedml
from craft_adapters import get_aggregator

if __name__ == "__main__":
    craft_adapters.fedml.install()
    args = fedml.init()
    device = fedml.device.get_device(args)
    dataset, classes = digits.load(args)
    model = digits.new_model(classes)

    server = create_server_aggregator(model, args)  # or a ServerAggregator of your own
    rule = get_aggregator("craft_balanced", scale="steady", server_lr=1.0)
    server = craft_adapters.fedml.wrap(server, rule)
    FedMLRunner(args, device, dataset, model, server_aggregator=server).run()
