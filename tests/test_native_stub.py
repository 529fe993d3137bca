"""The stub `_native.pyi` says what the compiled module exports: the same names, parameters and members."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvpool

stubgen = pytest.importorskip("nanobind.stubgen")
native = pytest.importorskip("kvpool._native", reason="the native part is not built: make build")

STUB = Path(str(kvpool.__file__)).parent / "_native.pyi"


def exports(text: str) -> dict[str, set[tuple[str, ...]]]:
    """Dotted name -> the parameter names of each overload; `()` alone for a value or class."""
    found: dict[str, set[tuple[str, ...]]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                args = node.args
                names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg != "self"]
                found.setdefault(prefix + node.name, set()).add(tuple(names))
            elif isinstance(node, ast.ClassDef):
                found[prefix + node.name] = {()}
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = {()}
            elif isinstance(node, ast.Assign):
                found.update({prefix + t.id: {()} for t in node.targets if isinstance(t, ast.Name)})

    visit(ast.parse(text).body, "")
    return {name: args for name, args in found.items() if not name.rpartition(".")[2].startswith("_") or "init" in name}


def test_the_stub_says_what_the_module_exports() -> None:
    generator = stubgen.StubGen(native)
    generator.put(native)
    real, written = exports(generator.get()), exports(STUB.read_text())
    missing = {name: sorted(args) for name, args in real.items() if name not in written}
    invented = sorted(set(written) - set(real))
    differing = {name: (written[name], real[name]) for name in real if written.get(name, real[name]) != real[name]}
    assert not missing, f"add to {STUB.name}: {missing}"
    assert not invented, f"{STUB.name} names what the module lacks: {invented}"
    assert not differing, f"parameters differ (stub, module): {differing}"


def test_everything_the_module_exports_has_a_docstring() -> None:
    bare = [name for name in dir(native) if not name.startswith("_") and not getattr(native, name).__doc__]
    assert not bare, f"give these a docstring in their binding: {bare}"
