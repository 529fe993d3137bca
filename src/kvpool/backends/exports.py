"""Our pools and tables in the shapes other libraries' kernels take: FlashInfer, FlashMLA, vLLM, TensorRT-LLM.

Views where the bytes are the same, copies where a format orders them otherwise. Shapes and conventions are those of
FlashInfer 0.7.4 (`page.py`, `decode.py`, `trace/templates`), FlashMLA 9241ae3 (`tests/quant.py`,
`csrc/smxx/decode/get_decoding_sched_meta`) and TensorRT-LLM's KV cache manager (`block_offsets`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvpool.errors import LayoutError, UnsupportedError
from kvpool.plan import PoolPlan
from kvpool.pools import Part

Ints = npt.NDArray[np.int32]

#: Tokens of a FlashMLA block, and rows of queries of one of its tiles.
FLASHMLA_BLOCK = 64
#: Bytes of a record of FlashMLA's sparse FP8 cache: 512 codes, four fp32 scales, 64 bf16.
FLASHMLA_RECORD_BYTES = 656
#: What TensorRT-LLM puts where a sequence has no block.
TRTLLM_UNUSED = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class PagedCache:
    """K and V of a layer as FlashInfer takes them; views, strided in the page axis.

    Attributes:
        layout: `HND` (`[pages, H, page, D]`) or `NHD` (`[pages, page, H, D]`).
        k: Keys: a plain or FP8 dtype, or uint8 with two E2M1 codes a byte.
        v: Values, alike.
        k_scales: None; fp32 scales of FP8 keys, one a token and head; or E4M3 block scales of E2M1, linear in memory.
        v_scales: The same of the values.
        k_scale: Decode scale of the layer; 1 where the format has none.
        v_scale: The same of the values.
        token_head: `k_scales` are one a token and head (`use_token_head_sf`).
    """

    layout: str
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    k_scale: float
    v_scale: float
    token_head: bool


def paged_cache(k: Part, v: Part) -> PagedCache:
    """Return the planes of a layer's K and V in FlashInfer's shapes.

    Raises:
        UnsupportedError: FlashInfer has no such cache; the message says what is in the way.
    """
    for part in (k, v):
        if part.constants.maps:
            raise UnsupportedError(f"FlashInfer knows no smoothing, rotation or mixing, and {part.name!r} has one")
    hnd = heads_first(k)
    tensors, scales, constants = [], [], []
    token_head = False
    for part in (k, v):
        data = part.planes["data"].tensor
        dtypes = {spec.name: spec.dtype for spec in part.codec.planes(part.vector)}
        native = CODES.get(dtypes["data"], data.dtype)
        known = dtypes.pop("data") in CODES or native in (torch.float16, torch.bfloat16)
        if not known or (dtypes and list(dtypes.items()) not in SCALES):
            raise UnsupportedError(
                f"FlashInfer takes no cache of codec {part.codec.name!r}; it takes fp16, bf16, FP8 with a scale a layer"
                " or one a token and head, and NVFP4 with one scale a layer. Use backend='triton'"
            )
        tensors.append(_ordered(data.view(native), hnd))
        scale = None
        if "scale" in dtypes:
            token_head = True
            scale = _ordered(part.planes["scale"].tensor, hnd)
        elif "block_scale" in dtypes:
            scale = _ordered(part.planes["block_scale"].tensor.view(torch.float8_e4m3fn), hnd)
        scales.append(scale)
        constants.append(1.0 if part.constants.scale is None else part.constants.scale)
    if token_head and any(scale is None for scale in scales):
        raise UnsupportedError("FlashInfer takes scales of a token and head for both K and V, or for neither")
    layout = "HND" if hnd else "NHD"
    return PagedCache(layout, tensors[0], tensors[1], scales[0], scales[1], constants[0], constants[1], token_head)


#: Containers of quantised formats that FlashInfer takes, as torch's types.
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1x2": torch.uint8}
#: Scale planes beside the codes that it takes.
SCALES = ([("scale", "fp32")], [("block_scale", "e4m3")])


def heads_first(part: Part) -> bool:
    """Whether the heads of a block stand before its tokens (HND)."""
    strides = part.planes["data"].tensor.stride()
    return strides[1] >= strides[2]


def _ordered(tensor: torch.Tensor, hnd: bool) -> torch.Tensor:
    """View `[B, H, N(, C)]` in the order of the layout."""
    return tensor if hnd else tensor.transpose(1, 2)


def combined_cache(k: Part, v: Part) -> torch.Tensor:
    """Return K and V as one tensor `[pages, 2, H, page, D]` (HND) or `[pages, 2, page, H, D]` (NHD), a view.

    It is what FlashInfer's `trtllm_batch_decode_with_kv_cache` and XQA take.

    Raises:
        LayoutError: K and V are not planes of one pool.
    """
    cache = paged_cache(k, v)
    step = v.planes["data"].address - k.planes["data"].address
    size = cache.k.element_size()
    if cache.k.shape != cache.v.shape or cache.k.stride() != cache.v.stride() or step % size or step <= 0:
        raise LayoutError("K and V of this layer are two pools; give them as a pair instead")
    first = cache.k
    shape, strides = (first.shape[0], 2, *first.shape[1:]), (first.stride(0), step // size, *first.stride()[1:])
    return first.as_strided(shape, strides)


def vllm_cache(k: Part, v: Part) -> torch.Tensor:
    """Return K and V as vLLM's FlashAttention backend takes them: `[2, blocks, block, H, D]`, a view."""
    both = combined_cache(k, v).transpose(0, 1)
    return both.transpose(2, 3) if heads_first(k) else both


