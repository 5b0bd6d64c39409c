"""Each kernel set, forced through NEO_ISA in a process of its own as a user would, against the float64 reference.

The other tests of this folder run every kernel set too, but inside one process and by name; here the environment
variable decides, and the shapes are those at which the ISPC kernels take another path: head dims around one vector and
one pair of vectors, query groups around the sizes that have a loop of their own, 64-token chunks and one more or less.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from neo_compile import _native
from neo_compile.host_attention import WorkerPool
from tests.native.decode_cases import DecodeCase

HEAD_DIMS = (8, 16, 24, 31, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12)
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 200)
NUM_CASES = 40


def is_ispc_required() -> bool:
    return os.environ.get("NEO_REQUIRE_ISPC") == "1"


def random_case(rng: random.Random) -> DecodeCase:
    kv_heads = rng.choice((1, 2, 3))
    head_dim = rng.choice(HEAD_DIMS)
    return DecodeCase(
        context_lens=[rng.choice(LENGTHS) for _ in range(rng.randint(1, 3))],
        num_q_heads=kv_heads * rng.choice(GROUPS),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=rng.choice((None, rng.choice(HEAD_DIMS))),
        block_size=rng.choice((1, 7, 8, 16, 16, 32, 128)),
        kv_dtype=rng.choice((torch.float32, torch.float16, torch.bfloat16)),
        q_dtype=rng.choice((torch.float32, torch.bfloat16)),
        interleaved=rng.random() < 0.7,
        window=rng.choice((None, None, 1, 16, 50)),
        softcap=rng.choice((None, None, 5.0)),
        has_sinks=rng.random() < 0.3,
        seed=rng.randrange(2**31),
    )


def check_cases(seed: int) -> None:
    """The body of the subprocess: the set named by NEO_ISA is in use, and right on random problems."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with WorkerPool(1) as pool:
        assert pool.isa == _native.isa() == os.environ["NEO_ISA"]
        for _ in range(NUM_CASES):
            case = random_case(rng)
            try:
                case.check(case.run(pool))
            except AssertionError as error:
                shape = {name: value for name, value in vars(case).items() if not isinstance(value, torch.Tensor)}
                raise AssertionError(f"{shape}: {error}") from error


def run_forced(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NEO_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_forced_kernels_equal_the_reference(isa: str, seed: int) -> None:
    done = run_forced(isa, f"from tests.native.test_isa import check_cases; check_cases({seed})")
    assert done.returncode == 0, done.stderr


def test_unknown_isa_is_an_error_that_lists_the_available() -> None:
    done = run_forced("itanium", "from neo_compile.host_attention import WorkerPool; WorkerPool(0)")
    assert done.returncode != 0
    assert "ValueError" in done.stderr
    assert "'itanium'" in done.stderr
    assert ", ".join(_native.available_isas()) in done.stderr


def test_this_build_has_ispc_kernels() -> None:
    """Skipped visibly in a build without ISPC; NEO_REQUIRE_ISPC=1 (CI) makes that a failure."""
    if not _native.has_ispc() and not is_ispc_required():
        pytest.skip("built without ISPC (scripts/get_ispc.sh, then build again): its kernels are not tested")
    assert _native.has_ispc(), f"NEO_REQUIRE_ISPC=1, but this build has only {_native.built_isas()}"
    assert _native.available_isas()[0].startswith("ispc-"), "this CPU runs none of the ISPC kernels"
