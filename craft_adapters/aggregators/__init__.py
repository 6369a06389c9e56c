"""The rules, one file each, all on the contract of ``craft_adapters.Aggregator``."""

from ._gram_rule import GramRule
from ._grams import Combination, Grams
from .afl import AFL
from .config import ConFIG
from .craft import Craft
from .craft_balanced import CraftBalanced
from .fedadagrad import FedAdagrad
from .fedadam import FedAdam
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedfv import FedFV
from .fedlf import FedLF
from .fedmgda import FedMGDA
from .fednova import FedNova
from .fedprox import FedProx
from .fedyogi import FedYogi
from .qfedavg import QFedAvg

__all__ = [
    "AFL",
    "Combination",
    "ConFIG",
    "Craft",
    "CraftBalanced",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedFV",
    "FedLF",
    "FedMGDA",
    "FedNova",
    "FedProx",
    "FedYogi",
    "GramRule",
    "Grams",
    "QFedAvg",
]
