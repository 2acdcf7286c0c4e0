"""A small torchtitan run for ``titan_muon.train --module tests.helpers.crashing_run --config run``.

``CRASH_FOLDER`` receives each rank's process id. ``SLOW_SAVE`` names a step whose checkpoint is
written slowly: every rank waits before its file, halfway through it, and before the metadata.
"""

import os
import time
from pathlib import Path
from typing import Any

from tests.helpers.torchtitan_runs import plain_config
from titan_muon.integration.toml_optimizer import optimizer_config

PAUSE = 1.0


def run() -> Any:
    """Return the config; torchtitan's flags set steps, intervals and folders."""
    folder, rank = Path(os.environ["CRASH_FOLDER"]), os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if "SLOW_SAVE" in os.environ:
        _slow_down(f"step-{os.environ['SLOW_SAVE']}")
    config = plain_config("llama3 small", {}, "NorMuon")
    config.optimizer = optimizer_config("NorMuon", lr=2e-2)
    config.lr_scheduler.total_steps = 100
    config.checkpoint.enable = True
    config.checkpoint.last_save_model_only = False
    config.checkpoint.keep_latest_k = 0
    config.metrics.log_freq = 1
    return config


def _slow_down(step: str) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    write, finish = FileSystemWriter.write_data, FileSystemWriter.finish

    def slow_write(self: Any, plan: Any, planner: Any) -> Any:
        if str(self.path).endswith(step):
            time.sleep(PAUSE)
            # A file that is there, and is not what the metadata will say.
            (Path(self.path) / f"__{os.environ['RANK']}_0.distcp").write_bytes(b"half")
            time.sleep(PAUSE)
        return write(self, plan, planner)

    def slow_finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self.path).endswith(step):
            time.sleep(PAUSE)
        return finish(self, *args, **kwargs)

    FileSystemWriter.write_data = slow_write  # type: ignore[method-assign]
    FileSystemWriter.finish = slow_finish  # type: ignore[method-assign]
