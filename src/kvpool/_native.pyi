"""Native kernels and ledger core of kvpool: what native/bind*.cpp exports, one section an area."""

# --- cpu (bind.cpp) -------------------------------------------------------------------------------------------

def best_isa() -> int: ...
def has_sha() -> bool: ...

# --- bind_kernels.cpp -------------------------------------------------------------------------------------
# dtype codes: 0 fp32, 1 fp16, 2 bf16. Strides of tensors outside the pool are in elements, of planes in bytes.

_Strides = tuple[int, int, int, int]  # address of element 0; bytes to the next block, head, token

class Workers:
    def __init__(self, num_threads: int, isa: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> int: ...

class Store:
    def __init__(
        self,
        codec: int,
        num_heads: int,
        segments: list[int],
        tokens_per_block: int,
        num_blocks: int,
        data: _Strides,
        scale: _Strides | None = None,
        block_scale: _Strides | None = None,
        constant_scale: float = 1.0,
        smoothing: int = 0,
        rotation: bool = False,
    ) -> None: ...
    def counters(self) -> tuple[int, int, int]:
        """Return elements saturated, flushed and not finite since the store was made."""

class StepView:
    def __init__(
        self,
        cu_seqlens: int,
        seq_lens: int,
        block_table: int,
        table_stride: int,
        slots: int,
        max_sequences: int,
        max_tokens: int,
        window: int = 0,
        chunk: int = 0,
        sink_tokens: int = 0,
    ) -> None: ...
    def plan(
        self,
        num_sequences: int,
        num_tokens: int,
        num_workers: int,
        num_kv_heads: int,
        rows_per_item: int = 32,
        split_tokens: int = 0,
    ) -> None:
        """Take over the lengths the arrays now hold and make the schedule of all layers' attention."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def items(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return (sequence, row begin, row end, token begin, token end, split or -1) of every work item."""

    def cumulative_splits(self) -> list[int]: ...

class Attention:
    def __init__(self, k: list[Store], v: Store, v_dim: int, num_q_heads: int) -> None: ...
    def __call__(
        self,
        workers: Workers,
        step: StepView,
        q: int,
        q_dtype: int,
        q_stride_t: int,
        q_stride_h: int,
        out: int,
        out_dtype: int,
        out_stride_t: int,
        out_stride_h: int,
        scale: float,
        softcap: float,
        sinks: int,
        lse: int,
        indices: int,
        num_indices: int,
        tree_mask: int,
        tree_words: int,
    ) -> None: ...

class Mover:
    def __init__(self, planes: list[tuple[_Strides, int, int]], tokens_per_block: int) -> None: ...
    def __call__(self, workers: Workers, src: int, dst: int, count: int) -> None: ...

def write(
    workers: Workers, step: StepView, store: Store, src: int, dtype: int, stride_t: int, stride_h: int
) -> None: ...
def write_kv(
    workers: Workers,
    step: StepView,
    k_store: Store,
    k: int,
    k_stride_t: int,
    k_stride_h: int,
    v_store: Store,
    v: int,
    v_stride_t: int,
    v_stride_h: int,
    dtype: int,
) -> None: ...
def read(
    workers: Workers, store: Store, slots: int, count: int, out: int, dtype: int, stride_t: int, stride_h: int
) -> None: ...
def gather(
    workers: Workers,
    step: StepView,
    store: Store,
    out: int,
    dtype: int,
    stride_t: int,
    stride_h: int,
    indptr: int,
    starts: int,
) -> None: ...
def copy_blocks(
    workers: Workers,
    src: int,
    src_stride: int,
    src_pitch: int,
    dst: int,
    dst_stride: int,
    dst_pitch: int,
    num_bytes: int,
    pieces: int,
    src_ids: int,
    dst_ids: int,
    count: int,
) -> None: ...
