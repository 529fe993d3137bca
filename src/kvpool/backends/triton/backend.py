"""The Triton backend: one kernel an operation, for every codec, layout and kind, on CUDA devices.

Tensors stay on the device; what a step needs from the host (how its attention is cut into work items) is made once a
step. The same code runs in Triton's interpreter on the CPU, which is how it is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvpool.backends.base import Attention
from kvpool.backends.triton import schedule
from kvpool.backends.triton.attend import attend_kernel, merge_kernel
from kvpool.backends.triton.copy import copy_kernel, move_kernel
from kvpool.backends.triton.launch import (
    READ_ELEMENTS,
    WRITE_ELEMENTS,
    AttendArguments,
    PartArguments,
    Shape,
    attend_arguments,
    choose_shape,
    option_constants,
    part_arguments,
    power,
    rows_of,
    score_arguments,
)
from kvpool.backends.triton.mix import mix_kernel
from kvpool.backends.triton.score import score_kernel
from kvpool.backends.triton.states import state_arguments
from kvpool.backends.triton.target import Target, find_target
from kvpool.backends.triton.work import StepWork
from kvpool.backends.triton.write import read_kernel, write_kernel
from kvpool.codecs import Counts
from kvpool.codecs.maps import Maps
from kvpool.kinds import Lifetime
from kvpool.pools import Part, Pools
from kvpool.step import Step, StepBuffers

#: Words of 8 bytes a program of the copy kernel moves.
COPY_WORDS = 2048
#: Pairs of one launch: CUDA's limit on the second axis of a grid.
MAX_PAIRS = 65_535
#: Vectors of a token that are decoded at a time on their way to another format.
CONVERT_TOKENS = 16384
#: Programs wanted for each multiprocessor, so that it has another to run while one waits for memory.
PROGRAMS_PER_PROCESSOR = 2


class TritonBackend:
    """Kernels for one CUDA device, or for the interpreter."""

    name = "triton"
    replayable = True

    def __init__(self, device: str | torch.device = "cuda", *, target: Target | None = None) -> None:
        self.target = find_target(device) if target is None else target
        self._device: torch.device | None = None
        self._parts: dict[Part, PartArguments] = {}
        self._states: dict[Part, PartArguments] = {}
        self._maps: dict[Part, Maps] = {}
        self._calls: dict[tuple[Any, ...], AttendArguments] = {}
        self._work: dict[StepBuffers, StepWork] = {}

    def prepare(self, pools: Pools, buffers: StepBuffers) -> None:
        if torch.device(pools.device).type == "cuda":
            self._device = buffers.token_ids.device
            self.target = find_target(self._device)
        root = buffers.root
        if root not in self._work:
            self._work[root] = StepWork(root)
        if root is not buffers:
            self._work[buffers] = StepWork(buffers, self._work[root])

    def begin(self, step: Step) -> None:
        self._work[step.buffers].begin(step)

    def counts(self, part: Part) -> Counts:
        return Counts(*self._parts[part].losses.tolist()) if part in self._parts else Counts()

    def forget(self) -> None:
        self._parts.clear()
        self._states.clear()
        self._maps.clear()
        self._calls.clear()

    def _current(self) -> AbstractContextManager[object]:
        """Make the pools' device the one kernels are launched on."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)

    def arguments(self, part: Part) -> PartArguments:
        """Return the kernel arguments of a part; its constants are frozen by the first call."""
        found = self._parts.get(part)
        if found is None:
            part.constants.freeze()
            scale = part.constants.scale
            found = self._parts[part] = part_arguments(part, 1.0 if scale is None else scale)
            self._maps[part] = part.constants.maps.on(found.data.device)
        return found

    def _multiply(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Return `x [T, Q, D]` times the matrices `[H, D, D]` of its heads, in fp32."""
        num_tokens, num_heads, dim = x.shape
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        rows = rows_of(power(dim, 16), WRITE_ELEMENTS)
        grid = (-(-num_tokens // rows), num_heads)
        if not grid[0]:
            return out
        with self._current():
            mix_kernel[grid](
                x, matrices, out, num_tokens, x.stride(0), x.stride(1), out.stride(0),
                GROUP=num_heads // len(matrices), D=dim, WIDTH=power(dim, 16), ROWS=rows,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    def _asked(self, q: torch.Tensor, k: tuple[Part, ...]) -> torch.Tensor:
        """Fold the maps of keys into the query, in the query's type."""
        if not any(part.constants.maps for part in k):
            return q
        pieces = torch.split(q, [part.vector.dim for part in k], -1)
        asked = [self._maps[part].ask(piece, self._multiply) for piece, part in zip(pieces, k, strict=True)]
        return torch.cat(asked, -1).to(q.dtype)

    def write(self, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
        for part, x in zip(parts, tensors, strict=True):
            self.store(part, x, step.groups[part.group].slots)

    def store(self, part: Part, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode `x [T, H, D]` into `slots [T]` int64; -1 writes nothing."""
        arguments = self.arguments(part)
        if maps := self._maps[part]:
            x = maps.store(x, self._multiply)
        self._encode(arguments, x, slots)

    def _encode(self, arguments: PartArguments, x: torch.Tensor, slots: torch.Tensor) -> None:
        rows = rows_of(arguments.encode["WIDTH"], WRITE_ELEMENTS)
        grid = (-(-x.shape[0] * arguments.encode["NUM_HEADS"] // rows),)
        if not grid[0]:
            return
        with self._current():
            write_kernel[grid](
                x, slots, arguments.data, arguments.block_scale, arguments.scale, arguments.constant, arguments.losses,
                x.shape[0], x.stride(0), x.stride(1),
                **arguments.encode, ROWS=rows, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def read(self, part: Part, slots: torch.Tensor, out: torch.Tensor) -> None:
        arguments = self.arguments(part)
        maps = self._maps[part]
        target = out if not maps else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._decode(arguments, slots, target)
        if maps:
            out.copy_(maps.restore(target, self._multiply))

    def _decode(self, arguments: PartArguments, slots: torch.Tensor, out: torch.Tensor) -> None:
        rows = rows_of(arguments.decode["WIDTH"], READ_ELEMENTS)
        grid = (-(-len(slots) * arguments.decode["NUM_HEADS"] // rows),)
        if not grid[0]:
            return
        with self._current():
            read_kernel[grid](
                out, slots, arguments.data, arguments.block_scale, arguments.scale, arguments.constant,
                len(slots), out.stride(0), out.stride(1),
                **arguments.decode, ROWS=rows, CAST=self.target.cast, HARDWARE=self.target.hardware,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def _state(self, part: Part) -> PartArguments:
        found = self._states.get(part)
        if found is None:
            found = self._states[part] = state_arguments(part, self.arguments(part))
        return found

    def read_states(self, part: Part, slots: torch.Tensor) -> torch.Tensor:
        arguments = self._state(part)
        rows, elements = arguments.decode["NUM_HEADS"], arguments.decode["D"]
        out = torch.empty((len(slots), rows, elements), dtype=torch.float32, device=slots.device)
        self._decode(arguments, slots, out)
        return out.view(len(slots), part.vector.dim)

    def write_states(self, part: Part, slots: torch.Tensor, states: torch.Tensor) -> None:
        arguments = self._state(part)
        rows, elements = arguments.encode["NUM_HEADS"], arguments.encode["D"]
        self._encode(arguments, states.reshape(len(slots), rows, elements), slots)

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
        if not q.shape[0]:
            return
        call = self._call(k, v, v_dim, q.dtype, q.shape[1])
        work = self._work[step.buffers]
        sparse = 0 if options.indices is None else options.indices.shape[1]
        bounded = bool(options.lifetime.window or options.lifetime.chunk)
        shape = choose_shape(call, self.target, work.max_rows, sparse > 0, options.tree is not None, bounded)
        q = self._asked(q, k)
        maps = self._maps[v]
        target = torch.empty(out.shape, dtype=torch.float32, device=out.device) if maps else out
        self._launch(q, step, work, call, shape, sparse, options, target, lse)
        if maps:
            whole = torch.zeros((*out.shape[:2], v.vector.dim), dtype=torch.float32, device=out.device)
            whole[..., :v_dim] = target
            out.copy_(maps.restore(whole)[..., :v_dim])

    def _call(self, k: tuple[Part, ...], v: Part, v_dim: int, dtype: torch.dtype, heads: int) -> AttendArguments:
        key = (*k, v, v_dim, dtype, heads)
        found = self._calls.get(key)
        if found is None:
            found = attend_arguments(k, v, v_dim, dtype, heads, self.arguments, self.target)
            self._calls[key] = found
        return found

    def _launch(
        self,
        q: torch.Tensor,
        step: Step,
        work: StepWork,
        call: AttendArguments,
        shape: Shape,
        sparse: int,
        options: Attention,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        head_tiles = -(-call.group // shape.tile_heads)
        programs = call.num_heads * head_tiles
        wanted = self.target.num_processors * PROGRAMS_PER_PROCESSOR
        cut = schedule.Cut(options.lifetime, shape.tile_tokens, shape.block_n, programs, wanted, sparse)
        tables = step.groups[call.table_group]
        items = work.items(cut, call.table_group)
        if not items.num_items:
            return
        partial = torch.empty(
            (items.num_partials, programs, shape.block_m, call.v_width), dtype=torch.float32, device=q.device
        )
        partial_lse = torch.empty((items.num_partials, programs, shape.block_m), dtype=torch.float32, device=q.device)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        tree, indices = options.tree, options.indices
        tiles = {"TILE_HEADS": shape.tile_heads, "TILE_TOKENS": shape.tile_tokens, "BLOCK_M": shape.block_m}
        asked = option_constants(options, lse is not None)
        with self._current():
            attend_kernel[(items.num_items * programs,)](
                q, out, out if lse is None else lse, partial, partial_lse, items.items, step.cu_seqlens,
                tables.seq_lens, tables.block_table,
                q if indices is None else indices, q if tree is None else tree, q if sinks is None else sinks,
                *call.tensors,
                options.scale * call.logit_factor, options.softcap, call.r_factor, call.v_constant,
                q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.block_table.stride(0),
                0 if indices is None else indices.stride(0), 0 if tree is None else tree.stride(0),
                **asked, **tiles, **call.constants, BLOCK_N=shape.block_n,
                num_warps=shape.num_warps, num_stages=shape.num_stages, maxnreg=shape.max_registers,
                enable_fp_fusion=True,
            )  # fmt: skip
        if items.num_merges:
            rows = min(shape.block_m, 32, max(2048 // call.v_width, 1))
            with self._current():
                merge_kernel[(items.num_merges * programs, shape.block_m // rows)](
                    partial, partial_lse, items.merges, step.cu_seqlens, out, out if lse is None else lse,
                    q if sinks is None else sinks, out.stride(0), out.stride(1),
                    **tiles, ROWS=rows, HAS_SINKS=asked["HAS_SINKS"], HAS_LSE=asked["HAS_LSE"],
                    **{name: call.constants[name] for name in ("NUM_HEADS", "GROUP", "V_COUNT", "V_TOTAL", "CAST")},
                    num_warps=4, enable_fp_fusion=True,
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
        num_rows, heads = q.shape[0], q.shape[1]
        if not num_rows:
            return
        arguments, work = self.arguments(part), self._work[step.buffers]
        tables = step.groups[part.group]
        q = self._asked(q, (part,))
        call = score_arguments(arguments, q.dtype, self.target)
        tile_heads = power(heads, 16)
        tile_tokens = max(64 // tile_heads, 1) if work.max_rows > 1 else 1
        cut = schedule.Cut(lifetime, tile_tokens, call["BLOCK_N"], 1, self.target.num_processors * 4)
        items = work.items(cut, part.group)
        width = tables.block_table.shape[1] * part.tokens_per_block
        scores = torch.full((num_rows, width), float("-inf"), dtype=torch.float32, device=q.device)
        with self._current():
            score_kernel[(max(items.num_items, 1),)](
                q, weights, scores, items.items, step.cu_seqlens, tables.seq_lens, tables.block_table,
                arguments.data, arguments.block_scale, arguments.scale, arguments.constant,
                q.stride(0), q.stride(1), weights.stride(0), scores.stride(0), tables.block_table.stride(0),
                WINDOW=lifetime.window or 0, CHUNK=lifetime.chunk or 0, SINK_TOKENS=lifetime.sink_tokens,
                Q_HEADS=heads, TILE_HEADS=tile_heads, TILE_TOKENS=tile_tokens, TOKENS_PER_BLOCK=part.tokens_per_block,
                **call, num_warps=4, num_stages=3, enable_fp_fusion=True,
            )  # fmt: skip
        # A row sees at most as many tokens as the table is wide.
        best = scores.topk(min(indices.shape[1], width), dim=1)
        row = torch.arange(num_rows, dtype=torch.int32, device=q.device)
        sequence = torch.searchsorted(step.cu_seqlens[1 : step.num_sequences + 1], row, right=True)
        entry = best.indices // part.tokens_per_block
        block = tables.block_table[sequence.clamp(max=step.num_sequences - 1)].gather(1, entry).long()
        slots = block * part.tokens_per_block + best.indices % part.tokens_per_block
        indices.fill_(-1)
        indices[:, : slots.shape[1]] = torch.where(best.values == float("-inf"), -1, slots)

    def convert(self, source: Part, source_slots: torch.Tensor, part: Part, slots: torch.Tensor) -> None:
        """Store the vectors at `source_slots [n]` of one part at `slots [n]` of another of any codec and layout."""
        for first in range(0, len(slots), CONVERT_TOKENS):
            piece = slice(first, first + CONVERT_TOKENS)
            shape = (len(slots[piece]), source.num_heads, source.vector.dim)
            vectors = torch.empty(shape, dtype=torch.float32, device=slots.device)
            self.read(source, source_slots[piece], vectors)
            self.store(part, vectors, torch.where(source_slots[piece] >= 0, slots[piece], -1))

    def copy(self, pools: Pools, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        slab = pools.slabs[group]
        plan = slab.group
        pieces = len(plan.layers) if plan.layer_first else 1
        words = plan.bytes_per_block // pieces // 8
        slab_words = slab.bytes[: slab.bytes.numel() // 8 * 8].view(torch.int64)
        for batch in batches(pairs):
            ids = torch.tensor(batch, dtype=torch.int64).to(slab_words.device)
            with self._current():
                copy_kernel[(-(-words // COPY_WORDS), len(batch), pieces)](
                    slab_words, ids, BLOCK_WORDS=words, PITCH_WORDS=plan.layer_pitch_bytes // 8, CHUNK=COPY_WORDS,
                    num_warps=8, enable_fp_fusion=False,
                )  # fmt: skip

    def move(self, pools: Pools, group: int, slots: Sequence[tuple[int, int]]) -> None:
        slab = pools.slabs[group]
        for batch in batches(slots):
            ids = torch.tensor(batch, dtype=torch.int64).to(slab.bytes.device)
            for pool in slab.group.pools:
                for plane in pool.planes:
                    tensor = slab.plane(plane)  # [B, L, F, H, N(, C)]
                    count = tensor.shape[5] if tensor.dim() == 6 else 1
                    named = dict(zip(("B", "L", "F", "H", "N"), tensor.stride(), strict=False))
                    with self._current():
                        move_kernel[(len(batch), len(pool.layers) * pool.kv_factor * pool.num_heads)](
                            tensor, ids, **{f"STRIDE_{axis}": stride for axis, stride in named.items()},
                            NUM_FACTORS=pool.kv_factor, NUM_HEADS=pool.num_heads, COUNT=count, WIDTH=power(count),
                            TOKENS_PER_BLOCK=slab.group.tokens_per_block, num_warps=1, enable_fp_fusion=False,
                        )  # fmt: skip


def batches(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut copies that are meant one after another into lists whose copies may run at once, each a launch."""
    out: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for source, destination in pairs:
        full = not out or len(out[-1]) == MAX_PAIRS
        if full or source in destinations or destination in destinations or destination in sources:
            out.append([])
            sources, destinations = set(), set()
        out[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return out
