"""Finds the config fields that the package reads, by their full names, from the source code.

`config` and `anything.config` are the whole config, `config.optim` is a group of it. If a name is assigned one of them,
the name holds it from there on. The same is true for a parameter of a function of the package, in any module, if a call
passes one of them.
"""

from __future__ import annotations

import ast
from pathlib import Path

WHOLE = "whole"
Held = frozenset  # of WHOLE and names of groups: the possible values of an expression
NOTHING = Held()
# Functions of these modules are called through a registry, with a group as `options`, and never by their name.
CALLED_BY_NAME = {"exvae.data.registry": "data", "exvae.priors": "prior"}


class Module:
    """A file of the package: its functions, its classes, its imports and its constants."""

    def __init__(self, name: str, source: str):
        self.name, self.tree = name, ast.parse(source)
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.imported = {}  # name in this file -> dotted name
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        self.constants = {}  # tuples of strings
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = strings(node.value)

    def dotted(self, function: ast.expr) -> str:
        """The full name of a called function, or ""."""
        if isinstance(function, ast.Name):
            return self.imported.get(function.id, f"{self.name}.{function.id}")
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return f"{self.imported.get(function.value.id, function.value.id)}.{function.attr}"
        return ""


def strings(node: ast.expr) -> tuple[str, ...]:
    elements = node.elts if isinstance(node, ast.Tuple) else ()
    return tuple(element.value for element in elements if isinstance(element, ast.Constant))


class Reader(ast.NodeVisitor):
    """Visits one function line by line and records the fields that it reads."""

    def __init__(self, package: Package, module: Module, names: dict[str, Held]):
        self.package, self.module = package, module
        self.names, self.loops = names, {}  # {name: what it holds}, {loop variable: its strings}

    def held(self, node: ast.expr) -> Held:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Held({WHOLE}) if node.id == "config" else NOTHING)
        if isinstance(node, ast.Attribute):
            if node.attr.strip("_") == "config":
                return Held({WHOLE})
            return Held({node.attr}) & self.package.groups if WHOLE in self.held(node.value) else NOTHING
        return NOTHING

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read(self.held(node.value), node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Name):
            for name in self.loops.get(node.slice.id, ()):
                self.read(self.held(node.value), name)
        self.generic_visit(node)

    def read(self, held: Held, name: str) -> None:
        self.package.found |= {name if group == WHOLE else f"{group}.{name}" for group in held}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self.names.pop(name.id, None)
                    if held := self.held(value):
                        self.names[name.id] = held

    def visit_DictComp(self, node: ast.DictComp) -> None:
        for loop in node.generators:
            if isinstance(loop.target, ast.Name):
                known = self.module.constants.get(getattr(loop.iter, "id", ""), ())
                self.loops[loop.target.id] = strings(loop.iter) or known
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        given = self.package.given.get(self.module.dotted(node.func))
        if given is not None:
            parameters, held_by = given
            pairs = [*zip(parameters, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
            for name, value in pairs:
                if held := self.held(value):
                    held_by[name] = held_by.get(name, NOTHING) | held
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inner = Reader(self.package, self.module, dict(self.names))
        for parameter in parameters_of(node):
            inner.names.pop(parameter, None)
        for line in node.body:
            inner.visit(line)


def parameters_of(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


class Package:
    """All modules. Calls pass the config and its groups from one to another."""

    def __init__(self, sources: dict[str, str], groups: set[str]):
        self.groups, self.found = Held(groups), set()
        self.modules = [Module(name, source) for name, source in sources.items()]
        self.given = {
            f"{module.name}.{name}": (parameters_of(node), {})
            for module in self.modules
            for name, node in module.functions.items()
        }
        for name, (parameters, held_by) in self.given.items():
            for package, group in CALLED_BY_NAME.items():
                if name.startswith(f"{package}.") and "options" in parameters:
                    held_by["options"] = Held({group})
        before = None
        while before != (before := str([held for _, held in self.given.values()])):
            self.found = set()
            for module in self.modules:
                self.walk(module)

    def walk(self, module: Module) -> None:
        for name, node in module.functions.items():
            reader = Reader(self, module, dict(self.given[f"{module.name}.{name}"][1]))
            for line in node.body:
                reader.visit(line)
        for node in module.classes:
            Reader(self, module, {}).visit(node)


def fields_read(sources: dict[str, str], groups: set[str]) -> set[str]:
    """The names of all fields that are read, such as 'optim.ema', and of all other attributes of a config.

    Args:
      sources: source code by module name.
      groups: names of the groups of the config.
    """
    return Package(sources, groups).found


def package_sources(root: Path) -> dict[str, str]:
    """The modules of exvae, except those that read finished runs. Of the functions in config.py, only `resolve`."""
    sources = {}
    for path in sorted((root / "exvae").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[1] not in ("reproduce", "sweeps"):
            sources[name] = path.read_text()
    tree = ast.parse(sources["exvae.config"])
    kept = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name == "resolve"]
    sources["exvae.config"] = ast.unparse(ast.Module(kept, []))
    return sources
