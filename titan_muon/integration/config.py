"""The typed optimizer config: what ``[optimizer]`` and ``--optimizer.*`` may say."""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_muon.distributed.matrices import parse_split
from titan_muon.optim.algorithms import Algorithm, check_options, get_algorithm
from titan_muon.optim.crossing import MOMENTUM_SOURCES, MomentumSource
from titan_muon.optim.options import QUANTIZED
from titan_muon.orthogonalization import resolve_schedule

__all__ = ["AS_ROUTED", "AdamWConfig", "OptimizerConfig", "import_algorithms"]

# The name of an entry of param_groups that leaves every parameter where it is routed to.
AS_ROUTED = ""

# What the unrouted parameters take from the main options where [optimizer.adamw] is silent.
INHERITED = (
    "lr",
    "weight_decay",
    "maximize",
    "nonfinite",
    "stochastic_rounding",
    "rounding_seed",
)

_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
    "fused_opt_states_bf16": {"fused": True, "foreach": False, "state_dtype": "bfloat16"},
}

_NAME_OR_TRIPLES = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME|[[A,B,C],...]",
    instance_from_str=lambda args: json.loads(args[0]) if args[0].startswith("[") else args[0],
    is_instance=lambda value: value is None or isinstance(value, str | list),
    str_from_instance=lambda value: [value if isinstance(value, str) else json.dumps(value)],
)


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """Options of the parameters that do not go to the Muon family; None inherits or defaults."""

    lr: float | None = None
    """Learning rate; by default that of the matrices"""

    weight_decay: float | None = None
    """Decay, multiplied by the plain lr; by default that of the matrices"""

    betas: tuple[float, float] | None = None
    """EMA factors of both moments; 0.9 0.95 by default"""

    eps: float | None = None
    """Added to the root of the second moment; 1e-8 by default"""

    state_dtype: str | None = None
    """auto, float32, bfloat16, int8, int4 or float8"""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig(OptimizersContainer.Config):
    """An algorithm by name and its options; None means the algorithm's default."""

    param_groups: Annotated[list[ParamGroupConfig], tyro.conf.Suppress] = field(
        default_factory=list
    )
    """Exceptions to the default routing, first match wins; [[optimizer.param_groups]] in TOML"""

    optimizer_factory_kwargs_by_name: Annotated[dict[str, dict[str, Any]], tyro.conf.Suppress] = (
        field(default_factory=dict)
    )
    """torchtitan's own; must stay empty here"""

    name: str = "Muon"
    """Algorithm of the hidden matrices: Muon, NorMuon, AdaMuon, Aurora, AdamW, Adam or a registered
    one"""

    lr: float | None = None
    """Learning rate"""

    weight_decay: float | None = None
    """Decay, multiplied by the plain lr"""

    cautious_weight_decay: bool | None = None
    """Decay only where update and weight agree in sign"""

    momentum: float | None = None
    """EMA factor of the gradient"""

    nesterov: bool | None = None
    """Look ahead by one EMA step"""

    ns_method: Annotated[Any, _NAME_OR_TRIPLES] = None
    """Polynomial schedule: polar_express, newton_schulz, ... or a list of (a, b, c) triples"""

    ns_steps: int | None = None
    """Number of iterations, in the schedule's range"""

    ns_dtype: str | None = None
    """Dtype of the iteration: auto, float16, bfloat16, float32 or float64"""

    adjust_lr_fn: str | None = None
    """How a matrix's shape scales its lr: original, match_rms_adamw (one lr serves both kinds of
    group), spectral_unclamped, match_param_rms or none"""

    beta2: float | None = None
    """NorMuon, AdaMuon: EMA factor of the update's second moment"""

    pp_iterations: int | None = None
    """Aurora: orthogonalizations by which a tall matrix is balanced"""

    pp_beta: float | None = None
    """Aurora: exponent of each balancing of rows, in (0, 1]"""

    flatten: bool | None = None
    """Take a tensor as one matrix (dim 0, all others): convolutions"""

    split: Annotated[Any, tyro.conf.Suppress] = None
    """Rows of a fused weight that are matrices of their own: row counts, or a table with kind"""

    betas: tuple[float, float] | None = None
    """AdamW, Adam: EMA factors of both moments"""

    eps: float | None = None
    """AdamW, Adam: added to the root of the second moment"""

    maximize: bool | None = None
    """Ascend instead of descend"""

    nonfinite: str | None = None
    """What an inf or NaN in a gradient does: propagate, skip (the whole step, on all ranks) or
    error"""

    state_dtype: str | None = None
    """Dtype of the state: auto, float32, bfloat16, int8, int4 or float8"""

    stochastic_rounding: bool | None = None
    """Round bfloat16 weights up or down at random, each as often as it is near"""

    rounding_seed: int | None = None
    """Seed of stochastic_rounding"""

    wire_dtype: str | None = None
    """Dtype of what ranks send each other: float16 (scaled by block), bfloat16 or float32"""

    max_stage_bytes: int | None = None
    """Bound on the work buffers of one stage of the step"""

    batch_size: int | None = None
    """Most matrices in one launch; 1 is the per-matrix reference loop"""

    split_fused: bool = True
    """Orthogonalize q, k, v of a fused wqkv and gate, up of fused experts each on its own"""

    momentum_from: MomentumSource = "zeros"
    """Where a matrix' momentum starts if the checkpoint holds AdamW's state: zeros or exp_avg"""

    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    """What the unrouted parameters get"""

    qk_clip_threshold: float | None = None
    """MuonClip: shrink query and key weights of heads whose largest attention logit exceeds this"""

    imports: list[str] = field(default_factory=list)
    """Modules to import first: they register algorithms"""

    options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Options of a registered algorithm that have no field here; [optimizer.options] in TOML"""

    def matrix_spec(self) -> tuple[str, dict[str, Any]]:
        """Return the algorithm of the routed matrices and its explicitly set options."""
        algorithm = get_algorithm(self.name)
        return algorithm.name, _known_to(algorithm, {**self._kernels(algorithm), **self.given()})

    def rest_spec(self) -> tuple[str, dict[str, Any]]:
        """Return the algorithm of all other parameters and its explicitly set options."""
        algorithm = get_algorithm(self.name)
        inherited = self.given()
        if algorithm.is_matrix:
            algorithm = get_algorithm("adamw")
            inherited = {key: inherited[key] for key in INHERITED if key in inherited}
        values = {**self._kernels(algorithm), **inherited, **_set_values(self.adamw)}
        return algorithm.name, _known_to(algorithm, values)

    def group_specs(self) -> list[tuple[str, str | None, dict[str, Any]]]:
        """Return pattern, algorithm and options of each entry of ``param_groups``, in order.

        A group starts from the options that its algorithm has anyway: those of the matrices for
        their algorithm and others of its family, those of the rest otherwise. Without an algorithm
        there are only the options that differ from these.
        """
        specs: list[tuple[str, str | None, dict[str, Any]]] = []
        for group in self.param_groups:
            if group.optimizer_name == AS_ROUTED:
                specs.append((group.pattern, None, dict(group.optimizer_kwargs)))
                continue
            algorithm = get_algorithm(group.optimizer_name)
            if algorithm.is_matrix or algorithm.name == get_algorithm(self.name).name:
                base = self.given()
            else:
                base = self.rest_spec()[1]
            values = {**self._kernels(algorithm), **_known_to(algorithm, base)}
            specs.append((group.pattern, algorithm.name, {**values, **group.optimizer_kwargs}))
        return specs

    def given(self) -> dict[str, Any]:
        """Return the main options that are set, by name; those under ``options`` included."""
        own = {key: value for key, value in _set_values(self).items() if key in _OPTION_FIELDS}
        return {**own, **self.options}

    def ignored_options(self) -> list[str]:
        """Return the set main options that no group of this config uses, sorted."""
        used = set(get_algorithm(self.name).options)
        for group in self.param_groups:
            used |= set(get_algorithm(group.optimizer_name or self.name).options)
        return sorted(set(self.given()) - used)

    def check(self, where: str = "optimizer") -> None:
        """Import what ``imports`` names, then refuse whatever cannot run.

        Args:
            where: Start of the message, for example a file and its table.

        Raises:
            ValueError: An unknown algorithm or option, a value that is not allowed, a pattern that
                is not a regular expression, a module that cannot be imported.
        """
        import_algorithms(self.imports, where=_inside(where, "imports"))
        algorithm = _algorithm(self.name, where=_inside(where, "name"))
        check_options(algorithm.name, self.given(), where=where)
        _check_schedule(_known_to(algorithm, self.given()), where=where)
        _check_split(self.given(), where=where)
        threshold = self.qk_clip_threshold
        if threshold is not None and not 0 < threshold < math.inf:
            raise ValueError(
                f"{where}: qk_clip_threshold = {threshold} must be a number above 0; leave it out "
                "to clip nothing."
            )
        rest = self.rest_spec()[0]
        check_options(rest, _set_values(self.adamw), where=_inside(where, "adamw"))
        if self.momentum_from not in MOMENTUM_SOURCES:
            raise ValueError(
                f"{where}: momentum_from = {self.momentum_from!r} is not allowed; use one of "
                f"{', '.join(map(repr, MOMENTUM_SOURCES))}."
            )
        if self.optimizer_factory_kwargs_by_name:
            raise ValueError(
                f"{where}: optimizer_factory_kwargs_by_name belongs to torchtitan's own DistMuon; "
                f"{algorithm.title} needs none. Leave it out."
            )
        for index, group in enumerate(self.param_groups):
            self._check_group(group, _inside(where, f"param_groups.{index}"))
        self._check_torchao(where)

    def _check_torchao(self, where: str) -> None:
        """Refuse quantised state here where it cannot be had, before any model is built."""
        groups = [self.matrix_spec()[1], self.rest_spec()[1], *(s[2] for s in self.group_specs())]
        wanted = [o["state_dtype"] for o in groups if o.get("state_dtype") in QUANTIZED]
        if wanted and importlib.util.find_spec("torchao") is None:
            raise ValueError(
                f"{where}: state_dtype = {wanted[0]!r} needs torchao: pip install torchao, or use "
                "'bfloat16'."
            )

    def _check_group(self, group: ParamGroupConfig, where: str) -> None:
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ValueError(
                f"{where}: pattern = {group.pattern!r} is not a regular expression: {error}."
            ) from None
        name = group.optimizer_name or self.name
        algorithm = _algorithm(name, where=_inside(where, "name"))
        check_options(algorithm.name, group.optimizer_kwargs, where=where)
        nonfinite = group.optimizer_kwargs.get("nonfinite")
        if nonfinite not in (None, self.nonfinite or "propagate"):
            raise ValueError(
                f"{where}: nonfinite = {nonfinite!r}: a step is taken or skipped as a whole; say "
                "it once, beside the optimizer's name."
            )
        schedule_of = {**_known_to(algorithm, self.given()), **group.optimizer_kwargs}
        _check_schedule(schedule_of, where=where)
        _check_split(group.optimizer_kwargs, where=where)

    def _kernels(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return what ``implementation`` says to an algorithm that runs torch's own kernels."""
        if "fused" not in algorithm.options:
            return {}
        return _IMPLEMENTATIONS[self.implementation]


