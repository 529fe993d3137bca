"""examples/new_codec.py: a codec from outside the package is planned, written and read like one of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "new_codec.py"


def test_the_example_runs_and_its_codec_is_as_good_as_its_format() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\S+) +([\d.]+) bits an element, ([\d.]+) %", done.stdout, re.MULTILINE)
    figures = {name: (float(bits), float(percent)) for name, bits, percent in rows}
    assert figures["fp32"] == (32.0, 0.0)
    assert figures["mxfp8"][0] == 8.25
    assert 1.0 < figures["mxfp8"][1] < 5.0
