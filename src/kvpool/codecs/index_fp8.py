"""`index-fp8`: indexer keys of sparse attention, E4M3 with one fp32 scale a `quant_block`.

At 128 channels a token is 128 + 4 bytes, and a block of 32 tokens or more is the record DeepGEMM reads: all codes,
token by token, then all scales (`kv_cache_cast_to_fp8` of its tests).
"""

from __future__ import annotations

from kvpool.codecs.fp8 import Fp8

INDEX_FP8 = Fp8("index-fp8")
