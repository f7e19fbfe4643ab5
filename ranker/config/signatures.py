"""Read signatures of classes and functions from source files; an import would also import torch, which is slow."""

from __future__ import annotations

import ast
import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

_SCALARS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature.

    Args:
        name: Name of the parameter.
        types: Names of the types that its annotation allows; empty: any value is accepted.
        required: Whether the parameter has no default.
        is_path: Whether its annotation includes `Path`.
    """

    name: str
    types: tuple[str, ...]
    required: bool
    is_path: bool = False

    def fault(self, value: Any) -> str:
        """Return why `value` does not fit; empty if `value` fits."""
        if not self.types:
            return ""
        if value is None:
            return "" if "None" in self.types else f"expected {self._expected()}, got null"
        if isinstance(value, (DictConfig, dict)):
            fits = "dict" in self.types
        elif isinstance(value, (ListConfig, list)):
            fits = "list" in self.types
        elif isinstance(value, bool):
            fits = "bool" in self.types
        else:
            fits = any(isinstance(value, _SCALARS[name]) for name in self.types if name in _SCALARS and name != "bool")
        if fits:
            return ""
        quotes = "; put it in quotes" if "str" in self.types and isinstance(value, (bool, int, float)) else ""
        return f"expected {self._expected()}, got {value!r}{quotes}"

    def _expected(self) -> str:
        return " or ".join(name for name in self.types if name != "None") + (" or null" if "None" in self.types else "")


@cache
def parameters_of(target: str) -> dict[str, Parameter] | None:
    """Parameters of the class or function at a dotted path.

    Returns:
        Name -> parameter; None if the source does not show the parameters, for example with **kwargs or in a compiled
        module.

    Raises:
        LookupError: There is no such module or name.
    """
    return _parameters(target, depth=0)


@cache
def attribute_of(target: str, name: str, default: Any = None, depth: int = 0) -> Any:
    """Return the literal value of a class attribute from the class or its nearest base; `default` if no class sets it.

    Raises:
        LookupError: There is no such module.
    """
    module, class_name, path = _locate(target)
    node = _definition(path, class_name) if path is not None and depth <= 5 else None
    if isinstance(node, ast.ImportFrom) and path is not None:
        return attribute_of(_origin(node, module, path, class_name), name, default, depth + 1)
    if not isinstance(node, ast.ClassDef):
        return default
    for item in node.body:
        if isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value is not None:
            assigned = item.targets if isinstance(item, ast.Assign) else [item.target]
            if any(isinstance(part, ast.Name) and part.id == name for part in assigned):
                with suppress(ValueError):  # the value is not a literal
                    return ast.literal_eval(item.value)
    for base in node.bases:
        if isinstance(base, ast.Name):
            # LookupError: `_locate` does not find modules outside packages, such as `abc` of the standard library
            with suppress(LookupError):
                inherited = attribute_of(f"{module}.{base.id}", name, None, depth + 1)
                if inherited is not None:
                    return inherited
    return default


def defines(target: str, within: str, depth: int = 0) -> bool:
    """Return whether the module that a dotted path names defines the class or function at the path.

    A name that this module imports also counts, if a module below `within` defines the name.

    Raises:
        LookupError: There is no such module.
    """
    module, name, path = _locate(target)
    if path is None or depth > 5:
        return False
    node = _definition(path, name)
    if node is not None and not isinstance(node, ast.ImportFrom):
        return True
    statements = (
        [node]
        if node is not None
        else [star for star in _statements(path) if isinstance(star, ast.ImportFrom) and star.names[0].name == "*"]
    )
    origins = [_origin(statement, module, path, name) for statement in statements]
    return any(origin.startswith(within) and defines(origin, within, depth + 1) for origin in origins)


def _origin(node: ast.ImportFrom, module: str, path: Path, name: str) -> str:
    """Return the dotted path of the object that an import statement binds to a name."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    # `import *` keeps the name
    source = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
    return ".".join(part for part in ((package if node.level else ""), node.module or "", source) if part)


def _parameters(target: str, depth: int) -> dict[str, Parameter] | None:
    module, name, path = _locate(target)
    if path is None or depth > 5:
        return None
    node = _definition(path, name)
    if isinstance(node, ast.ImportFrom):  # re-exported: follow the import
        return _parameters(_origin(node, module, path, name), depth + 1)
    if isinstance(node, ast.FunctionDef):
        return _signature(node, skip=0)
    if isinstance(node, ast.ClassDef):
        return _class_signature(node)
    if node is None and module.split(".")[0] == "ranker":
        raise LookupError(f"{path.name} has no {name}")
    return None


def _locate(target: str) -> tuple[str, str, Path | None]:
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError("no module in it")
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)  # only the top package: for `a.b`, find_spec would import `a`
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"no package {top}")
    path = Path(next(iter(spec.submodule_search_locations)))
    for part in inner:
        path = path / part
    if path.is_dir():
        path = path / "__init__.py"
    elif path.with_suffix(".py").is_file():
        path = path.with_suffix(".py")
    else:
        raise LookupError(f"no module {module}")
    return module, name, path if path.is_file() else None


@cache
def _statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _definition(path: Path, name: str) -> ast.AST | None:
    for node in _statements(path):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node
    return None


def _class_signature(node: ast.ClassDef) -> dict[str, Parameter] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _signature(item, skip=1)
    names = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    if any(isinstance(name, ast.Name) and name.id == "dataclass" for name in names):
        annotated = [
            item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        return {item.target.id: _parameter(item.target.id, item.annotation, item.value is None) for item in annotated}  # type: ignore[union-attr]
    return (
        {}
        if not node.bases or all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)
        else _inherited_signature(node)
    )


def _inherited_signature(node: ast.ClassDef) -> dict[str, Parameter] | None:
    """Return the signature of a class that inherits its `__init__` from its base.

    The signature is empty if the base is nn.Module. Signatures of other bases are not read; the result is then None.
    """
    known = all(ast.unparse(base) in ("nn.Module", "torch.nn.Module") for base in node.bases)
    return {} if known else None


def _signature(node: ast.FunctionDef, skip: int) -> dict[str, Parameter] | None:
    if node.args.kwarg is not None:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    required = len(positional) - len(node.args.defaults)
    parameters = {
        arg.arg: _parameter(arg.arg, arg.annotation, i < required) for i, arg in enumerate(positional) if i >= skip
    }
    for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        parameters[arg.arg] = _parameter(arg.arg, arg.annotation, default is None)
    return parameters


def _parameter(name: str, annotation: ast.expr | None, required: bool) -> Parameter:
    is_path = any(isinstance(part, ast.Name) and part.id == "Path" for part in ast.walk(annotation or ast.Pass()))
    return Parameter(name, tuple(dict.fromkeys(_types(annotation))), required, is_path)


def _types(annotation: ast.expr | None) -> tuple[str, ...]:
    """Type names of an annotation made of int, float, bool, str, Path, None, lists and dicts; empty for any other."""
    if annotation is None:
        return ()
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _types(annotation.left), _types(annotation.right)
        return (*left, *right) if left and right else ()
    if isinstance(annotation, ast.Constant):
        return ("None",) if annotation.value is None else ()
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        return (outer,) if outer in ("list", "dict") else ("list",) if outer in ("tuple", "Sequence") else ()
    if isinstance(annotation, ast.Name):
        if annotation.id in _SCALARS:
            return (annotation.id,)
        if annotation.id in ("list", "dict"):
            return (annotation.id,)
        if annotation.id == "Path":
            return ("str",)
    return ()
