"""What has gone wrong in optimizers of this kind, and the tests that keep it from going wrong here.

FAULTS is the map, by kind of fault; below it are the tests that had no other place.
"""

import ast
import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers.optimizers import assert_same, parameters, set_gradients, snapshot, train
from tests.helpers.spectra import SPECTRA, matrix
from titan_muon import Muon, orthogonalize, param_groups
from titan_muon.optim.matrix_math import inverse_norms
from titan_muon.orthogonalization import resolve_schedule, starting_norm
from titan_muon.orthogonalization.methods import _norms

TESTS = Path(__file__).parents[1]
LAYOUTS = "distributed/test_exactness.py::test_every_layout_with_every_split"
ANY_LAYOUT = "distributed/test_any_layout.py::test_any_layout_equals_unsharded"
RESHARD = "integration/test_reshard.py::test_state_crosses_every_pair_of_meshes"
RESUME = "integration/test_resume.py::test_resumed_run_equals_the_uninterrupted_one"
HERE = "unit/test_known_faults.py::"

FAULTS = {
    "layout: the update of a shard instead of the matrix": [LAYOUTS, ANY_LAYOUT],
    "layout: shards of uneven size, or of none, hang or pad wrongly": [
        LAYOUTS,
        ANY_LAYOUT,
        "integration/test_real_layouts.py::test_plan_of_a_real_layout",
    ],
    "layout: the mesh decides whether a config is legal": [
        ANY_LAYOUT,
        "integration/test_train_configs.py::test_parallelism_that_dist_muon_refuses",
    ],
    "layout: strided shards of column parallelism are gathered in another order": [
        LAYOUTS,
        "distributed/test_layout.py::test_fsdp_with_tensor_parallelism",
    ],
    "layout: fused projections are one matrix, or cut at the wrong rows": [
        LAYOUTS,
        "unit/test_matrices.py::test_interleaved_qkv_gathers_over_the_kv_groups",
        "unit/test_matrices.py::test_rules_that_do_not_fit_are_refused",
        "unit/test_routing_torchtitan.py::test_torchtitan_fused_weights_know_their_rows",
    ],
    "layout: a head is cut by a shard": [LAYOUTS, "unit/test_matrices.py::test_blocks_are_heads"],
    "layout: gradients that are not reduced yet": [
        "distributed/test_faults.py::test_partial_is_refused_by_name",
        "unit/test_optimizer.py::test_partial_gradients_of_elementwise_algorithms_are_refused_by_name",
        "distributed/test_accumulation.py::test_micro_steps_without_reduction",
        "distributed/test_accumulation.py::test_step_without_any_reduction_changes_nothing",
    ],
    "layout: a rank without a gradient hangs the others": [
        "distributed/test_faults.py::test_missing_on_one_rank_counts_as_zero_there",
        "distributed/test_faults.py::test_missing_on_all_ranks_touches_nothing",
        "distributed/test_faults.py::test_no_gradient_at_all_and_frozen",
    ],
    "layout: fewer matrices than ranks, or none": [
        "distributed/test_faults.py::test_no_matrices",
        "distributed/test_faults.py::test_fewer_matrices_than_ranks_and_groups_added_later",
        "distributed/test_costs.py::test_counted_is_predicted",
    ],
    "layout: replicas drift apart": [
        "distributed/test_faults.py::test_replicas_stay_equal_when_one_lacks_the_gradient",
        "integration/test_meshes.py::test_given_gradients_move_weights_as_in_one_process",
        "distributed/test_accumulation.py::test_plain_replicas_stay_equal",
    ],
    "routing: a pattern matches nothing and matrices fall to AdamW unseen": [
        "integration/test_container.py::test_config_that_cannot_run_is_refused",
        "unit/test_cli_plan.py::test_warnings",
        "integration/test_stages.py::test_pattern_that_is_dead_everywhere_is_refused_by_every_rank",
    ],
    "routing: wrappers of checkpointing and compilation change names": [
        "unit/test_param_groups.py::test_wrappers_do_not_change_the_routing",
    ],
    "routing: a tied weight is decided twice": [
        "unit/test_param_groups.py::test_tied_weight_has_one_decision_under_either_name_order",
    ],
    "routing: Muon orthogonalizes nothing, or something twice": [
        "distributed/test_costs.py::test_counted_is_predicted",
        "integration/test_meshes.py::test_costs_are_the_planned_ones",
        "integration/test_stages.py::test_a_model_without_any_matrix_is_refused_by_every_rank",
    ],
    "routing: a pipeline stage without a matrix": [
        "integration/test_stages.py::test_stage_without_a_matrix_builds_steps_and_saves",
        "integration/test_meshes.py::test_trained_steps_equal_one_process",
    ],
    "config: files and flags of older torchtitan versions": [
        "unit/test_toml_legacy.py::test_oldest_files",
        "unit/test_toml_legacy.py::test_every_old_name_leads_to_a_field_that_exists",
        "unit/test_cli.py::test_older_flags_are_renamed",
        "unit/test_readme.py::test_commands_exist",
    ],
    "config: optimizer names in another case, or misspelt": [
        "unit/test_toml_optimizer.py::test_names_in_any_letter_case_choose_their_recipe",
        "unit/test_options.py::test_unknown_algorithm_lists_all",
    ],
    "config: a misspelt option is ignored": [
        "unit/test_options.py::test_unknown_option_names_the_nearest",
        "unit/test_toml.py::test_one_message",
    ],
    "config: a schedule that knows one base lr only": [
        "unit/test_optimizer.py::test_scheduler_keeps_the_base_lr_of_each_group",
        "integration/test_resume.py::test_optimizer_and_scheduler_agree_on_the_first_step",
        HERE + "test_every_group_keeps_its_own_lr_and_decay",
    ],
    "config: options of a group are lost": [
        "unit/test_options.py::test_group_wins_over_constructor_wins_over_default",
        HERE + "test_every_group_keeps_its_own_lr_and_decay",
    ],
    "config: torchtitan's implementation flag reaches Muon": [
        "unit/test_config.py::test_implementation_reaches_adamw_alone",
    ],
    "numerics: tiny gradients give another update, zeros give NaN": [
        "unit/test_optimizer.py::test_scale_of_the_gradient_does_not_matter",
        "unit/test_orthogonalization.py::test_scale_of_the_input_does_not_matter",
        "unit/test_orthogonalization.py::test_zeros_and_nonfinite_matrices_stay_apart",
    ],
    "numerics: a momentum that fades away becomes NaN": [
        HERE + "test_momentum_that_fades_away_never_becomes_a_nan",
        HERE + "test_start_of_a_matrix_of_subnormal_numbers_is_finite",
        HERE + "test_a_momentum_of_zeros_moves_nothing_whatever_the_size",
        HERE + "test_norms_of_a_gpu_outlive_their_squares",
        "gpu/test_faults_gpu.py::test_momentum_that_fades_away_never_becomes_a_nan",
    ],
    "numerics: clipping changes Muon's update": [HERE + "test_clipping_moves_adamw_only"],
    "numerics: stacks of matrices are flattened": [
        "unit/test_matrices.py::test_leading_dims_are_a_batch",
        "unit/test_optimizer.py::test_many_parameters_equal_each_alone",
        "unit/test_update_rules.py::test_matches_golden_vector",
    ],
    "numerics: the lr factor comes from a shard or from the unflattened shape": [
        LAYOUTS,
        "unit/test_update_rules.py::test_matches_golden_vector",
    ],
    "numerics: another convention of the momentum": [
        "integration/test_crossing.py::test_torch_muon_momentum_is_the_same_mean",
        "unit/test_optimizer_state.py::test_state_of_torch_muon_loads_and_goes_on",
        "unit/test_update_rules.py::test_matches_golden_vector",
    ],
    "numerics: dtypes of weight, gradient and state that differ": [
        "unit/test_optimizer.py::test_dtype_mixes",
        "unit/test_algorithms.py::test_mixed_dtypes_equal_float32_on_the_same_values",
        "unit/test_state_dtypes.py::test_copies_and_loads_keep_all_bits",
    ],
    "numerics: the dtype of the iteration cannot be chosen": [
        "unit/test_orthogonalization.py::test_dtypes",
    ],
    "numerics: one inf poisons the state for good": [
        "unit/test_nonfinite.py::test_skipped_step_changes_no_bit_and_the_next_is_normal",
        "unit/test_nonfinite.py::test_names_the_guilty_and_changes_nothing",
        "distributed/test_nonfinite_ranks.py::test_all_ranks_skip_together_and_go_on",
        "integration/test_reshard.py::test_trainer_survives_and_names_what_clipping_leaves",
    ],
    "variants: NorMuon's statistics are those of a shard": [
        LAYOUTS,
        "distributed/test_any_layout.py::test_rank_without_a_column_keeps_the_row_buffer",
        "integration/test_meshes.py::test_given_gradients_move_weights_as_in_one_process",
    ],
    "variants: row statistics of convolutions, and of several weights in one batch": [
        "unit/test_matrices.py::test_one_value_a_row",
        "unit/test_optimizer.py::test_many_parameters_equal_each_alone",
        "unit/test_algorithms.py::test_buffers_follow_the_rows_of_a_split",
    ],
    "variants: another definition of NorMuon than the one that is written down": [
        "unit/test_update_rules.py::test_matches_golden_vector",
        "unit/test_algorithms.py::test_normuon_keeps_the_norm_of_every_matrix",
    ],
    "variants: QK clipping under tensor parallelism and shared keys": [
        "unit/test_qk_clip.py::test_rows_of_other_heads_and_shared_keys_stay_bitwise",
        "distributed/test_qk_clip_layouts.py::test_layouts_equal_one_process",
    ],
    "checkpoint: parameters that never stepped have no state": [
        "unit/test_optimizer_state.py::test_key_sets_do_not_depend_on_which_parameters_stepped",
        "integration/test_container.py::test_state_dict_steps_nothing_and_is_flat",
    ],
    "checkpoint: pending gradients change what is saved": [
        "unit/test_optimizer_state.py::test_state_dict_is_written_with_pending_gradients",
    ],
    "checkpoint: state comes back in another dtype": [
        "unit/test_optimizer_state.py::test_load_keeps_tensors_and_dtypes",
        "unit/test_state_dtypes.py::test_copies_and_loads_keep_all_bits",
    ],
    "checkpoint: wrappers of several optimizers lose state": [
        "unit/test_optimizer_state.py::test_flat_state_dict_of_torch_round_trips",
        "unit/test_state_dtypes.py::test_distributed_checkpoint_api",
        "integration/test_container.py::test_resumed_equals_uninterrupted",
    ],
    "checkpoint: momentum does not follow its shard to another mesh": [RESHARD],
    "checkpoint: momentum does not follow its expert": [RESHARD],
    "checkpoint: a resumed run is another run": [
        RESUME,
        "integration/test_crashes.py::test_killed_again_and_again",
    ],
    "checkpoint: empty groups": [HERE + "test_empty_and_frozen_groups_save_load_and_step"],
    "checkpoint: who wins on resume": [
        "integration/test_container.py::test_config_wins_at_the_position_of_the_schedule",
        "integration/test_resume.py::test_config_wins_over_the_checkpoint",
    ],
    "checkpoint: state that does not fit is loaded halfway": [
        "integration/test_crossing.py::"
        "test_state_that_does_not_fit_is_refused_before_anything_is_touched",
        "integration/test_container.py::test_refused_load_touches_nothing",
    ],
    "performance: whole parameters are gathered where shards would do": [
        "distributed/test_costs.py::test_layouts_cost_what_they_must",
        "integration/test_meshes.py::test_bytes_are_those_of_the_layout",
    ],
    "performance: every shape is compiled anew": [HERE + "test_many_shapes_compile_nothing"],
    "performance: one launch a matrix": [
        "unit/test_optimizer.py::test_many_parameters_equal_each_alone",
        "unit/test_orthogonalization.py::test_batch_size_changes_nothing_but_rounding",
    ],
    "performance: every rank repeats the work": [
        "distributed/test_costs.py::test_work_is_divided_among_all_that_can_share_it",
        "distributed/test_balance.py::test_plan_is_deterministic_and_balanced",
    ],
    "performance: a tensor lr is read by the host": [
        "unit/test_optimizer.py::test_tensor_lr_equals_number_and_follows_changes",
        "gpu/test_optimizer_gpu.py::test_captured_step_follows_the_lr_tensor",
        "gpu/test_optimizer_gpu.py::test_no_host_sync_in_a_step",
    ],
    "kernels: a backend makes inf of finite input": [
        HERE + "test_finite_in_finite_out",
        "gpu/test_faults_gpu.py::test_finite_in_finite_out",
    ],
    "memory: the work of a step grows with the model": [
        "distributed/test_balance.py::test_stages_hold_the_budget",
    ],
    "memory: caches grow with the steps": [
        HERE + "test_nothing_grows_with_the_steps",
        "gpu/test_optimizer_gpu.py::test_memory_is_flat_over_many_steps",
        "integration/test_soak.py::test_soak",
    ],
    "memory: weights that FSDP2 keeps on the CPU": [
        "gpu/test_offload_gpu.py::test_offloaded_update_is_that_of_the_gpu",
        "gpu/test_offload_gpu.py::test_training_step_with_offload",
    ],
    "memory: quantised blocks are cut by another mesh": [
        "distributed/test_quantized_state.py::test_another_layout_is_rounded_once_more",
        "distributed/test_quantized_state.py::test_shards_that_fit_no_block_are_refused_alike",
    ],
}


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_known_fault_has_its_tests(fault):
    assert FAULTS[fault]
    for place in FAULTS[fault]:
        path, _, name = place.partition("::")
        assert name.startswith("test_")
        assert name in _tests_of(path), place


