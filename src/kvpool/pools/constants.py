"""Constants: the numbers a codec needs and does not store per token, one set a part (K, V, latent, ...) of a layer.

Holds them, checks them, freezes them at the first write, hashes them for the identity of blocks, and reads scales from
checkpoints. Knows no pool, no plane and no model.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.codecs import Codec, Counts, Vector
from kvpool.codecs.base import need_scale
from kvpool.codecs.maps import LARGEST_SMOOTHING, SMALLEST_SMOOTHING, Maps, Mixing, rotation_block
from kvpool.errors import PlanError, PlanMismatch

if TYPE_CHECKING:
    import torch

#: Below, 1/s is not a normal fp32 number.
SMALLEST_SCALE = 2.0**-126
#: Above, the largest code of a wide format (57344) times s comes near the end of fp32.
LARGEST_SCALE = 2.0**100
#: Largest ratio of the singular values of a mixing matrix: beyond it fp32 products lose what an 8-bit code keeps.
LARGEST_CONDITION = 2.0**12


class Constants:
    """The constants of one part of one layer.

    Invariants: every value was checked when it was set; after `freeze` nothing changes, and a codec that needs a scale
    has one.

    Attributes:
        owner: `layer 3, k`: the name in messages.
        counts: What the scale lost so far.
    """

    __slots__ = (
        "_codec",
        "_frozen",
        "_maps",
        "_mixing",
        "_num_heads",
        "_part",
        "_rotation",
        "_scale",
        "_smoothing",
        "_vector",
        "counts",
        "owner",
    )

    def __init__(self, codec: Codec, vector: Vector, num_heads: int, layer: int, part: str) -> None:
        self._codec, self._vector, self._num_heads = codec, vector, num_heads
        self._part, self.owner = part, f"layer {layer}, {part}"
        self._scale: float | None = None
        self._smoothing: torch.Tensor | None = None
        self._rotation = False
        self._mixing: torch.Tensor | None = None
        self._maps = Maps()
        self._frozen = False
        self.counts = Counts()

    @property
    def scale(self) -> float | None:
        """The decode scale, exact in fp32; None when none is set."""
        return self._scale

    @property
    def smoothing(self) -> torch.Tensor | None:
        """fp32 `[H, D]`, or None."""
        return self._smoothing

    @property
    def rotation(self) -> bool:
        """True when vectors are rotated before they are stored."""
        return self._rotation

    @property
    def mixing(self) -> torch.Tensor | None:
        """fp32 `[H, D, D]`, or None."""
        return self._mixing

    @property
    def maps(self) -> Maps:
        """What stands before the codec."""
        return self._maps

    @property
    def needs_scale(self) -> bool:
        """True when the codec stores codes of a constant scale."""
        return self._codec.constant_scale

    @property
    def largest_code(self) -> float:
        """Largest decoded magnitude at scale 1."""
        return self._codec.largest

    @property
    def quantised(self) -> bool:
        """True when smoothing, rotation and mixing are of use to the codec."""
        return self._codec.quantised

    @property
    def frozen(self) -> bool:
        """True after the first write."""
        return self._frozen

    def set(
        self,
        *,
        scale: float | None = None,
        smoothing: torch.Tensor | None = None,
        rotation: bool | None = None,
        mixing: torch.Tensor | None = None,
    ) -> None:
        """Set what is given and leave the rest.

        Args:
            scale: Decode scale of a codec with `constant_scale`.
            smoothing: `[H, D]` or `[D]`, positive.
            rotation: Whether to rotate.
            mixing: `[H, D, D]` or `[D, D]`, invertible; of keys, in the place of smoothing.

        Raises:
            PlanError: A value is out of range, of the wrong shape, or of no use to this codec; or the constants are
                frozen. Nothing is changed then.
        """
        if self._frozen:
            raise PlanError(
                f"constants of {self.owner} were frozen by its first write, and stored blocks depend on them; set them"
                " before writing, or reset the cache"
            )
        checked_scale = self._scale if scale is None else self._check_scale(scale)
        checked_smoothing = self._smoothing if smoothing is None else self._check_smoothing(smoothing)
        checked_mixing = self._mixing if mixing is None else self._check_mixing(mixing)
        if checked_mixing is not None and checked_smoothing is not None:
            raise PlanError(
                f"{self.owner} has smoothing and mixing; a mixing matrix includes smoothing: give one of them"
            )
        if rotation:
            self._check_quantised("rotation")
            rotation_block(self._vector)
        self._scale, self._smoothing, self._mixing = checked_scale, checked_smoothing, checked_mixing
        self._rotation = self._rotation if rotation is None else bool(rotation)
        block = rotation_block(self._vector) if self._rotation else 0
        if checked_mixing is None:
            self._maps = Maps(checked_smoothing, block)
        else:
            self._maps = Maps(mixing=Mixing.of(checked_mixing, block))

    def freeze(self) -> None:
        """Forbid changes from now on; called by the first write.

        Raises:
            PlanError: The codec needs a scale and has none.
        """
        if not self._frozen:
            if self._codec.constant_scale:
                need_scale(f"{self._codec.name} ({self.owner})", self._scale)
            self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; for a cache that holds nothing any more."""
        self._frozen = False

    def digest(self) -> bytes:
        """Return a hash of the values, equal in every process."""
        h = hashlib.blake2b(digest_size=16)
        h.update(b"scale" + (b"-" if self._scale is None else struct.pack("<f", self._scale)))
        for name, values in (("smoothing", self._smoothing), ("mixing", self._mixing)):
            if values is not None:
                shape = struct.pack(f"<{values.dim()}q", *values.shape)
                h.update(name.encode() + shape + values.numpy().astype("<f4").tobytes())
        h.update(b"rotation" + struct.pack("<q", rotation_block(self._vector) if self._rotation else 0))
        return h.digest()

    def _check_quantised(self, option: str) -> None:
        if not self._codec.quantised:
            raise PlanError(
                f"{option} is for quantised formats; {self.owner} is stored as {self._codec.name}, which it cannot help"
            )

    def _check_scale(self, value: float) -> float:
        if not self._codec.constant_scale:
            raise PlanError(
                f"{self.owner} is stored as {self._codec.name}, which takes no constant scale; choose a codec with one"
                " (fp8-tensor, int8-tensor, nvfp4) or leave it out"
            )
        return check_scale(value, self.owner)

    def _check_smoothing(self, value: torch.Tensor) -> torch.Tensor:
        m = self._check_shape("smoothing", value, (self._num_heads, self._vector.dim))
        inside = (m >= SMALLEST_SMOOTHING) & (m <= LARGEST_SMOOTHING)
        if not bool(inside.all()):
            raise PlanError(
                f"smoothing of {self.owner} holds {m[~inside][0].item()!r}; allowed are finite values from 2^-24 to"
                " 2^24"
            )
        return m

    def _check_mixing(self, value: torch.Tensor) -> torch.Tensor:
        import torch

        if self._part != "k":
            raise PlanError(f"mixing is for keys alone; {self.owner} can have smoothing or rotation")
        m = self._check_shape("mixing", value, (self._num_heads, self._vector.dim, self._vector.dim))
        if not bool(m.isfinite().all()) or not bool((m.abs() <= LARGEST_SMOOTHING).all()):
            raise PlanError(
                f"mixing of {self.owner} holds numbers that are not finite or beyond 2^24; scale the matrix"
            )
        condition = torch.linalg.cond(m.double())
        if not bool((condition <= LARGEST_CONDITION).all()):
            raise PlanError(
                f"mixing of {self.owner} has the condition number {float(condition.max()):.3g}; allowed are up to"
                f" {LARGEST_CONDITION:g}, so that its inverse is exact enough. kvpool.KVCache.calibrate measures such"
            )
        return m

    def _check_shape(self, option: str, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        self._check_quantised(option)
        m = torch.as_tensor(value).detach().float().cpu()
        if m.shape not in (shape, shape[1:]):
            raise PlanError(f"{option} of {self.owner} has shape {tuple(m.shape)}; expected {shape} or {shape[1:]}")
        return m.expand(shape).contiguous()


def check_scale(value: float, owner: str) -> float:
    """Return a decode scale as the fp32 number it is used as.

    Raises:
        PlanError: It is not one number, not finite, not positive, or its fp32 value lies outside 2^-126 .. 2^100.
    """
    try:
        given = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"scale of {owner} must be one number, got {value!r}") from error
    if math.isfinite(given) and SMALLEST_SCALE <= given <= LARGEST_SCALE:
        # Rounded first and checked after: a double that is no normal fp32 number must not pass as one.
        single: float = struct.unpack("<f", struct.pack("<f", given))[0]
        if SMALLEST_SCALE <= single <= LARGEST_SCALE:
            return single
    raise PlanError(
        f"scale of {owner} is {given!r}; allowed are finite decode scales (value = code * scale) from 2^-126 to 2^100."
        " A calibrated one is amax / largest code"
    )


