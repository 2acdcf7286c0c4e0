"""Runs by function name: ``--module titan_muon.integration --config llama3_debug_muon``."""

from typing import Any

from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from titan_muon.integration.data import TRAIN_DATASET, VALIDATION_DATASET, register_datasets
from titan_muon.integration.metrics import with_optimizer_metrics
from titan_muon.integration.toml_optimizer import optimizer_config

__all__ = [
    "deepseek_v3_debug_muon",
    "llama3_debug_adamw",
    "llama3_debug_muon",
    "llama3_debug_normuon",
]


def llama3_debug_muon() -> Trainer.Config:
    """The run of ``train_configs/llama3_debug_muon.toml``."""
    return _debug_run(llama3_debugmodel(), "llama3_debug_muon", "Muon")


def llama3_debug_normuon() -> Trainer.Config:
    """The run of ``train_configs/llama3_debug_normuon.toml``."""
    return _debug_run(llama3_debugmodel(), "llama3_debug_normuon", "NorMuon")


def llama3_debug_adamw() -> Trainer.Config:
    """The run of ``train_configs/llama3_debug_adamw.toml``."""
    return _debug_run(llama3_debugmodel(), "llama3_debug_adamw", "AdamW")


def deepseek_v3_debug_muon() -> Trainer.Config:
    """The run of ``train_configs/deepseek_v3_debug_muon.toml``."""
    config = _debug_run(deepseek_v3_debugmodel(), "deepseek_v3_debug_muon", "Muon")
    # Experts make a step several times slower on a CPU.
    config.training.local_batch_size = 2
    config.training.steps = 40
    config.validator.steps = 4
    return config


def _debug_run(config: Trainer.Config, run: str, optimizer: str) -> Trainer.Config:
    """Turn a torchtitan debug model into a short run on the corpus of this package."""
    register_datasets()
    config.dump_folder = f"outputs/{run}"
    config.hf_assets_path = "outputs/data/tokenizer"
    # In so short a run AdamW's first steps are larger than Muon's at one lr.
    lrs: dict[str, Any] = (
        {"lr": 2e-3} if optimizer == "AdamW" else {"lr": 8e-3, "adamw": {"lr": 2e-3}}
    )
    config.optimizer = optimizer_config(optimizer, **lrs)
    config.lr_scheduler.warmup_steps = 5
    config.lr_scheduler.decay_type = "cosine"
    config.lr_scheduler.min_lr_factor = 0.1
    config.training = TrainingConfig(local_batch_size=4, seq_len=256, steps=60)
    config.metrics = with_optimizer_metrics(config.metrics)
    config.metrics.log_freq = 5
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset=TRAIN_DATASET)
    config.validator.enable = True
    config.validator.freq = 20
    config.validator.steps = 8
    config.validator.dataloader = HuggingFaceTextDataLoader.Config(
        dataset=VALIDATION_DATASET, infinite=False
    )
    config.checkpoint.enable = True
    config.checkpoint.interval = 20
    config.checkpoint.keep_latest_k = 2
    config.checkpoint.last_save_model_only = False
    return config
