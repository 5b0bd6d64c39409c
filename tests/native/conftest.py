from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from neo_compile import _native
from neo_compile.host_attention import WorkerPool


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's threads would only fight the pool's: the tensors here are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seed() -> int:
    """A fresh seed for every test, shown when it fails; NEO_TEST_SEED repeats one."""
    value = int(os.environ.get("NEO_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"NEO_TEST_SEED={value}")
    return value


@pytest.fixture(scope="session", params=_native.available_isas())
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Two workers, with each of the kernel sets this machine runs."""
    with WorkerPool(2, isa=request.param) as pool:
        yield pool


@pytest.fixture
def any_pool() -> Iterator[WorkerPool]:
    """One worker with the default kernels, for what does not depend on them."""
    with WorkerPool(1) as pool:
        yield pool
