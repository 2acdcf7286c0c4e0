"""Launch shapes for GPUs that :mod:`titan_muon.kernels.configurations` does not know.

A handful of shapes is timed once per GPU model, dtype and size; the winner is kept on disk.
"""

import json
import os
import tempfile
import zlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from titan_muon.kernels.configurations import CANDIDATES, Configuration, pointer_configuration

_REPEATS = 5
_LARGEST_OPERAND = 2**26


@lru_cache(maxsize=256)
def tuned_configuration(
    rows: int, depth: int, batch: int, dtype: torch.dtype, device: torch.device
) -> Configuration:
    """Return the fastest launch shape for ``batch`` results of (rows, rows) summed over ``depth``.

    Sizes are rounded up to powers of two, and one entry serves all batches. Blocks the host for
    about a second where there is no entry yet. Nothing is timed while a CUDA graph is captured: run
    one step before capture, or this process keeps an untimed shape.

    Args:
        rows: Side of the result.
        depth: Length of the sums.
        batch: Number of results.
        dtype: Dtype of the operands.
        device: CUDA device.
    """
    key, file = _key(rows, depth, dtype, device), cache_file()
    found = _candidate(_read(file).get(key))
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        return pointer_configuration(rows, torch.cuda.get_device_capability(device))
    times = [_time(shape, rows, depth, batch, dtype, device) for shape in CANDIDATES]
    best = times.index(min(times))
    _write(file, key, best)
    return CANDIDATES[best]


def cache_file() -> Path | None:
    """Return where winners are kept, None where there is no such place.

    In ``$TITAN_MUON_CACHE_DIR`` or the user's cache folder; a container may run as a user who has
    neither a name nor a home.
    """
    folder = os.environ.get("TITAN_MUON_CACHE_DIR")
    if not folder:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not os.path.isabs(root):
            return None
        folder = os.path.join(root, "titan_muon")
    return Path(folder) / "launch_shapes.json"


def _key(rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> str:
    import triton

    side, length = (1 << max(0, size - 1).bit_length() for size in (rows, depth))
    name = torch.cuda.get_device_name(device)
    # An entry is an index into the candidates, and means nothing among others.
    candidates = f"{zlib.crc32(repr(CANDIDATES).encode()):08x}"
    return f"{name}|triton {triton.__version__}|{dtype}|{side}x{length}|{candidates}"


def _candidate(index: object) -> Configuration | None:
    if isinstance(index, int) and 0 <= index < len(CANDIDATES):
        return CANDIDATES[index]
    return None


def _read(path: Path | None) -> dict[str, object]:
    try:
        entries = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # No file yet, or a damaged one: time again.
    return entries if isinstance(entries, dict) else {}


def _write(path: Path | None, key: str, index: int) -> None:
    """Add an entry; where nothing can be written, later runs time again."""
    if path is None:
        return
    # Ranks of one host write at the same time: each replaces the file whole. The one that loses
    # its entry times again in a later run.
    entries = {**_read(path), key: index}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            # With the rights of any new file, for the other users of a shared folder.
            new = Path(folder) / path.name
            new.write_text(json.dumps(entries), encoding="utf-8")
            os.replace(new, path)


def _time(
    shape: Configuration,
    rows: int,
    depth: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    from titan_muon.kernels import triton_symmetric

    count = max(1, min(batch, _LARGEST_OPERAND // (rows * max(rows, depth))))
    x = torch.randn(count, rows, depth, device=device, dtype=torch.float32).to(dtype)
    out = x.new_empty(count, rows, rows)
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        triton_symmetric.multiply(x, x.mT, None, 1.0, 0.0, out, shape)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    # The first run compiles.
    return min(times[1:])
