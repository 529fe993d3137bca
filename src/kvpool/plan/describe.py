"""A plan in plain data and in a table. Knows groups, pools and planes; knows no budget rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpool.dtypes import dtype
from kvpool.kinds import IndexerKind, KVKind, LatentKind, StateKind
from kvpool.plan.budget import format_bytes
from kvpool.plan.geometry import GroupPlan, PoolPlan
from kvpool.spec import CacheSpec

#: What `kind` says in reports.
_KIND_NAMES = {KVKind: "kv", LatentKind: "latent", IndexerKind: "index", StateKind: "state"}


def kind_name(pool: PoolPlan) -> str:
    """Return `kv`, `latent`, `rope`, `index` or `state`."""
    return "rope" if pool.parts == ("rope",) else _KIND_NAMES[type(pool.kind)]


def bytes_per_token(groups: Iterable[GroupPlan], spec: CacheSpec) -> dict[str, int]:
    """Return the bytes one cached token takes, without alignment: in full layers, windowed layers, indexers.

    A layer with a window or chunk counts as windowed even where the window is longer than any sequence.
    """
    out = {"full": 0, "window": 0, "index": 0}
    for group in groups:
        if group.is_state:
            continue
        for pool in group.pools:
            layer_bytes = sum(p.bytes_per_block for p in pool.planes) // (len(pool.layers) * group.tokens_per_block)
            for layer in pool.layers:
                lifetime = spec.layers[layer].lifetime
                windowed = lifetime.window is not None or lifetime.chunk is not None
                kind = "index" if isinstance(pool.kind, IndexerKind) else "window" if windowed else "full"
                out[kind] += layer_bytes
    return out


def state_bytes(groups: Iterable[GroupPlan]) -> int:
    """Return the bytes of one live state of a sequence, without alignment."""
    return sum(group.payload_bytes_per_block for group in groups if group.is_state)


def describe_group(group: GroupPlan) -> dict[str, Any]:
    """Return a group with its pools and planes as plain data."""
    lifetime = group.lifetime
    life = "state" if lifetime is None else "window" if lifetime.window else "chunk" if lifetime.chunk else "full"
    return {
        "name": group.name,
        "lifetime": life,
        "window": None if lifetime is None else lifetime.window or lifetime.chunk,
        "sink_tokens": 0 if lifetime is None else lifetime.sink_tokens,
        "layers": list(group.layers),
        "tokens_per_block": group.tokens_per_block,
        "num_blocks": group.num_blocks,
        "num_blocks_reserved": group.num_blocks_reserved,
        "bytes_per_block": group.bytes_per_block,
        "alignment_bytes_per_block": group.bytes_per_block - group.payload_bytes_per_block,
        "layer_first": group.layer_first,
        "slab_bytes": group.slab_bytes,
        "pools": [_describe_pool(pool) for pool in group.pools],
    }


def _describe_pool(pool: PoolPlan) -> dict[str, Any]:
    return {
        "kind": kind_name(pool),
        "parts": list(pool.parts),
        "num_layers": len(pool.layers),
        "layers": list(pool.layers),
        "kv_factor": pool.kv_factor,
        "num_kv_heads": pool.num_heads,
        "head_dim": pool.vector.dim,
        "bytes_per_token": _products(pool),
        "codec": pool.codec,
        "layout": pool.layout,
        "planes": [
            {
                "name": plane.name,
                "dtype": plane.dtype,
                "order": plane.order,
                "shape": list(plane.shape),
                "strides": list(plane.strides),
                "offset": plane.offset,
                "bytes_per_block": plane.bytes_per_block,
            }
            for plane in pool.planes
        ],
    }


def _products(pool: PoolPlan) -> list[str]:
    """Return every factor of the bytes that a token (or a state) takes in each plane of a pool."""
    parts = []
    for plane in pool.planes:
        width = plane.shape[5] if len(plane.shape) == 6 else 1
        factors = [f"{pool.kv_factor} ({'+'.join(pool.parts)})", f"{len(pool.layers)} layers"]
        factors += [f"{pool.num_heads} heads", f"{width} {plane.name}", f"{dtype(plane.dtype).itemsize} B"]
        total = plane.bytes_per_block // plane.shape[4]
        parts.append(f"{' x '.join(factors)} = {total:,}")
    return parts


# --- the table ----------------------------------------------------------------------------------------------


def columns(rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """Return rows as aligned lines; `right` has an `r` for every column set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shown(report: Mapping[str, Any]) -> list[str]:
    """Return the lengths of `sequences` that the model can reach; all of them where it reaches none."""
    return [n for n in report["sequences"] if int(n) <= report["max_seq_len"]] or list(report["sequences"])


