"""Train one config with several optimizers, learning rates and seeds, and draw what came out.

    python scripts/compare.py CONFIG.toml --optimizers AdamW Muon NorMuon --lrs 2e-3 4e-3 8e-3

Every run is a `titan_muon.train` of its own under torchrun. Flags that this script does not know go
to all of them (`--training.steps 60`). --lrs are learning rates of the matrices; embeddings, head,
norms and biases keep the config's [optimizer.adamw] in runs of the Muon family, and take the same
learning rate as all else in runs of AdamW and Adam. Into --output go curves.csv, table.txt and
compare.png, and each run's log and result; a run whose result is there is not repeated.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from pathlib import Path

from compare_report import write_report

_STEP = re.compile(r"\bstep: +(\d+)")
_NOT_FINITE = "Loss is not finite"


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        optimizer, lr, seed: What sets it apart.
        command: How it is trained.
    """

    optimizer: str
    lr: float
    seed: int
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.optimizer}_lr{self.lr:g}_seed{self.seed}"


@dataclass
class Result:
    """What a run left behind; lists have an entry for each logged step.

    Args:
        optimizer, lr, seed: Of the run.
        command: As it was trained; another one makes the result stale.
        steps, tokens, seconds, losses: Of training, validation and start-up not counted as time.
        validation: Loss on held-out data by step; the last one decides.
        diverged: Whether the loss became infinite or NaN.
    """

    optimizer: str
    lr: float
    seed: int
    command: list[str]
    steps: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    diverged: bool = False

    @property
    def final(self) -> float:
        """Loss by which runs are compared: the last validation, else the mean of the last steps."""
        if self.diverged or not self.losses:
            return float("inf")
        if self.validation:
            return self.validation[max(self.validation)]
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


def plan_runs(options: argparse.Namespace, more: Sequence[str]) -> list[Run]:
    """Return all runs, best comparable first: every optimizer at one lr before the next lr."""
    runs = []
    for seed, lr, name in product(options.seeds, options.lrs, options.optimizers):
        rest = ["--optimizer.adamw.lr", f"{lr:g}"] if name.lower() in ("adamw", "adam") else []
        flags = ["--optimizer.name", name, "--optimizer.lr", f"{lr:g}", *rest]
        flags += ["--debug.seed", str(seed), "--metrics.enable_tensorboard"]
        launch = ["--standalone", f"--nproc_per_node={options.nproc}", "--local-ranks-filter=0"]
        training = ["-m", "titan_muon.train", "--job.config_file", options.config, *flags]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *training, *more]
        runs.append(Run(name, lr, seed, tuple(command)))
    return runs


def finished(run: Run, folder: Path) -> Result | None:
    """Return the result of a run that was trained before with the same command."""
    file = folder / run.name / "result.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    if found["command"] != list(run.command):
        return None
    found["validation"] = {int(step): loss for step, loss in found["validation"].items()}
    return Result(**found)


def train(run: Run, folder: Path, on_step: Callable[[int], None]) -> Result:
    """Train and keep the result.

    Args:
        run: What to train.
        folder: Where all runs lie.
        on_step: Called with the number of each logged step.

    Raises:
        RuntimeError: The run ended with an error other than a loss that is not finite.
    """
    own = folder / run.name
    own.mkdir(parents=True, exist_ok=True)
    for old in own.rglob("events.out.tfevents.*"):
        old.unlink()
    command = [*run.command, "--dump_folder", str(own), "--checkpoint.no-enable"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "NO_COLOR": "1"}
    diverged = False
    with (
        open(own / "log.txt", "w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A library may print anything.
            encoding="utf-8",
            errors="replace",
            env=environment,
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            diverged |= _NOT_FINITE in line
            step = _STEP.search(re.sub(r"\x1b\[[\d;]*m", "", line))
            if step and "validate" not in line:
                on_step(int(step[1]))
    if process.returncode and not diverged:
        raise RuntimeError(f"{run.name} ended with code {process.returncode}; see {own}/log.txt")
    result = read_result(run, own, diverged=diverged)
    # It appears whole or not at all: a run that has one is not repeated.
    new = own / "result.json.new"
    new.write_text(json.dumps(asdict(result)))
    new.replace(own / "result.json")
    return result


def read_result(run: Run, folder: Path, *, diverged: bool) -> Result:
    """Read the curves that torchtitan wrote for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, dict[int, float]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values[tag] = {event.step: event.value for event in events.Scalars(tag)}
    losses = values.get("loss_metrics/global_avg_loss", {})
    steps = sorted(losses)
    times = values.get("time_metrics/end_to_end(s)", {})
    tokens = values.get("n_tokens_seen", {})
    return Result(
        run.optimizer,
        run.lr,
        run.seed,
        list(run.command),
        steps,
        [tokens[step] for step in steps],
        elapsed(steps, times),
        [losses[step] for step in steps],
        values.get("validation_metrics/loss", {}),
        diverged,
    )


def elapsed(steps: Sequence[int], times: Mapping[int, float]) -> list[float]:
    """Return the seconds of training up to each logged step.

    Args:
        steps: Logged steps, ascending.
        times: What torchtitan logs there: seconds since the last log, divided by its log_freq. The
            first log is that of step 1, which compiles; it counts like the steps after it.
    """
    log_freq = steps[2] - steps[1] if len(steps) > 2 else max(steps, default=1)
    since = [times[step] * log_freq for step in steps]
    if len(steps) > 1:
        since[0] = min(since[0], since[1] / (steps[1] - steps[0]) * steps[0])
    return list(accumulate(since))


def train_all(runs: Sequence[Run], folder: Path, steps: int | None) -> Iterator[Result]:
    """Yield the result of every run, with a progress bar; those that fail are named at the end.

    Raises:
        SystemExit: A run failed; all others are done then.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failures = []
    with Progress(*columns) as progress:
        everything = progress.add_task("all runs", total=len(runs))
        for run in runs:
            result = finished(run, folder)
            if result is None:
                own = progress.add_task(run.name, total=steps)
                try:
                    result = train(
                        run, folder, lambda step, own=own: progress.update(own, completed=step)
                    )
                except RuntimeError as error:
                    failures.append(str(error))
                progress.remove_task(own)
            progress.advance(everything)
            if result is not None:
                yield result
    if failures:
        raise SystemExit("\n".join(failures))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the flags that go to every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", help="train config in TOML")
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "Muon", "NorMuon"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--nproc", type=int, default=1, help="processes (GPUs) of a run")
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--png", type=Path, help="where to draw; default: compare.png in --output")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options, more = parse(arguments)
    runs = plan_runs(options, more)
    steps = int(more[more.index("--training.steps") + 1]) if "--training.steps" in more else None
    results = []
    for result in train_all(runs, options.output, steps):
        results.append(result)
        # After every run, so that a long comparison can be watched.
        table = write_report(results, options.output, options.png)
    print(table)


if __name__ == "__main__":
    main()
