"""Tokens do not depend on when copies and kernels run if tickets are respected; and it shows if they are not."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from neo_compile.host_attention import WorkerPool
from neo_compile.runtime.device import AdversarialDevice, DeviceConfig, open_device
from neo_compile.runtime.device.adversarial import DelayingWorkers
from neo_compile.runtime.staging import Staging, _Ring
from neo_compile.runtime.sub_batch_attention import SubBatchAttention
from neo_compile.runtime.swap import LayerCopies
from tests.helpers.adversary import WrongTokensError, serve_at_random
from tests.helpers.engines import tiny_llama

SEEDS = range(1, 6)  # between them everything happens that `assert_all_happened` asks for
NUM_SLOW_RUNS, NUM_SLOW_SEEDS = 6, 25


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def serve_seeds(model, seeds) -> Counter[str]:
    return sum((serve_at_random(model, seed) for seed in seeds), Counter())


def test_random_engines(model):
    counts = serve_seeds(model, SEEDS)
    assert_all_happened(counts, iterations=150)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(NUM_SLOW_RUNS))
def test_thousands_of_random_iterations(model, run):
    first = 1000 + run * NUM_SLOW_SEEDS
    counts = serve_seeds(model, range(first, first + NUM_SLOW_SEEDS))
    assert_all_happened(counts, iterations=4000 // NUM_SLOW_RUNS)


def assert_all_happened(counts: Counter[str], iterations: int) -> None:
    assert counts["iterations"] >= iterations, counts
    for what in (
        "swaps",
        "blocks reused at once",
        "host decodes",
        "host prefills",
        "host prefills in mid-block",
        "pipelined iterations",
        "unsplit iterations",
        "device-only iterations",
    ):
        assert counts[what] > 0, counts


def swap_without_wait(self, layer):
    while len(self.tickets) <= min(layer, self._num_layers - 1):
        self.submit_next()


def give_back_without_wait(self):
    self._give_back(self._leaving.popleft()[1])


def finish_without_wait(self, begun):
    return begun.out


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        pytest.param(LayerCopies, "wait", swap_without_wait, id="swap-wait"),
        pytest.param(_Ring, "_wait_oldest", give_back_without_wait, id="ring-wait"),
        pytest.param(Staging, "finish", lambda self: [], id="ring-finish"),
        pytest.param(SubBatchAttention, "finish", finish_without_wait, id="host-attention-wait"),
    ],
)
def test_a_missing_wait_is_caught(model, monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(WrongTokensError):
        serve_seeds(model, SEEDS)


def test_work_is_late_reordered_and_invisible():
    with WorkerPool(1) as inner:
        workers = DelayingWorkers(inner, Random(0))
        source, ran = torch.ones(1, 4), []
        targets = [torch.zeros(1, 4) for _ in range(40)]
        tickets = [workers.submit_copy(source, target, [[0, 0]]) for target in targets]
        done = [not torch.isnan(target).any() for target in targets]
        assert 0 < sum(done) < 40
        assert done != sorted(done, reverse=True), "in order of submission"
        assert workers.num_outstanding == 40 - sum(done)
        late = done.index(False)
        with pytest.raises(RuntimeError, match="waited"):
            _ = tickets[late].end_ns
        for index, ticket in enumerate(tickets):
            ticket.wait()
            assert torch.equal(targets[index], source)
            ran.append(ticket.start_ns)
        assert ran != sorted(ran)
        assert workers.num_outstanding == 0


def test_a_late_copy_reads_what_was_overwritten():
    """The hazard that swap waits are for."""
    with WorkerPool(1) as inner:
        workers = DelayingWorkers(inner, Random(0))
        source, target = torch.ones(1, 4), torch.zeros(1, 4)
        ticket = workers.submit_copy(source, target, [[0, 0]])
        assert torch.isnan(target).all()
        source.fill_(2.0)
        ticket.wait()
        assert torch.equal(target, torch.full((1, 4), 2.0))


def test_the_seed_decides(model):
    def order_of(seed: int) -> list[bool]:
        device = open_device(
            DeviceConfig(kind="adversarial", seed=seed, device_threads=1, host_threads=1), has_host_cache=True
        )
        assert isinstance(device, AdversarialDevice)
        source, targets = torch.ones(1, 4), [torch.zeros(1, 4) for _ in range(30)]
        for target in targets:
            device.host_pool.submit_copy(source, target, [[0, 0]])
        device.close()
        return [bool(torch.isnan(target).any()) for target in targets]

    assert order_of(1) == order_of(1)
    assert order_of(1) != order_of(2)
