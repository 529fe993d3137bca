"""What a cache is asked to have below its device, read and checked. Opens nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool.codecs import get_codec
from kvpool.errors import TierError, UnsupportedError
from kvpool.plan import Plan
from kvpool.plan.budget import parse_bytes


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The tiers a cache has below its device.

    Attributes:
        host_bytes: Host memory for blocks; None for none, or for a little in front of a disk.
        disk: Directory; None for none.
        disk_bytes: The most the directory may take; None for no cap.
        model: What tells the model's weights from all others; a disk needs it.
        codec: Format of the blocks there; None for the device's own.
    """

    host_bytes: int | None = None
    disk: Path | None = None
    disk_bytes: int | None = None
    model: str = ""
    codec: str | None = None

    def __post_init__(self) -> None:
        if self.disk is not None and not self.model:
            raise TierError(
                "blocks on disk outlive the process, and nothing says which weights computed them; give model=, a text"
                " that tells these weights from all others, such as kvpool.tiers.identity.weights_identity makes"
            )


def tier_options(
    plan: Plan,
    host_size: int | str | None,
    disk: str | Path | None,
    disk_size: int | str | None,
    model: str,
    codec: str | None,
) -> TierOptions | None:
    """Read what a cache is asked for below its device; None for nothing. Budgets of the plan are the defaults.

    Raises:
        TierError: The options make no sense together.
        UnsupportedError: This cache can have no tiers.
    """
    budgets = {tier.name: tier.budget_bytes for tier in plan.tiers}
    host = budgets.get("host") if host_size is None else parse_bytes(host_size, "host_size")
    cap = budgets.get("disk") if disk_size is None else parse_bytes(disk_size, "disk_size")
    if disk_size is not None and disk is None:
        raise TierError(f"disk_size is {disk_size!r}, but there is no directory; give disk=")
    if not host and disk is None:
        if codec is not None:
            raise TierError(
                f"host_codec is {codec!r}, but there is no tier to hold such blocks; give host_size or disk"
            )
        return None
    if codec is not None and get_codec(codec).constant_scale:
        raise UnsupportedError(
            f"host_codec {codec!r} needs constant scales, and tiers have none of their own; choose one that stores its"
            " scales, such as fp8, int8 or nvfp4-token"
        )
    return TierOptions(host or None, None if disk is None else Path(disk), cap or None, model, codec)