Table = Mapping[tuple[int, str], Constants]


def set_layer(
    parts: Mapping[str, Constants],
    scales: Mapping[str, float | None],
    smoothing: torch.Tensor | Mapping[str, torch.Tensor] | None,
    rotation: bool | Mapping[str, bool] | None,
    mixing: torch.Tensor | None,
) -> None:
    """Set constants of one layer.

    Args:
        parts: The layer's constants by part.
        scales: Decode scales by part; None leaves one.
        smoothing: By part; a tensor alone is that of the keys (`k`, or `latent`).
        rotation: By part; a bool alone holds for every quantised part except indexer keys.
        mixing: Of the keys.

    Raises:
        PlanError: A part does not exist, or a value is refused; parts before it keep what they got.
    """
    given: dict[str, dict[str, object]] = {p: {"scale": value} for p, value in scales.items() if value is not None}
    if isinstance(smoothing, Mapping):
        maps = dict(smoothing)
    else:
        maps = {} if smoothing is None else {"k" if "k" in parts else "latent": smoothing}
    if isinstance(rotation, Mapping):
        turns = dict(rotation)
    else:
        turned = [p for p, c in parts.items() if c.quantised and p != "index"]
        turns = {} if rotation is None else dict.fromkeys(turned, rotation)
    for part, smooth in maps.items():
        given.setdefault(part, {})["smoothing"] = smooth
    for part, turn in turns.items():
        given.setdefault(part, {})["rotation"] = turn
    if mixing is not None:
        given.setdefault("k", {})["mixing"] = mixing
    for part, values in given.items():
        if part not in parts:
            raise PlanError(f"this layer stores no {part!r}; it stores {', '.join(sorted(parts)) or 'nothing'}")
        parts[part].set(**values)  # type: ignore[arg-type]


