"""Every family in quantised storage: the loss is the codec's, and the pages add nothing to it."""

from __future__ import annotations

import pytest
import torch
from harness import generate
from lossy import lossy_logits
from tiny_models import prompts, tiny

from kvpool.kinds import LatentKind, StateKind
from kvpool.support import families
from kvpool.transformers import PagedCache

#: What the order of sums adds to a codec's loss: codes next to a border of rounding fall to its other side.
SHARE_OF_LOSS = 0.25
#: The same where nothing is lost.
NOISE = 1e-4
#: Indexer keys stay whole: which 8 of 60 tokens a row sees is all or nothing.
FORMATS: dict[str, dict[str, str]] = {
    "int8": {"*": "int8", "ssm": "int8", "index": "fp32"},
    "fp8": {"*": "fp8", "index": "fp32"},
    "fp8 latents, bf16 rope": {"latent": "fp8", "rope": "bf16", "index": "fp32"},
}
RUN = sorted(family.name for family in families() if family.mode != "refused")
QUICK = {"llama", "gemma4_shared", "gpt_oss", "deepseek_v3", "jamba"}


def kinds_of(cache: PagedCache) -> set[type]:
    return {type(kind) for layer in cache.cache.plan.spec.layers for kind in layer.kinds}


def distance(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """Root mean square of a difference of logits, in standard deviations of the logits."""
    return float((a - b).square().mean().sqrt() / scale.std())


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in RUN])
def test_the_loss_of_a_quantised_cache_is_the_codec_s(family: str, codec: str) -> None:
    """The codec's loss is measured on transformers' own cache, whose vectors are taken through the codec."""
    model = tiny(family, seed=1)
    cache = PagedCache(model, budget="16MiB", codec=FORMATS[codec], backend="cpu", tokens_per_block=16)
    kinds = kinds_of(cache)
    if "rope" in codec and LatentKind not in kinds:
        pytest.skip("no latents")
    if kinds == {StateKind} and (codec != "int8" or "ssm" not in cache.cache.plan.groups[0].pools[-1].parts):
        pytest.skip("only states are stored, and this format is not theirs")
    ids, mask = prompts([60, 33])
    got = generate(model, ids, mask, cache, max_new_tokens=1).logits[0]
    for row, keep, logits in zip(ids, mask.bool(), got, strict=True):
        with torch.inference_mode():
            exact = model(row[keep][None]).logits[0, -1]
        want = lossy_logits(cache, model, row[keep])
        loss = distance(want, exact, exact)
        added = distance(logits, want, exact)
        assert 0 < loss < 1
        assert added <= SHARE_OF_LOSS * loss + NOISE, (added, loss)
