"""Native kernels and ledger core of kvpool: what native/bind*.cpp exports, one section an area."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.ledger.decisions import Admission, BlockCopy, DraftRows, Evicted, Onboard, StepDecision

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
        mix_store: int = 0,
        mix_restore: int = 0,
        mix_ask: int = 0,
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
    def path(self, workers: Workers, q_dtype: int, rows: int = 1) -> str:
        """Return the name of the kernel that serves work items of so many rows of a sequence."""

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
def score(
    workers: Workers,
    step: StepView,
    store: Store,
    q: int,
    dtype: int,
    stride_t: int,
    stride_h: int,
    num_q_heads: int,
    weights: int,
    topk: int,
    slots: int,
) -> None:
    """Write int64 `[T, topk]`: slots of the tokens with the largest sums of `weight * relu(q . k)`, best first."""

def convert(workers: Workers, src: Store, src_slots: int, dst: Store, dst_slots: int, count: int) -> None: ...
def read_probe(workers: Workers, base: int, offsets: int, count: int, num_bytes: int) -> int: ...
def dot_probe(workers: Workers) -> float: ...
def copy_probe(workers: Workers, dst: int, src: int, num_bytes: int) -> None: ...
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

# --- ledger (bind_ledger.cpp) -----------------------------------------------------------------------------------

class StepArrays:
    """Addresses of the index tensors of a step."""

    def __init__(self, addresses: list[int], max_tokens: int, max_sequences: int) -> None: ...
    def add_group(self, tokens_per_block: int, slots: int, block_table: int, width: int, seq_lens: int) -> None: ...
    def add_state_group(
        self, read_slots: int, write_slots: int, draft_slots: int, num_draft: int, seq_lens: int
    ) -> None: ...

class Results:
    """Makes the decisions of a ledger, of the classes of `kvpool.ledger.decisions`."""

    def __init__(
        self,
        step: type[StepDecision],
        copy: type[BlockCopy],
        admission: type[Admission],
        drafts: type[DraftRows],
        onboard: type[Onboard],
        evicted: type[Evicted],
    ) -> None: ...

class Ledger:
    """The ledger core."""

    def __init__(
        self,
        groups: list[list[int]],
        limits: list[int],
        finder_mask: int = ...,
        portable_sha: bool = False,
        keyed: bool = False,
        offer: bool = False,
        num_events: int = 0,
    ) -> None: ...
    def open(
        self,
        tokens: object,
        salt: bytes,
        lora: bytes,
        media: list[tuple[int, int, bytes]],
        retention: list[tuple[int, int, int, float]],
        max_cached: int,
    ) -> int: ...
    def extend(self, sequences: object, token_ids: object | None) -> None: ...
    def resolve(self, sequences: object, token_ids: object) -> None: ...
    def append(self, sequence: int, token_ids: object) -> None: ...
    def rewind(self, sequence: int, num_tokens: int, now: float) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def release(self, sequence: int, keep: bool, now: float) -> None: ...
    def pause(self, sequence: int, now: float) -> None: ...
    def resume(self, sequence: int) -> None: ...
    def expect(self, sequence: int, num_blocks: int) -> None: ...
    def keys(self, sequence: int) -> list[bytes]: ...
    def extras(self, sequence: int) -> list[bytes]: ...
    def matched(self, sequence: int) -> int: ...
    def in_tree(self, sequence: int) -> list[bytes]: ...
    def tokens(self, sequence: int) -> NDArray[np.int32]: ...
    def block_table(self, sequence: int, group: int) -> NDArray[np.int32]: ...
    def state(self, sequence: int, group: int) -> int: ...
    def sequence(self, sequence: int) -> tuple[int, int, int, int, int, int, int, bool, bool]:
        """The fields of SequenceStats."""

    def num_tokens(self, sequence: int) -> int: ...
    def num_computed(self, sequence: int) -> int: ...
    def num_cached(self, sequence: int) -> int: ...
    def begin_step(
        self,
        items: list[tuple[int, int]],
        arrays: StepArrays,
        commit: bool,
        drafts: list[tuple[int, object, list[int]]],
        now: float,
        results: Results,
    ) -> StepDecision: ...
    def decode_step(
        self, previous: int, sequences: object, token_ids: object, arrays: StepArrays, now: float, results: Results
    ) -> StepDecision: ...
    def fits(self, items: list[tuple[int, int]]) -> int: ...
    def missing(self, items: list[tuple[int, int]]) -> list[int]: ...
    def end_step(self, step: int, now: float) -> None: ...
    def abort_step(self, step: int, now: float) -> None: ...
    def accept(self, sequence: int, indices: list[int]) -> list[tuple[int, int, int]]: ...
    def peek(
        self, tokens: object, salt: bytes, lora: bytes, media: list[tuple[int, int, bytes]]
    ) -> tuple[int, int]: ...
    def pin(self, tokens: object, salt: bytes, lora: bytes, media: list[tuple[int, int, bytes]]) -> tuple[int, int]: ...
    def unpin(self, pin: int, now: float) -> None: ...
    def clear(self, salt: bytes | None) -> None: ...
    def reset(self) -> None: ...
    def resize(
        self, group: int, num_blocks: int, results: Results
    ) -> tuple[int, list[tuple[int, int, int]], int, tuple[Evicted, ...]]: ...
    def stored(self, results: Results) -> tuple[Evicted, ...]: ...
    def events(self) -> list[tuple[Any, ...]]: ...
    def unkeyed(self) -> list[tuple[Any, ...]]: ...
    def push_keys(self, group: int, blocks: NDArray[np.int32], keys: NDArray[np.float64]) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def check(self) -> list[str]: ...

def sha256(data: bytes, portable: bool = False) -> bytes: ...

# --- bind_storage.cpp -------------------------------------------------------------------------------------

def crc32c(address: int, num_bytes: int, crc: int = 0, portable: bool = False) -> int: ...
def copy_bytes(dst: int, src: int, num_bytes: int) -> None: ...
