"""Three generations of torchtitan's older files still load."""

import pytest

pytest.importorskip("torchtitan")

from torchtitan.distributed.activation_checkpoint import FullAC

from tests.helpers.toml_files import load, table
from titan_muon.integration.toml import Selection, load_train_config
from titan_muon.integration.toml_check import field_types
from titan_muon.integration.toml_legacy import GONE, MOVED
from titan_muon.integration.toml_place import ConfigError

# Three generations of torchtitan's own files.
OLDEST = """
[job]
dump_folder = "here"
description = "a test"
[profiling]
run_profiler = true
profile_every_x_iter = 5
[model]
name = "llama3"
flavor = "debugmodel"
norm_type = "rmsnorm"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
lr = 4e-4
fused = false
[training]
batch_size = 3
warmup_steps = 9
data_parallel_degree = 4
tensor_parallel_degree = 2
compile = true
checkpoint_interval = 11
checkpoint_interval_type = "steps"
dataset = "c4"
seed = 5
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = ["layers.3"]
[float8]
enable_float8_linear = false
"""

MIDDLE = """
[job]
print_args = true
use_for_integration_test = true
[profiling]
enable_profiling = true
profile_freq = 8
[metrics]
log_freq = 2
[model]
name = "llama3"
flavor = "debugmodel"
converters = "float8"
[optimizer]
name = "adamw"
lr = 1e-3
eps = 1e-7
beta1 = 0.8
beta2 = 0.9
implementation = "foreach"
early_step_in_backward = false
[lr_scheduler]
warmup_steps = 2
lr_min = 0.2
[training]
local_batch_size = 5
deterministic = true
[parallelism]
fsdp_reshard_after_forward = "never"
enable_async_tensor_parallel = false
disable_loss_parallel = true
[checkpoint]
enable_checkpoint = true
model_weights_only = false
[activation_checkpoint]
mode = "full"
selective_ac_option = "2"
per_op_sac_force_recompute_mm_shapes_by_fqns = ["moe.router.gate"]
[mx]
recipe_name = "mxfp8"
filter_fqns = ["output"]
[memory_estimation]
enabled = false
"""

NEWEST = """
[job]
save_config_file = "config.json"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./assets/hf"
converters = ["quantize.linear.float8"]
[optimizer]
name = "Muon"
lr = 0.02
beta1 = 0.85
[training.dataloader]
num_workers = 2
[compile]
enable = true
[quantize.linear.float8]
emulate = true
[quantize.grouped_mm.mx]
fqns = []
[fault_tolerance]
enable = false
[validation]
enable = true
dataset = "c4_validation"
steps = 6
seq_len = 128
[validation.dataloader]
pin_memory = true
[debug]
seed = 3
"""


def old(tmp_path, text):
    path = tmp_path / "old.toml"
    path.write_text(text)
    config, notes = load_train_config(Selection(file=str(path)))
    assert all(note.startswith(f"{path}: ") and note.endswith(".") for note in notes)
    return config, [note.removeprefix(f"{path}: ") for note in notes]


def test_oldest_files(tmp_path):
    config, notes = old(tmp_path, OLDEST)
    assert config.dump_folder == "here"
    assert config.hf_assets_path == "assets/tokenizer/original"
    assert config.profiler.enable_profiling
    assert config.profiler.profile_freq == 5
    assert config.optimizer.implementation == "foreach"
    assert config.training.local_batch_size == 3
    assert config.lr_scheduler.warmup_steps == 9
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.pipeline_parallel_degree == 2
    assert config.compile.enable
    assert config.checkpoint.interval == 11
    assert config.dataloader.dataset == "c4"
    assert config.debug.seed == 5
    assert sum("is read as" in note for note in notes) == 14
    gone = [note for note in notes if "gone in torchtitan 0.3.0" in note]
    for name in (
        "[job] description is",
        "[model] norm_type is",
        "[training] checkpoint_interval_type is",
        "[experimental] pipeline_parallel_split_points is",
        "[float8] enable_float8_linear is",
    ):
        assert sum(note.startswith(name) for note in gone) == 1
    assert len(gone) == 5


def test_files_of_the_middle_years(tmp_path):
    config, notes = old(tmp_path, MIDDLE)
    assert config.debug.print_config
    assert config.debug.deterministic
    assert config.profiler.enable_profiling
    assert config.profiler.profile_freq == 8
    assert config.optimizer.matrix_spec() == (
        "adamw",
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "betas": (0.8, 0.9),
            "eps": 1e-7,
            "fused": False,
            "foreach": True,
        },
    )
    assert config.lr_scheduler.min_lr_factor == 0.2
    assert config.parallelism.fsdp_reshard_after_forward == "never"
    assert config.checkpoint.enable
    assert config.checkpoint.last_save_model_only is False
    assert config.activation_checkpoint == FullAC.Config()
    text = "\n".join(notes)
    assert "[optimizer] beta1 and beta2: read as [optimizer] betas." in text
    assert "has no effect with mode" in text
    for name in (
        "[job] use_for_integration_test is",
        "[model] converters is",
        "[optimizer] early_step_in_backward is",
        "[parallelism] disable_loss_parallel is",
        "[activation_checkpoint] selective_ac_option is",
        "[mx] recipe_name, filter_fqns are",
        "[memory_estimation] enabled is",
    ):
        assert text.count(f"{name} gone") == 1
    assert text.count("gone in torchtitan") == 7


def test_newest_files(tmp_path):
    config, notes = old(tmp_path, NEWEST)
    assert config.debug.save_config_file == "config.json"
    assert config.hf_assets_path == "./assets/hf"
    assert config.dataloader.num_workers == 2
    assert config.optimizer.adamw.betas == (0.85, 0.95)
    assert config.optimizer.beta2 is None
    assert config.validator.enable
    assert config.validator.steps == 6
    assert config.validator.dataloader.dataset == "c4_validation"
    assert config.validator.dataloader.pin_memory
    text = "\n".join(notes)
    assert "[quantize] linear.float8.emulate, grouped_mm.mx.fqns are gone" in text
    assert "[validation] seq_len is gone" in text
    assert "[fault_tolerance] enable is gone" in text


def test_every_old_name_leads_to_a_field_that_exists():
    """The right side of the table is checked against torchtitan, not against itself."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for new in {name for name in MOVED.values() if not name.endswith(".*")}:
        node = config
        *parents, key = new.split(".")
        for parent in parents:
            node = getattr(node, parent)
        assert key in field_types(node), new


@pytest.mark.parametrize("name", sorted(n for n in (*MOVED, *GONE) if not n.endswith("*")))
def test_no_old_name_hides_a_field_of_today(name):
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    node = llama3_debugmodel()
    *parents, key = name.split(".")
    for parent in parents:
        node = getattr(node, parent, None)
    assert node is None or key not in field_types(node)


def test_old_file_without_a_place_for_a_table(tmp_path):
    with pytest.raises(ConfigError, match=r"\[experimental\] is not a table"):
        load(tmp_path, table("experimental", "unheard_of = 1"))
    load(tmp_path, "[job]\n[experimental]\n")
