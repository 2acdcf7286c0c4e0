"""Train configs in the style of torchtitan's earlier TOML files: where each key went."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_muon.integration.toml_place import ConfigError, Place

__all__ = ["GONE", "MOVED", "gone_reason", "translate"]

_DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size",
    "context_parallel_degree",
)

# Old dotted name -> new one. A name that ends in ".*" moves a whole table.
MOVED: dict[str, str] = {
    "job.dump_folder": "dump_folder",
    "job.print_args": "debug.print_config",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "profiling.run_profiler": "profiler.enable_profiling",
    "profiling.profile_every_x_iter": "profiler.profile_freq",
    "profiling.*": "profiler.*",
    "model.hf_assets_path": "hf_assets_path",
    "model.tokenizer_path": "hf_assets_path",
    "optimizer.fused": "optimizer.implementation",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.dataloader.*": "dataloader.*",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.checkpoint_interval": "checkpoint.interval",
    "training.checkpoint_folder": "checkpoint.folder",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    **{f"training.{name}": f"parallelism.{name}" for name in _DEGREES},
    **{f"experimental.{name}": f"parallelism.{name}" for name in _DEGREES},
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "validation.enable": "validator.enable",
    "validation.enabled": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "validation.dataloader.*": "validator.dataloader.*",
}

_CONVERTERS = (
    "quantized models are registry functions now: name one with [model] config, "
    'for example config = "llama3_debugmodel_float8"'
)
_IMPORTS = "list modules in [optimizer] imports or [override] imports"
_MODEL_CODE = "the model's registry function decides it"

# Old dotted name -> what to do instead. A name that ends in ".*" stands for a whole table.
GONE: dict[str, str] = {
    "job.description": "nothing reads it",
    "job.use_for_integration_test": "nothing reads it",
    "job.config_file": "name the file on the command line, with --job.config_file",
    "job.custom_config_module": _IMPORTS,
    "model.converters": _CONVERTERS,
    "model.print_after_conversion": "set [debug] print_config to see the whole config",
    "model.norm_type": _MODEL_CODE,
    "float8.*": _CONVERTERS,
    "mx.*": _CONVERTERS,
    "quantize.*": _CONVERTERS,
    "training.enable_float8_linear": _CONVERTERS,
    "training.enable_fp8_linear": _CONVERTERS,
    "training.fp8_linear": _CONVERTERS,
    "training.data_parallel_type": "the degrees in [parallelism] decide it",
    "training.enable_loss_parallel": _MODEL_CODE,
    "training.checkpoint_interval_type": "the interval is in steps",
    "optimizer.early_step_in_backward": "the optimizer steps after the whole backward",
    "metrics.enable_color_printing": "colors are on unless [metrics] disable_color_printing",
    "metrics.rank_0_only": "rank 0 writes unless [metrics] save_for_all_ranks is set",
    "parallelism.disable_loss_parallel": _MODEL_CODE,
    "parallelism.enable_compiled_autograd": "there is no replacement",
    "parallelism.context_parallel_rotate_method": "there is no replacement",
    "parallelism.expert_tensor_parallel_degree": "expert_parallel_degree alone counts",
    "parallelism.expert_parallel_comm_backend": (
        "another dispatcher is a registry function: name one with [model] config"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": "there is no replacement",
    "parallelism.pipeline_parallel_split_points": (
        "list the modules of each stage in [parallelism] module_fqns_per_model_part"
    ),
    "experimental.pipeline_parallel_split_points": (
        "list the modules of each stage in [parallelism] module_fqns_per_model_part"
    ),
    "experimental.pipeline_parallel_microbatches": (
        "set [parallelism] pipeline_parallel_microbatch_size"
    ),
    "experimental.enable_compiled_autograd": "there is no replacement",
    "experimental.enable_loss_parallel": _MODEL_CODE,
    "experimental.custom_import": _IMPORTS,
    "experimental.custom_args_module": _IMPORTS,
    "experimental.custom_model_path": "name the package in [model] name",
    "checkpoint.interval_type": "the interval is in steps",
    "checkpoint.enable_ft_dataloader_checkpoints": "there is no replacement",
    "activation_checkpoint.selective_ac_option": 'mode = "selective" works by operation now',
    "activation_checkpoint.early_stop": "there is no replacement",
    "validation.local_batch_size": "validation uses [training] local_batch_size",
    "validation.seq_len": "validation uses [training] seq_len",
    "memory_estimation.*": "there is no replacement",
    "fault_tolerance.*": "it lives in torchtitan.experiments.torchft",
}


def translate(raw: Mapping[str, Any], place: Place) -> tuple[dict[str, Any], Place]:
    """Bring the keys of older files to the names torchtitan 0.3.0 has.

    Args:
        raw: The file as tomli read it. Not modified.
        place: The top level of the file; its notes get one sentence for each key that moved, and
            for each key or whole table that is gone.

    Returns:
        The table in today's names, and the place that knows the old spellings.

    Raises:
        ConfigError: A key is given in its old and in its new spelling.
    """
    table: dict[str, Any] = {}
    moved: dict[str, str] = {}
    gone: dict[str, list[str]] = {}
    for name, value in _leaves(_adam_betas(raw, place)):
        pattern, rest = _match(name, MOVED)
        if pattern is not None:
            new = MOVED[pattern].replace("*", rest)
            _refuse_twice(raw, name, new, moved, place)
            moved[new] = _spell(name)
            _put(table, new, _moved_value(name, value), place)
            place.notes.append(f"{place.file}: {_spell(name)} is read as {_spell(new)}.")
            continue
        pattern, rest = _match(name, GONE)
        if pattern is None:
            _put(table, name, value, place)
        else:
            gone.setdefault(pattern, []).append(rest or name)
    for pattern, names in gone.items():
        spelled = f"[{pattern[:-2]}] {', '.join(names)}" if "*" in pattern else _spell(pattern)
        verb = "are" if len(names) > 1 else "is"
        reason = f"{verb} gone in torchtitan 0.3.0 and not used: {GONE[pattern]}."
        place.notes.append(f"{place.file}: {spelled} {reason}")
    if isinstance(raw.get("optimizer"), dict):
        # Empty too, it asks for this package's optimizer.
        table.setdefault("optimizer", {})
    return table, Place(place.file, place.table, moved, place.notes)


def _refuse_twice(
    raw: Mapping[str, Any], name: str, new: str, moved: Mapping[str, str], place: Place
) -> None:
    other = moved.get(new) or (_spell(new) if _has(raw, new) else None)
    if other is not None:
        raise ConfigError(
            f"{place.file}: {_spell(name)} is an old name of {_spell(new)}, which {other} sets "
            "already; keep one of them."
        )


def gone_reason(name: str) -> str | None:
    """Return what to do instead of a key that is gone, or None for any other key."""
    pattern, _ = _match(name, GONE)
    return None if pattern is None else GONE[pattern]


def _match(name: str, known: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the entry for a dotted name and what its ``*`` stands for."""
    if name in known:
        return name, ""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:length]) + ".*"
        if pattern in known:
            return pattern, ".".join(parts[length:])
    return None, ""


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values, down to where no old key can lie."""
    for key, value in raw.items():
        name = prefix + key
        known = (*MOVED, *GONE)
        whole = any(old.endswith(".*") and name.startswith(old[:-1]) for old in known)
        inside = whole or any(old.startswith(f"{name}.") for old in known)
        if isinstance(value, dict) and inside:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _put(table: dict[str, Any], name: str, value: Any, place: Place) -> None:
    *parents, key = name.split(".")
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise place.refused(parent, inner, f"a table, [{parent}]")
        table = inner
    _join(table, key, value)


def _join(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a key; a table joins what is there already, since moved keys may have come first."""
    if isinstance(value, dict):
        inner = table.setdefault(key, {})
        for name, item in value.items():
            _join(inner, name, item)
    else:
        table[key] = value


