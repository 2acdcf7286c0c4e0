"""Largest attention logit of the Llama 3 debug model at a high lr, with QK-clip and without.

python scripts/figures/qk_clip.py [--steps 200]   writes qk_clip.csv and qk_clip.png beside it
"""

import argparse
import csv
import logging
import os
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
CONFIG = FOLDER.parents[1] / "train_configs" / "llama3_debug_muon.toml"
# Watches and never clips.
NEVER = 1e30


def train(threshold: float, steps: int, lr: float) -> list[dict[str, float]]:
    """Return the figures of each step of one run."""
    from titan_muon.integration.data import prepare
    from titan_muon.train import parse

    with tempfile.TemporaryDirectory() as folder:
        config = parse(
            [
                f"--job.config_file={CONFIG}",
                f"--dump_folder={folder}",
                f"--optimizer.qk_clip_threshold={threshold}",
                f"--optimizer.lr={lr}",
                f"--training.steps={steps}",
                "--training.seq_len=128",
                "--training.local_batch_size=2",
                "--lr_scheduler.decay_type=linear",
                "--lr_scheduler.min_lr_factor=1.0",
                "--debug.seed=0",
                "--metrics.log_freq=1",
                "--checkpoint.no-enable",
                "--validator.no-enable",
            ]
        )
        prepare(config.dataloader.dataset_path)
        trainer = config.build()
        figures: list[dict[str, float]] = []
        original = trainer.metrics_processor.logger.log
        trainer.metrics_processor.logger.log = lambda metrics, step: (
            figures.append({"step": step, **metrics}),
            original(metrics, step),
        )
        try:
            trainer.train()
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()
    return figures


def measure(steps: int, lr: float, threshold: float) -> list[tuple[float, ...]]:
    """Return (step, logit without, logit with, heads clipped, loss without, loss with) by step."""
    without = train(NEVER, steps, lr)
    clipped = train(threshold, steps, lr)
    return [
        (
            a["step"],
            a["optimizer/max_logit"],
            b["optimizer/max_logit"],
            b["optimizer/clipped_heads"],
            a["loss_metrics/global_avg_loss"],
            b["loss_metrics/global_avg_loss"],
        )
        for a, b in zip(without, clipped, strict=True)
    ]


def draw(rows: list[tuple[float, ...]], lr: float, threshold: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps, without, clipped, *_ = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    axes.semilogy(steps, without, label="Muon")
    axes.semilogy(steps, clipped, label=f"Muon, qk_clip_threshold = {threshold:g}")
    axes.axhline(threshold, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="largest attention logit", title=f"Llama 3 debug, lr {lr:g}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--threshold", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update({**rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    logging.getLogger().setLevel(logging.WARNING)
    rows = measure(given.steps, given.lr, given.threshold)
    with (given.folder / "qk_clip.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "logit", "logit clipped", "heads clipped", "loss", "loss clipped"])
        writer.writerows([f"{value:.6g}" for value in row] for row in rows)
    draw(rows, given.lr, given.threshold, given.folder / "qk_clip.png")
    print(f"largest logit of the last step: {rows[-1][1]:.4g} without, {rows[-1][2]:.4g} with")


if __name__ == "__main__":
    main()
