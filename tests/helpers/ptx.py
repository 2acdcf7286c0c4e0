"""What a Triton kernel becomes on a GPU, found without one."""

import re
from collections.abc import Mapping
from typing import Any

import pytest


def global_accesses(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object]
) -> list[str]:
    """Compile a kernel for an H100 and return its loads and stores of global memory.

    Args:
        kernel: Of four warps.
        types: Of its arguments, as triton spells them; pointers are multiples of 16.
        constants: Values of all others.
    """
    triton = pytest.importorskip("triton", reason="the kernels need triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(i,): constants[n] for i, n in enumerate(names) if n not in types},
        attrs={(i,): aligned for i, n in enumerate(names) if types.get(n, "").startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return re.findall(r"(?:ld|st)\.global\S*", compiled.asm["ptx"])
