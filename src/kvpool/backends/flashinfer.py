"""FlashInfer's attention over our pools: reads them as they are, for the formats it knows; refuses the rest by name.

Writing, copying and everything else is the Triton backend's: the bytes are the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvpool.backends.base import Attention
from kvpool.backends.exports import PagedCache, paged_cache
from kvpool.backends.triton import TritonBackend
from kvpool.dtypes import dtype
from kvpool.errors import UnsupportedError
from kvpool.pools import Part
from kvpool.step import Step
from kvpool.support import FLASHINFER_LATENT

#: Bytes FlashInfer recommends for its partial results.
WORKSPACE_BYTES = 128 << 20


def refusal(k: tuple[Part, ...], v: Part, options: Attention) -> str:
    """Return what of a call FlashInfer has no kernel for; empty when it has one, if it knows the format."""
    if options.lifetime.chunk is not None:
        return "chunked attention"
    if options.lifetime.sink_tokens:
        return "sink tokens before a window"
    if options.indices is not None:
        return "sparse slots"
    if options.tree is not None:
        return "tree masks"
    if v is not k[0]:
        return ""
    if len(k) > 1:
        return "latents whose rope part has a format of its own"
    if latent_type(v) is None:
        return f"latents in {v.codec.name}"
    if options.lifetime.window is not None or options.softcap or options.sinks is not None:
        return "windows, softcaps and sinks over latents"
    return ""


def latent_type(part: Part) -> torch.dtype | None:
    """Return the type of stored latents as FlashInfer reads them; None for what it does not know."""
    name, *scales = (plane.dtype for plane in part.codec.planes(part.vector))
    if scales:
        return None
    if name == "e4m3":
        return torch.float8_e4m3fn if part.vector.dim == sum(FLASHINFER_LATENT) else None
    stored: torch.dtype = getattr(torch, dtype(name).torch_name)
    return stored if stored in (torch.float16, torch.bfloat16) else None


class FlashInferBackend(TritonBackend):
    """Attends with FlashInfer's paged kernels (`fa2`, `fa3`), planned once a step for every kind of call."""

    name = "flashinfer"
    replayable = False  # a replay would go on with the plan of the step that was captured

    def __init__(self, device: str | torch.device = "cuda") -> None:
        super().__init__(device)
        try:
            import flashinfer
        except ImportError as error:
            raise UnsupportedError(f"backend 'flashinfer' needs the package flashinfer-python ({error})") from error
        self._library = flashinfer
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # On Hopper FlashInfer takes its `fa3` where that is faster; on later chips its choice may need other packages.
        major, _ = flashinfer.utils.get_compute_capability(self._workspace.device)
        self._kernels = "auto" if major == 9 else "fa2"
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._planned: set[tuple[Any, ...]] = set()

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._planned.clear()

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
        reason = refusal(k, v, options)
        if reason:
            raise UnsupportedError(f"backend 'flashinfer' has no kernel for {reason}; use backend='triton'")
        for part in (*k, v):
            part.constants.freeze()
        if v is k[0]:
            self._attend_latent(q, v, v_dim, step, options, out, lse)
            return
        cache = paged_cache(k[0], v)
        wrapper = self._plan(q, k[0], v, cache, step, options)
        result = wrapper.run(
            q,
            (cache.k, cache.v),
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out=out,
            return_lse=lse is not None or options.sinks is not None,
            kv_cache_sf=None if cache.k_scales is None else (cache.k_scales, cache.v_scales),
        )
        if isinstance(result, tuple):
            total = result[1] * math.log(2.0)  # theirs is base 2
            if options.sinks is not None:  # these kernels take none, and the wrapper leaves them out without a word
                seen, total = total, torch.logaddexp(total, options.sinks.float())
                out.mul_((seen - total).exp().unsqueeze(-1))
                total.masked_fill_(seen.isneginf(), float("-inf"))  # rows that see nothing
            if lse is not None:
                lse.copy_(total)

    def _plan(self, q: torch.Tensor, k: Part, v: Part, cache: PagedCache, step: Step, options: Attention) -> Any:
        window = -1 if options.lifetime.window is None else options.lifetime.window - 1  # theirs leaves itself out
        shape = (k.group, q.shape[1], k.vector, v.vector, q.dtype, cache.k.dtype, cache.token_head, cache.layout)
        key = (*shape, window, options.scale, options.softcap)
        if key not in self._wrappers:
            made = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, cache.layout, backend=self._kernels
            )
            self._wrappers[key] = made
        wrapper = self._wrappers[key]
        if key not in self._planned:
            indptr, indices, last = step.paged(k.group)
            wrapper.plan(
                step.cu_seqlens,
                indptr,
                indices.clamp(min=0),  # blocks outside the window are not held, and not seen
                last.clamp(min=1),
                q.shape[1],
                k.num_heads,
                k.vector.dim,
                k.tokens_per_block,
                head_dim_vo=v.vector.dim,
                causal=True,
                sm_scale=options.scale,
                window_left=window,
                logits_soft_cap=options.softcap,
                q_data_type=q.dtype,
                kv_data_type=cache.k.dtype,
                use_token_head_sf=cache.token_head,
            )
            self._planned.add(key)
        return wrapper

    def _attend_latent(
        self,
        q: torch.Tensor,
        part: Part,
        v_dim: int,
        step: Step,
        options: Attention,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        stored = latent_type(part)
        assert stored is not None  # else it was refused
        whole = part.planes["data"].tensor[:, 0].view(stored)  # [pages, page, D]
        latent, rope = whole[..., :v_dim], whole[..., v_dim:]
        asked = "none" if lse is None else "basee"
        key = ("latent", part.group, q.shape[1], v_dim, rope.shape[-1], q.dtype, latent.dtype, options.scale, asked)
        if key not in self._wrappers:
            self._wrappers[key] = self._library.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2")
        wrapper = self._wrappers[key]
        if key not in self._planned:
            indptr, indices, _ = step.paged(part.group)
            wrapper.plan(
                metadata=self._library.mla.MLAPlanMetadata.csr(
                    qo_indptr=step.cu_seqlens,
                    kv_indptr=indptr,
                    kv_indices=indices.clamp(min=0),
                    kv_len_arr=step.groups[part.group].seq_lens,
                ),
                num_heads=q.shape[1],
                head_dim_ckv=v_dim,
                head_dim_kpe=rope.shape[-1],
                page_size=part.tokens_per_block,
                causal=True,
                sm_scale=options.scale,
                q_data_type=q.dtype,
                kv_data_type=latent.dtype,
                query_layout="split",
                kv_cache_layout="split",
                lse_mode=asked,
            )
            self._planned.add(key)
        scale = part.constants.scale if latent.dtype.itemsize == 1 else None
        wrapper.run(
            query=(q[..., :v_dim], q[..., v_dim:]),
            kv_cache=(latent, rope),
            out=out,
            lse=lse,
            return_lse=lse is not None,
            return_lse_base_on_e=lse is not None,
            ckv_scale=scale,
            kpe_scale=scale,
        )
