"""`kvpool quality`: the figures are what they say, on a tiny random model and on numbers made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvpool as kv
from kvpool.codecs import Vector, get_codec
from kvpool.errors import KVError
from kvpool.measure.probe import HeadErrors, logit_noise, outlier_ratio
from kvpool.measure.quality import Meter, Row, Tally, cut, default_texts, report
from kvpool.measure.variants import Variant, parse_variant
from kvpool.transformers import PackedCache


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvpool.transformers import register_attention

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    network = LlamaForCausalLM(config).eval()
    network.set_attn_implementation(register_attention())
    return network


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(97, (600,), generator=torch.Generator().manual_seed(1)).tolist()


def measured(model: Any, ids: list[int], *names: str, **options: Any) -> dict[str, Row]:
    windows = cut(ids[100:], ids[:100], prefix=24, scored=40, num_windows=3)
    meter = Meter(model, windows, parse_variant("fp32"), backend="reference", **options)
    return {row.codec: row for row in meter.measure([parse_variant(n) for n in names])}


def test_a_better_format_has_a_smaller_error_by_every_measure(model: Any, ids: list[int]) -> None:
    rows = measured(model, ids, "bf16", "int8", "fp8", "nvfp4-token")
    assert list(rows) == ["fp32", "bf16", "int8", "fp8", "nvfp4-token"]
    order = [rows[n] for n in ("bf16", "int8", "fp8", "nvfp4-token")]
    for name in ("kl", "attention_error"):
        values = [getattr(row, name) for row in order]
        assert values == sorted(values)
        assert values[0] > 0
        assert values[-1] < 1
    assert [row.bits_per_element for row in order] == [16.0, 9.0, 9.0, 5.5]  # head size 32: a scale is 1 bit
    assert rows["nvfp4-token"].attention_error > 5 * rows["int8"].attention_error
    assert all(row.kl_stderr < row.kl for row in order)
    assert all(len(row.layers) == 3 for row in order)


def test_a_prefix_from_a_tier_of_a_smaller_format_costs_less_than_storing_all_in_it(model: Any, ids: list[int]) -> None:
    windows = cut(ids[100:], ids[:100], prefix=64, scored=40, num_windows=3)
    meter = Meter(model, windows, parse_variant("fp32"), backend="reference")
    names = ("nvfp4-token", "fp32>nvfp4-token", "fp32>fp32")
    rows = {row.codec: row for row in meter.measure([parse_variant(n) for n in names])}
    stored, below, nothing = (rows[name] for name in names)
    assert 0 < below.kl < stored.kl
    assert (below.bits_per_element, below.attention_error) == (stored.bits_per_element, stored.attention_error)
    assert nothing.kl == pytest.approx(0, abs=1e-9), "a format that loses nothing costs nothing"


def test_the_baseline_differs_from_itself_by_nothing(model: Any, ids: list[int]) -> None:
    row = measured(model, ids)["fp32"]
    assert (row.kl, row.top1_agreement, row.perplexity_change, row.attention_error) == (0.0, 1.0, 0.0, 0.0)


def test_perplexity_is_that_of_the_model_without_a_paged_cache(model: Any, ids: list[int]) -> None:
    windows = cut(ids[100:], ids[:100], prefix=24, scored=40, num_windows=3)
    losses = []
    model.set_attn_implementation("eager")
    try:
        for window in windows.scored:
            with torch.inference_mode():
                logits = model(window[None]).logits[0, 24:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[25:], reduction="none"))
    finally:
        model.set_attn_implementation("kvpool")
    want = math.exp(float(torch.cat(losses).mean()))
    assert measured(model, ids)["fp32"].perplexity == pytest.approx(want, rel=1e-4)


def test_keys_that_break_are_named_and_smoothing_or_mixing_mends_them(model: Any, ids: list[int]) -> None:
    bias = torch.zeros(2, 32)
    bias[1, 4] = 300.0
    projections = [layer.self_attn.k_proj for layer in model.model.layers]
    saved = [p.weight.data.clone() for p in projections]
    try:
        # One large channel in one head of the last layer.
        weight = projections[2].weight.data
        weight[32 + 15] *= 400
        rows = measured(model, ids, "nvfp4-token", "int8", "int8+smoothing", "int8+mixing+rotation", "int8/bf16")
    finally:
        for p, w in zip(projections, saved, strict=True):
            p.weight.data = w
    (warning,) = [w for w in rows["int8"].warnings if "breaks keys" in w]
    assert "layer 2, head 1" in warning
    assert "+mixing+rotation" in warning
    assert rows["int8"].worst[0][:2] == (2, 1)
    assert rows["int8/bf16"].warnings
    assert rows["int8+mixing+rotation"].layers[2] < rows["int8+smoothing"].layers[2] < rows["int8"].layers[2]


def test_constant_scales_are_measured_on_other_text_and_their_losses_told(model: Any, ids: list[int]) -> None:
    rows = measured(model, ids, "fp8-tensor", "int8-tensor", "int8-tensor:unit", "int8", "nvfp4", "nvfp4-token")
    assert rows["int8-tensor"].kl > rows["int8"].kl
    assert rows["int8-tensor:unit"].kl > 10 * rows["int8-tensor"].kl
    assert rows["fp8-tensor"].kl < 0.1
    (warning,) = [w for w in rows["int8-tensor:unit"].warnings if "constant scale" in w]
    assert "stored as zero" in warning
    assert not rows["int8"].warnings


def test_rotation_and_smoothing_change_the_result_and_keep_it_sound(model: Any, ids: list[int]) -> None:
    rows = measured(
        model, ids, "nvfp4-token", "nvfp4-token+rotation", "nvfp4-token+smoothing+rotation", "fp8/nvfp4-token"
    )
    plain = rows.pop("nvfp4-token")
    rows.pop("fp32")
    for row in rows.values():
        assert row.kl != plain.kl
        assert row.kl < 2 * plain.kl


@pytest.mark.parametrize("prefill", ["stored", "exact"])
def test_the_scored_tokens_read_what_a_cache_written_token_by_token_holds(
    model: Any, ids: list[int], prefill: str
) -> None:
    """Against transformers' own cache: the prefix in one forward, then single tokens, each stored before it is read."""
    codec, vector = get_codec("int8"), Vector((32,))

    def stored(x: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(x, vector, None), vector, None)

    class Lossy(DynamicCache):
        def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            first = self.get_seq_length(layer) == 0
            lossy = super().update(stored(k), stored(v), layer)
            return (k, v) if first and prefill == "exact" else lossy

    windows = cut(ids[100:], ids[:100], prefix=24, scored=12, num_windows=1)
    (window,) = windows.scored
    meter = Meter(model, windows, parse_variant("fp32"), prefill=prefill, backend="reference")
    caches = [meter.cache(parse_variant(name)) for name in ("fp32", "int8")]
    prefixes = meter._exact_prefixes(caches, window) if prefill == "exact" else [None, None]
    got = meter.logits(PackedCache(caches[1], model), window, prefixes[1])
    model.set_attn_implementation("eager")
    try:
        cache = Lossy(config=model.config)
        with torch.inference_mode():
            model(window[None, :24], cache=cache)
            want = torch.cat([model(token.view(1, 1), cache=cache).logits[0] for token in window[24:-1]])
    finally:
        model.set_attn_implementation("kvpool")
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    assert all(c.stats().used == 0 for c in caches[1:])


