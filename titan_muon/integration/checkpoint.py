"""torchtitan's CheckpointManager, able to load what another algorithm wrote, and plain in errors.

Everything is decided from the checkpoint's metadata before a byte of live state is touched.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torchtitan.components.checkpoint import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from titan_muon.integration.config_class import as_class
from titan_muon.integration.optimizers_container import MuonOptimizersContainer
from titan_muon.optim.crossing import MomentumSource, StateTensor, choose_sources
from titan_muon.optim.load_planner import StateLoadPlanner

__all__ = ["CrossingPlanner", "MuonCheckpointManager", "with_crossing"]

_STATE, _GROUPS = f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
_METADATA = ".metadata"


class CrossingPlanner(StateLoadPlanner):
    """A load plan that lets optimizer state cross between algorithms and between options.

    Args:
        momentum_from: Where a matrix' momentum starts if the checkpoint has AdamW's state.
        folder: The checkpoint, where its files can be looked at.
    """

    def __init__(self, momentum_from: MomentumSource, folder: Path | None) -> None:
        super().__init__()
        self._momentum_from: MomentumSource = momentum_from
        self._folder = folder
        self.notes: Counter[str] = Counter()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Decide for every key of the optimizer what is loaded into it.

        Raises:
            ValueError: A file of the checkpoint is missing or too short, state does not fit, or the
                data loader had another number of ranks.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            raise AssertionError("DCP plans a load by the checkpoint's metadata")
        if is_coordinator and self._folder is not None:
            _check_files(self._folder, metadata)
        _check_data_ranks(state_dict.get(DATALOADER), metadata)
        if OPTIMIZER in state_dict:
            self._cross(state_dict[OPTIMIZER], metadata)

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. Not the default one, which takes crossings for torch 2.3's keys."""
        if self.metadata is None:
            raise AssertionError("set_up_planner comes first")
        plan = create_default_local_load_plan(self.state_dict, self.metadata)
        return self.with_whole_shards(plan)

    def _cross(self, live: dict[str, Any], metadata: Metadata) -> None:
        saved = _saved_state(metadata)
        needed: dict[str, dict[str, Any]] = {}
        for key, value in live.items():
            if key.startswith("state."):
                name, _, buffer = key.removeprefix("state.").rpartition(".")
                needed.setdefault(name, {})[buffer] = value
        sources: dict[tuple[str, str], str | None] = {}
        for name, buffers in needed.items():
            described = {key: _describe(value) for key, value in buffers.items()}
            chosen, notes = choose_sources(
                name, described, saved.get(name, {}), self._momentum_from
            )
            sources |= {(name, key): source for key, source in chosen.items()}
            self.notes.update(notes)
        # Nothing is refused from here on.
        for (name, key), source in sources.items():
            if source == key:
                continue
            target = self.state_dict.pop(f"{_STATE}{name}.{key}")
            if source is None:
                live[f"state.{name}.{key}"] = torch.zeros_like(target)
            else:
                self.state_dict[f"{_STATE}{name}.{source}"] = target
        for key in [k for k in self.state_dict if k.startswith(_GROUPS)]:
            # The config decides anyway; an option that came later has no value there.
            if key not in metadata.state_dict_metadata:
                del self.state_dict[key]
                live.pop(key.removeprefix(f"{OPTIMIZER}."), None)


