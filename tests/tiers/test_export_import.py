from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import pytest

from kvpool.cli import main
from kvpool.errors import PlanMismatch, TierError
from kvpool.tiers.base import Entry, Identity
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory
from kvpool.tiers.export_import import export_blocks, import_blocks, prefix

from . import blocks


def write(path: Path, *chains: list[Entry], identity: Identity = blocks.IDENTITY) -> None:
    directory = WritableDirectory(path, identity)
    for entries in chains:
        memory, batch = blocks.stored(entries)
        assert all(o.ok for o in directory.append(batch))
        del memory
    directory.close()


def assert_holds(path: Path, entries: list[Entry]) -> None:
    directory = Directory(path)
    assert len(directory) == len(entries)
    for entry in entries:
        memory = blocks.Memory(1, blocks.BLOCK_BYTES[entry.group])
        assert directory.read(entry, memory.pieces(0)).ok
        assert memory.get(0) == blocks.content(entry, memory.num_bytes)
    directory.close()


def export_all(path: Path, target: Path) -> None:
    directory = Directory(path)
    export_blocks(directory, [record for record, _ in directory.entries()], target)
    directory.close()


def test_prefixes_travel_through_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    first, second = blocks.chain(1, 5, extras=b"salt"), blocks.chain(2, 4, group=2, priority=70)
    write(tmp_path / "a", first, second)
    export_all(tmp_path / "a", tmp_path / "file.safetensors")
    with safetensors.safe_open(str(tmp_path / "file.safetensors"), "numpy") as file:
        assert len(list(file.keys())) == 9
        assert file.get_tensor("block.6").tobytes() == blocks.content(second[1], blocks.BLOCK_BYTES[2])
        assert json.loads(file.metadata()["identity"]) == dict(blocks.IDENTITY.parts)
        assert json.loads(file.metadata()["blocks"])[6]["key"] == second[1].key.hex()
    done = import_blocks(tmp_path / "file.safetensors", tmp_path / "b")
    assert (done.num_blocks, done.skipped) == (9, 0)
    assert_holds(tmp_path / "b", first + second)
    again = import_blocks(tmp_path / "file.safetensors", tmp_path / "b")
    assert (again.num_blocks, again.skipped) == (0, 9)
    directory = Directory(tmp_path / "b")
    assert {r.entry for r, _ in directory.entries()} == set(first + second)
    directory.close()


def test_every_part_of_the_way_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a", blocks.chain(1, 5))
    directory = Directory(tmp_path / "a")
    told: list[int] = []
    export_blocks(directory, [r for r, _ in directory.entries()], tmp_path / "file", progress=told.append)
    directory.close()
    assert told == [10] * 10, "each of five is verified, then written"
    told.clear()
    import_blocks(tmp_path / "file", tmp_path / "b", progress=told.append)
    assert told == [5] * 5


def test_one_prefix_is_its_blocks_of_every_group_and_no_other(tmp_path: Path) -> None:
    full, other = blocks.chain(1, 5), blocks.chain(2, 5)
    window = [Entry(1, e.key, e.tokens, e.parent, e.position) for e in full[3:]]
    write(tmp_path, full, other, window)
    directory = Directory(tmp_path)
    assert [r.entry for r in prefix(directory, full[4].key)] == full + window
    with pytest.raises(TierError, match="holds no block with the key"):
        prefix(directory, bytes(16))
    directory.close()


def test_a_file_of_another_model_is_refused_and_the_directory_untouched(tmp_path: Path) -> None:
    write(tmp_path / "a", blocks.chain(1, 2), identity=Identity({**blocks.IDENTITY.parts, "model": "other"}))
    export_all(tmp_path / "a", tmp_path / "file")
    mine = blocks.chain(3, 2)
    write(tmp_path / "b", mine)
    with pytest.raises(PlanMismatch) as raised:
        import_blocks(tmp_path / "file", tmp_path / "b")
    assert raised.value.fields == ("model",)
    assert_holds(tmp_path / "b", mine)


