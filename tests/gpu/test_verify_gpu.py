"""titan-muon verify on a GPU; needs no torchtitan."""

import pytest
import torch

from titan_muon.cli.verify_math import measure_accuracy, measure_speed
from titan_muon.cli.verify_training import compare_optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_accuracy_and_speed():
    device = torch.device("cuda")
    found = list(measure_accuracy(device))
    assert {a.dtype for a in found} == {torch.float16, torch.bfloat16, torch.float32}
    assert [a for a in found if not a.passes] == []
    speed = list(measure_speed(device))
    assert [s for s in speed if not s.passes] == []
    if torch.cuda.get_device_capability(device) >= (9, 0):
        # A quarter of slack on what the benchmarks measure for these shapes.
        assert all(s.milliseconds < 0.95 * s.plain_milliseconds for s in speed)


def test_a_short_training():
    curves = list(compare_optimizers(torch.device("cuda"), steps=40))
    assert [c.optimizer for c in curves] == ["AdamW", "Muon", "NorMuon"]
    assert all(c.passes for c in curves)
