"""Paged stores on torch buffers and a float64 attention, for tests of the kernels alone (no plan, no ledger)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvpool import _native

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ISAS = [name for code, name in enumerate(("generic", "avx2", "avx512", "amx")) if code <= _native.best_isa()]


def workers(isa: str, num_threads: int = 2) -> _native.Workers:
    return _native.Workers(num_threads, ("generic", "avx2", "avx512", "amx").index(isa))


@dataclass
class PlainStore:
    """One part in a plain dtype; memory starts as NaN."""

    num_blocks: int
    num_heads: int
    tokens_per_block: int
    dim: int
    dtype: torch.dtype
    layout: str
    native: _native.Store = field(init=False)

    def __post_init__(self) -> None:
        b, h, n, d = self.num_blocks, self.num_heads, self.tokens_per_block, self.dim
        if self.layout == "HND":
            self.tensor = torch.full((b, h, n, d), math.nan, dtype=self.dtype)
        else:
            self.tensor = torch.full((b, n, h, d), math.nan, dtype=self.dtype).transpose(1, 2)
        item = self.tensor.element_size()
        strides = [s * item for s in self.tensor.stride()[:3]]
        self.native = _native.Store(
            DTYPES[self.dtype], h, [d], n, b, (self.tensor.data_ptr(), strides[0], strides[1], strides[2])
        )

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Stored vectors `[n, H, D]` of slots."""
        n = self.tokens_per_block
        return self.tensor[slots // n, :, slots % n]


@dataclass
class Batch:
    """A step: lengths after it, query rows, permuted blocks."""

    seq_lens: list[int]
    num_rows: list[int]
    tokens_per_block: int
    num_blocks: int
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        n = self.tokens_per_block
        need = [-(-length // n) for length in self.seq_lens]
        ids = torch.randperm(self.num_blocks, generator=generator).to(torch.int32)
        assert sum(need) <= self.num_blocks
        self.table = torch.full((max(len(need), 1), max(need, default=0) + 2), -1, dtype=torch.int32)
        at = 0
        for s, count in enumerate(need):
            self.table[s, :count] = ids[at : at + count]
            at += count
        self.cu_seqlens = torch.tensor([0, *self.num_rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.num_tokens = sum(self.num_rows)
        self.slots = torch.cat(
            [
                self.slots_of(s)[max(length - rows, 0) :]
                for s, (length, rows) in enumerate(zip(self.seq_lens, self.num_rows, strict=True))
            ]
            or [torch.zeros(0, dtype=torch.int64)]
        )
        pad = torch.full((self.num_tokens - len(self.slots),), -1, dtype=torch.int64)
        self.slots = torch.cat([self.slots, pad])
        self.view = _native.StepView(
            self.cu_seqlens.data_ptr(),
            self.lens.data_ptr(),
            self.table.data_ptr(),
            self.table.stride(0),
            self.slots.data_ptr(),
            len(self.seq_lens),
            self.num_tokens,
            self.window,
            self.chunk,
            self.sink_tokens,
        )

    def plan(self, num_workers: int, num_kv_heads: int, rows_per_item: int = 32, split_tokens: int = 0) -> None:
        self.view.plan(len(self.seq_lens), self.num_tokens, num_workers, num_kv_heads, rows_per_item, split_tokens)

    def slots_of(self, s: int) -> torch.Tensor:
        """Slots of all tokens of a sequence, int64."""
        token = torch.arange(self.seq_lens[s])
        n = self.tokens_per_block
        return self.table[s].long()[token // n] * n + token % n

    def visible(self, s: int) -> torch.Tensor:
        """`[rows, length]` bool."""
        length, rows = self.seq_lens[s], self.num_rows[s]
        p = torch.arange(length - rows, length)[:, None]
        t = torch.arange(length)[None, :]
        seen = t <= p
        if self.window:
            seen &= (t > p - self.window) | (t < self.sink_tokens)
        if self.chunk:
            seen &= t >= p // self.chunk * self.chunk
        return seen


def attend(
    pool: _native.Workers,
    batch: Batch,
    attention: _native.Attention,
    q: torch.Tensor,
    v_dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel; out `[T, Q, v_dim]` lies in a wider tensor, so that strides matter."""
    wide = torch.full((q.shape[0], q.shape[1], v_dim + 8), math.nan, dtype=dtype)
    out = wide[:, :, :v_dim]
    lse = torch.full(q.shape[:2], math.nan)
    attention(
        pool,
        batch.view,
        q.data_ptr(),
        DTYPES[q.dtype],
        q.stride(0),
        q.stride(1),
        out.data_ptr(),
        DTYPES[dtype],
        out.stride(0),
        out.stride(1),
        scale,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        lse.data_ptr(),
        0 if indices is None else indices.data_ptr(),
        0 if indices is None else indices.shape[1],
        0 if tree is None else tree.data_ptr(),
        0 if tree is None else tree.shape[1],
    )
    assert wide[:, :, v_dim:].isnan().all(), "wrote past v_dim"
    return out, lse


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence in float64: q `[r, Q, D]`, k `[n, H, D]`, v `[n, H, Dv]`, seen `[r, n]`."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    v = v.double().repeat_interleave(group, 1)
    logits = torch.einsum("rhd,nhd->rhn", q.double(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, None, :], -math.inf)
    total = logits
    if sinks is not None:
        total = torch.cat([logits, sinks.double()[None, :, None].expand(q.shape[0], -1, 1)], -1)
    lse = total.logsumexp(-1) if total.shape[-1] else torch.full(logits.shape[:2], -math.inf, dtype=torch.float64)
    lse = lse.masked_fill(~seen.any(1)[:, None], -math.inf)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("rhn,nhd->rhd", weights, v), lse
