"""The public face is frozen: a name that comes or goes is a decision, made here and in the changelog."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvpool

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = {
    "CacheSpec", "Codec", "KVCache", "KVError", "LayoutError", "Ledger", "Media", "OutOfBlocks", "Plan",
    "PlanError", "PlanMismatch", "Pools", "Retention", "Sequence", "SpecError", "Step", "TierError",
    "UnsupportedError", "make_plan", "register",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(kvpool.__all__) == PUBLIC | {"__version__"}
    assert dir(kvpool) == sorted(kvpool.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    value = getattr(kvpool, name)
    assert value.__name__ == name
    assert value.__module__.startswith("kvpool.")
    assert value.__doc__, f"{name} has no docstring"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(str(kvpool.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == kvpool._HOMES


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'KVEror'; public names: .*KVError"):
        kvpool.KVEror  # noqa: B018


def test_planning_through_the_face_never_loads_torch() -> None:
    code = (
        "import sys, kvpool as kv; kv.CacheSpec, kv.make_plan, kv.Plan, kv.register;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_version_is_the_package_s_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kvpool.__version__ == project["version"]
