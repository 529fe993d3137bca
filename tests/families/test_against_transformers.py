"""What is read from a configuration is what the models of transformers cache: shapes made on the meta device.

Minutes, so run by hand (`-m slow`) when the pinned transformers changes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import SpecError, UnsupportedError
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, StateKind
from kvpool.spec import CacheSpec

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]

#: Lists that a configuration of the hub may lack, so that the model's code fills them in.
LISTS = ("layer_types", "layers_block_type", "indexer_types", "no_rope_layers", "mlp_layer_types", "per_layer_config")
#: Models whose cache is described and whose forward pass runs on the meta device.
NAMES = """
    afmoe apertus arcee axk1 axk2 bailing_hybrid beam bitnet bloom codegen cohere cohere2 cohere2_moe cwm
    deepseek_v3 deepseek_v32 diffllama doge dots3_note_text emu3 ernie4_5 exaone4 falcon falcon_h1 falcon_mamba
    flint gemma gemma2 gemma3_text glm glm4 glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granite_swa granitemoe helium hy_v4 inkling_text jamba kimi_linear kolibri1 lara_mini lfm2
    lfm3 llama llama4_text mamba mamba2 mimo_v2_flash minicpm3 minimax_m2 mistral mixtral modernbert-decoder mpt
    nemotron_h olmo olmo2 olmo3 olmo_hybrid opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe
    qwen3_next sarvam_mla seed_oss smollm3 stablelm starcoder2 vaultgemma youtu zamba zamba2
""".split()  # noqa: SIM905
#: Models that are complete only with their lists.
ONLY_WHOLE = {"nemotron_h", "gemma4_text"}


def default_config(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]()


def as_json(config: Any, *, bare: bool) -> dict[str, Any]:
    """The configuration as a file has it; bare: without the lists that the class makes itself."""
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for part in [data, *(value for value in data.values() if isinstance(value, dict))] if bare else []:
        for name in LISTS:
            part.pop(name, None)
    return data


def cached(config: Any) -> list[dict[str, Any]]:
    """Shapes of what a forward pass of 12 tokens leaves in the cache."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import get_layer_types_and_kwargs

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(config).eval()
            out = model(input_ids=torch.zeros(1, 12, dtype=torch.long), use_cache=True)
    finally:
        torch.set_default_dtype(torch.float32)
    cache = next(
        c for name in ("cache", "past_key_values", "cache_params") if (c := getattr(out, name, None)) is not None
    )
    _, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return [_layer(layer, more) for layer, more in zip(cache.layers, arguments, strict=True)]


def _layer(layer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"window": arguments.get("sliding_window")}
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is not None and keys.dim() == 4:
        found["k"], found["v"] = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
    if getattr(layer, "indexer_keys", None) is not None:
        found["index"] = layer.indexer_keys.shape[-1]
    conv, ssm = getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}
    # It keeps `kernel` columns, of which the oldest is never read again.
    found["conv"] = sorted((t.shape[1], t.shape[2] - 1) for t in conv.values() if t is not None)
    found["ssm"] = [math.prod(t.shape[1:]) for t in ssm.values() if t is not None]
    return found


def described(layer: LayerSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"window": layer.lifetime.window or layer.lifetime.chunk, "conv": [], "ssm": []}
    for kind in layer.kinds:
        if isinstance(kind, KVKind):
            found["k"], found["v"] = (kind.num_kv_heads, kind.head_dim), (kind.num_kv_heads, kind.v_head_dim)
        elif isinstance(kind, LatentKind):
            found["k"], found["v"] = (1, kind.kv_lora_rank), (1, kind.qk_rope_head_dim)
        elif isinstance(kind, IndexerKind):
            found["index"] = kind.index_head_dim
        elif isinstance(kind, StateKind) and kind.name.startswith("conv"):
            found["conv"] = sorted([*found["conv"], kind.shape])
        elif isinstance(kind, StateKind):
            found["ssm"] = [kind.num_elements]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_has_the_shapes_that_the_model_caches(name: str) -> None:
    config = default_config(name)
    want = cached(config)
    for bare in (False, True):
        if not (bare and name in ONLY_WHOLE):
            spec = CacheSpec.from_config(as_json(config, bare=bare))
            assert [described(layer) for layer in spec.layers] == want, bare


def test_every_causal_model_is_read_or_refused_with_a_reason() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    read = 0
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = default_config(name)
        except Exception:
            warnings.warn(f"transformers cannot make a default {name}", stacklevel=1)
            continue
        with suppress(SpecError, UnsupportedError):
            CacheSpec.from_config(config)
            read += 1
    assert read > 120


def test_the_table_of_defaults_is_what_the_configuration_classes_say() -> None:
    module = importlib.util.spec_from_file_location("family_defaults", ROOT / "tools" / "family_defaults.py")
    assert module is not None
    assert module.loader is not None
    tool = importlib.util.module_from_spec(module)
    module.loader.exec_module(tool)
    assert json.loads((ROOT / "src/kvpool/families/defaults.json").read_text()) == tool.families()
