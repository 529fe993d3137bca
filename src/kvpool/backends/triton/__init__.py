"""Kernels for CUDA devices, written in Triton. Needs the package `triton`; imported on use."""

from __future__ import annotations

from kvpool.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
