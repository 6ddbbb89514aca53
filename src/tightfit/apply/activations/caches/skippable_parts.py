"""What a step cache does something around in a network, and how its cache is made for one guidance prediction."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tightfit.apply.activations.caches.attention_cache import AttentionCache
from tightfit.apply.activations.caches.block_cache import BlockCache, SkippableBlocks
from tightfit.apply.activations.caches.branch_cache import BranchCache, LeaveOut
from tightfit.apply.activations.caches.denoising_pipeline import DenoisingPipeline
from tightfit.apply.activations.caches.faster_cache import FasterCache
from tightfit.apply.activations.caches.guidance import ConditionalPrediction
from tightfit.apply.activations.caches.network_cache import NetworkCache
from tightfit.apply.activations.caches.prompt_cache import PromptCache, prompt_modules
from tightfit.apply.activations.caches.unet_cache import UnetCache, deep_blocks
from tightfit.apply.activations.gradient_checkpointing import attention_layers
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.errors import CacheError
from tightfit.measure.modules import has_skips
from tightfit.schema.step_cache import StepCache

__all__ = ["skippable_parts"]

Parts = tuple[tuple[nn.Module, ...], Callable[[], BranchCache]]


def skippable_parts(
    name: str, network: nn.Module, settings: StepCache, pool: ActivationHostPool | None, leave_out: LeaveOut,
    pipeline: DenoisingPipeline, conditional: ConditionalPrediction,
) -> Parts:  # fmt: skip
    """Return the modules around whose calls a cache of `network`, the component `name`, does something, and how to make
    a branch's cache. Raises CacheError where the network has no such modules.
    """
    kind = settings.kind
    if kind.reuses == "network":
        return (), lambda: NetworkCache(network, settings, pool, leave_out)
    if kind.reuses == "prompt":
        return prompt_modules(network), lambda: PromptCache(settings, leave_out)
    if kind.reuses == "attention":
        layers = tuple(attention_layers(network))
        if not layers:
            raise CacheError(f"cache={settings.strategy}: {name} has no attention layers of diffusers")
        if kind.predicts == "last change":
            return layers, lambda: FasterCache(network, layers, settings, pool, leave_out, pipeline, conditional)
        return layers, lambda: AttentionCache(layers, settings, pool, leave_out)
    if has_skips(network):
        _check_unet(name, settings)
        deep = deep_blocks(name, network, settings)
        return (*deep.first, *deep.middle), lambda: UnetCache(deep, settings, pool, leave_out)
    blocks = SkippableBlocks.of(name, network, settings)
    return (*blocks.first, *blocks.middle), lambda: BlockCache(blocks, settings, pool, leave_out)


def _check_unet(name: str, settings: StepCache) -> None:
    """Raise CacheError if the strategy cannot be one of a U-Net."""
    if settings.kind.decides == "filtered input" and settings.decides_in_blocks:
        raise CacheError(
            f"cache={settings.strategy} compares tokens of transformers, and {name} is a U-Net: set filters=latents"
        )
    if settings.kind.decides == "modulated input" or settings.strategy == "blockdance":
        raise CacheError(
            f"cache={settings.strategy} is for transformers: {name} is a U-Net. static, first-block, taylorseer, "
            "taylorseer-lite, pab, faster-cache, sea-cache, easycache, meancache and text-kv take U-Nets"
        )
