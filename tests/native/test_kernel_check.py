"""Native attention as a program without Python: compiled for this machine, and for 64-bit Arm, run in an emulator.

The latter needs a cross compiler, qemu and ISPC (scripts/check_neon.sh finds them; `make test-neon` gets them).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("paged_attention_scalar", "kernel_table", "partition", "attention_plan", "attention_work", "append_work")
SKIPPED = 77

pytestmark = pytest.mark.slow


def test_the_program_agrees_on_this_machine(tmp_path: Path, seed: int) -> None:
    """The plain C++ kernels alone, so that a failure under the emulator is the target's."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or pytest.skip("no C++ compiler")
    program = tmp_path / "kernel_check"
    csrc = REPOSITORY / "csrc"
    files = [csrc / f"{name}.cpp" for name in (*SOURCES, "thread_pool")]
    flags = ["-std=c++17", "-O2", "-pthread", f"-I{csrc}"]
    subprocess.run(
        [compiler, *flags, *map(str, files), str(Path(__file__).with_name("kernel_check.cpp")), "-o", str(program)],
        check=True,
    )
    done = subprocess.run([program, str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "scalar: 60 problems" in done.stdout


@pytest.mark.skipif(platform.system() != "Linux", reason="qemu's user mode is Linux's")
def test_neon_in_an_emulator(seed: int) -> None:
    done = subprocess.run([REPOSITORY / "scripts/check_neon.sh", str(seed)], capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ispc-neon: 60 problems" in done.stdout
