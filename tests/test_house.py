"""The rules of the house: who may import whom, who may know which name, what nobody may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpool
from kvpool.codecs import CODECS
from kvpool.families.rules import RULES
from kvpool.layout import LAYOUTS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "kvpool"
NATIVE = ROOT / "native"
FILES = sorted(SOURCE.rglob("*.py"))

#: The floors, lowest first. Units of a floor do not see each other; `a < b` lets b see a, `a b` does not.
FLOORS = """
errors < dtypes log _native
layout codecs
kinds < families < spec
plan < support
pools ledger
step
backends
ops
tiers
sequence layer_constants < layer_access < cache
transformers
engine
serve measure
cli
""".strip().splitlines()

#: Units that never import torch, not even inside a function: they work with integers and plain data.
WITHOUT_TORCH = {"errors", "dtypes", "layout", "kinds", "families", "spec", "plan", "support", "ledger"}
#: Environment variables, and the file that may read each; None for any.
ENVIRONMENT = {
    "KVPOOL_LOG": None,
    "KVPOOL_THREADS": None,
    "KVPOOL_CPU": None,
    "XDG_CACHE_HOME": "engine/embedded.py",
}


def ranks() -> dict[str, tuple[int, int]]:
    """Unit -> (floor, place in its order); equal places are neighbours."""
    found: dict[str, tuple[int, int]] = {}
    for floor, line in enumerate(FLOORS):
        place = 0
        for word in line.split():
            if word == "<":
                place += 1
            else:
                assert word not in found, f"{word} stands on two floors"
                found[word] = (floor, place)
    return found


RANKS = ranks()


def unit_of(path: Path) -> str:
    """`layout`, `codecs`, ...; `kvpool` for the face of the package."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return {"__init__": "kvpool", "__main__": "cli"}.get(first, first)


