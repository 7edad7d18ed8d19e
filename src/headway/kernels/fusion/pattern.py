"""How a module is recognised and changed: by the code of its forward, whatever its class is called.

A fused forward computes what one known forward computes, so it may stand in for that one alone. Copies of a forward
under other names (decoder layers of most language models) are recognised with it; a forward that another version of a
library changed is not, and its modules are left as they are.
"""

import ast
import copy
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Pattern:
    """A forward that can be fused, and what is fused in it."""

    operators: tuple[str, ...]
    """Names of the operators that ``forward`` uses."""
    names: tuple[str, ...]
    """Classes that are known to have such a forward; others with the same code are taken too."""
    known: frozenset[str]
    """Digests of the code that ``forward`` may stand in for, as ``code_of`` makes them."""
    forward: Callable[..., Any]
    """In its place: of the same arguments and results."""
    functions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Functions that the known forward calls, by name, and digests of their code."""
    obstacle: Callable[[Any], str | None] = lambda module: None
    """Why a module can't be fused although its code is known."""
    covers: tuple[str, ...] = ()
    """Children that ``forward`` computes itself: they are left as they are."""
    method: str = "forward"
    """What ``known`` is the code of and ``forward`` stands in for, where a class calls a part of its forward itself."""
    part: str | None = None
    """The attribute of a module that has the method, where it is not the module itself."""
    gives_weight: tuple[str, ...] = ()
    """Norms whose work ``forward`` does: called without an input they give their weight."""
    across_heads: bool = False
    """Whether ``forward`` needs all heads of a token on one rank."""
    not_within: str | None = None
    """A word in the class of the parent of modules that are left: a norm of single heads has rows too short."""

    def apply(self, module: nn.Module) -> None:
        """Change ``module`` in place. Its parameters, children, hooks and names stay."""
        owner = self.owner(module)
        if owner is not module:
            owner = copy.copy(owner)  # modules may share it
            setattr(module, str(self.part), owner)
        _replace(owner, self.method, self.forward)
        for name in self.gives_weight:
            norm: Any = getattr(module, name, None)
            if norm is not None:
                _replace(norm, "forward", _weight)

    def owner(self, module: nn.Module) -> Any:
        """What has the method: the module, a part of it, or None."""
        return module if self.part is None else getattr(module, self.part, None)


def _weight(norm: Any) -> Any:
    """The forward of a norm whose work another does."""
    return norm.weight


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> None:
    kind: Any = type(owner)
    owner.__class__ = _with_method(kind, name, method)


@functools.cache
def _with_method(kind: Any, name: str, method: Callable[..., Any]) -> type:
    """A subclass named alike. Equal blocks have equal ones, and so share compiled code."""
    return type(kind.__name__, (kind,), {name: method, "__module__": kind.__module__})


@functools.cache
def code_of(kind: Any, method: str = "forward") -> str:
    """Digest of the code of a class's forward or other method; empty where there is none whose source can be read."""
    function = getattr(kind, method, None)
    return "" if function is None else function_code(inspect.unwrap(function))


@functools.cache
def function_code(function: Callable[..., Any]) -> str:
    """As ``code_of``, of a function: its code without decorators, annotations, comments and documentation."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ""
    bare = _Bare().visit(tree)
    return hashlib.sha256(ast.unparse(bare).encode()).hexdigest()[:16]


def calls_known(kind: Any, method: str, functions: Mapping[str, frozenset[str]]) -> bool:
    """Whether a method finds those functions with known code under their names."""
    scope = inspect.unwrap(getattr(kind, method)).__globals__
    return all(callable(scope.get(name)) and function_code(scope[name]) in known for name, known in functions.items())


class _Bare(ast.NodeTransformer):
    """What is left of a function is what it does."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Without decorators, annotations, name and documentation."""
        node.decorator_list, node.returns, node.name = [], None, "function"
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Without its annotation."""
        node.annotation = None
        return node


def plain_norm(norm: Any) -> str | None:
    """Why ``norm`` is not a LayerNorm without parameters whose place a fused forward may take; None: it is one."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is not None or norm.bias is not None:
        return f"its norm is {norm}"
    return hooked(norm)


def hooked(module: nn.Module) -> str | None:
    """Why ``module`` must be called: someone listens."""
    return "a norm in it has hooks" if module._forward_hooks or module._forward_pre_hooks else None
