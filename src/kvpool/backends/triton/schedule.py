"""How a step's attention is cut into work items. Integers only; no kernel and no tensor.

A tile is some rows of one sequence; what its rows see is one range of tokens (two, with sink tokens before a window).
Ranges are cut so that the parts of all tiles are about equally long and fill the multiprocessors; a tile of several
parts is joined by the merge kernel. Everything is vectorised over sequences, and made once a step for all layers that
ask alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.kinds import Lifetime

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cut:
    """How tiles are made; equal for all layers that share a schedule.

    Attributes:
        lifetime: Which positions a row sees.
        tile_tokens: Tokens of a tile.
        block_n: Tokens of one turn of the kernel's loop; ranges start at its multiples.
        num_programs: Programs of one item: KV heads times tiles of query heads.
        wanted_programs: Programs that fill the device.
        sparse: Slots a row sees, for sparse attention; 0 when rows see ranges of tokens.
    """

    lifetime: Lifetime
    tile_tokens: int
    block_n: int
    num_programs: int
    wanted_programs: int
    sparse: int = 0

    def max_tiles(self, num_sequences: int, num_tokens: int) -> int:
        """Tiles that so many sequences and tokens can need."""
        return min(num_tokens, num_tokens // self.tile_tokens + num_sequences)

    def max_items(self, num_sequences: int, num_tokens: int) -> int:
        """Items that so many sequences and tokens can need (see `make`): the length of a captured grid."""
        ranges = 2 if self.lifetime.sink_tokens else 1
        return ranges * self.max_tiles(num_sequences, num_tokens) + -(-self.wanted_programs // self.num_programs)


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Arrays of the kernels.

    Attributes:
        items: `[I, 5]`: sequence, tile, first token, end, partial slot or -1 when the tile has one range.
        merges: `[M, 4]`: sequence, tile, first partial slot, number of slots.
        num_partials: Slots used.
    """

    items: Ints
    merges: Ints
    num_partials: int


def make(cut: Cut, num_rows: Ints, lengths: Ints) -> WorkItems:
    """Cut a step.

    Args:
        cut: Shapes of tiles.
        num_rows: `[S]` rows of every sequence.
        lengths: `[S]` tokens of every sequence, the rows included.
    """
    tiles = -(-num_rows.astype(np.int64) // cut.tile_tokens)
    sequence = np.repeat(np.arange(len(tiles)), tiles)  # [tiles]
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    start, stop, owner = _ranges(cut, sequence, tile, num_rows.astype(np.int64), lengths.astype(np.int64))
    # One length for all parts, so that parts <= ranges + wanted / programs.
    turns = -(-(stop - start) // cut.block_n)
    share = max(-(-int(turns.sum()) * cut.num_programs // cut.wanted_programs), 1)
    parts = np.maximum(-(-turns // share), 1)
    which = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = start[which] + part * share * cut.block_n
    items = np.empty((len(which), 5), np.int32)
    items[:, 0], items[:, 1] = sequence[owner[which]], tile[owner[which]]
    items[:, 2], items[:, 3] = first, np.minimum(first + share * cut.block_n, stop[which])
    per_tile = np.bincount(owner[which], minlength=len(sequence))
    split = per_tile > 1
    parts_split = split[owner[which]]
    items[:, 4] = np.where(parts_split, np.cumsum(parts_split) - 1, -1)
    merges = np.empty((int(split.sum()), 4), np.int32)
    merges[:, 0], merges[:, 1] = sequence[split], tile[split]
    merges[:, 3] = per_tile[split]
    merges[:, 2] = np.cumsum(per_tile[split]) - per_tile[split]
    return WorkItems(items, merges, int(parts_split.sum()))


def _ranges(
    cut: Cut,
    sequence: npt.NDArray[np.int64],
    tile: npt.NDArray[np.int64],
    num_rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (start, stop, index of the tile) of what the rows of every tile see, in the tiles' order."""
    owner = np.arange(len(sequence))
    if cut.sparse:
        return np.zeros_like(owner), np.full_like(owner, cut.sparse), owner
    before = (lengths - num_rows)[sequence]
    first = before + tile * cut.tile_tokens
    last = np.minimum(first + cut.tile_tokens, lengths[sequence]) - 1
    stop = np.maximum(last + 1, 0)
    low = np.zeros_like(first)
    if cut.lifetime.window is not None:
        low = np.maximum(first - cut.lifetime.window + 1, 0)
    if cut.lifetime.chunk is not None:
        low = np.maximum(first, 0) // cut.lifetime.chunk * cut.lifetime.chunk
    start = np.minimum(low, stop) // cut.block_n * cut.block_n
    sinks = cut.lifetime.sink_tokens
    if not sinks:
        return start, stop, owner
    far = start > -(-sinks // cut.block_n) * cut.block_n  # else the range begins at 0 and covers the sinks
    start = np.where(far, start, 0)
    both = np.sort(np.concatenate([owner, owner[far]]), kind="stable")
    is_sink = np.append(False, both[1:] == both[:-1])
    starts, stops = start[both], stop[both]
    starts[is_sink], stops[is_sink] = 0, sinks
    return starts, stops, both
