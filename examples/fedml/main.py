"""A FedML script that knows nothing of this package.

python main.py --cf fedml_config.yaml                 # FedML's own averaging
craft-adapters fedml main.py --cf fedml_config.yaml   # what craft_args says
"""

import digits
import fedml
from fedml import FedMLRunner

if __name__ == "__main__":
    args = fedml.init()
    device = fedml.device.get_device(args)
    dataset, classes = digits.load(args)
    FedMLRunner(args, device, dataset, digits.new_model(classes)).run()
