"""The support matrix: every row runs or is refused as it says, and the page in docs is made of it.

Run this file to write the page.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import generate
from tiny_models import prompts, tiny

import kvpool as kv
from kvpool.errors import PlanError, SpecError
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, SharedKind, StateKind
from kvpool.layout import LAYOUTS
from kvpool.support import SUPPORT, Family, families, rows
from kvpool.transformers import PagedCache

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support-matrix.md"
#: Backends that run here; the others run the same pools in tests/triton and tests/gpu.
HERE = ("reference", "cpu")
QUICK = {"llama", "deepseek_v32", "kimi_linear"}
HEAD = """# Support matrix

## Model families

Each family below runs `generate` on a `PagedCache` in the tests, on transformers' own modeling code with a small random
model, and gives the tokens and logits of transformers' own cache: batches of three prompts of different lengths, a
second round that finds the first, blocks of 16 tokens, windows of 8 and 24 that do not divide them. `kernel` means that
attention reads the pages, scores read the indexer keys and states come from their pool (calls are counted by layer and
step); every such family runs with `mode="gather"` as well. In int8 and fp8 the loss is the codec's own, measured on
transformers' cache with its vectors taken through the codec: the pages add less than a quarter of it, which is what
rounding in another order does.

"""
CODECS_HEAD = """
## Codecs, layouts and backends

For every family and codec: the backends that store it and attend to it, with K and V, latents and all layouts
(LAYOUTS); `-` where the codec cannot store the vectors of that (tiny) model, with the reason below. `reference` and
`cpu` run every row of this table for every layout in the tests, the whole model through; `triton`'s cells
are run, or refused, kind by kind in its interpreter, and `flashinfer`'s are those its adapter takes
(`tests/triton/test_cells.py`). `kvpool plan CONFIG` prints these rows for a model of yours: its
head sizes decide, not its family.

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


def stores(family: Family) -> str:
    try:
        spec = kv.CacheSpec.from_config(tiny(family.name).config)
    except SpecError:
        return ""
    return "; ".join(dict.fromkeys(words(layer) for layer in spec.layers))


def codec_table() -> list[str]:
    """Return the table of codecs and backends; families with the same cells share a line."""
    reasons: dict[str, str] = {}
    lines: dict[tuple[str, ...], list[str]] = {}
    names: tuple[str, ...] = ()
    for family in families():
        if family.mode == "refused":
            continue
        found = rows(kv.CacheSpec.from_config(tiny(family.name).config))
        names = tuple(row.codec for row in found)
        cells = []
        for row in found:
            if row.refused:
                reasons.setdefault(row.codec, row.refused)
            cells.append("-" if row.refused else ", ".join(b for b in SUPPORT if not row.backends[b]))
        lines.setdefault(tuple(cells), []).append(family.name)
    table = []
    for cells, same in lines.items():
        table += [f"{', '.join(same)}:", "", "| codec | backends |", "|---|---|"]
        table += [f"| `{name}` | {cell} |" for name, cell in zip(names, cells, strict=True)]
        table.append("")
    table += [f"- `{codec}` where it is `-`, for example: {reason}" for codec, reason in reasons.items()]
    return table


def page() -> str:
    lines = ["| family | `model_type` | runs as | its layers store | note |", "|---|---|---|---|---|"]
    lines += [f"| {f.name} | `{f.model}` | {f.mode} | {stores(f)} | {f.note} |" for f in families()]
    codecs = CODECS_HEAD.replace("LAYOUTS", ", ".join(f"`{name}`" for name in LAYOUTS))
    return HEAD + "\n".join(lines) + "\n" + codecs + "\n".join(codec_table()) + "\n"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "run python tests/transformers/test_support_matrix.py"


@pytest.mark.parametrize(
    "family",
    [f.name if f.name in QUICK else pytest.param(f.name, marks=pytest.mark.slow)
     for f in families() if f.mode != "refused"],
)  # fmt: skip
def test_every_row_of_a_family_runs_or_is_refused_as_it_says(family: str) -> None:
    """Logits of all layouts and backends differ by less than the format itself costs."""
    model = tiny(family, seed=1)
    ids, mask = prompts([20, 9])
    spec = kv.CacheSpec.from_config(model.config)

    def logits(codec: str, layout: str, backend: str) -> torch.Tensor:
        cache = PagedCache(model, budget="8MiB", codec=codec, layout=layout, backend=backend, tokens_per_block=8)
        cache.cache.set_scales("unit")
        out: Any = generate(model, ids, mask, cache, max_new_tokens=2).logits
        cache.close()
        return torch.stack(out)

    exact = logits("fp32", "HND", "reference")
    for row in rows(spec):
        if row.refused:
            with pytest.raises(PlanError) as refused:
                kv.make_plan(spec, codec=row.codec, num_blocks=8)
            assert str(refused.value) == row.refused
            continue
        assert not any(row.backends[name] for name in HERE)
        found = [logits(row.codec, *where) for where in product(LAYOUTS, HERE)]
        loss = max(float((x - exact).square().mean().sqrt()) for x in found)
        for other in found[1:]:
            assert float((other - found[0]).square().mean().sqrt()) <= 0.25 * loss + 1e-4, row.codec


def test_the_table_of_families_is_that_of_the_tests() -> None:
    from tiny_models import FAMILIES

    assert {f.name: f.model for f in families()} == {name: model for name, (model, _) in FAMILIES.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    PAGE.write_text(page())
