"""`kvpool plan`, `address` and `inspect`, run as a user runs them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import main
from kvpool.plan import make_plan
from kvpool.spec import CacheSpec
from model_data import config

LLAMA = "meta-llama__Meta-Llama-3.1-8B"


@pytest.fixture
def path(tmp_path: Path) -> Any:
    """Write a configuration as a file and return its path."""

    def write(name: str) -> str:
        target = tmp_path / f"{name}.json"
        target.write_text(json.dumps(config(name)))
        return str(target)

    return write


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command in this process and return its standard output."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code in (0, None), capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail, and return its one line of error."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Traceback" not in streams.err
    return streams.err


# --- plan ---------------------------------------------------------------------------------------------------


def test_the_json_has_every_promised_key(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    text = call(capsys, "plan", path("openai__gpt-oss-20b"), "--budget", "4GiB", "--host-budget", "1GiB", "--json")
    report = json.loads(text)
    assert text.count("\n") == 1
    keys = """model bound_by budget_bytes used_bytes left_over_bytes tokens_per_block num_tokens bytes_per_token
        state_bytes_per_sequence sequences notes fingerprint tiers groups"""
    for key in keys.split():
        assert key in report, key
    assert report["budget_bytes"] == 4 * 2**30
    assert set(report["bytes_per_token"]) == {"full", "window", "index"}
    assert set(report["sequences"]) == {"4096", "32768", "131072"}
    assert report["tiers"]["host"]["budget_bytes"] == 2**30
    assert report["tiers"]["disk"] == {
        "budget_bytes": 0,
        "used_bytes": 0,
        "left_over_bytes": 0,
        "num_blocks": {"full": 0, "window-128": 0},
    }
    full, window = report["groups"]
    assert (full["name"], full["lifetime"], full["window"]) == ("full", "full", None)
    assert (window["name"], window["lifetime"], window["window"]) == ("window-128", "window", 128)
    for group in report["groups"]:
        assert {"name", "lifetime", "window", "layers", "num_blocks", "num_blocks_reserved", "bytes_per_block",
                "pools"} <= set(group)  # fmt: skip
        for pool in group["pools"]:
            assert {"kind", "num_layers", "kv_factor", "num_kv_heads", "head_dim", "codec", "layout",
                    "planes"} <= set(pool)  # fmt: skip
            assert (pool["kind"], pool["num_layers"], pool["kv_factor"]) == ("kv", 12, 2)
            for plane in pool["planes"]:
                assert set(plane) == {"name", "dtype", "order", "shape", "strides", "offset", "bytes_per_block"}


def test_the_json_says_what_the_library_plans(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    arguments = ["--budget", "4GiB", "--codec", "k=fp8,v=nvfp4,0=bf16", "--layout", "NHD", "--tokens-per-block", "64",
                 "--tp", "2", "--tp-rank", "1", "--max-seq-len", "8192", "--typical-seq-len", "1024"]  # fmt: skip
    report = json.loads(call(capsys, "plan", path(LLAMA), *arguments, "--context", "4096,8Ki", "--json"))
    plan = make_plan(
        CacheSpec.from_config(config(LLAMA)),
        "4GiB",
        codec={"k": "fp8", "v": "nvfp4", "layers": {0: "bf16"}},
        layout="NHD",
        tokens_per_block=64,
        tp_size=2,
        tp_rank=1,
        max_seq_len=8192,
        typical_seq_len=1024,
    )
    assert report.pop("support")["codecs"]["nvfp4"]["cpu"] == "yes"
    assert report == json.loads(json.dumps(plan.to_dict([4096, 8192])))
    assert report["sequences"] == {str(n): plan.sequences(n).value for n in (4096, 8192)}


def test_the_model_s_rows_of_the_support_matrix_are_printed(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    text = call(capsys, "plan", path(LLAMA), "--budget", "4GiB")
    table = text[text.index("support, for layouts HND, NHD") :].splitlines()
    assert table[1].split() == ["codec", "reference", "cpu", "triton", "flashinfer"]
    assert ["int8", "yes", "yes", "yes", "no"] in [line.split()[:5] for line in table]
    assert "rotation in blocks of 128" in text
    assert "transformers: kernel" in text


def test_the_table_fits_a_terminal_and_says_what_bound_it(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    text = call(capsys, "plan", path("nvidia__Qwen3.6-27B-NVFP4"), "--budget", "16GiB")
    assert "bound by budget" in text
    for word in ("full", "state", "conv", "ssm", "bytes per token", "left over", "notes"):
        assert word in text
    table = [line for line in text.splitlines() if not line.startswith(("bytes a", "  - "))]
    assert max(map(len, table)) <= 120


def test_plans_stand_side_by_side(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    file = path(LLAMA)
    text = call(capsys, "plan", file, "--budget", "4GiB", "--compare", "codec=bf16,fp8,nvfp4")
    (line,) = (x for x in text.splitlines() if x.startswith("bytes/token full"))
    assert line.split()[2:] == ["131,072", "67,584", "36,864"]
    found = json.loads(
        call(capsys, "plan", file, "--budget", "4GiB", "--compare", "tokens_per_block=16,32,64", "--json")
    )
    assert found["compare"] == {"key": "tokens_per_block", "values": ["16", "32", "64"]}
    assert [plan["groups"][0]["bytes_per_block"] for plan in found["plans"]] == [2**21, 2**22, 2**23]


def test_weights_are_taken_off_the_memory_of_a_gpu(capsys: pytest.CaptureFixture[str], path: Any) -> None:
    arguments = [path(LLAMA), "--gpu-memory", "80GiB", "--json"]
    report = json.loads(call(capsys, "plan", *arguments))
    weights = report["weights"]
    assert weights["format"] == "bf16"
    assert weights["bytes"] == pytest.approx(8.03e9 * 2, rel=0.001)
    assert report["budget_bytes"] == int((80 * 2**30 - weights["bytes"]) * 0.9)
    small = json.loads(call(capsys, "plan", *arguments, "--weights", "nvfp4", "--tp", "2"))
    assert small["weights"]["bytes"] < weights["bytes"] / 5
    assert "do not fit" in refused(capsys, "plan", path(LLAMA), "--gpu-memory", "8GiB")
    assert "weights 'fp3' is unknown" in refused(capsys, "plan", path(LLAMA), "--weights", "fp3")
    assert "above the" in refused(capsys, "plan", path(LLAMA), "--gpu-memory", "20GiB", "--budget", "19GiB")


@pytest.mark.parametrize(("batch", "bound"), [(1, "weights"), (4, "weights"), (64, "cache")])
def test_advice_says_what_bounds_a_decode_step(
    capsys: pytest.CaptureFixture[str], path: Any, batch: int, bound: str
) -> None:
    arguments = [path(LLAMA), "--gpu-memory", "80GiB", "--advise", "--batch", str(batch), "--context", "8192"]
    advice = json.loads(call(capsys, "plan", *arguments, "--json"))["advice"]
    assert advice["bound_by"] == bound
    assert advice["cache_bytes_per_step"] == batch * 8192 * 131_072
    assert advice["order"] == ["fp8", "nvfp4"]
    balanced = advice["balanced_batch"]
    assert balanced * 8192 * 131_072 >= advice["weight_bytes_per_step"] > (balanced - 1) * 8192 * 131_072
    assert "fp8 first, nvfp4 when memory is what is short" in call(capsys, "plan", *arguments)


def test_plan_answers_without_torch_in_less_than_half_a_second(path: Any) -> None:
    code = (
        "import sys; from kvpool.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "plan", path("deepseek-ai__DeepSeek-V3.2"), "--budget", "16GiB"]
    subprocess.run(command, capture_output=True, check=True)  # compiles what is not compiled yet
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "[]"
    # Processor time: other processes of this machine do not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "-4GiB"], "budget must not be negative"),
        (["--budget", "4 apples"], "is not a size"),
        (["--tokens-per-block", "48"], "power of two"),
        (["--codec", "fp9"], "unknown codec 'fp9'"),
        (["--codec", "k=,v=fp8"], "has no name"),
        (["--compare", "colour=red"], "compare must be"),
        (["--compare", "codec="], "comma-separated list"),
        (["--context", "4k,many"], "context must be an integer"),
        (["--context", "0"], "num_tokens must be at least 1"),
        (["--shares", "full=most"], "shares"),
        (["--layers", "3"], "layers must be a range"),
        (["--tp", "3"], "8 KV heads cannot be split"),
        (["--advise", "--batch", "0"], "batch and context must be positive"),
        (["--plot", "/nowhere/at/all.png"], "cannot write"),
        (["--plot", "picture.xyz"], "cannot write"),
        (["--num-blocks", "full=x"], "num_blocks"),
        (["--gpu-memory", "lots"], "gpu_memory"),
    ],
)
def test_bad_options_get_one_line(
    capsys: pytest.CaptureFixture[str], path: Any, arguments: list[str], words: str
) -> None:
    base = [] if "--budget" in arguments or "--gpu-memory" in arguments else ["--budget", "4GiB"]
    assert words in refused(capsys, "plan", path(LLAMA), *base, *arguments)


@pytest.mark.parametrize(
    "text", ["", '{"num_hidden_layers": 8', "[1, 2]", '{"num_hidden_layers": 1000000}', "\x00\x01"]
)
def test_a_broken_config_gets_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert refused(capsys, "plan", str(file)).startswith("kvpool: ")
    assert refused(capsys, "plan", str(tmp_path / "missing.json")).startswith("kvpool: cannot read")


# --- address ------------------------------------------------------------------------------------------------


def test_an_address_is_printed_product_by_product(capsys: pytest.CaptureFixture[str]) -> None:
    text = call(capsys, "address", "--block", "17", "--layer", "3", "--kv", "v", "--head", "2", "--token", "5")
    assert "block 17 * 737280" in text
    assert "= 12628608" in text
    for name, index in (("layer", 3), ("part", 1), ("head", 2), ("token", 5)):
        assert f"{name} {index} * " in text


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4-token"])
def test_an_address_agrees_with_the_plan_in_any_layout_and_codec(
    capsys: pytest.CaptureFixture[str], path: Any, codec: str, layout: str
) -> None:
    where = ["--block", "17", "--layer", "3", "--kv", "v", "--head", "2", "--token", "5", "--dim", "77"]
    found = json.loads(call(capsys, "address", path(LLAMA), *where, "--codec", codec, "--layout", layout, "--json"))
    plan = make_plan(CacheSpec.from_config(config(LLAMA)), num_blocks=18, codec=codec, layout=layout)
    assert found == plan.address(17, 3, "v", 2, 5, 77).to_dict()
    for plane in found["planes"]:
        assert plane["offset"] == plane["base"] + sum(t["index"] * t["stride"] for t in plane["terms"])


def test_an_address_outside_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "head must be between 0 and 2" in refused(capsys, "address", "--head", "3")
    assert "layer 30 does not exist" in refused(capsys, "address", "--layer", "30")
    assert "stores no 'latent'" in refused(capsys, "address", "--kv", "latent")
    assert "block must be between" in refused(capsys, "address", "--block", "-1")


# --- pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("openai__gpt-oss-20b", "nvfp4-token"),
        ("deepseek-ai__DeepSeek-V3.2", "fp8"),
        ("nvidia__Qwen3.6-27B-NVFP4", "bf16"),
    ],
)
def test_the_memory_map_names_groups_planes_heads_and_both_layouts(
    capsys: pytest.CaptureFixture[str], path: Any, tmp_path: Path, name: str, codec: str
) -> None:
    picture = tmp_path / "map.svg"
    os.environ.setdefault("MPLCONFIGDIR", str(tmp_path))
    found = json.loads(call(capsys, "inspect", path(name), "--codec", codec, "--plot", str(picture), "--json"))
    assert found["plot"] == str(picture)
    text = "".join(line for line in picture.read_text().splitlines() if "<!--" in line)  # texts are kept as comments
    for group in found["plan"]["groups"]:
        assert f"{group['name']}: " in text
        assert f"{group['num_blocks']:,} blocks" in text
    planes = found["plan"]["groups"][0]["pools"][0]["planes"]
    for word in ("HND", "NHD", "next token", "next head", "h0", "t7", *(plane["name"] for plane in planes)):
        assert word in text, word


def test_bytes_are_drawn_by_context_and_codec(capsys: pytest.CaptureFixture[str], path: Any, tmp_path: Path) -> None:
    picture = tmp_path / "bytes.svg"
    call(capsys, "plan", path("nvidia__Qwen3.6-27B-NVFP4"), "--budget", "16GiB", "--plot", str(picture))
    text = picture.read_text()
    for word in ("bf16", "fp8", "int8", "nvfp4", "state", "full", "256Ki"):
        assert f"<!-- {word} -->" in text, word


def test_a_png_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    call(capsys, "inspect", "--plot", str(picture))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 30_000
