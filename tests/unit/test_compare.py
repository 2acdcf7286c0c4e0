"""scripts/compare.py: which runs, which are skipped, what is read from them, and which lr wins."""

import argparse
import csv
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Stands in for a training: writes what torchtitan would, and ends as it is told to.
TRAINING = """
import sys
from torch.utils.tensorboard import SummaryWriter
end, folder = sys.argv[1], sys.argv[sys.argv.index("--dump_folder") + 1]
writer = SummaryWriter(folder + "/tb")
for step, loss in ((1, 8.0), (5, 7.0), (10, 6.0)):
    print(f"\\x1b[31mstep: {step:2}  loss: {loss}", flush=True)
    writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
    writer.add_scalar("n_tokens_seen", 100 * step, step)
    writer.add_scalar("time_metrics/end_to_end(s)", 2.0, step)
print("validate step: 10  loss: 6.5", flush=True)
sys.stdout.buffer.write(b"some library says \\xff\\n")
writer.add_scalar("validation_metrics/loss", 6.5, 10)
writer.close()
if end == "diverges":
    print("RuntimeError: Loss is not finite (global_avg_loss=nan) at step 11.")
sys.exit(0 if end == "well" else 1)
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import compare

    yield compare
    for name in ("compare", "compare_report"):
        sys.modules.pop(name, None)


def options(**changes):
    base = {"config": "x.toml", "optimizers": ["AdamW", "Muon"], "lrs": [1e-3, 2e-3]}
    return argparse.Namespace(**{**base, "seeds": [0, 1], "nproc": 2, **changes})


def result(compare, optimizer, lr, *losses, seed=0, **changes):
    steps = list(range(1, len(losses) + 1))
    curves = {"steps": steps, "tokens": steps, "seconds": steps, "losses": list(losses)}
    return compare.Result(optimizer, lr, seed, [], **{**curves, **changes})


def test_every_combination_once(compare):
    runs = compare.plan_runs(options(), ["--training.steps", "9"])
    assert len({run.name for run in runs}) == len(runs) == 8
    # Every optimizer at one lr before the next, so that an early look is fair.
    assert [(run.optimizer, run.lr) for run in runs[:2]] == [("AdamW", 1e-3), ("Muon", 1e-3)]
    for run in runs:
        flags = dict(zip(run.command, run.command[1:], strict=False))
        assert flags["--optimizer.lr"] == f"{run.lr:g}"
        assert flags["--debug.seed"] == str(run.seed)
        assert flags["--training.steps"] == "9"
        # One lr for all of AdamW; the matrices' alone in a Muon run.
        assert flags.get("--optimizer.adamw.lr") == (f"{run.lr:g}" if "A" in run.name else None)


def stub(compare, end):
    return compare.Run("Muon", 1e-3, 0, (sys.executable, "-c", TRAINING, end))


def test_reads_a_run_and_does_not_repeat_it(compare, tmp_path):
    run, seen = stub(compare, "well"), []
    assert compare.finished(run, tmp_path) is None
    trained = compare.train(run, tmp_path, seen.append)
    assert seen == [1, 5, 10]
    assert (trained.steps, trained.losses) == ([1, 5, 10], [8.0, 7.0, 6.0])
    assert trained.tokens == [100, 500, 1000]
    # log_freq 5: torchtitan divides by five, also at step 1, whose 10 s are mostly compilation: it
    # counts like the four steps after it.
    assert trained.seconds == [2.5, 12.5, 22.5]
    assert trained.final == 6.5
    assert compare.finished(run, tmp_path) == trained
    other = compare.Run(run.optimizer, run.lr, run.seed, (*run.command, "--training.steps", "2"))
    assert compare.finished(other, tmp_path) is None


def test_a_result_that_was_cut_short_is_none(compare, tmp_path, monkeypatch):
    run, write = stub(compare, "well"), Path.write_text

    def cut_short(path, text, **kwargs):
        write(path, text[:20], **kwargs)
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="disk full"):
        compare.train(run, tmp_path, lambda step: None)
    monkeypatch.undo()
    assert compare.finished(run, tmp_path) is None


def test_divergence_is_a_result_and_failure_is_not(compare, tmp_path):
    diverged = compare.train(stub(compare, "diverges"), tmp_path, lambda step: None)
    assert diverged.diverged
    assert diverged.final == math.inf
    with pytest.raises(RuntimeError, match=r"ended with code 1; see .*log\.txt"):
        compare.train(stub(compare, "badly"), tmp_path, lambda step: None)


def test_report(compare, tmp_path, monkeypatch):
    import compare_report

    results = [
        result(compare, "AdamW", 1e-3, 5.0, 4.0),
        result(compare, "AdamW", 1e-3, 5.0, 4.2, seed=1),
        result(compare, "AdamW", 2e-3, 5.0, 3.0, diverged=True),
        result(compare, "Muon", 1e-3, 5.0, 3.9, validation={2: 4.5}),
        result(compare, "Muon", 2e-3, 5.0, 4.1),
    ]
    table = compare_report.write_report(results, tmp_path)
    # Validation decides where there is one.
    assert compare_report.best_lrs(results) == {"AdamW": 1e-3, "Muon": 2e-3}
    lines = [line.split() for line in table.splitlines()[1:]]
    assert lines[0] == ["AdamW", "0.001", "2", "4.1000", "0.2000", "1.000", "best"]
    assert lines[1][3] == "diverged"
    assert [line[-1] for line in lines].count("best") == 2
    with open(tmp_path / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert rows[-3]["validation_loss"] == "4.5"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    # Without it the runs still count.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = compare_report.write_report(results, tmp_path / "without")
    assert without.startswith(table)
    assert "pip install matplotlib" in without
