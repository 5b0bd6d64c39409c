"""Linears of decode-sized batches on the CPU: `pytest tests/benchmarks/bench_linear.py --benchmark-only`.

    plain      F.linear, as eager stages run it
    packed     neo::packed_linear in a compiled stage: the weight is an input, equal layers share the code
    onednn     oneDNN's product with the same packed weights
    frozen     Inductor with constant weights: packed too, but nothing can be shared

`test_step` runs all linear stages of SmolLM2 in bf16 on one thread, without attention, in turn with our kernel and with
oneDNN's on the same weights.

Ids are dtype-outxin-tokens-impl. A call works through more weights than the last-level cache can hold; extra_info has
GB/s of weights and their share of the sequential read bandwidth, the best pass so far.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from neo_compile import _native, packed_linear
from neo_compile.app.bench.bandwidth import BandwidthMeter, last_level_cache_bytes
from neo_compile.app.models import SMOLLM2, ModelNotFoundError, load_model
from neo_compile.capture import capture
from neo_compile.host_attention import WorkerPool
from neo_compile.packed_linear import can_pack
from neo_compile.passes.inductor import compile_with_inductor
from neo_compile.passes.pack_linears import pack_linears
from tests.passes.graphs import trace

NUM_THREADS = len(_native.usable_cpus())
COLD_BYTES = 4 * last_level_cache_bytes()
# out x in: SmolLM2's fused q, k, v and gate, up; a 7B model's output projection.
SHAPES = [(960, 576), (3072, 576), (4096, 4096)]
TOKENS = (1, 8, 16, 32)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Layers(nn.Module):
    """Linears of one shape, each given the same input: together more than the cache holds."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        number = max(2, COLD_BYTES // (out_features * in_features * dtype.itemsize))
        self.layers = nn.ModuleList(nn.Linear(in_features, out_features, False, dtype=dtype) for _ in range(number))

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(parameter.nbytes for parameter in self.parameters())


@pytest.fixture(scope="module")
def meter() -> Iterator[BandwidthMeter]:
    """Reads with as many threads as the linears have."""
    torch.set_num_threads(NUM_THREADS)
    with WorkerPool(NUM_THREADS - 1, participate=True) as pool:
        yield BandwidthMeter(pool, 2 * COLD_BYTES)


@pytest.fixture(scope="module")
def layers(request: pytest.FixtureRequest) -> Layers:
    """The weights of a case, shared by its implementations."""
    return Layers(*request.param).requires_grad_(False)


def plain(layers: Layers, x: torch.Tensor) -> Callable[[], object]:
    """All layers by F.linear."""
    weights = [layer.weight for layer in layers.layers]
    return lambda: [F.linear(x, weight) for weight in weights]


def packed(layers: Layers, x: torch.Tensor) -> Callable[[], object]:
    """All layers by one artefact, which is given each layer's packed weight in turn."""
    if not can_pack(layers.layers[0].weight):
        pytest.skip(f"oneDNN packs no {x.dtype} here")
    weights = [torch.ops.neo.pack_weights.default([layer.weight], False) for layer in layers.layers]
    gm, example_inputs = trace(lambda x, w: F.linear(x, w), x, nn.Parameter(layers.layers[0].weight))
    pack_linears(gm, example_inputs)
    artifact = compile_with_inductor(*_with_packed_input(gm), num_threads=NUM_THREADS)
    return lambda: [artifact.function([x, weight]) for weight in weights]


def onednn(layers: Layers, x: torch.Tensor) -> Callable[[], object]:
    """All layers, called one by one."""
    if not can_pack(layers.layers[0].weight):
        pytest.skip(f"oneDNN packs no {x.dtype} here")
    weights = [torch.ops.neo.pack_weights.default([layer.weight], False) for layer in layers.layers]
    function = torch.ops.mkldnn._linear_pointwise.default
    return lambda: [function(x, weight, None, "none", [], "") for weight in weights]


def frozen(layers: Layers, x: torch.Tensor) -> Callable[[], object]:
    """All layers in one graph with constant weights."""
    function = torch.compile(lambda x: [layer(x) for layer in layers.layers], options={"freezing": True})
    return lambda: function(x)


def _with_packed_input(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    """`gm` as a stage: what is made of parameters once is an input."""
    (pack,) = (node for node in gm.graph.nodes if node.target is torch.ops.neo.pack_weights.default)
    (weight,) = pack.all_input_nodes
    weight.meta["example_value"] = pack.meta["example_value"]
    pack.replace_all_uses_with(weight)
    gm.graph.erase_node(pack)
    gm.recompile()
    return gm, [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]


CASES = [(shape, dtype) for dtype in DTYPES for shape in SHAPES]


@pytest.mark.parametrize("impl", [plain, packed, onednn, frozen], ids=lambda impl: impl.__name__)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "layers",
    [(*shape, DTYPES[dtype]) for shape, dtype in CASES],
    ids=[f"{dtype}-{shape[0]}x{shape[1]}" for shape, dtype in CASES],
    indirect=True,
)
def test_linear(
    benchmark: Any,
    layers: Layers,
    meter: BandwidthMeter,
    num_tokens: int,
    impl: Callable[[Layers, torch.Tensor], Callable[[], object]],
) -> None:
    weight = layers.layers[0].weight
    x = torch.randn(num_tokens, weight.shape[1], dtype=weight.dtype)
    with torch.no_grad():
        run = impl(layers, x)
        bandwidth = meter.measure(passes=3)
        benchmark.pedantic(run, rounds=10, warmup_rounds=2)
    if benchmark.stats is not None:
        gbps = layers.num_bytes / benchmark.stats.stats.median / 1e9
        benchmark.extra_info.update(gbps=round(gbps, 2), bandwidth_share=round(gbps / bandwidth, 3))


class Echo:
    """Attention that costs nothing."""

    def begin(self, site: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: object) -> Any:
        """The ticket is q."""
        return q

    def finish(self, ticket: Any) -> Any:
        """The result is q."""
        return ticket


@pytest.fixture(scope="module")
def staged() -> Any:
    """SmolLM2 in bf16, for one thread."""
    torch.set_num_threads(1)
    try:
        model, _ = load_model(SMOLLM2, torch.bfloat16)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    return capture(model, num_threads=1)


@pytest.mark.parametrize("num_tokens", [1, 6, 16, 32])
def test_step(benchmark: Any, monkeypatch: pytest.MonkeyPatch, staged: Any, num_tokens: int) -> None:
    if not packed_linear.max_few_tokens(torch.bfloat16):
        pytest.skip("no kernel of our own here")
    torch.set_num_threads(1)
    positions = torch.arange(num_tokens)[None]
    inputs = {"input_ids": torch.ones_like(positions), "position_ids": positions, "logit_rows": torch.zeros(1).long()}
    limits = {"own": packed_linear.max_few_tokens, "onednn": lambda dtype: 0}
    times: dict[str, list[float]] = {name: [] for name in limits}

    def run_both() -> None:
        for name, limit in limits.items():
            monkeypatch.setattr(packed_linear, "max_few_tokens", limit)
            start = time.perf_counter()
            staged.run(Echo(), **inputs)
            times[name].append(1e3 * (time.perf_counter() - start))

    benchmark.pedantic(run_both, rounds=20, warmup_rounds=3)
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    benchmark.extra_info.update({f"{name}_ms": round(value, 2) for name, value in medians.items()})
    benchmark.extra_info["onednn_over_own"] = round(medians["onednn"] / medians["own"], 2)
