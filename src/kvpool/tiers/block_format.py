"""How blocks of the device look to the tiers below it: as they are, or in another format.

A tier reads and writes memory. Where it keeps the device's own bytes, that memory is the slab; where it has a codec of
its own, blocks pass through a few rows in that format, converted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvpool import ops
from kvpool.backends import Backend
from kvpool.errors import PlanError
from kvpool.plan import GroupPlan, Plan, make_plan
from kvpool.pools import Part, Pools, Slab
from kvpool.pools.constants import Constants, fingerprint
from kvpool.tiers.base import Pieces

#: Group and block id on the device.
DeviceBlock = tuple[int, int]
#: Blocks converted at once: enough to keep the kernels' threads busy, few enough to stay in a cache.
CONVERT_BLOCKS = 8


class BlockFormat(Protocol):
    """What a transfer asks for memory.

    Attributes:
        plan: Of the blocks as tiers hold them.
        slabs: Memory they lie in on their way.
        constants: What their bytes depend on besides the plan.
        num_blocks: The most that pass at once.
        origin: What they were converted from, for their identity; empty when they are the device's own.
    """

    plan: Plan
    slabs: Sequence[Slab]
    constants: dict[tuple[int, str], Constants]
    num_blocks: int
    origin: str

    def leave(self, blocks: Sequence[DeviceBlock]) -> list[Pieces]:
        """Return memory that holds the blocks in the tiers' format, good until the next call."""

    def room(self, blocks: Sequence[DeviceBlock]) -> list[Pieces]:
        """Return memory that a tier may fill; `enter` brings what came to the device."""

    def enter(self, blocks: Sequence[DeviceBlock], came: Sequence[bool]) -> None:
        """Bring those that came into the device, after `room` for the same blocks."""


class DeviceFormat:
    """The slabs themselves."""

    num_blocks = 1 << 30
    origin = ""

    def __init__(self, plan: Plan, pools: Pools) -> None:
        self.plan = plan
        self.slabs: Sequence[Slab] = pools.slabs
        self.constants = pools.constants
        self._bases = [slab.address for slab in pools.slabs]

    def leave(self, blocks: Sequence[DeviceBlock]) -> list[Pieces]:
        return [_pieces(self.plan, self._bases, *block) for block in blocks]

    room = leave

    def enter(self, blocks: Sequence[DeviceBlock], came: Sequence[bool]) -> None:
        pass


class CodecFormat:
    """Rows in another codec, between the slabs and the tiers. States stay as they are: their bytes are the slab's.

    Args:
        plan: Of the device.
        pools: Of the device.
        backend: Converts.
        codec: Of the blocks below; one without constant scales.

    Raises:
        PlanError: It cuts layers into other parts than the device's codec does.
    """

    num_blocks = CONVERT_BLOCKS

    def __init__(self, plan: Plan, pools: Pools, backend: Backend, codec: str) -> None:
        self.plan = make_plan(
            plan.spec,
            num_blocks=CONVERT_BLOCKS,
            codec={"*": codec, "layers": _state_codecs(plan)},
            layout=plan.groups[0].pools[0].layout,
            tokens_per_block=plan.tokens_per_block,
            tp_rank=plan.tp_rank,
            tp_size=plan.tp_size,
            layers=plan.layers or None,
        )
        rows = Pools(self.plan, pools.device)
        self.slabs: Sequence[Slab] = [*rows.slabs, *pools.slabs]  # those of the device for states
        self.constants = rows.constants
        for constants in self.constants.values():
            constants.freeze()
        self.origin = f"{plan.block_format} {fingerprint(pools.constants).hex()}"
        self._backend = backend
        self._device = DeviceFormat(plan, pools)
        self._bases = [slab.address for slab in rows.slabs]
        self._pairs: list[list[tuple[Part, Part]]] = []
        for ours, theirs in zip(plan.groups, self.plan.groups, strict=True):
            names = [_names(ours), _names(theirs)]
            if names[0] != names[1]:
                raise PlanError(
                    f"host_codec {codec!r} stores {names[1][:4]} in group {ours.name}, the device {names[0][:4]}; use"
                    " codecs that cut a layer alike"
                )
            self._pairs.append([] if ours.is_state else [(pools.part(*name), rows.part(*name)) for name in names[0]])

    def leave(self, blocks: Sequence[DeviceBlock]) -> list[Pieces]:
        for group, parts in enumerate(self._pairs):
            device, row = self._slots(group, blocks, [True] * len(blocks))
            for part, below in parts if len(device) else ():
                ops.convert(self._backend, part, device, below, row)
        return self.room(blocks)

    def room(self, blocks: Sequence[DeviceBlock]) -> list[Pieces]:
        return [
            self._device.room([(group, block)])[0]
            if self.plan.groups[group].is_state
            else _pieces(self.plan, self._bases, group, row)
            for row, (group, block) in enumerate(blocks)
        ]

    def enter(self, blocks: Sequence[DeviceBlock], came: Sequence[bool]) -> None:
        for group, parts in enumerate(self._pairs):
            device, row = self._slots(group, blocks, came)
            for part, below in parts if len(device) else ():
                ops.convert(self._backend, below, row, part, device)

    def _slots(
        self, group: int, blocks: Sequence[DeviceBlock], wanted: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the wanted blocks of a group: on the device, and in the rows."""
        n = self.plan.groups[group].tokens_per_block
        pairs = [(b, row) for row, ((g, b), want) in enumerate(zip(blocks, wanted, strict=True)) if want and g == group]
        ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2, 1) * n + torch.arange(n)  # [blocks, 2, N]
        ids = ids.to(self.slabs[group].bytes.device)
        return ids[:, 0].flatten(), ids[:, 1].flatten()


def _names(group: GroupPlan) -> list[tuple[int, str]]:
    return sorted({(layer, part) for pool in group.pools for layer in pool.layers for part in pool.parts})


def _state_codecs(plan: Plan) -> dict[int, dict[str, str]]:
    """Return the codec of every state, by layer."""
    codecs: dict[int, dict[str, str]] = {}
    for pool in (pool for group in plan.groups if group.is_state for pool in group.pools):
        for layer in pool.layers:
            codecs.setdefault(layer, {}).update(dict.fromkeys(pool.parts, pool.codec))
    return codecs


def _pieces(plan: Plan, bases: Sequence[int], group: int, block: int) -> Pieces:
    return tuple((bases[group] + start, size) for start, size in plan.groups[group].pieces(block))