def module_of(path: Path) -> str:
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, lazy ones too; `from kvpool import x` yields `kvpool.x`."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module == "kvpool":
                yield from ((node.lineno, f"kvpool.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant))


def show(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_file_stands_on_a_floor() -> None:
    strays = sorted({unit_of(f) for f in FILES} - set(RANKS) - {"kvpool"})
    assert not strays, f"give these a floor in DESIGN section 3 and in FLOORS first: {strays}"


def test_imports_go_strictly_down() -> None:
    faults = []
    for path in FILES:
        unit = unit_of(path)
        for line, name in imports(path):
            if not name.startswith("kvpool.") or unit == "kvpool":
                continue
            target = name.split(".")[1]
            if target == unit:
                continue
            if target not in RANKS:
                faults.append(f"{show(path, line)} imports {name}, which has no floor")
            elif not RANKS[target] < RANKS[unit]:
                faults.append(f"{show(path, line)} ({unit}) imports {name}: up, or a neighbour")
    assert not faults, "\n".join(faults)


def test_the_checker_of_imports_sees_lazy_relative_and_type_checking_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
if TYPE_CHECKING:
    from kvpool.cache import KVCache
def f():
    from . import engine
    from .codecs import base
    import kvpool.ops
    import_module("kvpool.step")
"""
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    want = {"kvpool.cache", "kvpool.engine", "kvpool.codecs", "kvpool.ops", "kvpool.step"}
    assert {name for _, name in imports(SOURCE / "layout.py")} == want


def test_the_floors_of_integers_never_import_torch() -> None:
    faults = []
    for path in FILES:
        if unit_of(path) in WITHOUT_TORCH:
            heavy = [(n, m) for n, m in imports(path) if m.split(".")[0] in ("torch", "transformers", "triton")]
            faults += [f"{show(path, line)} imports {name}" for line, name in heavy]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "code",
    [
        "import kvpool",
        "import kvpool.plan, kvpool.layout, kvpool.codecs, kvpool.spec",
        "import kvpool.support",
        "import kvpool.ledger",
        "import kvpool.cli",
    ],
)
def test_importing_what_needs_no_torch_does_not_load_it(code: str) -> None:
    module = code.split()[1].split(",")[0]
    if not (SOURCE / module.partition(".")[2]).exists() and not (SOURCE / f"{module.partition('.')[2]}.py").exists():
        pytest.skip(f"{module} is not built yet")
    check = f"{code}; import sys; print(sorted({{'torch', 'transformers', 'triton', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "helper", "helpers", "common", "misc", "tools"}
    faults = [show(f) for f in FILES if drawers & set(f.relative_to(SOURCE).with_suffix("").parts)]
    faults += [show(f) for f in NATIVE.rglob("*.[ch]pp") if drawers & set(f.relative_to(NATIVE).with_suffix("").parts)]
    assert not faults, f"name these after what they hold: {faults}"


def test_only_the_bindings_know_python() -> None:
    foreign = re.compile(r'#\s*include\s*[<"](Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/)')
    faults = [
        show(path, number)
        for path in sorted(NATIVE.rglob("*.[ch]pp"))
        if not re.fullmatch(r"bind(_\w+)?\.[ch]pp", path.name) or path.parent != NATIVE
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if foreign.search(text)
    ]
    assert not faults, f"move what needs Python into native/bind*: {faults}"


def owners_of_names() -> dict[str, set[str]]:
    """Name of a codec, layout or model family -> files that may ask for it."""
    owners: dict[str, set[str]] = {name: {"layout.py"} for name in LAYOUTS}
    for name, codec in CODECS.items():
        own = Path(str(sys.modules[type(codec).__module__].__file__)).relative_to(SOURCE).as_posix()
        owners[name] = {own}
    for plain in ("fp32", "fp16", "bf16"):  # Names of element types before they are names of codecs.
        owners[plain].add("dtypes.py")
    for family in RULES:
        owners[family] = {"families/rules.py"}
    for family in ("mamba", "mamba2"):  # Names of layer types before they are names of models.
        owners[family] |= {"families/layer_types.py", "families/weights.py"}
    return owners


def names_asked_for(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every text constant that a decision hangs on: ==, in, match, startswith, dict keys."""
    for node in ast.walk(tree):
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith"):
                operands = list(node.args)
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        for operand in operands:
            inner = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            for item in inner:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield node.lineno if hasattr(node, "lineno") else item.lineno, item.value


def test_nobody_asks_for_the_name_of_a_codec_layout_or_model() -> None:
    owners = owners_of_names()
    faults = []
    for path in FILES:
        here = path.relative_to(SOURCE).as_posix()
        for line, text in names_asked_for(ast.parse(path.read_text())):
            if text in owners and here not in owners[text]:
                faults.append(f"{show(path, line)} decides by {text!r}; ask a property of the codec, layout or spec")
    quoted = re.compile(r'"(' + "|".join(map(re.escape, owners)) + r')"')
    for path in sorted(NATIVE.rglob("*.[ch]pp")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if quoted.search(text):
                faults.append(f"{show(path, number)} knows a name: {text.strip()}")
    assert not faults, "\n".join(faults)


def test_the_checker_of_names_sees_every_way_to_ask() -> None:
    text = """
a == "fp8"
"HND" in x
x in ("int8", "nvfp4")
x.startswith("index-fp8")
d = {"fp16": 1}
match x:
    case "fp32":
        pass
"""
    assert [name for _, name in sorted(names_asked_for(ast.parse(text)))] == [
        "fp8", "HND", "int8", "nvfp4", "index-fp8", "fp16", "fp32",
    ]  # fmt: skip


def test_only_the_declared_environment_variables_are_read() -> None:
    faults = []
    for path in FILES:
        here = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            name: ast.AST | None = None
            if isinstance(node, ast.Call) and re.search(r"(^|\.)(getenv|environ\.\w+)$", ast.unparse(node.func)):
                name = node.args[0] if node.args else node
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                name = node.slice
            if name is None:
                continue
            text = name.value if isinstance(name, ast.Constant) else None
            if text not in ENVIRONMENT or ENVIRONMENT[text] not in (None, here):
                faults.append(f"{show(path, node.lineno)} reads {ast.unparse(node)}")
    for path in sorted(NATIVE.rglob("*.[ch]pp")):
        for match in re.finditer(r"getenv\(([^)]*)\)", path.read_text()):
            if match[1].strip('"') not in ENVIRONMENT:
                faults.append(f"{show(path)} reads {match[0]}")
    assert not faults, "\n".join(faults)


def test_no_module_keeps_a_process_global_or_a_pickle() -> None:
    faults = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Global):
                faults.append(f"{show(path, node.lineno)}: global {', '.join(node.names)}")
        for line, name in imports(path):
            if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
                faults.append(f"{show(path, line)} imports {name}: bytes from outside must not run code")
    assert not faults, "\n".join(faults)


def test_test_files_have_names_of_their_own() -> None:
    names = [p.name for p in (ROOT / "tests").rglob("*.py") if p.name not in ("__init__.py", "conftest.py")]
    doubled = sorted({name for name in names if names.count(name) > 1})
    assert not doubled, f"pytest imports by basename; rename one of each: {doubled}"


def test_the_package_is_the_one_in_this_tree() -> None:
    assert Path(str(kvpool.__file__)).parent == SOURCE
