"""The owners that the planner chooses, against every assignment there is."""

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_muon.distributed import stages as stages_module
from titan_muon.distributed.balance import improve, load_bound
from titan_muon.distributed.layout import Cut, Layout
from titan_muon.distributed.matrices import matrix_rule
from titan_muon.distributed.plan import Channel, PlanParam, make_plan


@dataclass(frozen=True)
class Job:
    homes: tuple[int, ...]
    cost: float


def _loads(jobs, owners, ranks):
    loads = dict.fromkeys(range(ranks), 0.0)
    for job, owner in zip(jobs, owners, strict=True):
        loads[owner] += job.cost
    return loads


def _best(jobs, ranks):
    """Return the least largest load of all assignments."""
    choices = itertools.product(*(job.homes for job in jobs))
    return min(max(_loads(jobs, owners, ranks).values()) for owners in choices)


@st.composite
def _jobs(draw):
    ranks = draw(st.integers(1, 3))
    homes = [(0,), tuple(range(ranks)), tuple(range(max(1, ranks - 1)))]
    job = st.builds(Job, st.sampled_from(homes), st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0]))
    return ranks, draw(st.lists(job, min_size=1, max_size=6))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(_jobs())
def test_bound_and_search_against_all_assignments(case):
    ranks, jobs = case
    best = _best(jobs, ranks)
    owners = [job.homes[0] for job in jobs]
    loads = _loads(jobs, owners, ranks)
    assert load_bound(jobs, loads) <= best + 1e-9
    before = max(loads.values())
    improve(jobs, owners, loads)
    assert all(owner in job.homes for owner, job in zip(owners, jobs, strict=True))
    assert loads == _loads(jobs, owners, ranks)
    assert best <= max(loads.values()) <= before


def test_swap_reaches_what_no_move_does():
    # Loads 12 and 8: no single job fits, but 6 against 4 does.
    jobs = [Job((0, 1), c) for c in (6.0, 6.0, 4.0, 4.0)]
    owners = [0, 0, 1, 1]
    loads = _loads(jobs, owners, 2)
    improve(jobs, owners, loads)
    assert loads == {0: 10.0, 1: 10.0}


def test_bound_knows_that_expensive_jobs_must_share_a_rank():
    # 400 of 560 jobs on 256 ranks: 144 ranks have two, and only 160 jobs are cheap.
    jobs = [Job(tuple(range(256)), c) for c in [35.0] * 240 + [20.0] * 160]
    loads = _loads(jobs, [i % 256 for i in range(400)], 256)
    assert load_bound(jobs, loads) == 55.0


def _params(count: int, ranks: int, cost=lambda i: 1.0 + i % 7) -> list[PlanParam]:
    layout = Layout((4 * ranks, 8), (ranks,), tuple(range(ranks)), (Cut(0),))
    channels = (Channel("direction", "float16"),)
    rule = matrix_rule(layout.shape)
    return [
        PlanParam(f"p{i}", layout, rule, 0, channels, (cost(i),), (1024,)) for i in range(count)
    ]


def test_plan_is_deterministic_and_balanced():
    first, second = (make_plan(_params(100, 8), max_stage_bytes=1 << 30) for _ in range(2))
    assert first == second
    assert first.fingerprint() == second.fingerprint()
    total = sum(1.0 + i % 7 for i in range(100))
    assert sum(first.loads) == total
    assert max(first.loads) == math.ceil(total / 8)


def test_fingerprint_changes_with_any_part_of_the_plan():
    plans = [
        make_plan(_params(26, 4), max_stage_bytes=1 << 30),
        make_plan(_params(26, 4)[::-1], max_stage_bytes=1 << 30),
        make_plan(_params(25, 4), max_stage_bytes=1 << 30),
        make_plan(_params(26, 8), max_stage_bytes=1 << 30),
        make_plan(_params(26, 4, cost=lambda i: 2.0), max_stage_bytes=1 << 30),
        make_plan(_params(26, 4), max_stage_bytes=1024),
    ]
    assert len({p.fingerprint() for p in plans}) == len(plans)


def test_stages_hold_the_budget():
    plan = make_plan(_params(40, 4), max_stage_bytes=3000)
    for rank, stage in itertools.product(plan.ranks, range(plan.stages)):
        assert sum(u.owner == rank and u.stage == stage for u in plan.units) <= 2


def test_first_and_last_stage_are_the_smallest(monkeypatch):
    """What they send is all that no arithmetic hides."""
    monkeypatch.setattr(stages_module, "STAGE_FLOPS", 1.0)
    # Each of 2 ranks gets six large matrices, two middling and two small ones.
    plan = make_plan(
        _params(20, 2, cost=lambda i: 2.4 if i < 12 else 1.6 if i < 16 else 1.4),
        max_stage_bytes=1 << 30,
    )
    assert plan.stages == 6
    for rank in plan.ranks:
        work = [
            sum(_cost(plan, u) for u in plan.units if (u.owner, u.stage) == (rank, stage))
            for stage in range(plan.stages)
        ]
        assert work == pytest.approx([1.4, 4.8, 4.8, 4.8, 3.2, 1.4])


@pytest.mark.parametrize(
    ("cost", "stages"), [(0.01, 1), (0.1, 1), (0.25, 2), (0.5, 4), (1.0, 6), (100.0, 6)]
)
def test_little_work_gets_few_stages(monkeypatch, cost, stages):
    monkeypatch.setattr(stages_module, "STAGE_FLOPS", 1.2)
    plan = make_plan(_params(20, 2, cost=lambda i: cost), max_stage_bytes=1 << 30)
    assert plan.stages == stages


def _cost(plan, unit) -> float:
    return plan.params[unit.param].costs[unit.index]