def test_every_group_keeps_its_own_lr_and_decay():
    """Groups of each algorithm with and without decay, under a schedule, and after a load."""
    values = [
        (algorithm, lr, decay)
        for algorithm in ("muon", "normuon", "adamw")
        for lr, decay in ((1e-3, 0.1), (1e-4, 0.0))
    ]

    def build():
        params = parameters(*[(4, 6)] * len(values))
        groups = [
            {"params": [p], "algorithm": a, "lr": lr, "weight_decay": d}
            for p, (a, lr, d) in zip(params, values, strict=True)
        ]
        optimizer = Muon(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
        return optimizer, schedule

    def check(optimizer, factor):
        groups = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        assert groups == [(a, lr * factor, d) for a, lr, d in values]

    optimizer, schedule = build()
    for step in range(3):
        check(optimizer, (step + 1) / 4)
        train(optimizer, 1, first=step)
        schedule.step()
    resumed, resumed_schedule = build()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_schedule.load_state_dict(schedule.state_dict())
    check(resumed, 1.0)
    resumed_schedule.step()
    check(resumed, 5 / 4)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "aurora"])
def test_clipping_moves_adamw_only(algorithm):
    """A huge gradient elsewhere shrinks all others; a direction has no size, AdamW's has."""
    moved = {}
    for clipped in (False, True):
        matrix, other, vector = params = parameters((8, 12), (8, 12), (12,))
        before = [p.detach().clone() for p in params]
        groups = [
            {"params": [matrix, other], "algorithm": algorithm},
            # A large eps, by which the size of a gradient matters in the first step too.
            {"params": [vector], "algorithm": "adamw", "eps": 0.1},
        ]
        optimizer = Muon(groups, lr=0.1, weight_decay=0.0)
        set_gradients(params)
        other.grad.mul_(5e7)
        if clipped:
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
            assert norm > 1e8
        optimizer.step()
        moved[clipped] = [p.detach() - b for p, b in zip(params, before, strict=True)]
    for index in (0, 1):
        # Scaling by a number that is no power of two rounds once, at 6e-8.
        torch.testing.assert_close(moved[True][index], moved[False][index], rtol=1e-4, atol=1e-5)
    assert moved[True][2].norm() < 1e-3 * moved[False][2].norm()


