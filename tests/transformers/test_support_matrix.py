"""The page of supported families is what the data and the plans say. Run this file to write it."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_models import tiny

import kvpool as kv
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, SharedKind, StateKind
from kvpool.transformers.support import support, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support-matrix.md"
HEAD = """# Support matrix: model families

Each family below runs `generate` on a `PagedCache` in the tests, on transformers' own modeling code with a small random
model, and gives the tokens and logits of transformers' own cache: batches of three prompts of different lengths, a
second round that finds the first, blocks of 16 tokens, windows of 8 and 24 that do not divide them. `kernel` means that
attention reads the pages, scores read the indexer keys and states come from their pool (calls are counted by layer and
step); every such family runs with `mode="gather"` as well.

"""


def words(spec: LayerSpec) -> str:
    names = []
    for kind in spec.kinds:
        if isinstance(kind, KVKind):
            same = kind.head_dim == kind.v_head_dim
            names.append("keys and values" if same else "keys and values of different sizes")
        elif isinstance(kind, LatentKind):
            names.append("a latent")
        elif isinstance(kind, IndexerKind):
            names.append("indexer keys")
        elif isinstance(kind, SharedKind):
            names.append("nothing: they read another layer")
        elif isinstance(kind, StateKind):
            names.append(f"state {kind.name}")
    lifetime = spec.lifetime
    where = " in a window" if lifetime.window else " in a chunk" if lifetime.chunk else ""
    return " and ".join(names) + where if names else "nothing"


def page() -> str:
    stores = {}
    for row in support():
        spec = kv.CacheSpec.from_config(tiny(row.family).config)
        stores[row.family] = "; ".join(dict.fromkeys(words(layer) for layer in spec.layers))
    return HEAD + table(stores)


def test_the_page_is_what_the_data_and_the_plans_say() -> None:
    assert PAGE.read_text() == page(), "run python tests/transformers/test_support_matrix.py"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    PAGE.write_text(page())
