"""Ranks that start by forking: torch and torchtitan are imported once, not once a rank.

Call from a process without process group and without threads of torch's own, that is from a
small program of its own, never from pytest's process.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("fork")


def run_ranks(world_size: int, function: Callable[..., None], *args: Any, limit: float) -> None:
    """Run ``function(*args)`` on every rank, in an environment as torchrun makes it.

    Args:
        world_size: Number of ranks.
        function: Initialises its process group by ``env://`` itself.
        *args: The same for every rank.
        limit: Seconds after which all ranks are ended.

    Raises:
        RuntimeError: A rank failed (its traceback is on stderr) or the time is over.
    """
    # Whoever ends this process ends its ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    here, there = _CONTEXT.Pipe()
    # The store's threads must not exist in this process: the ranks are its forks.
    store = _CONTEXT.Process(target=_serve_store, args=(there,), daemon=True)
    store.start()
    port = here.recv()
    ranks = [
        _CONTEXT.Process(target=_run_rank, args=(rank, world_size, port, function, args))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        _join(ranks, limit)
    finally:
        for process in [*ranks, store]:
            process.kill()
            process.join()


def _join(ranks: list[Any], limit: float) -> None:
    end = time.monotonic() + limit
    running = list(ranks)
    while running:
        if not wait([process.sentinel for process in running], end - time.monotonic()):
            raise RuntimeError(f"{len(running)} of {len(ranks)} ranks still run after {limit} s")
        for process in [p for p in running if p.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                number = ranks.index(process)
                raise RuntimeError(f"rank {number} ended with exit code {process.exitcode}")


def _serve_store(pipe: Connection) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _run_rank(
    rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        # env:// then joins the store that is there, as under torchrun.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