@pytest.mark.parametrize("through", ["torch.optim", "torch.distributed.checkpoint"])
def test_empty_and_frozen_groups_save_load_and_step(through):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 6)})
        model["encoder"].requires_grad_(False)
        groups = [{"params": [], "param_names": []}, *param_groups(model, "normuon")]
        return model, Muon(groups, lr=0.1)

    model, optimizer = build(0)
    train(optimizer, 2)
    other, loaded = build(0)
    if through == "torch.optim":
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(other, loaded, saved)
    other.load_state_dict(model.state_dict())
    assert_same(snapshot(loaded), snapshot(optimizer))
    for one in (optimizer, loaded):
        train(one, 1, first=2)
    assert_same(snapshot(loaded), snapshot(optimizer))
    assert len(optimizer.param_groups[0]["params"]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_that_fades_away_never_becomes_a_nan(dtype):
    """Gradients of zero, as of an expert that gets no token, until the momentum is nothing."""
    for algorithm in ("muon", "normuon", "adamuon", "aurora"):
        (w,) = parameters((12, 8), dtype=dtype)
        options = {"lr": 1e-4, "weight_decay": 0.0, "momentum": 0.5}
        optimizer = Muon([{"params": [w], "algorithm": algorithm, **options}])
        set_gradients([w])
        optimizer.step()
        w.grad.zero_()
        # 0.5 ** 1200 is below the smallest float64 number, 0.5 ** 150 below that of float32.
        for step in range(1200 if dtype is torch.float64 else 160):
            optimizer.step()
            assert w.isfinite().all(), (algorithm, step)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-24, 1e-18, 1e15, 1e30])
