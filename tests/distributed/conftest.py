"""Small layouts are cut into as many stages as large ones."""

import pytest

from titan_muon.distributed import plan


@pytest.fixture(autouse=True)
def _stages_without_work(monkeypatch):
    monkeypatch.setattr(plan, "STAGE_FLOPS", 0.0)
