"""What a recurrent layer keeps for a sequence: convolution columns and states. Reads fields, knows no model.

A convolution of kernel k needs the last k - 1 inputs; libraries that keep k columns keep one they never read again.
"""

from __future__ import annotations

from kvpool.dtypes import DTYPES, dtype
from kvpool.errors import PlanError, SpecError
from kvpool.families.attention import HEADS, HIDDEN, KV_HEADS
from kvpool.families.fields import Fields
from kvpool.families.layer_types import CONV, HYBRID, HYBRID_SLIDING, LayerType
from kvpool.kinds import Kind, KVKind, StateKind

#: Fields that only models with lightning attention have.
LIGHTNING = ("attn_type_list", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha", "layer_group_size")
SSM_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
KERNEL = ("linear_conv_kernel_dim", "short_conv_kernel_size", "mamba_d_conv", "conv_kernel", "d_conv")


def state_kinds(fields: Fields, kind: LayerType, model_dtype: str, beside: tuple[Kind, ...] = ()) -> tuple[Kind, ...]:
    """Return the states of a recurrent layer.

    Args:
        fields: As the layer sees them.
        kind: The layer's type.
        beside: What the layer stores for every token.
        model_dtype: Of the model: that of convolutions, and of states unless the config names another.

    Raises:
        SpecError: The fields of no known recurrence are complete.
    """
    if kind is CONV:
        width = fields.integer("conv_dim") or fields.need(*HIDDEN)
        return _conv(width, fields.need("conv_L_cache", *KERNEL), model_dtype, ((width, 1),))
    if kind in (HYBRID, HYBRID_SLIDING) and fields.has("sconv_kernel_size", "conv_kernel_size"):
        return _short_convolutions(fields, model_dtype, beside)
    if fields.has("linear_num_value_heads"):
        return _gated_delta_net(fields, model_dtype)
    linear = fields.section("linear_attn_config")
    if linear is not None or fields.has("linear_num_heads", "short_conv_kernel_size"):
        return _kimi_delta(fields, linear or fields, model_dtype)
    if fields.has("lru_width", "conv1d_width"):
        width = fields.integer("lru_width") or fields.need(*HIDDEN)
        fields.note("the recurrent state has no dtype in the config: fp32, as its code keeps it")
        return (
            *_conv(width, fields.need("conv1d_width"), model_dtype, ((width, 1),)),
            StateKind("ssm", (width,), "fp32", ((width, 1),)),
        )
    if fields.has("mamba_num_heads", "mamba_n_heads") or fields.has("mamba_ngroups", "n_groups"):
        return _mamba2(fields, model_dtype)
    if fields.has("mamba_d_state", "state_size", "ssm_state_size"):
        return _mamba1(fields, model_dtype)
    if fields.has(*LIGHTNING):
        return _lightning(fields)
    raise SpecError(
        f"{fields.where} has a {kind.value} layer, and the fields of no known recurrence (gated delta net, KDA, Mamba 1"
        f" or 2, lightning, RG-LRU, short convolution): what such a layer keeps is not known"
    )


def _conv(
    width: int, kernel: int, model_dtype: str, heads: tuple[tuple[int, int], ...], name: str = "conv"
) -> tuple[Kind, ...]:
    """The columns of a convolution; none for a kernel of 1."""
    return (StateKind(name, (width, kernel - 1), model_dtype, heads),) if kernel > 1 else ()


def _ssm_dtype(fields: Fields, otherwise: str) -> str:
    name = fields.get(*SSM_DTYPE)
    if name is None or name == "auto":
        fields.note(f"the recurrent state has no dtype in the config: {otherwise}")
        return otherwise
    try:
        return dtype(str(name)).name
    except PlanError:
        raise SpecError(f"{fields.where}: state dtype {name!r} is unknown; known: {', '.join(DTYPES)}") from None


def _gated_delta_net(fields: Fields, model_dtype: str) -> tuple[Kind, ...]:
    """Yang et al., Gated Delta Networks: q, k and v pass one convolution; the state is a matrix a value head."""
    keys, values = fields.need("linear_num_key_heads"), fields.need("linear_num_value_heads")
    k, v = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
    parts = ((keys, k), (keys, k), (values, v))
    width = sum(n * size for n, size in parts)
    return (
        *_conv(width, fields.need(*KERNEL), model_dtype, parts),
        StateKind("ssm", (values, k, v), _ssm_dtype(fields, model_dtype), ((values, 1),)),
    )


def _kimi_delta(fields: Fields, linear: Fields, model_dtype: str) -> tuple[Kind, ...]:
    """Kimi Linear: q, k and v pass short convolutions; the state is a square matrix a head, kept in fp32."""
    heads = linear.integer("num_heads", "linear_num_heads") or fields.need(*HEADS)
    size = linear.need("linear_head_dim", "head_dim")
    kernel = linear.need(*KERNEL)
    width = 3 * heads * size
    return (
        *_conv(width, kernel, model_dtype, ((heads, size),) * 3),
        StateKind("ssm", (heads, size, size), _ssm_dtype(fields, "fp32"), ((heads, 1),)),
    )


def _mamba2(fields: Fields, model_dtype: str) -> tuple[Kind, ...]:
    """Dao and Gu, Mamba-2: x, B and C pass one convolution; the state is head size by state size, a head."""
    heads = fields.need("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    groups = fields.integer("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    state = fields.need("mamba_d_state", "ssm_state_size", "state_size")
    inner = fields.integer("mamba_d_ssm")
    size = None
    for name in ("mamba_head_dim", "mamba_d_head", "mamba_headdim"):
        if isinstance(fields.data.get(name, fields.defaults.get(name)), int):
            size = fields.need(name)
            break
    if size is None and not fields.has("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        size = fields.integer("head_dim")
    if inner is None:
        inner = heads * size if size else int(fields.need("mamba_expand", "expand") * fields.need(*HIDDEN))
    if size is None:
        size = inner // heads
    if heads * size != inner:
        raise SpecError(f"{fields.where}: {heads} state heads of {size} do not make the inner size {inner}")
    parts = ((heads, size), (groups, state), (groups, state))
    return (
        *_conv(inner + 2 * groups * state, fields.need(*KERNEL), model_dtype, parts),
        StateKind("ssm", (heads, size, state), _ssm_dtype(fields, model_dtype), ((heads, 1),)),
    )


def _mamba1(fields: Fields, model_dtype: str) -> tuple[Kind, ...]:
    """Gu and Dao, Mamba: one state vector a channel."""
    expand = fields.integer("mamba_expand", "expand") or 2
    inner = expand * fields.need(*HIDDEN)
    state = fields.need("mamba_d_state", "state_size", "ssm_state_size")
    return (
        *_conv(inner, fields.need(*KERNEL), model_dtype, ((inner, 1),)),
        StateKind("ssm", (inner, state), _ssm_dtype(fields, model_dtype), ((inner, 1),)),
    )


def _lightning(fields: Fields) -> tuple[Kind, ...]:
    """Lightning attention (MiniMax-01): a square matrix a query head, no convolution, kept in fp32."""
    if not fields.has(*KV_HEADS):
        raise SpecError(
            f"{fields.where} has lightning layers and no num_key_value_heads; its full layers cannot be sized without"
        )
    heads = fields.need(*HEADS)
    size = fields.integer("head_dim") or fields.need(*HIDDEN) // heads
    return (StateKind("ssm", (heads, size, size), _ssm_dtype(fields, "fp32"), ((heads, 1),)),)


def _short_convolutions(fields: Fields, model_dtype: str, beside: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Inkling: convolutions after K, V, attention and MLP (inkling/modeling_inkling.py)."""
    kernel = fields.need("sconv_kernel_size", "conv_kernel_size")
    hidden = fields.need(*HIDDEN)
    kv = next(k for k in beside if isinstance(k, KVKind))
    heads = kv.num_kv_heads
    return (
        *_conv(heads * kv.head_dim, kernel, model_dtype, ((heads, kv.head_dim),), "conv_k"),
        *_conv(heads * kv.v_head_dim, kernel, model_dtype, ((heads, kv.v_head_dim),), "conv_v"),
        *_conv(hidden, kernel, model_dtype, (), "conv_attention"),
        *_conv(hidden, kernel, model_dtype, (), "conv_mlp"),
    )
