"""`kvpool cache`: look into a directory of stored prefixes, check it, cap it, carry prefixes between machines."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.progress import bar

if TYPE_CHECKING:
    from kvpool.tiers.disk.segment_format import RecordHeader

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Look into a directory of stored prefixes, check it, cap it, carry prefixes between machines.",
)
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Directory given to --disk.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command("ls")
def list_blocks(
    directory: DirectoryArgument,
    as_json: JsonOption = False,
    blocks: Annotated[bool, typer.Option("--blocks", help="List every block, not only the ends of prefixes.")] = False,
) -> None:
    """List the prefixes a directory holds: one line for each end of a prefix."""
    from kvpool.plan.budget import format_bytes
    from kvpool.tiers.disk.directory import Directory

    with bar("opening"):
        found = Directory(directory)
        records = [record for record, _ in found.entries()]
    parents = {record.entry.parent_id for record in records}
    shown = [record for record in records if blocks or record.entry.id not in parents]
    rows = [_row(record) for record in shown]
    groups = Counter(record.entry.group for record in records)
    payload = sum(record.payload_bytes for record in records)
    identity = dict(found.identity.parts) if found.identity else {}
    total, damage = found.total_bytes, [asdict(item) for item in found.damage]
    found.close()
    if as_json:
        summary = {"identity": identity, "blocks": len(records), "bytes": payload, "bytes_on_disk": total,
                   "blocks_by_group": {str(group): n for group, n in sorted(groups.items())}}  # fmt: skip
        print(json.dumps({**summary, "prefixes": rows, "damage": damage}))
        return
    for name, value in identity.items():
        print(f"{name:14} {value}")
    print(f"{'blocks':14} {len(records)}, {format_bytes(payload)} ({format_bytes(total)} on disk)")
    for row in rows:
        print(f"{row['key']}  group {row['group']}  {row['tokens']:>7} tokens  begins its last block with {row['ids']}")
    _print_damage(damage)


def _print_damage(damage: list[dict[str, Any]]) -> None:
    for item in damage:
        print(f"damaged: {item['file']} at {item['offset']}: {item['reason']}")


def _row(record: RecordHeader) -> dict[str, Any]:
    from kvpool.tiers.base import unpack_tokens

    entry = record.entry
    return {
        "key": entry.key.hex(),
        "group": entry.group,
        "tokens": entry.position + entry.num_tokens,
        "priority": entry.priority,
        "created_s": record.created_ns / 1e9,
        "ids": unpack_tokens(entry.tokens)[:8],
    }


@app.command("verify")
def verify(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Read and check every block; exit code 1 when anything is damaged."""
    from kvpool.tiers.disk.directory import Directory
    from kvpool.tiers.export_import import BlockReader

    with bar("opening") as shown:
        found = Directory(directory)
        reader = BlockReader()
        records = [record for record, _ in found.entries()]
        good = 0
        for record in records:
            good += reader.load(found, record)
            shown.advance("verifying", len(records))
    damage = [asdict(item) for item in found.damage]
    for segment, item in found.torn_ends():
        damage.append({"file": segment.path.name, "offset": item.start, "reason": f"torn end: {item.reason}"})
    found.close()
    if as_json:
        print(json.dumps({"blocks": len(records), "good": good, "damage": damage}))
    else:
        print(f"{good} of {len(records)} blocks are whole")
        _print_damage(damage)
    if damage or good < len(records):
        raise typer.Exit(1)


@app.command("prune")
def prune(
    directory: DirectoryArgument,
    size: Annotated[str, typer.Option("--size", help="The most all files may take, such as 10GiB.")],
    as_json: JsonOption = False,
) -> None:
    """Give up the least useful blocks until a directory takes at most a size."""
    from kvpool.plan.budget import parse_bytes
    from kvpool.tiers.disk.directory_writer import WritableDirectory

    limit = parse_bytes(size, "--size")
    with bar("pruning"):
        found = WritableDirectory(directory)
        before = {"bytes_before": found.total_bytes, "blocks_before": len(found)}
        found.shrink(limit)
    result = {**before, "bytes_after": found.total_bytes, "blocks_after": len(found)}
    found.close()
    if as_json:
        print(json.dumps(result))
    else:
        print("{bytes_before:,} -> {bytes_after:,} bytes, {blocks_before} -> {blocks_after} blocks".format(**result))


@app.command("export")
def export(
    directory: DirectoryArgument,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="New safetensors file.")],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only the prefix that ends with this key; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write prefixes to a safetensors file."""
    from kvpool.errors import TierError
    from kvpool.tiers.disk.directory import Directory
    from kvpool.tiers.export_import import export_blocks, prefix

    try:
        keys = [bytes.fromhex(text) for text in key or ()]
    except ValueError:
        raise TierError(f"--key takes hexadecimal digits as `ls` shows them, got {key}") from None
    with bar("opening") as shown:
        found = Directory(directory)
        records = [record for record, _ in found.entries()]
        if key:
            records = list({r.entry.id: r for k in keys for r in prefix(found, k)}.values())
        done = export_blocks(found, records, target, progress=lambda total: shown.advance("exporting", total))
        found.close()
    _print_exchanged(done, as_json, f"written to {target}", "damaged and left out")


@app.command("import")
def import_(
    directory: DirectoryArgument,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Safetensors file made by export.")],
    size: Annotated[str | None, typer.Option("--size", help="Cap of the directory, such as 10GiB.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read prefixes from a safetensors file into a directory."""
    from kvpool.plan.budget import parse_bytes
    from kvpool.tiers.export_import import import_blocks

    limit = None if size is None else parse_bytes(size, "--size")
    with bar("opening") as shown:
        done = import_blocks(
            source, directory, size_bytes=limit, progress=lambda total: shown.advance("importing", total)
        )
    _print_exchanged(done, as_json, f"taken into {directory}", "there already")


def _print_exchanged(done: Any, as_json: bool, where: str, skipped: str) -> None:
    if as_json:
        print(json.dumps(asdict(done)))
    else:
        print(f"{done.num_blocks} blocks, {done.num_bytes:,} bytes {where}; {done.skipped} {skipped}")
