"""What a session compiles when it begins is all that its steps need."""

import json
import os
import subprocess
import sys

CODE = """
import json, sys, torch
from numba.core import event
from tests.laws.cohort import CONFIGURATIONS, Cohort
from thinwire.sessions.preparation import prepare_for

found = {}
for method in CONFIGURATIONS:
    cohort = Cohort(method, 3)
    session = cohort.sessions[0]
    prepare_for(session.engine.exchanges, loud=False)
    with event.install_recorder("numba:compile") as recorder:
        for dtype in (torch.float32, torch.bfloat16):
            cohort = Cohort(method, 3, dtype=dtype)
            for step in range(2):
                cohort.average(cohort.inputs(step))
    compiled = {str(e.data["dispatcher"].py_func.__qualname__) for _, e in recorder.buffer if e.is_start}
    if compiled:
        found[method] = sorted(compiled)
print(json.dumps(found))
"""


def test_no_step_waits_for_the_compiler() -> None:
    """In a fresh process, since kernels that another test has used would be compiled already."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, cwd=os.getcwd(), timeout=400
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}