def test_a_prefix_computed_without_loss_costs_less_and_the_baseline_nothing(model: Any, ids: list[int]) -> None:
    rows = {prefill: measured(model, ids, "nvfp4-token", prefill=prefill) for prefill in ("stored", "exact")}
    assert rows["exact"]["nvfp4-token"].kl < rows["stored"]["nvfp4-token"].kl
    assert rows["exact"]["fp32"].kl == 0.0
    assert rows["exact"]["fp32"].perplexity == pytest.approx(rows["stored"]["fp32"].perplexity, rel=1e-5)
    with pytest.raises(KVError, match="unknown prefill 'none'"):
        measured(model, ids, prefill="none")


@pytest.mark.parametrize(("prefill", "num_passes"), [("stored", 11), ("exact", 14)])
def test_every_pass_is_reported_once(model: Any, ids: list[int], prefill: str, num_passes: int) -> None:
    seen: list[str] = []
    windows = cut(ids[100:], ids[:100], prefix=24, scored=40, num_windows=3)
    variants = [parse_variant(n) for n in ("int8", "int8-tensor")]
    meter = Meter(model, windows, parse_variant("fp32"), prefill=prefill, backend="reference", progress=seen.append)
    meter.measure(variants)
    assert len(seen) == meter.num_passes(variants) == num_passes
    assert seen.count("int8") == 3


def test_the_json_has_the_promised_keys(model: Any, ids: list[int]) -> None:
    payload = json.loads(json.dumps(report(list(measured(model, ids, "int8").values()), text="t")))
    promised = {
        "codec", "bits_per_element", "perplexity", "perplexity_change", "top1_agreement", "kl", "kl_stderr",
        "attention_error",
    }  # fmt: skip
    assert payload["text"] == "t"
    assert all(promised <= set(row) for row in payload["rows"])