class MuonCheckpointManager(CheckpointManager):
    """torchtitan's manager with a plan for crossings, and errors that say what to do."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Same fields as torchtitan's."""

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load a checkpoint into the live states.

        Raises:
            RuntimeError: It is damaged or does not fit; says which other steps are there.
        """
        container = self.states.get(OPTIMIZER)
        if from_hf or not isinstance(container, MuonOptimizersContainer):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        folder = None if filesystem.is_remote(checkpoint_id) else Path(checkpoint_id)
        planner = CrossingPlanner(container.momentum_from, folder)
        try:
            dcp.load(state_dict, checkpoint_id=checkpoint_id, planner=planner)
        except CheckpointException as error:
            raise RuntimeError(_explain(checkpoint_id, error)) from error
        for note, count in planner.notes.items():
            logger.info(f"Optimizer state of {count} parameters: {note}.")
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any):
        """Save, so that a folder counts as a checkpoint only while it is a complete one."""
        if not filesystem.is_remote(checkpoint_id) and dist.get_rank() == 0:
            # Written over, an older save of this step would look complete all the time. Other
            # ranks write after a collective with this one.
            (Path(checkpoint_id) / _METADATA).unlink(missing_ok=True)
        return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)


def with_crossing(config: Any) -> Any:
    """Return torchtitan's checkpoint config as one of :class:`MuonCheckpointManager`.

    Args:
        config: Not modified; any other class than torchtitan's own comes back as it is.
    """
    return as_class(config, CheckpointManager.Config, MuonCheckpointManager.Config)


def _describe(value: Any) -> StateTensor:
    return StateTensor(tuple(value.shape), value.dtype)


def _saved_state(metadata: Metadata) -> dict[str, dict[str, StateTensor]]:
    """Return the saved optimizer state, by parameter and key."""
    saved: dict[str, dict[str, StateTensor]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(_STATE) and isinstance(entry, TensorStorageMetadata):
            name, _, buffer = key.removeprefix(_STATE).rpartition(".")
            tensor = StateTensor(tuple(entry.size), entry.properties.dtype)
            saved.setdefault(name, {})[buffer] = tensor
    return saved


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Refuse a checkpoint with a file missing or shorter than its metadata say."""
    ends: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        path = getattr(entry, "relative_path", None)
        if path is not None:
            ends[path] = max(ends.get(path, 0), entry.offset + entry.length)
    for path, end in sorted(ends.items()):
        file = folder / path
        if not file.is_file():
            raise ValueError(f"the file {path} is missing")
        size = os.path.getsize(file)
        if size < end:
            raise ValueError(f"the file {path} has {size} bytes and should have {end}")


def _check_data_ranks(loader: Any, metadata: Metadata) -> None:
    """Refuse another number of data-parallel ranks in words; torchtitan's loader only asserts."""
    pattern = re.compile(rf"{DATALOADER}\.dp_rank_\d+")
    saved = sum(pattern.fullmatch(key) is not None for key in metadata.state_dict_metadata)
    here = loader.get("world_size", saved) if isinstance(loader, dict) else saved
    if saved and here != saved:
        raise ValueError(
            f"{saved} data-parallel ranks saved it and this run has {here}, and torchtitan's data "
            "loader cannot share its place in the data out anew. Keep their number, or add "
            f"--checkpoint.exclude_from_loading {DATALOADER}: weights and optimizer go on, and "
            "the data start again from the beginning."
        )


def _explain(checkpoint_id: str, error: CheckpointException) -> str:
    """Return one sentence for what went wrong on any rank, and what else could be loaded."""
    said = list(dict.fromkeys(f"{_unwrapped(e)}" for e, _ in error.failures.values()))
    text = f"{checkpoint_id} cannot be loaded: {'; '.join(said)}"
    here = Path(checkpoint_id)
    steps = sorted(
        int(match[1])
        for path in here.parent.glob("step-*/.metadata")
        if path.parent != here and (match := re.fullmatch(r"step-(\d+)", path.parent.name))
    )
    if steps:
        listed = ", ".join(map(str, steps))
        text += f" Other checkpoints there: {listed}; choose one with --checkpoint.load_step."
    return text


def _unwrapped(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    if text.startswith("metadata is None"):
        cause = text.partition("global metadata read failed: ")[2].partition("; rank local")[0]
        return f"its {_METADATA} cannot be read: {cause or text}."
    text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return text if text.endswith((".", "?")) else f"{text}."
