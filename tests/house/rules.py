"""Rules on the structure of a package's source tree. Each rule returns its violations, one line each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# Packages whose modules are plug-ins: a new plug-in is a new file, and plug-ins do not import each other.
PLUGINS = ("losses", "models", "data/sources", "probing/tasks", "retrieval/indexes", "commands")
TOP_LEVEL = 8  # largest number of modules at the top level, without `__init__` and `__main__`
PARAMETERS, STATEMENTS, COLUMNS = 8, 50, 120
# package -> packages that it must not import
NEVER = {"data": ("probing", "multitask")}


class Tree:
    """A package's modules and their imports.

    Args:
        package: The package's folder; its name is the package's name.
    """

    def __init__(self, package: Path) -> None:
        self.package, self.name = package, package.name
        self.modules: dict[str, ast.Module] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = ast.parse(path.read_text(encoding="utf-8"))

    def imports(self, module: str) -> Iterator[tuple[str, str | None]]:
        """Yield (module, name or None) of each import, including imports in functions and under TYPE_CHECKING."""
        is_package = (self.package.parent / module.replace(".", "/") / "__init__.py").is_file()
        for node in ast.walk(self.modules[module]):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield (inner, None) if inner in self.modules else (source, alias.name)

    def node_of(self, module: str) -> str:
        """Return the node of a module in the graph of imports: a package below the top one, or a top-level module."""
        return module.split(".")[1] if "." in module else "__init__"


def import_cycles(tree: Tree) -> list[str]:
    """Return the packages and top-level modules that import each other, directly or through others."""
    graph: dict[str, set[str]] = {tree.node_of(module): set() for module in tree.modules}
    for module in tree.modules:
        for target, _ in tree.imports(module):
            if target.split(".")[0] == tree.name and target in tree.modules:
                graph[tree.node_of(module)].add(tree.node_of(target))
    for node, targets in graph.items():
        targets -= {node, "__init__"}

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    after = {node: reachable(node) for node in graph}
    cycles = {tuple(sorted({node} | {other for other in after[node] if node in after[other]})) for node in graph
              if node in after[node]}  # fmt: skip
    return [f"import cycle: {', '.join(cycle)}" for cycle in sorted(cycles)]


def sibling_imports(tree: Tree) -> list[str]:
    """Return plug-ins that import a plug-in of their package; a module with a leading underscore may be imported."""
    packages = [f"{tree.name}.{name.replace('/', '.')}" for name in PLUGINS]
    return [
        f"{module} imports its sibling {target}"
        for module in tree.modules
        for target, _ in tree.imports(module)
        if (package := module.rpartition(".")[0]) in packages
        and target != module
        and target.startswith(f"{package}.")
        and not target.rpartition(".")[2].startswith("_")
    ]


def private_imports(tree: Tree) -> list[str]:
    """Return names with a leading underscore that another module imports."""
    return [
        f"{module} imports the private name {source}.{name}"
        for module in tree.modules
        for source, name in tree.imports(module)
        if source.split(".")[0] == tree.name and name and name.startswith("_") and not name.startswith("__")
    ]


def forbidden_imports(tree: Tree) -> list[str]:
    """Return imports that `NEVER` forbids."""
    return [
        f"{module} imports {target}"
        for module in tree.modules
        for target, _ in tree.imports(module)
        if target.split(".")[0] == tree.name and tree.node_of(target) in NEVER.get(tree.node_of(module), ())
    ]


def top_level(tree: Tree) -> list[str]:
    """Return one violation if the package has more than eight modules at its top level."""
    names = sorted(path.stem for path in tree.package.glob("*.py") if path.stem not in ("__init__", "__main__"))
    return [] if len(names) <= TOP_LEVEL else [f"{len(names)} modules at the top level: {', '.join(names)}"]


def functions(tree: Tree) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Yield (dotted name, function, its class if it is a method, else None) of every function, inner ones included."""

    def walk(node: ast.AST, name: str, owner: ast.ClassDef | None) -> Iterator:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{name}.{child.name}", child, owner
                yield from walk(child, f"{name}.{child.name}", None)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{name}.{child.name}", child)
            else:
                yield from walk(child, name, owner)

    for module, body in tree.modules.items():
        yield from walk(body, module, None)


def long_signatures(tree: Tree, from_yaml: set[str]) -> list[str]:
    """Return functions with more than eight parameters, not counting self.

    Exempt are
    - the `_target_`s of conf/, whose parameters are the keys of a yaml file, one line each;
    - Triton kernels and the functions that launch them (folders `kernels`), whose parameters are pointers and strides;
    - methods of `torch.autograd.Function` and operators of `torch.library.custom_op`, since each tensor that needs a
      gradient must be a separate parameter.
    """
    found = []
    for name, function, owner in functions(tree):
        arguments = function.args
        names = [part.arg for part in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len([part for part in names if part not in ("self", "cls")])
        is_autograd = owner is not None and any(ast.unparse(base).endswith("autograd.Function") for base in owner.bases)
        is_operator = any("custom_op(" in ast.unparse(decorator) for decorator in function.decorator_list)
        is_exempt = is_autograd or is_operator or ".kernels." in name or name.removesuffix(".__init__") in from_yaml
        if count > PARAMETERS and not is_exempt:
            found.append(f"{name} has {count} parameters")
    return found


def long_functions(tree: Tree) -> list[str]:
    """Return functions with more than fifty statements; the docstring counts as one.

    Triton kernels are exempt: splitting a kernel into functions would not make its memory layout easier to read.
    """
    return [
        f"{name} has {count} statements"
        for name, function, _ in functions(tree)
        if (count := sum(isinstance(part, ast.stmt) for part in ast.walk(function)) - 1) > STATEMENTS
        and ".kernels." not in name
    ]


def wide_lines(paths: list[Path]) -> list[str]:
    """Return lines of more than 120 columns, not counting a comment for the linter or the type checker at the end."""
    return [
        f"{path}:{number}: {len(line)} columns"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(re.sub(r"\s+# (noqa|type: ignore).*", "", line)) > COLUMNS
    ]
