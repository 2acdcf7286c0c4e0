"""Layouts of torchtitan's real models at their true world size, planned without processes.

A process of its own, since on a machine without GPU torchtitan must be imported after the CPU
runtime is in place, and since the fake process group must not meet another one.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, logging, sys
from titan_muon.integration import cpu_runtime
if cpu_runtime.needs_cpu_runtime():
    cpu_runtime.install()
logging.disable(logging.WARNING)
from tests.helpers.plan_checks import check_plan
from titan_muon.cli.gpu_plans import plan_model
from titan_muon.integration.meta_model import fake_ranks, meta_model
import importlib
module, name, ranks, tp, ep = json.loads(sys.argv[1])
config = getattr(importlib.import_module(module), name)()
config.parallelism.tensor_parallel_degree = tp
config.parallelism.expert_parallel_degree = ep
config.compile.enable = False
with fake_ranks(ranks):
    (plan,) = plan_model(meta_model(config, ranks))
print(json.dumps(check_plan(plan)))
"""

LLAMA = "torchtitan.models.llama3.config_registry"
DEEPSEEK = "torchtitan.models.deepseek_v3.config_registry"
# module, config, ranks, tensor parallel, expert parallel, and what must come out
CASES = {
    "llama3 70B, FSDP 8 x TP 8": (
        (LLAMA, "llama3_70b", 64, 8, 1),
        {"units": 560, "local_units": 0, "balance": 0.97},
    ),
    # One expert a rank of (efsdp 4, ep 64): 58 layers of 3 x 256 experts stay where they are.
    "deepseek v3 671B, EP 64": (
        (DEEPSEEK, "deepseek_v3_671b", 256, 1, 64),
        {
            "units": 61 * 5 + 3 * 3 + 58 * (3 + 1 + 3 * 256),
            "local_units": 58 * 3 * 256,
            "balance": 0.87,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_of_a_real_layout(name):
    case, expected = CASES[name]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(case)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["units"] == expected["units"]
    assert found["local_units"] == expected["local_units"]
    assert found["balance"] >= expected["balance"]
    assert found["sent_bytes"] == found["routed_bytes"]
    # 2u(1 - 1/p) a rank on average, with a header and an end filled up for each parcel.
    assert found["bodies"] <= found["total_bytes"] <= found["bodies"] + 63 * found["parcels"]
