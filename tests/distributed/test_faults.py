"""Missing gradients, few matrices, late groups, and plans that differ between ranks."""

import time
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.distributed.test_exactness import ThreadRanks
from tests.helpers.thread_ranks import ROW, deviation, differing_replicas, like, shard
from titan_muon import Muon, NorMuon
from titan_muon.distributed.tensors import local_of
from titan_muon.optim import matrix_work

EXACT = {"wire_dtype": "float32", "lr": 0.05}
# Only batched products may add in another order.
TOLERANCE = 1e-5
SHARD = (Shard(0),)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _bits(params: list[nn.Parameter], optimizer: Muon) -> list[Tensor]:
    state = [v for p in params for v in optimizer.state[p].values()]
    return [local_of(t.detach()).clone() for t in [*params, *state]]


class TestMissingGradients(ThreadRanks):
    def _params(self, placements=SHARD, mesh_shape=(4,), count=3) -> list[nn.Parameter]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return [nn.Parameter(shard(_draw(12, 8, seed=s), mesh, placements)) for s in range(count)]

    def _step(self, params: list[nn.Parameter], optimizer: Muon, seed: int, missing=()) -> None:
        for index, param in enumerate(params):
            grad = like(param, _draw(12, 8, seed=100 * seed + index))
            param.grad = None if index in missing else grad
        optimizer.step()

    def test_missing_on_one_rank_counts_as_zero_there(self):
        for cls in (Muon, NorMuon):
            for placements, mesh_shape in (((Shard(0),), (4,)), (ROW, (2, 2))):
                params = self._params(placements, mesh_shape)
                optimizer = cls(params, **EXACT)
                plain = [nn.Parameter(_draw(12, 8, seed=s)) for s in range(3)]
                reference = cls(plain, **EXACT)
                for seed in (1, 2):
                    self._step(params, optimizer, seed, missing=(1,) if self.rank == 2 else ())
                    for index, other in enumerate(plain):
                        grad = _draw(12, 8, seed=100 * seed + index)
                        if index == 1:
                            if placements == ROW:
                                grad[6:, :4] = 0
                            else:
                                grad[6:9] = 0
                        other.grad = grad
                    reference.step()
                for s, (param, want) in enumerate(zip(params, plain, strict=True)):
                    moved = want.detach() - _draw(12, 8, seed=s)
                    assert deviation(param, want.detach(), moved) <= TOLERANCE
                    for key, value in optimizer.state[param].items():
                        whole = reference.state[want][key]
                        assert deviation(value, whole, whole) <= TOLERANCE, key

    def test_missing_on_all_ranks_touches_nothing(self):
        for placements, shape in (((Shard(0),), (4,)), ((Replicate(), Shard(0)), (2, 2))):
            params = self._params(placements, shape)
            optimizer = NorMuon(params, **EXACT)
            self._step(params, optimizer, 1)
            before = _bits(params[1:2], optimizer)
            others = _bits(params[:1], optimizer)
            self._step(params, optimizer, 2, missing=(1,))
            after = _bits(params[1:2], optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            changed = [
                torch.equal(a, b) for a, b in zip(others, _bits(params[:1], optimizer), strict=True)
            ]
            assert not any(changed)

    def test_no_gradient_at_all_and_frozen(self):
        params = self._params()
        params[2].requires_grad_(False)
        optimizer = NorMuon(params, **EXACT)
        before = _bits(params, optimizer)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, _bits(params, optimizer), strict=True))

    def test_replicas_stay_equal_when_one_lacks_the_gradient(self):
        for lacking in ((0,), (0, 1), (2, 3), (3,)):
            for placements, shape in (
                ((Replicate(), Shard(0)), (2, 2)),
                ((Replicate(),), (4,)),
                ((Shard(0), Replicate()), (2, 2)),
            ):
                params = self._params(placements, shape)
                optimizer = NorMuon(params, **EXACT)
                for seed in (1, 2, 3):
                    # With a history first: without one the update is zero whoever computes it.
                    missing = (1,) if seed > 1 and self.rank in lacking else ()
                    self._step(params, optimizer, seed, missing=missing)
                assert differing_replicas(params) == [], (lacking, placements)
                second = [optimizer.state[p]["second_moment_buffer"] for p in params]
                assert differing_replicas(second) == [], (lacking, placements)

    def test_elementwise_parameters_step_where_the_gradient_is(self):
        # Whether another rank has it cannot be known without a collective, and none is spent.
        mesh = init_device_mesh("cpu", (4,))
        param = nn.Parameter(shard(_draw(8, 4), mesh, [Shard(0)]))
        optimizer = Muon([{"params": [param], "algorithm": "adamw"}], lr=0.1)
        param.grad = None if self.rank == 2 else like(param, _draw(8, 4, seed=1))
        optimizer.step()
        assert optimizer.state[param]["step"].item() == float(self.rank != 2)
        moved = not torch.equal(local_of(param.detach()), local_of(like(param, _draw(8, 4))))
        assert moved == (self.rank != 2)


