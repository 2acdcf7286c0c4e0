"""Muon for a whole model: one optimizer, one step, an algorithm for each param group."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_muon.distributed.layout import is_dtensor, layout_of
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.distributed.tensors import local_gradient, local_of
from titan_muon.optim.algorithms import check_options, get_algorithm
from titan_muon.optim.algorithms.base import ElementwiseAlgorithm
from titan_muon.optim.elements import in_chunks
from titan_muon.optim.groups import (
    check_foreach,
    complete_group,
    full_names,
    matrix_rules,
    planned_options,
)
from titan_muon.optim.loading import apply_load, prepare_load
from titan_muon.optim.nonfinite import Guard, check_alike
from titan_muon.optim.observer import Observer
from titan_muon.optim.rounding import Rounding, is_rounded
from titan_muon.optim.state import create_state, saved_groups

if TYPE_CHECKING:
    import torch.distributed as dist

    from titan_muon.optim.matrix_work import MatrixWork

__all__ = ["Muon", "NorMuon"]


class Muon(Optimizer):
    """Muon for matrices and AdamW for the rest, on plain tensors and on DTensors.

    Every param group carries ``algorithm`` (``"muon"``, ``"normuon"``, ``"adamw"``, ``"adam"`` or a
    registered one) and the options of that algorithm. Options given here are the defaults of all
    groups whose algorithm knows them. All state exists from construction.

    Args:
        params: Parameters, named parameters, or param groups, as torch takes them.
        lr: Learning rate, a number or a 0-d tensor; its unit depends on ``adjust_lr_fn`` (spectral
            norm of a step for ``original``, AdamW's for ``match_rms_adamw``).
        weight_decay: Decay factor, multiplied by the plain lr.
        **options: Any option of any registered algorithm; the README has the table.

    Raises:
        ValueError: Unknown algorithm or option, a value out of range, a parameter that a
            Muon-family group cannot take. Names the group or parameter.
        TypeError: A parameter is not of a real float dtype.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/
    """

    algorithm: ClassVar[str] = "muon"
    observer: Observer = Observer()
    """Sees the parts of every step; this one sees nothing and costs nothing."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        **options: Any,
    ) -> None:
        self._given = {"lr": lr, "weight_decay": weight_decay, **options}
        check_options(self.algorithm, self._given, where=type(self).__name__)
        self._guard = Guard()
        self._forget_layouts()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # As torch does with other methods of an optimizer: a compiled region breaks here. The public
    # torch.compiler.disable would import the compiler with this package.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        A matrix without a gradient on every rank that holds it stays as it is; where only some
        ranks lack it, it counts as zero there. AdamW and Adam step the shards that have a gradient:
        whether another rank has one cannot be known without a collective, and none is spent. With
        ``nonfinite="skip"`` a step that meets an inf or NaN on any rank changes nothing on all of
        them.

        Args:
            closure: Evaluates the loss again and returns it; optional.

        Returns:
            What the closure returned.

        Raises:
            FloatingPointError: A gradient is not finite and ``nonfinite="error"``; nothing has
                changed then.

        Collective: all ranks that hold shards call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # First: ranks that disagree find it out here.
        works = self._matrix_works()
        take = self._guard.look(self.param_groups, type(self).__name__)
        works = self.observer.works(works)
        for work in works:
            work.begin(take)
        arriving = works[0].send(0) if works else None
        self._step_elements(take)
        for work in works:
            arriving = arriving if work is works[0] else work.send(0)
            work.advance()
            returning = None
            for stage in work.stages:
                batches = work.receive(stage, arriving)
                # Both directions travel under the arithmetic, each through one pair of buffers.
                arriving = work.send(stage + 1) if stage + 1 in work.stages else None
                work.compute(batches)
                work.land(returning)
                work.write(batches)
                returning = work.send_back(stage, batches)
            work.land(returning)
            work.finish()
        return loss

    def _step_elements(self, take: Tensor | None) -> None:
        for number, group in enumerate(self.param_groups):
            algorithm = get_algorithm(group["algorithm"])
            if not isinstance(algorithm, ElementwiseAlgorithm):
                continue
            params, grads, roundings = [], [], []
            for param, name in zip(group["params"], full_names(number, group), strict=True):
                grad = local_gradient(param, name)
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
                    roundings.append(self._rounding(param, name, group))
            if params:
                step = algorithm.step if take is None else partial(algorithm.step_if, take)
                step = in_chunks(step, roundings, conditional=take is not None)
                step = self.observer.elements(step, params)
                step(
                    [local_of(p) for p in params],
                    grads,
                    [{k: local_of(v) for k, v in self.state[p].items()} for p in params],
                    group,
                )

    def _rounding(self, param: Tensor, name: str, group: dict[str, Any]) -> Rounding | None:
        if not is_rounded(param, group):
            return None
        if id(param) not in self._roundings:
            self._roundings[id(param)] = Rounding(param, name, group["rounding_seed"])
        return self._roundings[id(param)]

    @property
    def skipped_steps(self) -> int:
        """Steps that ``nonfinite="skip"`` skipped since this optimizer was built.

        Reading it makes the host wait for the device. It is no part of a state dict.
        """
        return self._guard.skipped_steps

    @property
    def taken(self) -> Tensor | None:
        """0-d float32, 0 where the last step was skipped; None where none can be."""
        return self._guard.taken

    def agree_over(self, group: "dist.ProcessGroup | None") -> None:
        """Name the ranks that skip a step, or raise, together.

        By default these are the ranks that hold shards of this optimizer's parameters. Pipeline
        stages, each with an optimizer of its own, name the ranks of all stages.

        Args:
            group: Process group of these ranks; None for this rank alone.
        """
        self._guard.agree_over(group)

    def rank_sets(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks that exchange matrices, each ascending; see ``create_groups``.

        Before the first step, ranks that do not all hold parameters of the same meshes (pipeline
        stages without torchtitan) pass them to
        :func:`titan_muon.distributed.groups.create_groups`.
        """
        params = [p for g in self.param_groups for p in g["params"] if id(p) in self._rules]
        sets = {tuple(sorted(layout_of(p).ranks)) for p in params if is_dtensor(p)}
        return sorted(sets)

    def _matrix_works(self) -> "list[MatrixWork]":
        """Return the plan and exchange of every set of ranks, made once, with today's state."""
        groups = self.param_groups
        if self._works is None or not _are(groups, self._planned):
            # Planner and exchange are a third of the package's import time.
            from titan_muon.optim.matrix_work import matrix_works

            self._works = matrix_works(groups, self.state, self._rules)
            self._planned = list(groups)
        for work in self._works:
            work.take_states()
        return self._works

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, complete it with its algorithm's options, and create its state.

        Args:
            param_group: ``params`` and any options; ``algorithm`` defaults to the class' own.

        Raises:
            ValueError, TypeError: As the constructor; the group is not added then.
        """
        where = f"{type(self).__name__}: param group {len(self.param_groups)}"
        super().add_param_group(complete_group(param_group, self.algorithm, self._given, where))
        group = self.param_groups[-1]
        params = group["params"]
        try:
            check_alike(self.param_groups, type(self).__name__)
            check_foreach(group, where)
            rules = matrix_rules(group, where)
            states = [create_state(p, group, r) for p, r in zip(params, rules, strict=True)]
        except BaseException:
            self.param_groups.pop()
            raise
        self._keep_rules(params, rules)
        self._works = None
        self._guard.forget_ranks()
        self.state.update(zip(params, states, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; groups hold only the options that change the mathematics."""
        result = super().state_dict()
        result["param_groups"] = saved_groups(result["param_groups"])
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict: its tensors into the live ones, its options over the live ones.

        The state dict wins, its algorithms included; options that it does not hold stay. State
        keeps the dtype this optimizer was built with. Everything is checked first, so a state dict
        that does not fit leaves the optimizer as it was.

        Args:
            state_dict: Result of :meth:`state_dict`. Not modified.

        Raises:
            ValueError: Groups, keys, shapes or placements differ, or an option is out of range;
                names them.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        where = type(self).__name__
        loads = prepare_load(self.param_groups, self.state, state_dict, self._given, where)
        before = [planned_options(group) for group in self.param_groups]
        for load in loads:
            apply_load(load, self.state)
        if before != [planned_options(group) for group in self.param_groups]:
            self._forget_layouts()
        for load in loads:
            self._keep_rules(load.group["params"], load.rules)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and copy keep; layouts are found again."""
        return {**super().__getstate__(), "_given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied optimizer."""
        super().__setstate__(state)
        self._guard = Guard()
        self._forget_layouts()
        for index, group in enumerate(self.param_groups):
            rules = matrix_rules(group, f"{type(self).__name__}: param group {index}")
            self._keep_rules(group["params"], rules)

    def _keep_rules(self, params: list[Tensor], rules: Sequence[MatrixRule | None]) -> None:
        self._rules.update({id(p): r for p, r in zip(params, rules, strict=True) if r})

    def _forget_layouts(self) -> None:
        self._rules: dict[int, MatrixRule] = {}
        self._roundings: dict[int, Rounding] = {}
        self._works: list[MatrixWork] | None = None
        self._planned: list[dict[str, Any]] = []


def _are(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class NorMuon(Muon):
    """Muon whose rows are normalised by a running second moment.

    Takes the arguments of :class:`Muon`; groups without ``algorithm`` are NorMuon.

    Source: NorMuon, https://arxiv.org/abs/2510.05491
    """

    algorithm = "normuon"