_OPTION_FIELDS = frozenset(f.name for f in dataclasses.fields(OptimizerConfig)) - {
    *(f.name for f in dataclasses.fields(OptimizersContainer.Config)),
    "name",
    "split_fused",
    "momentum_from",
    "adamw",
    "imports",
    "options",
    "qk_clip_threshold",
}


def import_algorithms(modules: list[str], *, where: str) -> None:
    """Import modules for the algorithms that they register.

    Raises:
        ValueError: A module cannot be imported; says why.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # Only where the module itself is not found; what it imports is its own business.
            hint = missing is not None and f"{name}.".startswith(f"{missing}.")
            raise ValueError(
                f"{where}: importing {name!r} failed: {type(error).__name__}: {error}"
                + "; install it, start in its folder or put that folder on PYTHONPATH." * hint
            ) from error


def _algorithm(name: str, *, where: str) -> Algorithm:
    try:
        return get_algorithm(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_schedule(options: Mapping[str, Any], *, where: str) -> None:
    """Refuse a step count outside the range of its schedule; each alone may be fine."""
    if "ns_method" not in options and "ns_steps" not in options:
        return
    defaults = get_algorithm("muon").options
    values = {key: options.get(key, defaults[key].default) for key in ("ns_method", "ns_steps")}
    try:
        resolve_schedule(values["ns_method"], values["ns_steps"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _check_split(options: Mapping[str, Any], *, where: str) -> None:
    """Refuse a split whose kind or numbers are wrong for every matrix."""
    if options.get("split") is not None:
        parse_split(options["split"], where)


def _inside(where: str, name: str) -> str:
    """Return the place of something inside a place: ``[optimizer]``, ``[optimizer.adamw]``."""
    return f"{where[:-1]}.{name}]" if where.endswith("]") else f"{where}.{name}"


def _set_values(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def _known_to(algorithm: Algorithm, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in algorithm.options}
