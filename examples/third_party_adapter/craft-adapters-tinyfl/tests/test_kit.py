from craft_adapters.testing import AdapterTests


class TestTinyfl(AdapterTests):
    adapter = "tinyfl"