def _has(raw: Mapping[str, Any], name: str) -> bool:
    *parents, key = name.split(".")
    for parent in parents:
        inner = raw.get(parent)
        if not isinstance(inner, dict):
            return False
        raw = inner
    return key in raw


def _moved_value(name: str, value: Any) -> Any:
    if name == "model.tokenizer_path" and isinstance(value, str) and Path(value).suffix:
        # The folder is named today, not the tokenizer's file.
        return str(Path(value).parent)
    if name == "optimizer.fused" and isinstance(value, bool):
        return "fused" if value else "foreach"
    return value


def _adam_betas(raw: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Turn ``beta1`` and Adam's ``beta2`` into ``betas``; NorMuon's ``beta2`` stays."""
    optimizer = raw.get("optimizer")
    if not isinstance(optimizer, dict):
        return dict(raw)
    adam = str(optimizer.get("name", "")).lower() in ("adam", "adamw")
    # With another algorithm beta2 may be its own; beta1 only ever was Adam's.
    old = [key for key in ("beta1", "beta2") if key in optimizer and (adam or key == "beta1")]
    if not old:
        return dict(raw)
    betas = [optimizer["beta1"] if "beta1" in old else 0.9]
    betas.append(optimizer["beta2"] if "beta2" in old else 0.95)
    kept = {key: value for key, value in optimizer.items() if key not in old}
    if adam:
        target, changed = "[optimizer] betas", {"betas": betas, **kept}
    else:
        adamw = {"betas": betas, **kept.get("adamw", {})}
        target, changed = "[optimizer.adamw] betas", {**kept, "adamw": adamw}
    place.notes.append(f"{place.file}: [optimizer] {' and '.join(old)}: read as {target}.")
    return {**raw, "optimizer": changed}


def _spell(name: str) -> str:
    table, _, key = name.rpartition(".")
    return f"[{table}] {key}" if table else f"{key} (top level)"
