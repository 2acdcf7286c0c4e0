"""From the model of every pipeline stage to the figures of the report."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from titan_muon.cli.gpu_plans import RankSet, elements_by_rank, parts_of, rank_sets
from titan_muon.cli.layouts import Stage
from titan_muon.cli.rates import Rates, Times, elementwise_bytes, set_seconds
from titan_muon.cli.report import GroupReport, LayoutReport, ParameterReport, SetReport
from titan_muon.distributed.costs import PlanCosts, owner_bound, plan_costs
from titan_muon.distributed.layout import is_dtensor
from titan_muon.distributed.plan import Plan
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.param_groups import Assignment, to_groups
from titan_muon.optim.state_tensors import element_bytes

__all__ = ["Figures"]

_FOREIGN = ("params", "param_names", "algorithm")


@dataclass
class _Group:
    """Sums of one param group; tensors have an entry for each rank."""

    index: int
    algorithm: str
    options: dict[str, Any]
    layouts: dict[str, list[int]]
    matrices: Tensor
    bytes_sent: Tensor
    flops: Tensor
    state: Tensor


@dataclass
class Figures:
    """Adds up one pipeline stage after the other.

    Args:
        world_size: Number of ranks.
        rates: Assumed by the model of the time.
        per_parameter: Whether to measure every parameter alone.
    """

    world_size: int
    rates: Rates
    per_parameter: bool
    assignments: list[Assignment] = field(default_factory=list)
    sets: list[SetReport] = field(default_factory=list)
    parameters: list[ParameterReport] = field(default_factory=list)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _slowest: Times = field(default_factory=lambda: Times(0.0, 0.0, 0.0, 0.0))

    def __post_init__(self) -> None:
        # Ranks of another mesh position than the planned one are like it; they stay unknown here.
        self._known = torch.zeros(self.world_size, dtype=torch.bool)
        self._state = self._zeros()

    def add(self, stage: Stage, assignments: Sequence[Assignment]) -> None:
        """Plan one pipeline stage.

        Args:
            stage: The model parts.
            assignments: The decisions on their parameters.
        """
        if not assignments:
            return
        self.assignments += assignments
        optimizer = Muon(to_groups(assignments))
        sets = rank_sets(optimizer)
        known = {r for found in sets for r in found.plan.ranks} or set(stage.ranks)
        self._known[sorted(known)] = True
        reasons = {a.name: a.reason for a in assignments}
        for group in optimizer.param_groups:
            self._add_group(optimizer, group, stage, reasons)
        costs = [self._add_set(found, stage) for found in sets]
        for found in sets:
            self._add_parts(found)
        self._add_times(optimizer, costs, stage)

    def group_reports(self) -> list[GroupReport]:
        """Return the groups in the order of the model."""
        return [self._group_report(group) for group in self._groups.values()]

    @property
    def state_bytes(self) -> int:
        """Optimizer state of the rank with most."""
        return int(self._state.max())

    @property
    def milliseconds(self) -> Times:
        """Modelled times of the slowest pipeline stage."""
        return self._slowest

    def _zeros(self) -> Tensor:
        return torch.zeros(self.world_size, dtype=torch.float64)

    def _add_group(
        self, optimizer: Muon, group: dict[str, Any], stage: Stage, reasons: Mapping[str, str]
    ) -> None:
        entry = self._entry(group)
        ranks = slice(stage.ranks.start, stage.ranks.stop)
        for param, name in zip(group["params"], group["param_names"], strict=True):
            layout = _layout(param)
            counts = entry.layouts.setdefault(layout, [0, 0])
            counts[0] += 1
            counts[1] += param.numel()
            state = torch.zeros(len(stage.ranks), dtype=torch.int64)
            for tensor in optimizer.state[param].values():
                elements = elements_by_rank(tensor, stage.ranks)
                state += (elements * element_bytes(tensor)).long()
            entry.state[ranks] += state
            self._state[ranks] += state
            if self.per_parameter:
                self.parameters.append(
                    ParameterReport(
                        name=name,
                        group=entry.index,
                        algorithm=entry.algorithm,
                        reason=reasons[name],
                        shape=list(param.shape),
                        layout=layout,
                        matrices=0,
                        sizes=[],
                        owners=0,
                        stages=[],
                        bytes_sent=0.0,
                        flops=0.0,
                        state_bytes=int(state.max()),
                    )
                )

    def _entry(self, group: Mapping[str, Any]) -> _Group:
        """Return the sums of a group; one of two pipeline stages is the same."""
        options = {key: value for key, value in group.items() if key not in _FOREIGN}
        title = get_algorithm(group["algorithm"]).title
        return self._groups.setdefault(
            repr((title, sorted(options.items()))),
            _Group(
                len(self._groups),
                title,
                options,
                {},
                *(self._zeros() for _ in range(4)),
            ),
        )

    def _add_set(self, found: RankSet, stage: Stage) -> PlanCosts:
        plan, costs = found.plan, plan_costs(found.plan)
        largest = max(plan.loads)
        bound = owner_bound(plan)
        self.sets.append(
            SetReport(
                pipeline_stage=stage.number,
                first_rank=plan.ranks[0],
                ranks=len(plan.ranks),
                matrices=len(plan.units),
                idle=int((costs.matrices == 0).sum()),
                stages=plan.stages,
                collectives=costs.collectives,
                balance=plan.balance,
                # The bound is on the largest load, whose mean is the same in every assignment.
                best_balance=plan.balance * largest / bound if bound else 1.0,
                bytes_sent=float(costs.bytes_sent.double().mean()),
                most_bytes_sent=int(costs.bytes_sent.max()),
                most_flops=largest,
                work_bytes=int(costs.work_bytes.max()),
                buffer_bytes=int(costs.buffer_bytes.max()),
            )
        )
        return costs

    def _add_parts(self, found: RankSet) -> None:
        """Divide a plan's costs among groups and, where asked to, parameters."""
        ranks = list(found.plan.ranks)
        numbers: dict[int, list[int]] = {}
        for number, member in enumerate(found.members):
            numbers.setdefault(id(member.group), []).append(number)
        own = list(numbers.values())
        for first, part in zip(own, parts_of(found.plan, own), strict=True):
            costs = plan_costs(part)
            entry = self._entry(found.members[first[0]].group)
            entry.matrices[ranks] += costs.matrices
            entry.bytes_sent[ranks] += costs.bytes_sent
            entry.flops[ranks] += costs.loads
        if self.per_parameter:
            position = {report.name: i for i, report in enumerate(self.parameters)}
            alone = parts_of(found.plan, [[number] for number in range(len(found.members))])
            for member, part in zip(found.members, alone, strict=True):
                at = position[member.name]
                self.parameters[at] = replace(self.parameters[at], **_figures_of(part))

    def _add_times(self, optimizer: Muon, costs: Sequence[PlanCosts], stage: Stage) -> None:
        weights = [torch.zeros(len(stage.ranks), dtype=torch.float64) for _ in range(2)]
        for group in optimizer.param_groups:
            total = weights[0 if get_algorithm(group["algorithm"]).is_matrix else 1]
            for param in group["params"]:
                total += elements_by_rank(param, stage.ranks)
        seconds = float(elementwise_bytes(*weights).max()) / (self.rates.memory_gbs * 1e9)
        parts = [
            set_seconds(cost.loads, cost.bytes_sent, cost.edge_bytes, self.rates) for cost in costs
        ]
        compute, exchange, both = (sum(part[i] for part in parts) for i in range(3))
        times = Times(*(1e3 * s for s in (compute, exchange, seconds, both + seconds)))
        self._slowest = max(self._slowest, times, key=lambda t: t.total)

    def _group_report(self, group: _Group) -> GroupReport:
        known = self._known
        matrices, sent, flops = (t[known] for t in (group.matrices, group.bytes_sent, group.flops))
        layouts = [LayoutReport(name, *counts) for name, counts in group.layouts.items()]
        return GroupReport(
            algorithm=group.algorithm,
            options=group.options,
            tensors=sum(layout.tensors for layout in layouts),
            parameters=sum(layout.parameters for layout in layouts),
            layouts=layouts,
            matrices=int(matrices.sum()),
            owners=int((matrices > 0).sum()),
            fewest=int(matrices.min()),
            most=int(matrices.max()),
            bytes_sent=float(sent.mean()),
            most_bytes_sent=int(sent.max()),
            flops=float(flops.sum()),
            most_flops=float(flops.max()),
            state_bytes=int(group.state.max()),
        )


def _figures_of(part: Plan) -> dict[str, Any]:
    """Return the fields of a parameter's report that its plan decides on."""
    costs = plan_costs(part)
    sizes = Counter((unit.rows, unit.columns) for unit in part.units)
    return {
        "matrices": len(part.units),
        "sizes": [[count, *size] for size, count in sizes.items()],
        "owners": int((costs.matrices > 0).sum()),
        "stages": sorted({unit.stage for unit in part.units}),
        "bytes_sent": float(costs.bytes_sent.double().mean()),
        "flops": sum(part.loads),
    }


def _layout(param: Tensor) -> str:
    """Spell where a parameter lies: each placement, the mesh axis that it is on, and its size."""
    if not is_dtensor(param):
        return "not distributed"
    mesh: Any = param.device_mesh
    names: Iterable[str] = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
    return ", ".join(
        f"{_placement(placement)} on {name} {size}"
        for placement, name, size in zip(param.placements, names, mesh.shape, strict=True)
    )


def _placement(placement: Any) -> str:
    kind = type(placement).__name__
    if kind == "Replicate":
        return kind
    strided = f", split_factor={placement.split_factor}" if kind == "_StridedShard" else ""
    return f"{kind}({placement.dim}{strided})"