class TestFewMatrices(ThreadRanks):
    def test_no_matrices(self):
        mesh = init_device_mesh("cpu", (4,))
        bias = nn.Parameter(shard(_draw(8), mesh, [Shard(0)]))
        empty = nn.Parameter(shard(torch.zeros(0, 4), mesh, [Shard(0)]))
        optimizer = Muon([{"params": [bias], "algorithm": "adamw"}, {"params": [empty]}])
        bias.grad, empty.grad = like(bias, _draw(8)), like(empty, torch.zeros(0, 4))
        optimizer.step()
        Muon([{"params": [], "algorithm": "muon"}]).step()

    def test_fewer_matrices_than_ranks_and_groups_added_later(self):
        mesh = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(shard(_draw(9, 5, seed=s), mesh, [Shard(0)])) for s in range(2)]
        plain = [nn.Parameter(_draw(9, 5, seed=s)) for s in range(2)]
        optimizer, reference = Muon(params[:1], **EXACT), Muon(plain[:1], **EXACT)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": params[1:], "algorithm": "normuon"})
                reference.add_param_group({"params": plain[1:], "algorithm": "normuon"})
            for index, (param, other) in enumerate(zip(params, plain, strict=True)):
                grad = _draw(9, 5, seed=10 * step + index)
                param.grad, other.grad = like(param, grad), grad
            optimizer.step()
            reference.step()
        for s, (param, want) in enumerate(zip(params, plain, strict=True)):
            moved = want.detach() - _draw(9, 5, seed=s)
            assert deviation(param, want.detach(), moved) <= TOLERANCE

    def test_plan_is_made_once(self):
        mesh = init_device_mesh("cpu", (4,))
        param = nn.Parameter(shard(_draw(9, 5), mesh, [Shard(0)]))
        optimizer = Muon([param])
        with mock.patch.object(matrix_work, "make_plan", side_effect=matrix_work.make_plan) as made:
            for _ in range(3):
                param.grad = like(param, _draw(9, 5))
                optimizer.step()
        # The four ranks share the patched module.
        assert made.call_count <= self.world_size


class TestRefusals(ThreadRanks):
    def _refused(self, params: list[nn.Parameter], **group) -> str:
        optimizer = Muon([{"params": params, **group}])
        for param in params:
            param.grad = like(param, torch.ones(param.shape))
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        # Agreement is two small all-reduces; a hang would end in the group's timeout.
        assert time.monotonic() - start < 20
        return str(error.value)

    def test_ranks_with_other_parameters_get_one_error(self):
        mesh = init_device_mesh("cpu", (4,))
        odd = self.rank == 2
        shapes = {
            "is": [(8, 6), (8, 12) if odd else (12, 8)],
            "has 1": [(8, 6)] * (1 if odd else 2),
        }
        for text, sizes in shapes.items():
            params = [nn.Parameter(shard(torch.ones(s), mesh, [Shard(0)])) for s in sizes]
            message = self._refused(params)
            assert "ranks disagree on the Muon parameters" in message
            assert text in message
            assert "rank 2" in message

    def test_ranks_with_other_options_get_one_error(self):
        mesh = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(shard(torch.ones(8, 6), mesh, [Shard(0)]))]
        one = self.rank == 1
        # With nonfinite one rank would reduce a number that the others do not ask for.
        for option, values in {"ns_steps": (5, 4), "nonfinite": ("propagate", "skip")}.items():
            message = self._refused(params, **{option: values[one]})
            said = f"{option} = {values[0]!r} on rank 0 and {values[1]!r} on rank 1"
            assert said in message

    def test_partial_is_refused_by_name(self):
        mesh = init_device_mesh("cpu", (4,))
        local = torch.ones(8, 6)
        partial = nn.Parameter(DTensor.from_local(local, mesh, [Partial()], run_check=False))
        with pytest.raises(NotImplementedError, match=r"w\.partial.*Partial"):
            Muon([("w.partial", partial)]).step()
        param = nn.Parameter(shard(torch.ones(8, 6), mesh, [Shard(0)]))
        optimizer = Muon([("w.weight", param)])
        param.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        with pytest.raises(NotImplementedError, match=r"w\.weight.*Partial"):
            optimizer.step()


class TestSchedule(ThreadRanks):
    def test_next_exchange_starts_before_the_arithmetic_of_this_stage(self):
        mesh = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(shard(_draw(8, 4, seed=s), mesh, [Shard(0)])) for s in range(16)]
        optimizer = Muon(params)
        for param in params:
            param.grad = like(param, _draw(8, 4))
        optimizer.step()
        (work,) = optimizer._works
        events: list[tuple[str, int]] = []

        def traced(name, function, stage_of):
            def call(*args, **kwargs):
                events.append((name, stage_of(*args)))
                return function(*args, **kwargs)

            return call

        last = [0]
        momenta = [work.members[unit.param].momentum for unit in work.plan.units]
        before = [momentum.clone() for momentum in momenta]
        advanced: list[bool] = []

        def advance(advance=work.advance):
            advanced.extend(not m.equal(b) for m, b in zip(momenta, before, strict=True))
            events.append(("advance", 0))
            advance()

        work.advance = advance
        work.receive = traced("arrive", work.receive, lambda s, m: last.__setitem__(0, s) or s)
        work.compute = traced("compute", work.compute, lambda b: last[0])
        work.land = traced("land", work.land, lambda m: -1 if m is None else m.stage)
        start = work.exchange.start
        work.exchange.start = lambda stage, tables, direction: (
            events.append((direction, stage)) or start(stage, tables, direction)
        )
        optimizer.step()
        when = {event: position for position, event in enumerate(events)}
        stages = work.plan.stages
        assert stages == 4
        # Only the momentum of what leaves first is waited for; the rest advances meanwhile.
        assert advanced == [unit.stage == 0 for unit in work.plan.units]
        assert when["there", 0] < when["advance", 0] < when["arrive", 0]
        for stage in range(stages - 1):
            # Under way before this stage is computed, and no earlier than its buffers are free.
            assert when["arrive", stage] < when["there", stage + 1] < when["compute", stage]
            # Updates of a stage travel back under the arithmetic of the next.
            assert when["back", stage] < when["compute", stage + 1] < when["land", stage]
            assert when["land", stage] < when["back", stage + 1]
        assert when["land", stages - 1] > when["back", stages - 1]
