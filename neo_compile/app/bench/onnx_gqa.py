"""onnxruntime's GroupQueryAttention on the CPU, with the cache shared between past and present (nothing is copied).

The operator appends the current token's K and V to the cache by itself; it is given the values that are there already.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from neo_compile.app.bench.cases import KernelCase, KVArena
from neo_compile.app.bench.peers import UnavailableError, describe

OPSET, IR_VERSION, CONTRIB = 17, 9, "com.microsoft"


def open_runner(arena: KVArena, num_threads: int) -> OnnxRunner:
    """onnxruntime on this case; UnavailableError says what is missing."""
    for package in ("onnxruntime", "onnx"):
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"{package} is not installed (pip install onnxruntime onnx)")
    return OnnxRunner(arena, num_threads)


class OnnxRunner:
    """One session; per slot, the bindings of its memory."""

    layout = "dense"

    def __init__(self, arena: KVArena, num_threads: int) -> None:
        import onnxruntime as ort

        case = arena.case
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 4  # errors come as exceptions
        try:
            self._session = ort.InferenceSession(_model_bytes(case), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own types: no such kernel for this dtype or shape
            raise UnavailableError(f"refuses the model: {describe(error)}") from error
        self._out = torch.empty_like(arena.q_BHD)
        self._lens = torch.full((case.batch,), case.context_len - 1, dtype=torch.int32)
        self._total = torch.tensor([case.context_len], dtype=torch.int32)
        self._keep: list[Tensor] = []
        self._bindings = [self._bind(arena, slot) for slot in range(arena.num_slots)]

    def _bind(self, arena: KVArena, slot: int) -> Any:
        """A binding of one slot: past and present are the same memory."""
        case, binding = arena.case, self._session.io_binding()
        k_BHSD, v_BHSD = arena.dense(slot)
        newest = [x[:, :, -1].contiguous().view(case.batch, 1, -1) for x in (k_BHSD, v_BHSD)]
        inputs = {
            "query": arena.q_BHD.view(case.batch, 1, -1),
            "key": newest[0],
            "value": newest[1],
            "past_key": k_BHSD,
            "past_value": v_BHSD,
            "seqlens_k": self._lens,
            "total_sequence_length": self._total,
        }
        outputs = {"output": self._out.view(case.batch, 1, -1), "present_key": k_BHSD, "present_value": v_BHSD}
        self._keep += newest
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(name, "cpu", 0, _onnx_type(tensor.dtype), tuple(tensor.shape), tensor.data_ptr())
        return binding

    def __call__(self, slot: int) -> Tensor:
        self._session.run_with_iobinding(self._bindings[slot])
        return self._out

    def close(self) -> None:
        self._bindings.clear()
        del self._session


def _onnx_type(dtype: torch.dtype) -> int:
    from onnx import TensorProto

    types = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.int32: TensorProto.INT32,
    }
    return int(types[dtype])


def _model_bytes(case: KernelCase) -> bytes:
    """A graph of the one operator; sizes are left open."""
    from onnx import TensorProto, helper

    value_type = _onnx_type(case.torch_dtype)
    info = helper.make_tensor_value_info
    cache = ["b", case.num_kv_heads, "s", case.head_dim]
    inputs = [
        info("query", value_type, ["b", 1, case.num_q_heads * case.head_dim]),
        *(info(name, value_type, ["b", 1, case.num_kv_heads * case.head_dim]) for name in ("key", "value")),
        *(info(name, value_type, cache) for name in ("past_key", "past_value")),
        info("seqlens_k", TensorProto.INT32, ["b"]),
        info("total_sequence_length", TensorProto.INT32, [1]),
    ]
    outputs = [
        info("output", value_type, ["b", 1, case.num_q_heads * case.head_dim]),
        *(info(name, value_type, cache) for name in ("present_key", "present_value")),
    ]
    node = helper.make_node(
        "GroupQueryAttention",
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain=CONTRIB,
        num_heads=case.num_q_heads,
        kv_num_heads=case.num_kv_heads,
        scale=case.scale,
    )
    graph = helper.make_graph([node], "decode_attention", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    return model