def table(report: Mapping[str, Any], lengths: Sequence[str] | None = None) -> str:
    """Return the report of a plan as text for people.

    Args:
        report: What `Plan.to_dict` gives.
        lengths: Keys of `sequences` to print; by default those the model can reach.
    """
    per_token = report["bytes_per_token"]
    lines = [
        f"{report['model'] or 'model'}: {report['num_tokens']:,} tokens in {format_bytes(report['used_bytes'])} of"
        f" {format_bytes(report['budget_bytes'])} (bound by {report['bound_by']})",
        "bytes per token  "
        + ", ".join(f"{name} {value:,}" for name, value in per_token.items() if value)
        + (f"; state {report['state_bytes_per_sequence']:,} a sequence" if report["state_bytes_per_sequence"] else ""),
    ]
    lengths = shown(report) if lengths is None else lengths
    if lengths:
        fits = ", ".join(f"{report['sequences'][length]:,} of {int(length):,}" for length in lengths)
        lines.append(f"sequences        {fits} tokens; the longest one {report['longest_sequence']:,}")
    lines.append(
        f"overhead         alignment {format_bytes(report['alignment_bytes'])}, granules"
        f" {format_bytes(report['granule_bytes_lost'])}, left over {format_bytes(report['left_over_bytes'])}"
    )
    rows = [["group", "layers", "blocks", "of tokens", "bytes/block", "committed", "share"]]
    for group in report["groups"]:
        share = group["committed_bytes"] / report["used_bytes"] if report["used_bytes"] else 0
        rows.append(
            [
                group["name"],
                str(len(group["layers"])),
                f"{group['num_blocks']:,}",
                "-" if group["lifetime"] == "state" else str(group["tokens_per_block"]),
                f"{group['bytes_per_block']:,}",
                format_bytes(group["committed_bytes"]),
                f"{share:.1%}",
            ]
        )
    lines += ["", *columns(rows, " rrrrrr")]
    rows = [["pool", "layers", "heads", "dim", "codec", "layout", "plane", "dtype", "bytes/block", "stride (B)"]]
    for group in report["groups"]:
        for pool in group["pools"]:
            for i, plane in enumerate(pool["planes"]):
                name = f"{group['name']}: {'+'.join(pool['parts'])}"
                head = [name, str(pool["num_layers"]), str(pool["num_kv_heads"]), str(pool["head_dim"])]
                head += [pool["codec"], pool["layout"]]
                rows.append(
                    (head if i == 0 else [""] * 6)
                    + [plane["name"], plane["dtype"], f"{plane['bytes_per_block']:,}", f"{plane['strides'][0]:,}"]
                )
    lines += ["", *columns(rows, " rrr    rr")]
    lines.append("")
    for group in report["groups"]:
        unit = "sequence" if group["lifetime"] == "state" else "token"
        lines.append(f"bytes a {unit}, {group['name']}")
        lines += [f"  {product}" for pool in group["pools"] for product in pool["bytes_per_token"]]
    for name, tier in report["tiers"].items():
        blocks = ", ".join(f"{g} {n:,}" for g, n in tier["num_blocks"].items())
        if tier["budget_bytes"]:
            lines += ["", f"{name}: {blocks} blocks in {format_bytes(tier['budget_bytes'])}"]
    if report["notes"]:
        lines += ["", "notes"]
        lines += [f"  - {note}" for note in report["notes"]]
    return "\n".join(lines)
