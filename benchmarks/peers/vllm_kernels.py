"""vLLM's CPU attention and append, one call at a time on request. Runs in an environment of its own that has vLLM.

Reads lines from standard input: a JSON object describes a case and is answered by `{"ready": ...}` or `{"error": ...}`;
`go` makes one call on the next part of a cache of at least 1 GiB and is answered by its seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # it shares the cores with what it is compared to

import torch
import vllm
from vllm.platforms import current_platform

current_platform.import_kernels()
from vllm import _custom_ops as ops  # noqa: E402

SMALLEST_BYTES = 1 << 30
HAS_AMX = bool(getattr(torch.cpu, "_init_amx", lambda: False)())


class Pages:
    """Key and value caches of several layers, which calls take in turn."""

    def __init__(self, case: dict) -> None:
        self.batch, self.context, self.block = case["batch"], case["context"], case["tokens_per_block"]
        self.heads, self.kv_heads, self.dim = case["q_heads"], case["kv_heads"], case["head_dim"]
        self.kv_dtype = {"bf16": "auto", "fp8": "fp8_e4m3"}[case["codec"]]
        element = torch.bfloat16 if case["codec"] == "bf16" else torch.uint8
        each = -(-self.context // self.block)
        blocks = self.batch * each
        size = blocks * self.kv_heads * self.block * 2 * self.dim * element.itemsize
        self.layers = max(2, -(-SMALLEST_BYTES // size))
        self.kv = torch.empty(self.layers, blocks, self.kv_heads, self.block, 2 * self.dim, dtype=element)
        self.kv.view(torch.uint8).random_(0, 60)
        self.table = torch.randperm(blocks, dtype=torch.int32).view(self.batch, each).contiguous()
        self.isa = "amx" if HAS_AMX else "vec"
        self.blocks, self.turn = blocks, 0

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the next layer."""
        self.turn += 1
        layer = self.kv[self.turn % self.layers].view(self.blocks, self.kv_heads, 2 * self.block, self.dim)
        return layer.chunk(2, dim=2)


def decode(case: dict):
    pages = Pages(case)
    q = torch.randn(pages.batch, pages.heads, pages.dim, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lengths = torch.full((pages.batch,), pages.context, dtype=torch.int32)
    starts = torch.arange(pages.batch + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        pages.batch, pages.heads, pages.kv_heads, pages.dim, lengths, torch.bfloat16, starts, True, -1, pages.isa, True,
        None, pages.kv_dtype,
    )  # fmt: skip

    def call() -> None:
        k, v = pages.halves()
        ops.cpu_attention_with_kv_cache(
            q, k, v, out, starts, lengths, pages.dim**-0.5, True, None, -1, pages.table, 0.0, plan, None, None,
            1.0, 1.0, pages.kv_dtype,
        )  # fmt: skip

    return call, pages.isa


def write(case: dict):
    pages = Pages({**case, "batch": 1, "context": max(case["rows"], 8192)})
    tokens = case["rows"]
    sources = max(2, SMALLEST_BYTES // 4 // (4 * tokens * pages.kv_heads * pages.dim))
    x = torch.randn(1, 2, tokens, pages.kv_heads, pages.dim).bfloat16().repeat(sources, 1, 1, 1, 1)
    position = torch.arange(tokens)
    slots = (pages.table[0].long()[position // pages.block] * pages.block + position % pages.block).contiguous()

    def call() -> None:
        kc, vc = pages.halves()
        k, v = x[pages.turn % sources]
        ops.cpu_attn_reshape_and_cache(k, v, kc, vc, slots, pages.isa, 1.0, 1.0, pages.kv_dtype)

    return call, pages.isa


def mla(case: dict):
    batch, context, heads, block = case["batch"], case["context"], case["q_heads"], case["tokens_per_block"]
    dim, v_dim = case["head_dim"], case["v_dim"]
    each = -(-context // block)
    layers = max(2, -(-SMALLEST_BYTES // (batch * each * block * dim * 2)))
    kv = torch.randn(1, batch * each, block, dim, dtype=torch.bfloat16).mul_(0.5).repeat(layers, 1, 1, 1)
    table = torch.randperm(batch * each, dtype=torch.int32).view(batch, each).contiguous()
    q = torch.randn(batch, heads, dim, dtype=torch.bfloat16)
    out = torch.zeros(batch, heads, v_dim, dtype=torch.bfloat16)
    scale = dim**-0.5
    turn = iter(range(1 << 62))
    if HAS_AMX:
        from vllm.v1.attention.backends.mla.amx_mla import _compute_num_kv_splits, _expand_block_table

        request = _expand_block_table(table, block)
        rows = torch.arange(batch, dtype=torch.int64)
        lengths = torch.full((batch,), context, dtype=torch.int64)
        splits = _compute_num_kv_splits(context, torch.get_num_threads())
        partial = torch.zeros(batch, heads, splits, v_dim + 1, dtype=torch.float32)

        def call() -> None:
            flat = kv[next(turn) % layers].view(-1, 1, dim)
            ops.cpu_mla_decode(
                q, flat, flat[..., :v_dim], out, None, None, None, partial, request, rows, lengths, scale, 0.0, False,
                0, None, None,
            )  # fmt: skip

        return call, "amx"
    lengths = torch.full((batch,), context, dtype=torch.int32)

    def call() -> None:
        ops.mla_decode_kvcache_cpu(out, q, kv[next(turn) % layers], scale, table, lengths)

    return call, "reference"


def main() -> None:
    cases = {"decode": decode, "write": write, "mla": mla}
    call = None
    for line in sys.stdin:
        if line.strip() == "go":
            start = time.perf_counter()
            call()
            print(time.perf_counter() - start, flush=True)
            continue
        case = json.loads(line)
        call = None
        torch.set_num_threads(case["threads"])
        try:
            call, kernel = cases[case["case"]](case)
            call()
            print(json.dumps({"ready": kernel, "version": vllm.__version__}), flush=True)
        except Exception as error:
            print(json.dumps({"error": str(error)[:200]}), flush=True)


if __name__ == "__main__":
    main()
