"""Where blocks go when they leave the device: host memory, disk, later elsewhere. Knows no sequence and no kernel."""

from __future__ import annotations
