"""The rules, one file each, all on the contract of ``craft_adapters.Aggregator``."""

from ._gram_rule import Combination, GramRule, Grams
from .craft import Craft
from .fedavg import FedAvg

__all__ = ["Combination", "Craft", "FedAvg", "GramRule", "Grams"]
