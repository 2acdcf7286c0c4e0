"""What the mesh tests measure: given gradients and trained steps on a torchtitan model's layout."""

import contextlib
import hashlib
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from titan_muon.distributed.packets import route
from titan_muon.distributed.plan import Plan
from titan_muon.integration.toml_optimizer import optimizer_config
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm

# Wide enough that an update is as large as the weights: its rounding error does not count then.
GIVEN_LR = 0.1
GIVEN_STEPS = 2
TRAINED_LR = 2e-2
TRAINED_STEPS = 3

Whole = dict[str, Tensor]


@dataclass
class Outcome:
    """What one run leaves behind, whole tensors by name.

    Args:
        moved: Change of each parameter.
        state: ``name/key`` of each state tensor.
        losses: Global loss of each trained step.
    """

    moved: Whole
    state: Whole = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


@dataclass
class Wire:
    """Counts what optimizers really send, and loses packets where asked to.

    Args:
        loses_packets: Send zeros instead of this rank's bytes.
    """

    loses_packets: bool = False
    bytes_sent: int = 0
    collectives: int = 0
    _kept: list[Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self, optimizer: Muon) -> Generator[None]:
        """Stand between the optimizer and ``all_to_all_single`` while it steps."""
        step = optimizer.step
        # A method, since LR schedulers wrap it once more.
        vars(optimizer)["step"] = types.MethodType(self._watched(step), optimizer)
        try:
            yield
        finally:
            vars(optimizer)["step"] = step

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(optimizer: Muon, *args: Any, **kwargs: Any) -> Any:
            original = dist.all_to_all_single
            vars(dist)["all_to_all_single"] = self._sender(original)
            try:
                return step(*args, **kwargs)
            finally:
                vars(dist)["all_to_all_single"] = original
                self._kept.clear()

        return watched

    def _sender(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(
            output: Tensor,
            sent: Tensor,
            output_sizes: list[int],
            sent_sizes: list[int],
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            own = sent_sizes[dist.get_rank(group)]
            self.bytes_sent += (sum(sent_sizes) - own) * sent.element_size()
            self.collectives += 1
            if self.loses_packets:
                sent = torch.zeros_like(sent)
                self._kept.append(sent)
            return original(output, sent, output_sizes, sent_sizes, group, async_op)

        return send


def draw(name: str, shape: Iterable[int], scale: float) -> Tensor:
    """Return normal numbers that depend on the name and the shape only."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator) * scale


def parameters_of(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: p for part in parts for name, p in part.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor by torch's own gather; collective for a DTensor."""
    tensor = tensor.detach()
    # Where nothing is sharded, full_tensor() returns the live tensor itself.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Lay a whole tensor out as a parameter is, by torch's own arithmetic."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def give_steps(
    parts: list[nn.Module], algorithm: str, wire_dtype: str | None, fault: str | None = None
) -> tuple[Outcome, Any, Wire]:
    """Step twice from given weights with given gradients, both a function of the name.

    Args:
        parts: Model parts of this rank; their weights are overwritten.
        algorithm: Muon or NorMuon.
        wire_dtype: None for the default.
        fault: See :func:`broken`.

    Returns:
        The outcome, the optimizer container, and the wire.
    """
    parameters = parameters_of(parts)
    for name, parameter in parameters.items():
        start = draw(f"weight {name}", parameter.shape, 0.02)
        local(parameter).copy_(local(like(parameter, start)))
    container = _optimizer(algorithm, GIVEN_LR, wire_dtype).build(model_parts=parts)
    wire = Wire(loses_packets=fault == "packet" and dist.get_rank() == 1)
    with wire.watch(container.optimizers[0]), broken(container.optimizers[0], fault):
        for step in range(GIVEN_STEPS):
            for name, parameter in parameters.items():
                # Gradients of other sizes, as in a model; each step has its own.
                grad = draw(f"gradient {step} {name}", parameter.shape, 1e-3)
                parameter.grad = like(parameter, grad)
            container.step()
    container.zero_grad()
    moved = {}
    for name, parameter in parameters.items():
        moved[name] = whole(parameter) - draw(f"weight {name}", parameter.shape, 0.02)
    return Outcome(moved, state_of(container.optimizers[0])), container, wire


def train_steps(
    trainer: Any,
    start: Mapping[str, Tensor],
    algorithm: str,
    wire_dtype: str | None,
    fault: str | None = None,
) -> Outcome:
    """Train three steps from the Trainer's initial weights with a new optimizer.

    Args:
        trainer: Its weights, buffers and data start anew.
        start: Result of :func:`snapshot`, from right after the Trainer was built.
        algorithm: Muon or NorMuon.
        wire_dtype: None for the default.
        fault: See :func:`broken`.
    """
    restore(trainer.model_parts, start)
    config = trainer.config
    optimizer = _optimizer(algorithm, TRAINED_LR, wire_dtype)
    optimizers = optimizer.build(model_parts=trainer.model_parts)
    hook = config.model_spec.post_optimizer_build_fn
    if hook is not None:
        hook(optimizers, trainer.model_parts, trainer.parallel_dims)
    trainer.optimizers = trainer.metrics_processor.optimizers = optimizers
    parameters = parameters_of(trainer.model_parts)
    before = {name: whole(parameter) for name, parameter in parameters.items()}
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    trainer.dataloader.load_state_dict({})
    batches = trainer.batch_generator(trainer.dataloader)
    wire = Wire(loses_packets=fault == "packet" and dist.get_rank() == 1)
    with wire.watch(optimizers.optimizers[0]), broken(optimizers.optimizers[0], fault):
        trainer.lr_schedulers = config.lr_scheduler.build(
            optimizers=optimizers, training_steps=config.training.steps
        )
        for step in range(1, TRAINED_STEPS + 1):
            trainer.step = step
            trainer.train_step(batches)
    # Under pipeline parallelism only the last stage knows the loss; others say -1.
    figures = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    moved = {name: whole(p) - before[name] for name, p in parameters.items()}
    return Outcome(moved, losses=figures.tolist())


def _optimizer(algorithm: str, lr: float, wire_dtype: str | None) -> Any:
    options = {} if wire_dtype is None else {"wire_dtype": wire_dtype}
    return optimizer_config(algorithm, lr=lr, **options)


@contextlib.contextmanager
def broken(optimizer: Muon, fault: str | None) -> Generator[None]:
    """Break the optimizer for a while.

    Args:
        optimizer: Steps inside the context.
        fault: ``"shard"``: rank 1's shards of all directions are zero; ``"packet"`` is the wire's
            to break; None breaks nothing.
    """
    if fault != "shard" or dist.get_rank() != 1:
        yield
        return

    def drop(optimizer: Muon, *_: Any) -> None:
        for group in optimizer.param_groups:
            if get_algorithm(group["algorithm"]).is_matrix:
                for parameter in group["params"]:
                    local(parameter.grad).zero_()

    handle = optimizer.register_step_pre_hook(drop)
    try:
        yield
    finally:
        handle.remove()


def snapshot(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers."""
    return {
        name: local(tensor).clone()
        for part in parts
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]
    }


def restore(parts: Iterable[nn.Module], start: Mapping[str, Tensor]) -> None:
    for part in parts:
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            local(tensor).copy_(start[name])


def local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(optimizer: Muon) -> Whole:
    return {
        f"{name}/{key}": whole(value)
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state[param].items()
    }


def deviation(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative Frobenius distance of each tensor of this rank from one process'."""
    distances = {}
    for name, value in got.items():
        size = expected[name].norm().item()
        distance = (value - expected[name]).norm().item()
        distances[name] = distance / size if size else float(distance > 0)
    return distances


def differing_replicas(tensors: Mapping[str, Tensor]) -> int:
    """Count the mesh axes on which some replicated shard differs in a bit from another rank's."""
    by_axis: dict[tuple[Any, int], list[Tensor]] = {}
    for tensor in tensors.values():
        if not isinstance(tensor, DTensor):
            continue
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
                flat = local(tensor).contiguous().view(-1).view(torch.uint8)
                by_axis.setdefault((tensor.device_mesh, axis), []).append(flat)
    differing = 0
    for (mesh, axis), shards in by_axis.items():
        mine = torch.cat(shards)
        all_of_them = [torch.empty_like(mine) for _ in range(mesh.size(axis))]
        dist.all_gather(all_of_them, mine, group=mesh.get_group(axis))
        differing += any(not torch.equal(mine, other) for other in all_of_them)
    return differing


def predicted(plan: Plan, rank: int) -> tuple[int, int, int]:
    """Return bytes sent, collectives and matrices computed by a rank in a step, from the plan."""
    bytes_sent = collectives = 0
    own = plan.ranks.index(rank)
    for stage in range(plan.stages):
        if not any(unit.travels for unit in plan.units if unit.stage == stage):
            continue
        for direction in route(plan, rank, stage):
            bytes_sent += sum(direction.send_bytes) - direction.send_bytes[own]
            collectives += 1
    return bytes_sent, collectives, sum(unit.owner == rank for unit in plan.units)
