"""titan-muon verify: what it measures is right, what is wrong fails, and it needs little."""

import os
import subprocess
import sys

import pytest
import torch

from titan_muon.cli import main, verify_math
from titan_muon.cli.verify_math import LIMITS, measure_accuracy, measure_speed

CPU = torch.device("cpu")


def test_every_schedule_is_within_its_limit():
    found = list(measure_accuracy(CPU))
    assert {a.dtype for a in found} == {torch.float64, torch.float32, torch.bfloat16}
    assert len({a.schedule for a in found}) >= 3
    assert all(a.passes for a in found)
    for accuracy in found:
        low, high = accuracy.arrived
        # The documented ranges; the bound of float32's rounding is far below the third digit.
        bounds = (0.85, 1.15) if accuracy.schedule == "polar_express" else (0.67, 1.21)
        assert bounds[0] < low <= high < bounds[1]


def test_wrong_arithmetic_fails(monkeypatch):
    right = verify_math.orthogonalize_batch

    def wrong(x, schedule, *, dtype, **options):
        result = right(x, schedule, dtype=dtype, **options)
        # A hundredth of the norm: what float16 may do and float32 may not.
        return result * 1.01 if dtype == torch.float32 else result

    monkeypatch.setattr(verify_math, "orthogonalize_batch", wrong)
    found = list(measure_accuracy(CPU))
    assert [a.passes for a in found] == [a.dtype != torch.float32 for a in found]
    assert not any(s.passes for s in measure_speed(CPU))


def test_a_nan_fails():
    accuracy = next(measure_accuracy(CPU))
    broken = type(accuracy)(**{**vars(accuracy), "error": float("nan")})
    assert not broken.passes
    assert set(LIMITS) >= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def test_report_and_exit_code(tmp_path, capsys):
    """Two steps teach nothing, which the report must say."""
    with pytest.raises(SystemExit) as stopped:
        main.main(["verify", "--device", "cpu", "--steps", "2", "--output", str(tmp_path)])
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    report = (tmp_path / "report.txt").read_text()
    assert report in said
    assert "outside their limits:\n  AdamW: validation loss" in report
    pytest.importorskip("matplotlib")
    assert (tmp_path / "verify.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_device(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["verify", "--device", "gpu"])
    assert stopped.value.code == 2
    assert "--device gpu cannot be used here" in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("titan_muon.cli.verify._measure", lambda *_: pytest.fail("it measures"))
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "report.txt").mkdir(parents=True)
    for name in ("file", "file/folder", "folder"):
        with pytest.raises(SystemExit) as stop:
            main.main(["verify", "--device", "cpu", "--output", str(tmp_path / name)])
        assert stop.value.code == 2
        assert f"--output {tmp_path / name}: " in capsys.readouterr().err


def test_needs_no_torchtitan_tokenizers_or_matplotlib(tmp_path):
    program = (
        "import sys\n"
        "for name in ('torchtitan', 'tyro', 'tokenizers', 'matplotlib', 'triton', 'torchao'):\n"
        "    sys.modules[name] = None\n"
        "from titan_muon.cli import main\n"
        "try:\n"
        "    main.main(['verify', '--device', 'cpu', '--steps', '1', '--output', sys.argv[1]])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 1, stop.code\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a picture needs pip install 'titan-muon[plot]'" in done.stdout


@pytest.mark.slow
def test_the_whole_run_is_within_its_limits(tmp_path, capsys):
    main.main(["verify", "--device", "cpu", "--output", str(tmp_path)])
    assert "all within their limits" in capsys.readouterr().out
