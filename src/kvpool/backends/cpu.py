"""The native CPU backend: C++ kernels on their own threads. Objects are made once; a call passes integers only."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvpool import _native
from kvpool.backends.base import Attention
from kvpool.backends.states import read_states, write_states
from kvpool.codecs import Counts
from kvpool.errors import UnsupportedError
from kvpool.kinds import Lifetime
from kvpool.pools import Part, Plane, Pools
from kvpool.step import Step, StepBuffers
from kvpool.support import NATIVE_CODECS

#: Codec -> `CodecId` in native/kernels/types.hpp.
CODEC_IDS = {name: index for index, name in enumerate(NATIVE_CODECS)}
#: Order of `DType` in native/kernels/types.hpp.
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Instruction sets, lowest first.
ISAS = ("generic", "avx2", "avx512", "amx")


def choose_isa(wanted: str | None) -> int:
    """Return the instruction set to use: the best of this CPU, or the one `KVPOOL_CPU` names.

    Raises:
        UnsupportedError: The name is unknown, or this CPU lacks it.
    """
    best = _native.best_isa()
    if wanted is None:
        return best
    if wanted not in ISAS[: best + 1]:
        raise UnsupportedError(f"KVPOOL_CPU={wanted!r}: allowed here are {', '.join(ISAS[: best + 1])}")
    return ISAS.index(wanted)


def choose_threads(num_threads: int | None, wanted: str | None) -> int:
    """Return the number of kernel threads: what was asked for, else `KVPOOL_THREADS`, else the CPUs of this process.

    Raises:
        UnsupportedError: It is no number from 1 to 1024.
    """
    if num_threads is not None:
        if not 1 <= num_threads <= 1024:
            raise UnsupportedError(f"num_threads={num_threads}: give a number of threads from 1 to 1024")
        return num_threads
    if wanted is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not wanted.isdigit() or not 1 <= int(wanted) <= 1024:
        raise UnsupportedError(f"KVPOOL_THREADS={wanted!r}: give a number of threads from 1 to 1024")
    return int(wanted)


def _strides(plane: Plane) -> tuple[int, int, int, int]:
    b, h, n = plane.strides[:3]
    return plane.address, b, h, n


def make_store(part: Part) -> _native.Store:
    """Return what the kernels need to know of a part, and freeze its constants."""
    constants = part.constants
    constants.freeze()
    maps, m = constants.maps, constants.maps.mixing
    return _native.Store(
        CODEC_IDS[part.codec.name],
        part.num_heads,
        list(part.vector.segments),
        part.tokens_per_block,
        part.planes["data"].tensor.shape[0],
        _strides(part.planes["data"]),
        _strides(part.planes["scale"]) if "scale" in part.planes else None,
        _strides(part.planes["block_scale"]) if "block_scale" in part.planes else None,
        1.0 if constants.scale is None else constants.scale,
        0 if maps.smoothing is None else maps.smoothing.data_ptr(),
        maps.block > 0,
        *((0, 0, 0) if m is None else (m.store.data_ptr(), m.restore.data_ptr(), m.ask.data_ptr())),
    )


class CpuBackend:
    """Kernels for this machine's instruction set.

    Attributes:
        isa: Name of the instruction set in use.
        num_threads: Threads that share a call's work.
    """

    name = "cpu"
    replayable = False

    def __init__(self, num_threads: int | None = None) -> None:
        isa = choose_isa(os.environ.get("KVPOOL_CPU"))
        self.isa = ISAS[isa]
        self.num_threads = choose_threads(num_threads, os.environ.get("KVPOOL_THREADS"))
        self._workers = _native.Workers(self.num_threads, isa)
        self._stores: dict[Part, _native.Store] = {}
        self._attentions: dict[tuple[Part, int, int], _native.Attention] = {}
        self._views: dict[StepBuffers, list[_native.StepView]] = {}
        self._heads: tuple[int, ...] = ()

    def prepare(self, pools: Pools, buffers: StepBuffers) -> None:
        self._heads = tuple(max(pool.num_heads for pool in group.pools) for group in pools.plan.groups)
        views = []
        for group, tables in zip(pools.plan.groups, buffers.groups, strict=True):
            lifetime = group.lifetime
            views.append(
                _native.StepView(
                    buffers.cu_seqlens.data_ptr(),
                    tables.seq_lens.data_ptr(),
                    tables.block_table.data_ptr(),
                    tables.block_table.stride(0),
                    tables.slots.data_ptr(),
                    len(buffers.num_tokens),
                    len(buffers.token_ids),
                    (lifetime.window or 0) if lifetime else 0,
                    (lifetime.chunk or 0) if lifetime else 0,
                    lifetime.sink_tokens if lifetime else 0,
                )
            )
        self._views[buffers] = views

    def begin(self, step: Step) -> None:
        for view, heads in zip(self._views[step.buffers], self._heads, strict=True):
            view.plan(step.num_sequences, step.total_tokens, self.num_threads, heads)

    def counts(self, part: Part) -> Counts:
        return Counts(*self._store(part).counters()) if part in self._stores else part.constants.counts

    def forget(self) -> None:
        self._stores.clear()
        self._attentions.clear()

    def _store(self, part: Part) -> _native.Store:
        store = self._stores.get(part)
        if store is None:
            store = self._stores[part] = make_store(part)
        return store

    def write(self, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
        view = self._views[step.buffers][parts[0].group]
        if len(parts) == 2 and tensors[0].dtype == tensors[1].dtype:
            k, v = tensors
            (k_row, k_head, _), (v_row, v_head, _) = k.stride(), v.stride()
            _native.write_kv(
                self._workers, view,
                self._store(parts[0]), k.data_ptr(), k_row, k_head,
                self._store(parts[1]), v.data_ptr(), v_row, v_head,
                _DTYPES[k.dtype],
            )  # fmt: skip
            return
        for part, x in zip(parts, tensors, strict=True):
            _native.write(
                self._workers, view, self._store(part), x.data_ptr(), _DTYPES[x.dtype], x.stride(0), x.stride(1)
            )

    def attend(
        self,
        q: torch.Tensor,
        k: tuple[Part, ...],
        v: Part,
        v_dim: int,
        step: Step,
        options: Attention,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        heads = q.shape[1]
        call = self._attentions.get((k[0], v_dim, heads))
        if call is None:
            call = _native.Attention([self._store(part) for part in k], self._store(v), v_dim, heads)
            self._attentions[k[0], v_dim, heads] = call
        sinks, indices, tree = options.sinks, options.indices, options.tree
        (q_row, q_head, _), (out_row, out_head, _) = q.stride(), out.stride()
        sinks = None if sinks is None else sinks.float().contiguous()
        call(
            self._workers, self._views[step.buffers][v.group],
            q.data_ptr(), _DTYPES[q.dtype], q_row, q_head,
            out.data_ptr(), _DTYPES[out.dtype], out_row, out_head,
            options.scale, options.softcap,
            0 if sinks is None else sinks.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if indices is None else indices.data_ptr(), 0 if indices is None else indices.shape[1],
            0 if tree is None else tree.data_ptr(), 0 if tree is None else tree.shape[1],
        )  # fmt: skip

    def score(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        part: Part,
        step: Step,
        lifetime: Lifetime,
        indices: torch.Tensor,
    ) -> None:
        # The step's view of the group knows the lifetime.
        weights = weights.float().contiguous()
        _native.score(
            self._workers, self._views[step.buffers][part.group], self._store(part),
            q.data_ptr(), _DTYPES[q.dtype], q.stride(0), q.stride(1), q.shape[1],
            weights.data_ptr(), indices.shape[1], indices.data_ptr(),
        )  # fmt: skip

    def read(self, part: Part, slots: torch.Tensor, out: torch.Tensor) -> None:
        _native.read(
            self._workers, self._store(part), slots.data_ptr(), len(slots),
            out.data_ptr(), _DTYPES[out.dtype], out.stride(0), out.stride(1),
        )  # fmt: skip

    def read_states(self, part: Part, slots: torch.Tensor) -> torch.Tensor:
        return read_states(part, slots)

    def write_states(self, part: Part, slots: torch.Tensor, states: torch.Tensor) -> None:
        write_states(part, slots, states)

    def convert(self, source: Part, source_slots: torch.Tensor, part: Part, slots: torch.Tensor) -> None:
        _native.convert(
            self._workers, self._store(source), source_slots.data_ptr(), self._store(part), slots.data_ptr(), len(slots)
        )

    def copy(self, pools: Pools, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        slab = pools.slabs[group]
        ids = torch.tensor(pairs, dtype=torch.int32).T.contiguous()  # [2, n]
        for part in slab.group.ranges:
            start, row, pitch = slab.address + part.offset, part.row_bytes, part.pitch_bytes
            _native.copy_blocks(
                self._workers, start, row, pitch, start, row, pitch,
                row, part.num_rows, ids[0].data_ptr(), ids[1].data_ptr(), ids.shape[1],
            )  # fmt: skip

    def move(self, pools: Pools, group: int, slots: Sequence[tuple[int, int]]) -> None:
        slab = pools.slabs[group]
        planes = []
        for pool in slab.group.pools:
            for plane in pool.planes:
                for layer in range(len(pool.layers)):
                    for factor in range(pool.kv_factor):
                        tensor = slab.plane(plane)[:, layer, factor]
                        size = (tensor.shape[3] if tensor.dim() == 4 else 1) * tensor.element_size()
                        b, h, n = plane.strides[0], plane.strides[3], plane.strides[4]
                        planes.append(((tensor.data_ptr(), b, h, n), pool.num_heads, size))
        pairs = torch.tensor(slots, dtype=torch.int64).T.contiguous()  # [2, n]
        mover = _native.Mover(planes, slab.group.tokens_per_block)
        mover(self._workers, pairs[0].data_ptr(), pairs[1].data_ptr(), pairs.shape[1])
