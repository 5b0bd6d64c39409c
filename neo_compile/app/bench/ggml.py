"""llama.cpp's attention on the CPU: ggml's `flash_attn_ext`, called in the shared library of whichever package has it.

`pip install libggml-python` brings the library alone (built for AVX2); llama-cpp-python, where it is built from source
for this CPU, brings the same with more. There is one small graph per slot; its tensors are views of the arena. ggml
takes queries and gives results in float32 whatever the KV's type.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neo_compile.app.bench.cases import KVArena
from neo_compile.app.bench.peers import UnavailableError

PACKAGES = {"libggml": ("lib64", "lib"), "llama_cpp": ("lib",)}  # import name -> folders that may hold the library
GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type
ALIGNMENT = 64
# Of a graph of one node (ggml sizes it for 2,048) with its tensors, generously.
_GRAPH_BYTES = 256 * 2**10
_MAX_GRAPHS = 1024


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def find_libraries() -> tuple[Path, Path]:
    """libggml-base and libggml-cpu of an installed package; UnavailableError says what to install."""
    for package, folders in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            for folder in folders:
                base = Path(root, folder, "libggml-base.so")
                cpu = base.with_name("libggml-cpu.so")
                if base.exists() and cpu.exists():
                    return base, cpu
    raise UnavailableError("no package with ggml's library is installed (pip install libggml-python)")


class _Library:
    """The handful of functions that are used, with their types."""

    def __init__(self, base: Path, cpu: Path) -> None:
        self._libraries = (ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL), ctypes.CDLL(str(cpu)))
        pointer, size, int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self.init = self._function("ggml_init", pointer, _InitParams)
        self.free = self._function("ggml_free", None, pointer)
        self.new_tensor = self._function("ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, *[int64] * 4)
        floats = [ctypes.c_float] * 3
        self.flash_attn = self._function("ggml_flash_attn_ext", pointer, *[pointer] * 5, *floats)
        self.set_precision = self._function("ggml_flash_attn_ext_set_prec", None, pointer, ctypes.c_int)
        self.new_graph = self._function("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.buffer_from_ptr = self._function("ggml_backend_cpu_buffer_from_ptr", pointer, pointer, size)
        self.buffer_free = self._function("ggml_backend_buffer_free", None, pointer)
        self.place = self._function("ggml_backend_tensor_alloc", ctypes.c_int, *[pointer] * 3)
        self.cpu_init = self._function("ggml_backend_cpu_init", pointer)
        self.set_threadpool = self._function("ggml_backend_cpu_set_threadpool", None, pointer, pointer)
        self.set_num_threads = self._function("ggml_backend_cpu_set_n_threads", None, pointer, ctypes.c_int)
        self.compute = self._function("ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
        self.backend_free = self._function("ggml_backend_free", None, pointer)
        params = ctypes.POINTER(_ThreadpoolParams)
        self.threadpool_params = self._function("ggml_threadpool_params_init", None, params, ctypes.c_int)
        self.threadpool_new = self._function("ggml_threadpool_new", pointer, params)
        self.threadpool_free = self._function("ggml_threadpool_free", None, pointer)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                return function
        raise UnavailableError(f"this version of ggml has no function {name}")


class GgmlRunner:
    """ggml's CPU backend with a thread pool that stays, as llama.cpp runs it."""

    layout = "dense"

    def __init__(self, arena: KVArena, num_threads: int) -> None:
        case = arena.case
        if arena.num_slots > _MAX_GRAPHS:
            raise UnavailableError(f"{arena.num_slots} graphs are too many (at most {_MAX_GRAPHS})")
        self._ggml = ggml = _Library(*find_libraries())
        self._q = arena.q_BHD.float().contiguous()  # [D, 1, Hq, B] as ggml counts dimensions
        self._out = torch.empty(case.batch, case.num_q_heads, case.head_dim)
        self._context = ggml.init(_InitParams(arena.num_slots * _GRAPH_BYTES, None, True))
        self._buffers: list[Any] = []
        self._keep = [self._q, self._out, arena]
        shape_q = (case.head_dim, 1, case.num_q_heads, case.batch)
        q = self._tensor(self._q, shape_q)
        self._graphs = [self._graph(arena, slot, q) for slot in range(arena.num_slots)]
        self._backend = ggml.cpu_init()
        params = _ThreadpoolParams()
        ggml.threadpool_params(params, num_threads)
        self._threads = ggml.threadpool_new(params)
        ggml.set_num_threads(self._backend, num_threads)
        ggml.set_threadpool(self._backend, self._threads)

    def _tensor(self, values: Tensor, shape: tuple[int, ...]) -> Any:
        """A ggml tensor over the bytes of a torch tensor."""
        tensor = self._ggml.new_tensor(self._context, GGML_TYPES[values.dtype], *shape)
        self._place(tensor, values)
        return tensor

    def _place(self, tensor: Any, values: Tensor) -> None:
        address = values.data_ptr()
        base = address // ALIGNMENT * ALIGNMENT  # ggml wants buffers aligned, not tensors
        buffer = self._ggml.buffer_from_ptr(base, address - base + values.numel() * values.element_size())
        self._buffers.append(buffer)
        if self._ggml.place(buffer, tensor, address) != 0:
            raise UnavailableError("ggml does not accept memory of ours")

    def _graph(self, arena: KVArena, slot: int, q: Any) -> Any:
        case, ggml = arena.case, self._ggml
        shape = (case.head_dim, case.context_len, case.num_kv_heads, case.batch)
        k, v = (self._tensor(values, shape) for values in arena.dense(slot))
        out = ggml.flash_attn(self._context, q, k, v, None, case.scale, 0.0, 0.0)
        ggml.set_precision(out, 10)  # GGML_PREC_F32, as llama.cpp asks for
        self._place(out, self._out)
        graph = ggml.new_graph(self._context, 16, False)
        ggml.expand(graph, out)
        return graph

    def __call__(self, slot: int) -> Tensor:
        status = self._ggml.compute(self._backend, self._graphs[slot])
        assert status == 0, f"ggml_backend_graph_compute returned {status}"
        return self._out

    def close(self) -> None:
        self._ggml.backend_free(self._backend)
        self._ggml.threadpool_free(self._threads)
        for buffer in self._buffers:
            self._ggml.buffer_free(buffer)
        self._ggml.free(self._context)
        self._graphs.clear()


def open_runner(arena: KVArena, num_threads: int) -> GgmlRunner:
    """ggml on this case; UnavailableError says what is missing."""
    return GgmlRunner(arena, num_threads)