def test_windows_are_spread_from_the_start_and_calibration_is_another_text() -> None:
    windows = cut(range(1000), range(5000, 9000), prefix=50, scored=49, num_windows=5)
    assert windows.num_scored == 245
    assert [w.tolist() for w in windows.scored] == [list(range(s, s + 100)) for s in range(0, 1000, 200)]
    assert windows.calibration.tolist() == list(range(5000, 5100))
    with pytest.raises(KVError, match="the text has 499 tokens"):
        cut(range(499), [], prefix=50, scored=49, num_windows=5)


def test_kl_agreement_and_perplexity_are_the_textbook_s() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])
    targets = torch.tensor([0, 2])
    base, tally, row = Tally(), Tally(), Row("x", 8.0)
    base.add(p.log(), p.log(), targets)
    tally.add(p.log(), q.log() + 3.0, targets)
    tally.fill(row, base)
    kl = [0.5 * math.log(2) - 0.25 * math.log(2), 0.0]
    assert row.kl == pytest.approx(sum(kl) / 2)
    assert row.kl_stderr == pytest.approx(torch.tensor(kl).std().item() / math.sqrt(2))
    assert row.top1_agreement == 0.5
    assert row.perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.8))
    assert row.perplexity_change == pytest.approx(math.sqrt(2) - 1)


def test_head_errors_are_kept_apart() -> None:
    errors = HeadErrors()
    exact = torch.ones(5, 4, 8)
    lossy = exact.clone()
    lossy[:, 2:] += 0.5
    errors.add(0, exact, lossy, num_kv_heads=2)
    errors.add(0, exact, lossy, num_kv_heads=2)
    assert errors.relative()[0].tolist() == [0.0, 0.5]
    assert errors.by_layer()[0] == pytest.approx(math.sqrt(0.125))


def test_logit_noise_ignores_what_all_keys_share_and_finds_outlier_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(16, 4, 32, generator=generator), torch.randn(500, 2, 32, generator=generator)
    assert logit_noise(q, k, k + torch.randn(32, generator=generator), 1.0).max() < 1e-4
    noise = torch.randn(500, 2, 32, generator=generator)
    lossy = k + noise * torch.tensor([0.0, 0.1])[:, None]
    got = logit_noise(q, k, lossy, 0.5)
    assert got[0] < 1e-6
    assert 0.2 < got[1] < 0.4  # 0.1 * sqrt(32) * 0.5
    k[:, 1, 3] *= 40
    assert outlier_ratio(k)[0] < 2 < 20 < outlier_ratio(k)[1]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("fp8", Variant("fp8", "fp8", "fp8")),
        ("fp8/nvfp4-token", Variant("fp8/nvfp4-token", "fp8", "nvfp4-token")),
        ("int8-tensor:unit", Variant("int8-tensor:unit", "int8-tensor", "int8-tensor", scales="unit")),
        ("bf16>fp8", Variant("bf16>fp8", "bf16", "bf16", below="fp8")),
        ("int8+rotation+smoothing", Variant("int8+rotation+smoothing", "int8", "int8", True, True)),
        ("int8+mixing", Variant("int8+mixing", "int8", "int8", mixing=True)),
    ],
)
def test_a_variant_is_read_from_one_word(text: str, want: Variant) -> None:
    assert parse_variant(text) == want


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp9", "unknown codec 'fp9'"),
        ("fp8/", "unknown codec ''"),
        ("fp8+spin", "option 'spin'"),
        ("fp8+rotation+rotation", "at most once"),
        ("fp8+mixing+smoothing", "mixing includes smoothing"),
        ("fp8:unit", "no constant scale"),
        ("fp8-tensor:big", "option 'big'"),
        ("bf16+rotation", "not quantised"),
        ("bf16>fp8-tensor", "no constant scales"),
        ("bf16>", "unknown codec ''"),
    ],
)
def test_a_wrong_variant_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(kv.PlanError, match=reason):
        parse_variant(text)


def test_the_default_texts_are_english_long_enough_and_apart() -> None:
    scored, calibration = default_texts()
    assert len(scored) > 300_000
    assert len(calibration) > 20_000
    assert scored.count(" the ") > 2_000
    assert calibration[1000:1200] not in scored


def test_a_plot_is_an_image(tmp_path: Path, model: Any, ids: list[int]) -> None:
    pytest.importorskip("matplotlib")
    from kvpool.measure.quality_plot import plot

    rows = list(measured(model, ids, "int8").values())
    plot(rows, tmp_path / "q.png", "title")
    assert (tmp_path / "q.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(KVError, match="cannot write the plot"):
        plot(rows, tmp_path / "q.nonsense", "title")
