# Addresses are ints (`tensor.data_ptr()`), strides are in elements, dtype codes: 0 = fp32, 1 = fp16, 2 = bf16.
from collections.abc import Sequence
from typing import overload

def kernel_sets() -> list[tuple[str, bool]]: ...
def convert_row(kernels: str, src: int, src_dtype: int, dst: int, dst_dtype: int, n: int, /) -> None: ...
def hash_words(addresses: int, count: int) -> int: ...
def checksum(data: int, num_bytes: int, num_threads: int, /) -> int: ...
def steady_ns() -> int: ...
def has_packed_linear(dtype: int, /) -> bool: ...

max_linear_tokens: int

class PackedLinear:
    def __init__(self, weight: int, num_outputs: int, num_inputs: int, dtype: int, /) -> None: ...
    def run(self, x: int, bias: int, y: int, num_tokens: int, num_threads: int, /) -> None: ...

class Rows:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, data: int, token_stride: int, head_stride: int, dtype: int, /) -> None: ...

class TokenRows:
    def __init__(
        self,
        q: Rows,
        out: Rows,
        k_new: Rows,
        v_new: Rows,
        num_tokens: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        /,
    ) -> None: ...
    @staticmethod
    def contiguous(
        q: int,
        out: int,
        k_new: int,
        v_new: int,
        dtype: int,
        num_tokens: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        /,
    ) -> TokenRows: ...

class BlockPairs:
    def __init__(self, pairs: int, count: int, /) -> None: ...

class LayerCache:
    def __init__(
        self,
        k: int,
        k_strides: Sequence[int],
        v: int,
        v_strides: Sequence[int],
        num_blocks: int,
        dtype: int,
        num_kv_heads: int,
        block_size: int,
        head_dim_k: int,
        head_dim_v: int,
        /,
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        tables: int,
        table_stride: int,
        max_blocks: int,
        context_lens: int,
        cu_seqlens: int,
        num_requests: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        block_size: int,
        max_shares: int,
        min_share_bytes: int,
        /,
    ) -> None: ...
    def tiles(self) -> list[list[int]]: ...
    def tasks(self, window: int, /) -> list[list[int]]: ...
    def poison_workspace(self) -> None: ...

class Ticket:
    def wait(self) -> None: ...
    def done(self) -> bool: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...

class Pool:
    def __init__(
        self, num_threads: int, cpus: Sequence[int], participate: bool, spin_ns: int, kernels: str, /
    ) -> None: ...
    def slow_attention(self, factor: float, /) -> None: ...
    def submit_attention(
        self,
        plan: AttentionPlan,
        layer: LayerCache,
        rows: TokenRows,
        first_row: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: int,
        refs: object,
        /,
    ) -> Ticket: ...
    def submit_copy(
        self, src: int, dst: int, block_bytes: int, pairs: BlockPairs, max_gbps: float, refs: object, /
    ) -> Ticket: ...
    def submit_first_touch(self, data: int, num_bytes: int, refs: object, /) -> Ticket: ...
    def submit_read(self, data: int, num_bytes: int, streams: int, refs: object, /) -> Ticket: ...
    def close(self) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def parallelism(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def isa(self) -> str: ...
    @property
    def pin_failures(self) -> list[int]: ...
