"""Triton kernels run by Triton's interpreter, on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def interpreted(*arguments: str) -> str:
    """Run Python where Triton interprets, and return what it printed.

    It is a process of its own: Triton decides at its first import whether it interprets.

    Args:
        *arguments: Of Python; ``-c`` code may import the files of tests/unit by name.
    """
    pytest.importorskip("triton", reason="the kernels need triton, which exists for Linux only")
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "unit")])
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()