def test_size_of_a_direction_does_not_matter_where_squares_under_and_overflow(size):
    (w,) = parameters((12, 8))
    updates = []
    for scale in (1.0, size):
        optimizer = Muon([w], lr=0.1, weight_decay=0.0)
        before = w.detach().clone()
        set_gradients([w])
        w.grad.mul_(scale)
        optimizer.step()
        updates.append(w.detach() - before)
        with torch.no_grad():
            w.copy_(before)
    # Scaling rounds once, at 6e-8, and the iteration enlarges it.
    torch.testing.assert_close(*updates, rtol=1e-4, atol=1e-5)


def test_many_shapes_compile_nothing():
    from torch._dynamo.utils import counters

    params = parameters(*[(3 + i, 4 + 2 * i) for i in range(12)])
    counters.clear()
    optimizer = Muon([{"params": params, "algorithm": "normuon"}])
    train(optimizer, 3)
    assert not counters["frames"]
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_finite_in_finite_out(kind, dtype):
    """Random and ill-conditioned matrices of extreme sizes through every schedule."""
    for shape in ((24, 64), (32, 32)):
        x = torch.stack([matrix(kind, *shape, seed) for seed in range(8)]).float()
        for scale in (1e-35, 1e-24, 1.0, 1e30):
            for method in ("polar_express", "newton_schulz", "you"):
                y = orthogonalize(x * scale, ns_method=method, ns_dtype=dtype)
                assert y.isfinite().all(), (method, scale)
                # A polynomial that escapes goes far beyond. float16 rounds the Gram matrix of
                # ill-conditioned 24 x 64 up to 4.3, everything else stays below 1.3.
                assert torch.linalg.matrix_norm(y.float(), 2).max() < 6, (method, scale)


