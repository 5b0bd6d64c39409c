"""Implementations of decode attention, ours and those that one would use instead, behind one small protocol.

`open_runner(name, arena, num_threads)` gives a `Runner`: everything that is done once per batch (plans, compiling,
sessions) lies behind it, a call is one layer's attention. What cannot run here raises `UnavailableError` with the
reason. An implementation asked for by name never falls back to another. Legend as in `cases.py`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from neo_compile import _native
from neo_compile.app.bench.cases import KVArena
from neo_compile.errors import ConfigError
from neo_compile.host_attention import LayerCache, WorkerPool, plan_decode

OpenRunner: TypeAlias = Callable[[KVArena, int], "Runner"]


class UnavailableError(Exception):
    """This implementation cannot run here; the message says why, and what would change that."""


class Runner(Protocol):
    """One implementation, ready for one case."""

    layout: str
    """How it reads a slot of the arena: "paged" or "dense"."""

    def __call__(self, slot: int) -> Tensor:
        """Attention over the KV of `slot`: [B, Hq, D], overwritten by the next call."""

    def close(self) -> None:
        """Give back threads and memory. The runner cannot be called any more."""


class NativeRunner:
    """Our kernels, the way the engine calls them: the plan is made once, then a submit and a wait per layer.

    The caller works too, so `num_threads` threads are num_threads - 1 workers and the caller.
    """

    layout = "paged"

    def __init__(self, isa: str, arena: KVArena, num_threads: int) -> None:
        case = arena.case
        self.isa = isa
        self._pool = WorkerPool(num_threads - 1, participate=True, isa=isa)
        self._plan = plan_decode(
            arena.block_tables,
            arena.context_lens,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            num_threads=self._pool.parallelism,
        )
        self._layers = [LayerCache(*arena.paged(slot)) for slot in range(arena.num_slots)]
        self._q_BHD, self._scale = arena.q_BHD, case.scale
        self._out = torch.empty_like(arena.q_BHD)

    def __call__(self, slot: int) -> Tensor:
        self._pool.submit_layer(self._plan, self._layers[slot], self._q_BHD, self._out, scale=self._scale).wait()
        return self._out

    def close(self) -> None:
        self._pool.close()


class TorchRunner:
    """A function of torch tensors q, k [B, Hkv, S, D], v -> [B, Hq, D], with torch's own threads."""

    layout = "dense"

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], arena: KVArena, num_threads: int) -> None:
        self._attend = attend
        self._q_BHD = arena.q_BHD
        self._slots = [arena.dense(slot) for slot in range(arena.num_slots)]
        self._previous_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)

    def __call__(self, slot: int) -> Tensor:
        with torch.inference_mode():
            return self._attend(self._q_BHD, *self._slots[slot])

    def close(self) -> None:
        torch.set_num_threads(self._previous_threads)


def _open_sdpa(arena: KVArena, num_threads: int) -> Runner:
    """`enable_gqa=True` on the padded batch. All lengths are equal here, so it gets by without a mask."""
    scale = arena.case.scale

    def attend(q_BHD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
        out = scaled_dot_product_attention(q_BHD.unsqueeze(2), k_BHSD, v_BHSD, scale=scale, enable_gqa=True)
        return out.squeeze(2)

    return TorchRunner(attend, arena, num_threads)


def _open_folded_sdpa(arena: KVArena, num_threads: int) -> Runner:
    """The query heads of a group as if they were query tokens of one head: each KV head is read once."""
    case = arena.case
    folded = (case.batch, case.num_kv_heads, case.num_q_heads // case.num_kv_heads, case.head_dim)

    def attend(q_BHD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
        return scaled_dot_product_attention(q_BHD.view(folded), k_BHSD, v_BHSD, scale=case.scale).view(q_BHD.shape)

    return TorchRunner(attend, arena, num_threads)


def _open_flex(arena: KVArena, num_threads: int) -> Runner:
    """Compiled for the very shape, which takes half a minute."""
    from torch.nn.attention.flex_attention import flex_attention

    scale = arena.case.scale
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q_BHD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
        out: Tensor = compiled(q_BHD.unsqueeze(2), k_BHSD, v_BHSD, scale=scale, enable_gqa=True)
        return out.squeeze(2)

    runner = TorchRunner(attend, arena, num_threads)
    try:
        runner(0)
    except Exception as error:  # whatever a peer's compiler stumbles over is a reason, not a bug of ours
        runner.close()
        raise UnavailableError(f"does not compile here: {describe(error)}") from error
    return runner


def describe(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line[:160]}"


def _open_optional(module: str) -> OpenRunner:
    """An adapter in a module of its own, which imports a package that need not be installed."""

    def open_it(arena: KVArena, num_threads: int) -> Runner:
        runner: Runner = importlib.import_module(f"neo_compile.app.bench.{module}").open_runner(arena, num_threads)
        return runner

    return open_it


_PEERS: dict[str, OpenRunner] = {
    "sdpa": _open_sdpa,
    "sdpa-folded": _open_folded_sdpa,
    "flex": _open_flex,
    "onnxruntime": _open_optional("onnx_gqa"),
    "ggml": _open_optional("ggml"),
}
DEFAULT_NAMES = ("ispc", "cpp", *_PEERS)


def resolve_kernels(name: str) -> str:
    """The kernel set meant by "ispc", "cpp" (the one forced by NEO_ISA, otherwise the best) or a full name."""
    available = _native.available_isas()
    if name in available:
        return name
    forced = _native.isa() if os.environ.get("NEO_ISA") else None
    family = [isa for isa in available if isa.startswith(f"{name}-") or (name == "cpp" and isa == "scalar")]
    if forced in family:
        return forced
    if family:
        return family[0]
    built = f"this build has {', '.join(_native.built_isas())}, and this CPU runs {', '.join(available)}"
    hint = "; `make ispc` and a rebuild add the ISPC kernels" if not _native.has_ispc() else ""
    raise UnavailableError(built + hint)


def known_names() -> list[str]:
    """Every name that `open_runner` takes: the defaults, and each kernel set of this build by its own name."""
    return [*DEFAULT_NAMES, *_native.built_isas()]


def select(names: list[str]) -> list[str]:
    """Names without duplicates, "all" replaced by every name that runs here. ConfigError lists the valid ones."""
    known = known_names()
    for name in names:
        if name not in known and name != "all":
            raise ConfigError.unknown("--impl", name, [*known, "all"])
    everything = [*DEFAULT_NAMES, *_native.available_isas()]
    return list(dict.fromkeys(chosen for name in names for chosen in (everything if name == "all" else [name])))


def open_runner(name: str, arena: KVArena, num_threads: int) -> Runner:
    """Prepare an implementation for a case. Raises UnavailableError where it cannot run."""
    if name in _PEERS:
        return _PEERS[name](arena, num_threads)
    return NativeRunner(resolve_kernels(name), arena, num_threads)
