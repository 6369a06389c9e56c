"""A rule of craft-adapters as a tinyfl strategy: ``craft_adapters_tinyfl.adapter.new_strategy``."""
