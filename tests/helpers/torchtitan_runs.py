"""Configs of torchtitan's debug models and of smaller siblings, for runs on any mesh on a CPU."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from tests.helpers.indexed_dataloader import IndexedDataLoader
from titan_muon.integration import cpu_runtime
from titan_muon.integration.checkpoint import with_crossing
from titan_muon.integration.lr_schedule import followed_schedule
from titan_muon.integration.toml_optimizer import optimizer_config

SEED = 17
SAMPLES_PER_STEP = 8
SEQ_LEN = 64
_DIM = 64
_VOCABULARY = 256


class NoTokenizer(BaseTokenizer):
    """The samples are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No fields."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return _VOCABULARY


def _llama3_small() -> Any:
    """Two layers, grouped key heads, fused qkv."""
    config = llama3_debugmodel()
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=_DIM,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=160,
        rope=ComplexRoPE.Config(
            dim=_DIM // 4, max_seq_len=4 * SEQ_LEN, theta=500000, scaling="llama"
        ),
        attn_backend="flex",
    )
    return _with_model(config, llama3, layers)


def _deepseek_v3_small(num_experts: int = 4) -> Any:
    """A dense and an expert layer; wkv_a has 30 rows, which 4 ranks share unevenly."""
    config = deepseek_v3_debugmodel()
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=_DIM,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=22,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mscale=0.7,
        dense_hidden_dim=96,
        moe_hidden_dim=48,
        num_experts=num_experts,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="softmax",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=dataclasses.replace(
            config.model_spec.model.layers[0].attention.rope, dim=8, max_seq_len=4 * SEQ_LEN
        ),
    )
    return _with_model(config, deepseek_v3, layers)


def _with_model(config: Any, models: Any, layers: list[Any]) -> Any:
    spec = config.model_spec
    model = dataclasses.replace(
        spec.model,
        dim=_DIM,
        vocab_size=_VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=_VOCABULARY, embedding_dim=_DIM, param_init=models._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=_DIM, param_init=models._NORM_INIT),
        lm_head=Linear.Config(
            in_features=_DIM,
            out_features=_VOCABULARY,
            param_init=models._output_linear_init(_DIM),
        ),
        layers=layers,
    )
    config.model_spec = dataclasses.replace(spec, model=model)
    config.loss.loss_fn.global_vocab_size = _VOCABULARY
    return config


MODELS: dict[str, Callable[[], Any]] = {
    "llama3 small": _llama3_small,
    "deepseek_v3 small": _deepseek_v3_small,
    "deepseek_v3 two experts": lambda: _deepseek_v3_small(num_experts=2),
    "llama3 debug": llama3_debugmodel,
    "deepseek_v3 debug": deepseek_v3_debugmodel,
}

# Fields of ParallelismConfig; what is left of the ranks goes to FSDP2.
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"data_parallel_replicate_degree": 2},
    "ddp": {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
    "fsdp x tp": {"tensor_parallel_degree": 2},
    "pp x fsdp": {"pipeline_parallel_degree": 2},
    "ep x fsdp": {"expert_parallel_degree": 2},
    "ep x tp": {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    "hsdp x ep": {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
    "pp x fsdp, head alone": {
        "pipeline_parallel_degree": 2,
        # The last stage has no matrix.
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["norm", "lm_head"],
        ],
    },
}


def run_config(
    model: str, parallelism: dict[str, Any], optimizer: str, *, local_batch_size: int = 2
) -> Any:
    """Return a Trainer config for the CPU whose steps do not depend on the mesh.

    Args:
        model: Key of :data:`MODELS`.
        parallelism: Fields of torchtitan's ParallelismConfig.
        optimizer: Muon or NorMuon.
        local_batch_size: Samples a rank takes at a time; a step has SAMPLES_PER_STEP in all.
    """
    plain = plain_config(model, parallelism, optimizer, local_batch_size=local_batch_size)
    return cpu_runtime.adapt_config(plain)


def plain_config(
    model: str, parallelism: dict[str, Any], optimizer: str, *, local_batch_size: int = 2
) -> Any:
    """Return the same, not yet adapted to the CPU."""
    config = MODELS[model]()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = IndexedDataLoader.Config(
        samples_per_step=SAMPLES_PER_STEP, vocab_size=config.model_spec.model.vocab_size
    )
    config.optimizer = optimizer_config(optimizer)
    config.lr_scheduler = followed_schedule(config.lr_scheduler)
    config.lr_scheduler.warmup_steps = 2
    config.lr_scheduler.total_steps = 10
    config.training.seq_len = SEQ_LEN
    config.training.global_batch_size = SAMPLES_PER_STEP
    config.training.local_batch_size = local_batch_size
    config.validator.enable = False
    config.checkpoint = with_crossing(config.checkpoint)
    config.checkpoint.enable = False
    config.activation_checkpoint = None
    config.debug.seed = SEED
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config