def test_an_export_never_replaces_a_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "a", blocks.chain(1, 2))
    (tmp_path / "file").write_text("precious")
    with pytest.raises(TierError, match="File exists"):
        export_all(tmp_path / "a", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {"a", "file"}


def test_damaged_blocks_are_left_out_of_an_export(tmp_path: Path) -> None:
    entries = blocks.chain(1, 5)
    write(tmp_path / "a", entries)
    path = next((tmp_path / "a").glob("segment-*"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(blocks.content(entries[2], blocks.BLOCK_BYTES[0])[:64])] ^= 1
    path.write_bytes(raw)
    directory = Directory(tmp_path / "a")
    done = export_blocks(directory, [r for r, _ in directory.entries()], tmp_path / "file")
    assert (done.num_blocks, done.skipped) == (4, 1)
    directory.close()
    import_blocks(tmp_path / "file", tmp_path / "b")
    assert_holds(tmp_path / "b", [e for e in entries if e != entries[2]])


def test_flipped_bits_and_hostile_headers_never_import_a_wrong_block(tmp_path: Path) -> None:
    entries = blocks.chain(1, 3, group=2)
    write(tmp_path / "a", entries)
    export_all(tmp_path / "a", tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])

    def forged(change: object) -> bytes:
        text = json.dumps(change).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    def with_block(**fields: object) -> bytes:
        meta = dict(header["__metadata__"])
        listed = json.loads(meta["blocks"])
        listed[1].update(fields)
        return forged({**header, "__metadata__": {**meta, "blocks": json.dumps(listed)}})

    def with_tensor(**fields: object) -> bytes:
        return forged({**header, "block.1": {**header["block.1"], **fields}})

    hostile = [
        b"", raw[:7], b"\xff" * 8 + raw[8:], struct.pack("<Q", 1 << 63) + raw[8:], raw[: 8 + length // 2], raw[:-1],
        forged([]), forged({}), forged({"__metadata__": []}), forged({**header, "block.1": None}),
        with_tensor(data_offsets=[0, 1 << 63]), with_tensor(data_offsets=[-5, 3328]), with_tensor(data_offsets=[5, 5]),
        with_tensor(data_offsets=[True, 3328]), with_tensor(data_offsets="00"), with_tensor(data_offsets=[0, 3327]),
        with_block(key="../../x"), with_block(key="00"), with_block(tokens=[]), with_block(tokens=[1 << 64]),
        with_block(tokens="abc"), with_block(group=-1), with_block(group=1.5), with_block(position=1 << 60),
        with_block(crc32c=0), with_block(extras="zz"), with_block(priority=None), with_block(parent="00" * 65),
    ]  # fmt: skip
    for number, data in enumerate(hostile):
        (tmp_path / "hostile").write_bytes(data)
        with pytest.raises(TierError):
            import_blocks(tmp_path / "hostile", tmp_path / f"h{number}")
        if (tmp_path / f"h{number}").exists():
            directory = Directory(tmp_path / f"h{number}")
            assert {r.entry for r, _ in directory.entries()} <= set(entries)
            directory.close()
    rng = random.Random(2)
    for number in range(60):
        damaged = bytearray(raw)
        damaged[8 + length + rng.randrange(len(raw) - 8 - length)] ^= 1 << rng.randrange(8)
        (tmp_path / "hostile").write_bytes(damaged)
        with pytest.raises(TierError, match="damaged"):
            import_blocks(tmp_path / "hostile", tmp_path / f"f{number}")


# --- the command line ---------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        main(["cache", *map(str, arguments)])
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    return code, capsys.readouterr().out


def test_the_command_line_lists_verifies_prunes_exports_and_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chains = [blocks.chain(seed, 6) for seed in range(4)]
    write(tmp_path / "a", *chains)
    code, out = run(capsys, "ls", tmp_path / "a", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["blocks"] == 24
    assert found["bytes"] == 24 * blocks.BLOCK_BYTES[0]
    assert found["identity"] == dict(blocks.IDENTITY.parts)
    assert [p["key"] for p in found["prefixes"]] == [c[-1].key.hex() for c in chains]
    assert [p["tokens"] for p in found["prefixes"]] == [24] * 4
    code, out = run(capsys, "ls", tmp_path / "a")
    assert out.count("24 tokens") == 4
    assert run(capsys, "verify", tmp_path / "a") == (0, "24 of 24 blocks are whole\n")

    key = chains[2][3].key.hex()
    code, out = run(capsys, "export", tmp_path / "a", tmp_path / "file", "--key", key, "--json")
    assert json.loads(out) == {"num_blocks": 4, "num_bytes": 4 * blocks.BLOCK_BYTES[0], "skipped": 0}
    code, out = run(capsys, "import", tmp_path / "b", tmp_path / "file", "--size", "64MiB", "--json")
    assert json.loads(out)["num_blocks"] == 4
    assert_holds(tmp_path / "b", chains[2][:4])

    code, out = run(capsys, "prune", tmp_path / "a", "--size", "300KB", "--json")
    pruned = json.loads(out)
    assert code == 0
    assert pruned["blocks_before"] == 24
    assert 10 < pruned["blocks_after"] < 16
    assert sum(p.stat().st_size for p in (tmp_path / "a").glob("segment-*")) == pruned["bytes_after"] <= 300_000
    assert run(capsys, "verify", tmp_path / "a")[0] == 0

    path = max((tmp_path / "a").glob("segment-*"))
    os.truncate(path, path.stat().st_size - 5000)
    code, out = run(capsys, "verify", tmp_path / "a", "--json")
    assert code == 1
    assert json.loads(out)["damage"]


def test_wrong_arguments_are_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["ls", tmp_path / "nowhere"],
        ["export", tmp_path, tmp_path / "x"],
        ["export", tmp_path, tmp_path / "x", "--key", "zz"],
        ["import", tmp_path / "new", tmp_path / "nowhere"],
        ["prune", tmp_path / "file" / "x", "--size", "1GiB"],
        ["prune", tmp_path, "--size", "much"],
    ):
        (tmp_path / "file").write_text("")
        with pytest.raises(SystemExit) as raised:
            main(["cache", *map(str, arguments)])
        assert raised.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("kvpool: ")
        assert captured.err.count("\n") == 1
