"""The Triton kernels without a GPU: interpreted against the reference, and compiled for three of them."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.kernels import dispatch as dispatcher
from thinwire.kernels import triton as backend
from thinwire.kernels.dispatch import dispatch

ROOT = Path(__file__).parents[2]
FAMILIES = ("selection", "feedback", "chunks", "gaussian", "scatter", "gspar", "sketch", "indices")
# Too many entries, or too many calls, for an interpreter.
LONG = (
    "blind or heavy_part or bad_sample or threads or unbiased or recall or sketches_add or about_k"
    " or two_rounds or non_finite or every_density or anywhere_in_a_long or both_searches or without_numbers"
    " or host_waits or nothing_is_lost or jump_from or a_block_with_the_output"
)


def interpret(launches, *options):
    """Run the tests of the CPU kernels on Triton's; the programs that ran go to the file."""
    files = [f"tests/kernels/test_kernel_{family}.py" for family in FAMILIES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.interpreted", *files, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "THINWIRE_LAUNCHES": str(launches)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton")
    launches = tmp_path_factory.mktemp("interpreted") / "launches.json"
    run = interpret(launches, "-k", f"not ({LONG})")
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
    return json.loads(launches.read_text())


@pytest.mark.timeout(1500)
def test_the_tests_of_the_cpu_kernels_reach_every_program_in_the_interpreter(interpreted):
    from benchmarks.gpu_programs import name_of, programs

    assert {name_of(launch) for launch in interpreted} == set(programs())


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90", "gfx942"])
def test_every_program_compiles(interpreted, target):
    from benchmarks.gpu_programs import compiled, one_of_each

    for name, launch in one_of_each(interpreted).items():
        assert compiled(launch, target).asm.keys() & {"cubin", "hsaco"}, name


@pytest.mark.slow
def test_the_long_tests_pass_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    run = interpret(tmp_path / "launches.json", "-k", LONG, "--timeout", "1700")
    assert run.returncode == 0, run.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_variant_compiles(interpreted, target):
    """Also without optional tensors, for 16-bit floats, and with sizes of one, which Triton builds in."""
    from benchmarks.gpu_programs import compiled

    for launch in interpreted:
        compiled(launch, target)
        free = import_module(launch["module"]).__dict__[launch["name"]].do_not_specialize or ()
        for name, kind in launch["types"].items():
            if kind == "i32" and name not in free:
                one = {**launch, "types": {**launch["types"], name: "constexpr"}}
                compiled({**one, "constants": {**launch["constants"], name: 1}}, target)


def test_importing_thinwire_never_imports_triton():
    code = (
        "import sys, thinwire, thinwire.kernels, thinwire.methods, thinwire.kernels.triton\n"
        "assert 'triton' not in sys.modules\n"
        "assert not [m for m in sys.modules if m.startswith('thinwire.kernels.triton.')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


@pytest.mark.parametrize("family", backend.FAMILIES)
def test_every_kernel_has_the_parameters_of_the_reference(family):
    pytest.importorskip("triton")
    names: set[str] = set()
    for file in (ROOT / "src/thinwire/kernels").glob("[a-z]*.py"):
        for module, name in re.findall(r"dispatch\(\s*(\w+)\.(\w+)", file.read_text()):
            if family == (file.stem if module == "reference" else module):
                names.add(name)
    assert names
    for name in names:
        plain = getattr(import_module(f"thinwire.kernels.reference.{family}"), name)
        assert signature(getattr(import_module(f"thinwire.kernels.triton.{family}"), name)) == signature(
            plain
        )


def a_kernel(x):
    return "reference"


def test_a_family_without_a_gpu_kernel_takes_the_reference(monkeypatch):
    monkeypatch.setitem(dispatcher.BACKENDS, "cpu", "thinwire.kernels.triton")
    monkeypatch.setattr(a_kernel, "__module__", "thinwire.kernels.reference.rotation")
    assert dispatch(a_kernel, torch.ones(3)) == "reference"


def test_without_triton_every_family_takes_the_reference(monkeypatch):
    monkeypatch.setitem(dispatcher.BACKENDS, "cpu", "thinwire.kernels.triton")
    monkeypatch.setattr(backend, "FAMILIES", ())
    monkeypatch.setattr(dispatcher, "_compiled", {})
    monkeypatch.setattr(a_kernel, "__module__", "thinwire.kernels.reference.selection")
    assert dispatch(a_kernel, torch.ones(3)) == "reference"


def test_fake_tensors_take_the_reference(monkeypatch):
    """They have no memory. A tensor of this device that has some would be looked for among the kernels."""
    monkeypatch.setattr(a_kernel, "__module__", "thinwire.kernels.reference.selection")
    with FakeTensorMode():
        assert dispatch(a_kernel, torch.empty(3, device="cuda")) == "reference"
