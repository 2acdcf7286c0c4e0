"""Run by test_cpu_runtime.py under torchrun on 4 processes: real torchtitan Trainers on gloo.

Every mesh must start from the weights that one process would draw, bit for bit, and then see the
same losses. Prints one JSON object a mesh on rank 0.
"""

import copy
import gc
import json
import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from titan_muon.integration import cpu_runtime

torch.set_num_threads(1)
cpu_runtime.install()

from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from tests.helpers.indexed_dataloader import IndexedDataLoader  # noqa: E402
from titan_muon.integration import cpu_init  # noqa: E402

SEED = 17
STEPS = 2
SAMPLES = 8
MODELS = {"llama3": llama3_debugmodel, "deepseek_v3": deepseek_v3_debugmodel}
# Context parallelism deals in blocks of 128.
SEQUENCE_LENGTHS = {"llama3": 256, "deepseek_v3": 64}

# name -> (model, fields of ParallelismConfig); the first mesh of a model is its yardstick.
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 fsdp": ("llama3", {}),
    "llama3 hsdp": ("llama3", {"data_parallel_replicate_degree": 2}),
    "llama3 pp x fsdp": ("llama3", {"pipeline_parallel_degree": 2}),
    "llama3 cp x fsdp": ("llama3", {"context_parallel_degree": 2}),
    "deepseek_v3 fsdp": ("deepseek_v3", {}),
    "deepseek_v3 ddp": (
        "deepseek_v3",
        {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
    ),
    "deepseek_v3 fsdp x tp": ("deepseek_v3", {"tensor_parallel_degree": 2}),
    "deepseek_v3 ep x fsdp": ("deepseek_v3", {"expert_parallel_degree": 2}),
    "deepseek_v3 ep x tp": (
        "deepseek_v3",
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    ),
}


def make_config(model: str, parallelism: dict[str, Any], tokenizer: str) -> Any:
    config = MODELS[model]()
    layers = config.model_spec.model.layers
    # The first two layers: deepseek's are a dense and an expert one.
    del layers[2:]
    config.hf_assets_path = tokenizer
    config.dataloader = IndexedDataLoader.Config(samples_per_step=SAMPLES)
    config.training.seq_len = SEQUENCE_LENGTHS[model]
    config.training.global_batch_size = SAMPLES
    config.training.local_batch_size = 2
    config.training.steps = STEPS
    config.validator.enable = False
    config.checkpoint.enable = False
    config.activation_checkpoint = None
    config.debug.seed = SEED
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    return cpu_runtime.adapt_config(config)


def weights_of_one_process(config: Any) -> dict[str, torch.Tensor]:
    """What the seed-checkpoint path makes: no mesh, no parallelism."""
    model_config = copy.deepcopy(config.model_spec.model)
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return dict(model.named_parameters())


def count_differences(trainer: Any, expected: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return (parameters compared, parameters that differ), over this rank's model parts."""
    compared = differing = 0
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            compared += 1
            differing += not torch.equal(whole, expected[name])
    return compared, differing


def train(trainer: Any) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step; under PP only the last stage knows the loss."""
    seen = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: seen.append((loss, norm))
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        trainer.step = step
        trainer.train_step(batches)
    figures = torch.tensor(seen, dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return [(loss, norm) for loss, norm in figures.tolist()]


def run_mesh(name: str, tokenizer: str) -> dict[str, Any]:
    started = time.perf_counter()
    config = make_config(*MESHES[name], tokenizer)
    expected = weights_of_one_process(config)
    trainer = config.build()
    compared, differing = count_differences(trainer, expected)
    result = {"mesh": name, "compared": compared, "differing": differing}
    result["steps"] = train(trainer)
    if name == "deepseek_v3 fsdp":
        with torch.no_grad():
            cpu_init._original_init_weights(trainer.model_parts[0])
        result["differing_without_ours"] = count_differences(trainer, expected)[1]
    trainer.close()
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def main() -> None:
    logging.disable(logging.WARNING)
    for name in MESHES:
        result = run_mesh(name, sys.argv[1])
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            result["differing"] = sum(each["differing"] for each in results)
            print(json.dumps(result), flush=True)
        gc.collect()
        # DTensor's cache would answer the next Trainer with this one's mesh objects.
        _clear_sharding_prop_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
