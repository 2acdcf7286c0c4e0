"""Figures of the optimizer in torchtitan's logger: when, which, and on pipeline stages too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402

from tests.helpers.optimizers import train  # noqa: E402
from titan_muon.integration.manager import TrainConfigManager  # noqa: E402
from titan_muon.integration.metrics import (  # noqa: E402
    OptimizerMetricsProcessor,
    with_optimizer_metrics,
)
from titan_muon.integration.optimizers_container import MuonOptimizersContainer  # noqa: E402
from titan_muon.integration.override import metrics as override  # noqa: E402
from titan_muon.integration.toml_place import ConfigError  # noqa: E402
from titan_muon.optim.meter import PARTS  # noqa: E402
from titan_muon.optim.observer import Observer  # noqa: E402

ROOT = Path(__file__).parents[2]


class _Silent(OptimizerMetricsProcessor):
    """Keeps what would be logged; needs no device, model or folder."""

    def __init__(self, container: MuonOptimizersContainer, optimizer_freq: int) -> None:
        self.config = OptimizerMetricsProcessor.Config(log_freq=2)
        self._optimizer_freq = optimizer_freq
        self.optimizers = container


def _container(**options) -> MuonOptimizersContainer:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(8, 12), "norm": nn.RMSNorm(12)})
    config = MuonOptimizersContainer.Config(**{"name": "Muon", "lr": 0.1, **options})
    return MuonOptimizersContainer(config, model_parts=[model])


def _step(processor: _Silent, step: int) -> dict[str, float]:
    processor.should_log(step)
    optimizer = processor.optimizers.optimizers[0]
    taken = optimizer.step
    with processor.optimizers.metrics.watching():
        train(optimizer, 1, first=step)
    assert optimizer.step == taken
    return processor.optimizers.metrics.collect()


def test_measured_at_the_first_step_and_every_so_many():
    processor = _Silent(_container(), optimizer_freq=4)
    found = [step for step in range(1, 10) if _step(processor, step)]
    assert found == [1, 4, 8]


def test_figures_are_those_of_the_step():
    figures = _step(_Silent(_container(adjust_lr_fn="match_rms_adamw"), 1), 1)
    assert {f"optimizer/time/{part}(ms)" for part in (*PARTS, "step")} <= set(figures)
    # lr 0.1 of RMS 0.2; squared singular values of a polar factor lie within [0.74, 1.3].
    assert figures["optimizer/update_rms/Muon"] == pytest.approx(0.02, rel=0.15)
    # AdamW's first step moves every element by lr.
    assert figures["optimizer/update_rms/AdamW"] == pytest.approx(0.1, rel=0.1)
    weight = _container().model_parts[0]["layer"].weight.detach().square().mean().sqrt().item()
    ratio = figures["optimizer/update_rms/Muon"] / weight
    assert figures["optimizer/update_to_weight/Muon"] == pytest.approx(ratio, rel=1e-5)
    # The momentum was still zero.
    assert "optimizer/momentum_cosine/Muon" not in figures


def test_off_is_off():
    processor = _Silent(_container(), optimizer_freq=0)
    optimizer = processor.optimizers.optimizers[0]
    assert _step(processor, 1) == {}
    assert type(optimizer.observer) is Observer
    # What it stands before comes back as it is.
    works = optimizer._matrix_works()
    assert optimizer.observer.works(works) is works


def test_more_sources_are_logged_at_every_logged_step():
    processor = _Silent(_container(), optimizer_freq=0)
    processor.optimizers.metrics.add(lambda: {"optimizer/largest_logit": 12.5})
    assert _step(processor, 3) == {"optimizer/largest_logit": 12.5}


def test_groups_of_one_algorithm_keep_apart():
    groups = [{"pattern": "layer", "name": "Muon", "lr": 0.5}]
    from titan_muon.integration.toml_optimizer import optimizer_config

    config = optimizer_config("Muon", lr=0.1, param_groups=groups)
    model = nn.ModuleDict({n: nn.Linear(8, 12, bias=False) for n in ("layer", "other")})
    processor = _Silent(MuonOptimizersContainer(config, model_parts=[model]), 1)
    figures = _step(processor, 1)
    sizes = [figures[f"optimizer/update_rms/Muon{suffix}"] for suffix in ("", ".2")]
    assert sizes[0] == pytest.approx(5 * sizes[1], rel=0.15)


@pytest.mark.parametrize("value", [-1, 5, 15])
def test_frequency_fits_that_of_the_log(value):
    args = ["--module", "llama3", "--config", "llama3_8b", "--optimizer.name", "Muon"]
    args += ["--metrics.log_freq", "10", "--metrics.optimizer_freq", str(value)]
    with pytest.raises(ConfigError, match=rf"optimizer_freq = {value} must be 0 or a multiple"):
        TrainConfigManager(cuda_graphs=False).parse_args(args)


def test_both_doors_keep_the_other_fields():
    plain = MetricsProcessor.Config(log_freq=5, enable_tensorboard=True)
    assert with_optimizer_metrics(plain) == OptimizerMetricsProcessor.Config(
        log_freq=5, enable_tensorboard=True
    )
    assert override(plain, optimizer_freq=10).optimizer_freq == 10
    with pytest.raises(ConfigError, match="multiple of log_freq = 5"):
        override(plain, optimizer_freq=7)


def test_stages_of_a_pipeline_write_one_set_of_figures(tmp_path):
    """The first stage has the embedding, the last one the head, and no matrix at all."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    parts = '[["tok_embeddings","layers.0","layers.1","layers.2","layers.3","layers.4","layers.5"],'
    parts += '["norm","lm_head"]]'
    config = (ROOT / "train_configs/llama3_debug_muon.toml").read_text().replace("log_freq = 5", "")
    config = config.replace("[metrics]", "[metrics]\noptimizer_freq = 2\nlog_freq = 1")
    config += "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = '1F1B'\n"
    config += f"module_fqns_per_model_part = {parts}\n"
    file = tmp_path / "run.toml"
    file.write_text(config)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "titan_muon.train", "--job.config_file", str(file)]
    command += ["--training.steps", "2", "--validator.no-enable", "--checkpoint.no-enable"]
    command += ["--dump_folder", str(tmp_path), "--metrics.enable_tensorboard"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (path.parent for path in tmp_path.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    values = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    # RMS 0.2 times the lr, of matrices that the rank which writes does not hold; it logs the lr of
    # its own AdamW, a quarter of Muon's.
    lrs = [4 * lr for lr in values["lr/Muon"]]
    assert len(lrs) == 2
    for rms, lr in zip(values["optimizer/update_rms/Muon"], lrs, strict=True):
        assert rms == pytest.approx(0.2 * lr, rel=0.15)
    assert len(values["loss_metrics/global_avg_loss"]) == 2
    assert len(values["optimizer/momentum_cosine/AdamW"]) == 1
    assert values["optimizer/time/step(ms)"][0] > 0
