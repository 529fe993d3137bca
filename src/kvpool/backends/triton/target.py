"""The device kernels are launched on: what is known of it. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from kvpool.codecs import jit
from kvpool.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Target:
    """The device kernels are launched on.

    Attributes:
        interpreted: Kernels run in Triton's interpreter, where bf16 arithmetic is wrong and casts truncate.
        hardware: What converts elements: 0 the interpreter, 1 a GPU, 2 a GPU that knows E4M3 (compute capability
            8.9 and later).
        num_processors: Multiprocessors.
        tile_rows: Most rows of a tile: where tensor cores take operands from registers, 128 leave too few of them.
        tensor_memory: Sums of products are kept in a memory of their own and pass through registers every turn.
    """

    interpreted: bool
    hardware: int
    num_processors: int
    tile_rows: int = 128
    tensor_memory: bool = False

    @classmethod
    def of(cls, capability: int, num_processors: int) -> Target:
        """Return the target of a GPU of a compute capability: 80, 90, 100."""
        hardware, tile_rows = 2 if capability >= 89 else 1, 128 if 90 <= capability < 120 else 64
        return cls(False, hardware, num_processors, tile_rows, 100 <= capability < 120)

    @property
    def cast(self) -> Any:
        """The device function that rounds fp32 to a plain type."""
        return jit.cast_interpreted if self.interpreted else jit.cast


INTERPRETER = Target(True, 0, 4)


@cache
def find_target(device: torch.device | str) -> Target:
    """Return what is known of a device.

    Raises:
        UnsupportedError: It is no CUDA device, and kernels are not interpreted.
    """
    if isinstance(jit.cast, triton.runtime.JITFunction):
        if torch.device(device).type != "cuda":
            raise UnsupportedError(f"backend 'triton' runs on cuda, not on {str(device)!r}")
        properties = torch.cuda.get_device_properties(device)
        return Target.of(10 * properties.major + properties.minor, properties.multi_processor_count)
    return INTERPRETER