def set_unit_scales(table: Table) -> None:
    """Set the scale 1.0 wherever a codec needs one and has none: `scales="unit"`."""
    for constants in table.values():
        if constants.needs_scale and constants.scale is None:
            constants.set(scale=1.0)


def fingerprint(table: Table) -> bytes:
    """Return one hash of all constants: the part of a block's identity that is not its plan."""
    h = hashlib.blake2b(digest_size=16)
    for (layer, part), constants in sorted(table.items()):
        h.update(f"{layer}/{part}/".encode() + constants.digest())
    return h.digest()


def differing(a: Table, b: Table) -> tuple[str, ...]:
    """Return the owners whose constants differ between two tables, for messages."""
    keys = sorted(a.keys() | b.keys())
    return tuple(f"layer {k[0]}, {k[1]}" for k in keys if k not in a or k not in b or a[k].digest() != b[k].digest())


# --- scales in checkpoints ----------------------------------------------------------------------------------

#: modelopt writes `...self_attn.k_proj.k_scale`, llm-compressor `...self_attn.k_scale`; a fused projection has
#: `qkv_proj.k_scale`; older FP8 checkpoints have one `kv_scale` for both. All are decode scales.
_SCALE = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(?:.*\.)?(k|v|kv)_scale$")


def read_scales(path: str | Path) -> dict[tuple[int, str], float]:
    """Read the K and V decode scales of a checkpoint.

    Args:
        path: A safetensors file, or a directory of them.

    Returns:
        The scale of every (layer, `k` or `v`) the checkpoint has; `kv_scale` gives both, a scale of their own wins.

    Raises:
        PlanError: There is no such file, it holds no scale, or one of them is not a single valid number.
    """
    from safetensors import safe_open

    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise PlanError(f"no safetensors file at {str(path)!r}; give the checkpoint's directory or one of its files")
    own: dict[tuple[int, str], float] = {}
    shared: dict[tuple[int, str], float] = {}
    for file in files:
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                found = _SCALE.search(name)
                if not found:
                    continue
                tensor = tensors.get_tensor(name)
                if tensor.numel() != 1:
                    raise PlanError(
                        f"{name} in {file.name} has shape {tuple(tensor.shape)}; a constant is one number a layer and"
                        " plane. Use fp8 or int8, which need none"
                    )
                value = check_scale(float(tensor), f"{name} in {file.name}")
                layer, part = int(found[1]), found[2]
                for key in "kv" if part == "kv" else (part,):
                    (shared if part == "kv" else own)[layer, key] = value
    if not own and not shared:
        raise PlanError(f"{str(path)!r} holds no k_scale, v_scale or kv_scale; calibrate, or use fp8 or int8")
    return shared | own


def apply_scales(table: Table, scales: Mapping[tuple[int, str], float]) -> None:
    """Set the scales of a checkpoint wherever a codec needs one; a latent takes its layer's K scale.

    Raises:
        PlanMismatch: A part that needs a scale has none in `scales`; nothing is changed then.
    """
    wanted = {key: (key[0], "v" if key[1] == "v" else "k") for key, c in table.items() if c.needs_scale}
    missing = tuple(f"layer {layer}, {part}" for (layer, part), source in wanted.items() if source not in scales)
    if missing:
        raise PlanMismatch(f"the checkpoint has no scale for {', '.join(missing)}; calibrate, or use fp8", missing)
    for key, source in wanted.items():
        table[key].set(scale=scales[source])