def swizzled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return linear NVFP4 block scales of V in the order trtllm-gen reads: four tokens of a scale side by side.

    Args:
        scales: `[pages, H, page, D/16]`.

    Raises:
        UnsupportedError: The page is no multiple of 4 tokens, or the head none of 64 elements.
    """
    pages, heads, page, count = scales.shape
    if page % 4 or count % 4:
        raise UnsupportedError(
            f"trtllm-gen wants pages of a multiple of 4 tokens and heads of one of 64, got {page} and {16 * count}"
        )
    tiles = scales.reshape(pages, heads, page // 4, 4, count)
    return tiles.transpose(3, 4).reshape(pages, heads, page, count)


def flashmla_records(latent: Part, rope: Part, blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks as FlashMLA's sparse FP8 kernel reads them: `[n, page, 1, 656]` uint8, a copy.

    A record is 512 E4M3 codes, four fp32 scales of 128 channels each, and 64 bf16 of the rope part.

    Args:
        latent: FP8 with a scale for 128 channels, 512 long.
        rope: bf16, 64 long.
        blocks: `[n]` block ids.

    Raises:
        UnsupportedError: The parts are stored otherwise.
    """
    stored = [[(s.name, s.dtype, s.containers) for s in part.codec.planes(part.vector)] for part in (latent, rope)]
    if stored != [[("data", "e4m3", 512), ("scale", "fp32", 4)], [("data", "bf16", 64)]]:
        raise UnsupportedError(
            f"FlashMLA's record is a latent of 512 in fp8 with a bf16 rope part of 64, got {latent.codec.name!r} of"
            f" {latent.vector.dim} and {rope.codec.name!r} of {rope.vector.dim}; plan the codec of each by name"
        )
    ids = blocks.long()
    pieces = [latent.planes["data"].tensor[ids], latent.planes["scale"].tensor[ids], rope.planes["data"].tensor[ids]]
    rows = [piece.contiguous().view(torch.uint8).transpose(1, 2) for piece in pieces]  # [n, page, 1, bytes]
    return torch.cat(rows, -1)


def flashmla_schedule(
    seq_lens: Ints, *, num_processors: int, num_q_heads: int, rows: int = 1, overhead: int = 5
) -> tuple[Ints, Ints]:
    """Return FlashMLA's `tile_scheduler_metadata [parts, 8]` and `num_splits [S+1]`.

    Each part takes consecutive blocks of consecutive sequences, about equally many: (first sequence, last sequence,
    first block, end block, first split, whether the first sequence began in another part, whether the last one ends in
    another part, 0). `num_splits` is cumulative.

    Args:
        seq_lens: `[S]`.
        num_processors: Multiprocessors of the device.
        num_q_heads: Query heads; FlashMLA has one KV head.
        rows: Query rows of a sequence.
        overhead: Cost of beginning a sequence, in blocks.
    """
    parts = max(num_processors // -(-rows * num_q_heads // FLASHMLA_BLOCK), 1)
    blocks = np.maximum(-(-seq_lens.astype(np.int64) // FLASHMLA_BLOCK), 1)
    payload = -(-int((blocks + overhead).sum()) // parts) + overhead
    metadata = np.zeros((parts, 8), np.int32)
    splits = np.zeros(len(seq_lens) + 1, np.int32)
    sequence, block, split, total = 0, 0, 0, 0
    for part in range(parts):
        metadata[part, 0], metadata[part, 2], metadata[part, 4] = sequence, block, split
        metadata[part, 5] = block > 0
        room = payload
        while sequence < len(seq_lens):
            left = int(blocks[sequence]) - block
            if room >= left + overhead:
                total += split + 1
                splits[sequence + 1] = total
                room -= left + overhead
                sequence, block, split = sequence + 1, 0, 0
            else:
                if room - overhead > 0:
                    block += room - overhead
                    split += 1
                break
        metadata[part, 1] = sequence if block > 0 else sequence - 1
        metadata[part, 3] = block if block > 0 else (int(blocks[sequence - 1]) if sequence else 0)
        metadata[part, 6] = block > 0
    return metadata, splits


def trtllm_block_offsets(table: Ints, pool: PoolPlan, bytes_per_block: int) -> Ints:
    """Return the offsets `[S, 2, M]` of one layer's K and V of a pool, in units of one layer's K of one block.

    A kernel adds `offset * unit` to the pool's base of its layer, as with TensorRT-LLM's own manager, where the factor
    is layers times two; here it is whatever the slab's blocks are apart.

    Args:
        table: `[S, M]` block ids, -1 where not held.
        pool: One of the group's pools, with K and V in it.
        bytes_per_block: Of the group's slab.

    Raises:
        LayoutError: The distance of two blocks is no multiple of a unit.
    """
    plane = pool.plane("data")
    unit = plane.strides[2] if pool.kv_factor == 2 else plane.strides[1]
    if unit <= 0 or bytes_per_block % unit:
        raise LayoutError(
            f"blocks are {bytes_per_block} bytes apart and one K of a layer is {unit}: offsets count in whole units."
            " Use a format without scale planes, or another tokens_per_block"
        )
    first = table.astype(np.int64) * (bytes_per_block // unit)
    both = np.stack([first, first + (1 if pool.kv_factor == 2 else 0)], 1)
    both[np.broadcast_to((table < 0)[:, None], both.shape)] = TRTLLM_UNUSED
    if both.max(initial=0) > TRTLLM_UNUSED:
        raise LayoutError("offsets do not fit 32 bits; plan fewer blocks")
    return both.astype(np.int32)
