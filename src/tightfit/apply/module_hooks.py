"""Callbacks before and after modules run: by hooks that torch.compile skips, and around compiled functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["announce", "at_work", "is_watch_hook", "is_watched", "watch", "wrap"]

Foretold = Callable[[Sequence[nn.Module]], None]
# returns the compiler of new frames, if one is active; torch has no public name for it
_compiling: Callable[[], object] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
_MARK = "tightfit_watches"  # attribute of `watch`'s hooks: their `foretold` callback or None


def watch(
    module: nn.Module,
    before: Callable[[], None],
    after: Callable[[], None] | None,
    undo: Callable[..., object],
    foretold: Foretold | None = None,
) -> None:
    """Call `before` and `after` around each forward pass of `module`; `undo` receives how to remove the hooks.

    `after` is called too where `before` or the module raised.

    Where it is known beforehand which modules will run (`foretell`), `foretold` is called with those it watches.
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
    """Replace the compiled function of `module` by `around` of it; `undo` receives how to restore it."""
    compiled = module._compiled_call_impl
    module._compiled_call_impl = around(compiled)  # type: ignore[arg-type]
    undo(setattr, module, "_compiled_call_impl", compiled)


def announce(modules: Iterable[nn.Module]) -> None:
    """Notify the watchers of `modules` that these will run next (`at_work`), in this order."""
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
    """Run the callbacks of `module`'s watchers before and after the context, without a forward pass."""
    try:
        for hook in filter(is_watch_hook, tuple(module._forward_pre_hooks.values())):
            hook(module, ())
        yield
    finally:
        for hook in filter(is_watch_hook, tuple(module._forward_hooks.values())):
            hook(module, (), None)


def is_watched(module: nn.Module) -> bool:
    """Whether `module` has hooks of `watch`."""
    return any(map(is_watch_hook, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def is_watch_hook(hook: Callable[..., Any]) -> bool:
    """Whether `hook` is one of `watch`'s: it ignores its arguments and changes nothing."""
    return hasattr(hook, _MARK)


def _hook(function: Callable[[], None], foretold: Foretold | None = None) -> Callable[..., None]:
    disabled = torch.compiler.disable(lambda *_: function())  # type: ignore[no-untyped-call]
    if _compiling is None:
        setattr(disabled, _MARK, foretold)
        return disabled  # type: ignore[no-any-return]

    def hook(*_: object) -> None:
        if _compiling() is None:  # not compiling: `disabled` takes 0.7 us more
            function()
        else:
            disabled()

    setattr(hook, _MARK, foretold)
    skipped: Callable[..., None] = torch._dynamo.decorators.skip(hook)
    return skipped
