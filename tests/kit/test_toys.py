"""Each check of the kit catches the adapter that is made for it, and passes the sound ones."""

from __future__ import annotations

import dataclasses

import pytest

from craft_adapters.plugins import AdapterDescriptor
from craft_adapters.testing import CHECKS, Report, check_adapter
from craft_adapters.testing.toy.adapter import Adapter
from craft_adapters.testing.toy.harness import ToyHarness
from craft_adapters.testing.toy.plugin import ADAPTER

from .toys import DEFECTS, Differences, early_load

IMPORT = {"load", "lazy-import"}  # of the descriptor, not of the adapter's code
NO_LOSS = dataclasses.replace(ADAPTER, gives=ADAPTER.gives - {"loss"})
BY_DESCRIPTOR = {
    "load": dataclasses.replace(ADAPTER, load=print),
    "lazy-import": dataclasses.replace(ADAPTER, load=early_load),
}


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.status == "failed"}


@pytest.mark.parametrize("adapter", [Adapter, Differences])
def test_sound_adapters_pass(adapter: type[Adapter]) -> None:
    report = check_adapter(ADAPTER, ToyHarness(adapter))
    assert report.passed, report.to_text()
    skipped = {check.name for check in report.checks if check.status == "skipped"}
    assert skipped == {"unmet-requirements"}


def test_every_check_has_its_defect() -> None:
    assert set(DEFECTS) | set(BY_DESCRIPTOR) == set(CHECKS)


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in IMPORT])
def test_a_defect_is_caught_by_its_check_and_by_no_unrelated_one(check: str) -> None:
    toy, also = DEFECTS[check]
    descriptor = NO_LOSS if check == "unmet-requirements" else ADAPTER
    report = check_adapter(descriptor, ToyHarness(toy), only=CHECKS.keys() - IMPORT)
    assert failed(report) == {check, *also}, report.to_text()
    assert report.verdict == "fail"


@pytest.mark.parametrize("check", sorted(IMPORT))
def test_defects_of_the_descriptor(check: str) -> None:
    descriptor: AdapterDescriptor = BY_DESCRIPTOR[check]
    report = check_adapter(descriptor, only=IMPORT)
    assert failed(report) == {check}, report.to_text()