def test_nothing_grows_with_the_steps():
    import gc

    params = parameters((16, 24), (24, 16), (3, 8, 8), (5,))
    groups = [{"params": params[:3], "algorithm": "normuon"}]
    optimizer = Muon([*groups, {"params": params[3:], "algorithm": "adamw"}], nonfinite="skip")
    train(optimizer, 20)
    gc.collect()
    before = len(gc.get_objects())
    train(optimizer, 60, first=20)
    gc.collect()
    # Python's own bookkeeping moves by a few objects, a leak of one a step by 60.
    assert len(gc.get_objects()) - before < 30
    (work,) = optimizer._works
    assert work._shards is None


def test_norms_of_the_kernels_path_outlive_their_squares():
    """As the GPU's fused path computes them: float32 sums of squares, and the largest element."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1e-35, 1e-24, 1.0, 1e30, 0.0, 1.0])[:, None]
    x[5, 3] = torch.nan
    inverse = inverse_norms(x.abs().amax(1), x.square().sum(1), 40.0**0.5)
    norms = (x.double() * inverse.double()[:, None]).norm(dim=1)
    # Never above 1, where the iteration diverges; exact where the squares are.
    assert norms[2].item() == pytest.approx(1.0, rel=1e-6)
    for index in (0, 1, 3):
        assert 0.1 < norms[index] <= 1.0
    assert norms[4] == 0
    assert norms[5].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_start_of_a_matrix_of_subnormal_numbers_is_finite(dtype):
    """On a GPU the direction is multiplied by both in one go, and 0 * inf is NaN."""
    sizes = [torch.finfo(dtype).tiny * 2.0**-k for k in (0, 4, 8, 12)] + [0.0]
    largest = torch.tensor(sizes, dtype=dtype)
    schedule = resolve_schedule("polar_express", 5)
    start = starting_norm(1024, 4096, torch.float16, torch.device("cpu"), schedule)
    assert start > 30
    factors = inverse_norms(largest, largest.square(), 2.0**0.5) * start
    assert factors.isfinite().all()
    assert (largest * factors).isfinite().all()


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamuon", "aurora"])
def test_a_momentum_of_zeros_moves_nothing_whatever_the_size(algorithm):
    """sqrt(rows) over the smallest norm overflowed from 12 rows on, and 0 * inf is NaN."""
    w = nn.Parameter(torch.randn(96, 160, generator=torch.Generator().manual_seed(0)))
    before = w.detach().clone()
    optimizer = Muon([{"params": [w], "algorithm": algorithm, "weight_decay": 0.0}])
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert torch.equal(w, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e-7, 1.0, 1e10, 1e30])
def test_norms_of_a_gpu_outlive_their_squares(dtype, size):
    """There sums are float32."""
    x = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)).mul(size).to(dtype)
    if not x.isfinite().all() or not x.count_nonzero():
        return
    norms = _norms(x, torch.float32).flatten().double()
    exact = x.double().norm(dim=(1, 2))
    # Never too small, where the iteration diverges; exact where squares are.
    assert (norms >= 0.999 * exact).all()
    assert (norms <= (1.001 if 1e-14 < size < 1e18 else 5.0) * exact).all()
