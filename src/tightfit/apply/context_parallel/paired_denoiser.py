"""A denoiser's calls in a pipeline's call: which are computed by one of two groups of ranks, which by both, and why."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from tightfit.apply.activations.max_batch import PLAIN, find_batch, why_coupled
from tightfit.apply.context_parallel.batch_halves import why_not_divided, why_not_halved
from tightfit.apply.context_parallel.call_pairs import CallPairs, OutputForm, UnknownOutput
from tightfit.apply.context_parallel.deferred_tensor import DeferredTensor
from tightfit.apply.context_parallel.settings import NetworkSettings
from tightfit.apply.module_hooks import is_watch_hook
from tightfit.errors import RunError
from tightfit.measure.module_equivalence import is_own
from tightfit.measure.recorder import Recorder

__all__ = ["PairedDenoiser"]

MISSES = 3  # first calls in a row without a second one, after which both groups compute every call
TRIES = 3  # calls that change the network's attributes, which first calls may do: they fill tables


class PairedDenoiser:
    """Calls of the denoiser `name`. `halves`: its batches are halved where they can be.

    What an output looks like is learned from a call that both groups compute, for each form of the arguments: nothing
    else is known in a group that computes no call of them. Then each call is taken for the first of two, and the next
    one for the second.
    """

    def __init__(self, name: str, pairs: CallPairs, recorder: Recorder, *, halves: bool = True) -> None:
        self._name, self._pairs, self._recorder, self._halves = name, pairs, recorder, halves
        self._forms: dict[Any, OutputForm | str] = {}  # or why there is none
        self._tries: dict[Any, int] = {}
        self._latents: weakref.ref[torch.Tensor] | None = None  # of the call before, which both groups computed
        self._misses, self._paired, self._halved = 0, 0, False  # in this pipeline call
        self._reason = ""

    def wrapped(self, call: Callable[..., Any], busy: Callable[[], bool]) -> Callable[..., Any]:
        """Return what runs in place of `call`, the network's `__call__`; `busy`: another component is running."""

        @functools.wraps(call)
        def run(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def compute() -> Any:
                return call(network, *args, **kwargs)

            if not self._pairs.active or busy():
                return compute()
            self._pairs.at_end(self._name, self._end)
            if self._pairs.waiting not in (None, self._name) or _any_deferred(args, kwargs):
                self._pairs.complete()
            reason = self._why_whole(network, args, kwargs)
            if reason is None:
                try:
                    return self._in_pairs(network, compute, args, kwargs)
                except UnknownOutput as error:
                    raise RunError(f"{self._name}: {error}: leave cfg out of parallel", name=self._name) from error
            self._pairs.complete()
            self._reason = reason
            return compute()

        return run

    def _why_whole(self, network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return why this call is not one of two; None: it may be."""
        halves = why_not_halved(network, args, kwargs) if self._halves else "its graph has a fixed batch"
        if halves is None:
            self._halved = True
            return "its batches are halved"
        reason = _why_alone(network, args, kwargs)
        return reason and (reason if reason == halves else f"{halves}, and {reason}")

    def _in_pairs(
        self, network: nn.Module, compute: Callable[[], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        key = _form_of(args, kwargs)
        form, tensors = self._forms.get(key), _tensors(args, kwargs)
        if isinstance(form, OutputForm) and self._pairs.waiting == self._name:
            self._misses, self._paired = 0, self._paired + 1
            return self._pairs.end(form, tensors, compute)
        self._pairs.complete()
        if isinstance(form, OutputForm) and self._may_be_first(tensors):
            return self._pairs.begin(self._name, form, tensors, compute, self._read_early)
        if form is None:
            return self._learn(key, network, compute, tensors)
        if isinstance(form, str):
            self._reason = form
        return compute()

    def _may_be_first(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether two calls may be in a row here: not after MISSES, unless two calls had the same latents."""
        if self._misses < MISSES:
            return True
        before, self._latents = self._latents and self._latents(), weakref.ref(tensors[0])
        if before is tensors[0]:
            self._misses = 0
        return False

    def _learn(self, key: Any, network: nn.Module, compute: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output of a call that both groups compute, and remember its form if the call changed nothing."""
        branches = self._pairs.guidance.branches
        settings, before = NetworkSettings(network), branches.digest(tensors)
        output = compute()
        try:
            form: OutputForm | str = OutputForm.of(output)
        except UnknownOutput as error:
            form = str(error)
        if not branches.are_same(before, branches.digest(tensors)):
            form = "it writes to its arguments"
        elif not settings.unchanged:
            self._tries[key] = tries = self._tries.get(key, 0) + 1
            if tries < TRIES:
                return output
            form = f"{tries} calls each changed the network's attributes"
        self._forms[key] = form
        return output

    def _read_early(self) -> None:
        self._misses += 1

    def _end(self) -> None:
        """End a pipeline's call."""
        if self._paired:
            self._recorder.note(f"{self._name}: of {self._paired} pairs of calls, each group computed one call")
        elif not self._halved:
            reason = self._reason or "no two of its calls are in a row before the first one's output is read"
            self._recorder.note(f"{self._name}: both groups of ranks compute the same: {reason}")
        self._misses, self._paired, self._halved, self._reason = 0, 0, False, ""


def _why_alone(network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why a call of `network` must be made in both groups; None: its output alone counts."""
    if find_batch(network, args, dict(kwargs)) is None:
        return "its first argument is not a batch of three or more dimensions"
    for leaf in tree_leaves((args, kwargs)):
        if not isinstance(leaf, PLAIN):
            return f"it is given a {type(leaf).__name__}, which may hold values of earlier calls"
    for module in network.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(is_watch_hook(hook) or is_own(hook) for hook in hooks):
            return f"a hook of somebody else's is on {type(module).__name__}, and sees each call"
    return why_coupled(network) or why_not_divided(network, args, kwargs)


def _form_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A key of the arguments on which an output's form depends: shapes, dtypes, and values other than real numbers."""
    leaves, structure = tree_flatten((list(args), dict(kwargs)))
    return str(structure), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor)
                             else float if isinstance(leaf, float) else repr(leaf) for leaf in leaves)  # fmt: skip


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def _any_deferred(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(leaf, DeferredTensor) for leaf in _tensors(args, kwargs))
