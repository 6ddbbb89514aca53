"""Telling when modules work: by hooks that a compiler does not look into, and around what is compiled already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["at_work", "foretell", "is_watched", "only_tells", "watch", "wrap"]

Foretold = Callable[[Sequence[nn.Module]], None]
# who compiles the frames that begin now, if anybody; it has no public name
_compiling: Callable[[], object] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
_MARK = "tightfit_watches"  # of hooks that only tell: who is told beforehand, if anybody


def watch(
    module: nn.Module,
    before: Callable[[], None],
    after: Callable[[], None] | None,
    undo: Callable[..., object],
    foretold: Foretold | None = None,
) -> None:
    """Calls `before` and `after` each forward pass of `module`, whatever it raises; `undo` is given how to stop it.

    `after` is called where `before` raised, too.

    Where somebody knows beforehand which modules will be at work, `foretold` is called with those it watches.
    """
    if module._compiled_call_impl is None:
        undo(module.register_forward_pre_hook(_hook(before, foretold), prepend=True).remove)
        if after is not None:
            undo(module.register_forward_hook(_hook(after), always_call=True).remove)
        return

    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                before()
                return work(*args, **kwargs)
            finally:
                if after is not None:
                    after()

        return run

    wrap(module, around, undo)


def wrap(
    module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]], undo: Callable[..., object]
) -> None:
    """Calls of `module`, which is compiled, go to what `around` makes of the compiled function."""
    compiled = module._compiled_call_impl
    module._compiled_call_impl = around(compiled)  # type: ignore[arg-type]
    undo(setattr, module, "_compiled_call_impl", compiled)


def foretell(modules: Iterable[nn.Module]) -> None:
    """Says to whoever watches `modules` that these will be `at_work` next, in this order."""
    uses: dict[Foretold, list[nn.Module]] = {}
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            foretold = getattr(hook, _MARK, None)
            if foretold is not None:
                uses.setdefault(foretold, []).append(module)
    for foretold, watched in uses.items():
        foretold(watched)


@contextlib.contextmanager
def at_work(module: nn.Module) -> Iterator[None]:
    """Does what is done before and after each forward pass of `module` for whoever watches it, without one."""
    try:
        for hook in filter(only_tells, tuple(module._forward_pre_hooks.values())):
            hook(module, ())
        yield
    finally:
        for hook in filter(only_tells, tuple(module._forward_hooks.values())):
            hook(module, (), None)


def is_watched(module: nn.Module) -> bool:
    """Whether anybody is told when `module` works."""
    return any(map(only_tells, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def only_tells(hook: Callable[..., Any]) -> bool:
    """Whether `hook` is one of `watch`'s: it looks at nothing that is passed, and changes nothing."""
    return hasattr(hook, _MARK)


def _hook(function: Callable[[], None], foretold: Foretold | None = None) -> Callable[..., None]:
    disabled = torch.compiler.disable(lambda *_: function())  # type: ignore[no-untyped-call]
    if _compiling is None:
        setattr(disabled, _MARK, foretold)
        return disabled  # type: ignore[no-any-return]

    def hook(*_: object) -> None:
        if _compiling() is None:  # nothing is: what is disabled takes 0.7 us more
            function()
        else:
            disabled()

    setattr(hook, _MARK, foretold)
    skipped: Callable[..., None] = torch._dynamo.decorators.skip(hook)
    return skipped
