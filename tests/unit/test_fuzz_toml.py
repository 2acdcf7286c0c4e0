"""Random train configs: every one loads, or one message names the file and what is wrong in it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from titan_muon.integration.config import AdamWConfig, OptimizerConfig  # noqa: E402
from titan_muon.integration.toml import Selection, load_train_config  # noqa: E402
from titan_muon.integration.toml_check import field_types  # noqa: E402
from titan_muon.integration.toml_legacy import GONE, MOVED  # noqa: E402
from titan_muon.integration.toml_place import ConfigError  # noqa: E402

MODEL = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
TABLES = {
    "optimizer": [f.name for f in dataclasses.fields(OptimizerConfig)] + ["recipe", "momentun"],
    "optimizer.adamw": [f.name for f in dataclasses.fields(AdamWConfig)] + ["momentum", "lrr"],
    "optimizer.options": ["keep", "momentum", "beta2"],
    "training": ["steps", "seq_len", "local_batch_size", "max_norm", "dtype", "stepz"],
    "parallelism": ["tensor_parallel_degree", "pipeline_parallel_schedule", "context"],
    "checkpoint": ["enable", "interval", "async_mode", "keep_latest_k", "folder", "load_step"],
    "activation_checkpoint": ["mode", "memory_budget", "selective_ac_option"],
    "lr_scheduler": ["warmup_steps", "decay_type", "decay_ratio", "min_lr_factor"],
    "model": ["name", "flavor", "config", "tokenizer_path"],
    "job": ["config_file", "dump_folder", "print_config"],
    "metrics": ["log_freq", "optimizer_freq", "enable_wandb"],
    "trainig": ["steps"],
}
OLD = sorted(name for name in {*GONE, *MOVED} if re.fullmatch(r"[a-z_]+\.[a-z_]+", name))

words = st.one_of(
    st.integers(-2, 10).map(str),
    st.sampled_from(["1e-3", "nan", "inf", "-inf", "0.5", "true", "false", "99999999999999999999"]),
    st.sampled_from(['""', '"Muon"', '"adamw"', '"float32"', '"skip"', '"none"', '"\u00e9\u4e2d"']),
    st.sampled_from(["[]", "[1, 2]", "[[1.0, 2.0, 3.0]]", '["a"]', "{}", '{ kind = "blocks" }']),
    st.sampled_from(["2024-01-01", "12:00:00", '{ kind = "blocks", rows = 4 }', "[0.9, 0.95]"]),
)
lines = st.one_of(
    st.sampled_from(sorted(TABLES)).flatmap(
        lambda table: st.tuples(st.just(table), st.sampled_from(TABLES[table]), words)
    ),
    st.tuples(st.sampled_from(OLD), words).map(lambda pair: (*pair[0].split("."), pair[1])),
)


def written(entries: list[tuple[str, str, str]]) -> str:
    """Return TOML with each table once and each key once."""
    tables: dict[str, dict[str, str]] = {}
    for table, key, value in entries:
        tables.setdefault(table, {})[key] = value
    text = "" if "model" in tables else MODEL
    for table, keys in tables.items():
        text += f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
    return text


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.toml"


QUICK = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def load(file: Path, text: str) -> Any:
    file.write_text(text, encoding="utf-8")
    try:
        return load_train_config(Selection(file=str(file)))[0]
    except ConfigError as error:
        if not (str(error).startswith(str(file)) and len(str(error)) > len(str(file)) + 10):
            raise AssertionError(f"the message does not begin with the file: {error}") from error
        return None


@QUICK
@given(st.lists(lines, min_size=1, max_size=4))
def test_tables(file: Path, entries: list[tuple[str, str, str]]) -> None:
    config = load(file, written(entries))
    if config is None:
        return
    # What loads has values of the fields' own types, and an optimizer that can be built from it.
    config.optimizer.check() if isinstance(config.optimizer, OptimizerConfig) else None
    for table, key, value in entries:
        if table == "training" and key in field_types(config.training) and value == "true":
            assert isinstance(getattr(config.training, key), bool)


@QUICK
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60))
def test_any_text(file: Path, text: str) -> None:
    load(file, text + "\n" + MODEL)
