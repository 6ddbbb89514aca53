"""Everything that was tried beside tightfit: a new row of "What works together" is one entry of GROUPS."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

from more_pipelines import MORE_CASES
from offloaded_by_others import HERE, by_group, by_layer, by_model
from pipeline_classes.unets_parts import vision
from tiny_pipelines import CASES, CLIP_WIDTH, PIXELS
from together.ways import ROUNDING, WAYS, Fit, Script, Trial, draw, made

FUSED = 1e-5  # a fused LoRA is added to the weights in float32 instead of to what they give

Pictures = list[torch.Tensor]

# LoRA


@functools.cache
def lora(scale: int) -> dict[str, torch.Tensor]:
    """A LoRA of the U-Net and the text encoder that visibly changes the picture."""
    pipe, state = made(scale), dict[str, torch.Tensor]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, targets in (("unet", ["to_q", "to_v", "conv1"]), ("text_encoder", ["q_proj", "v_proj"])):
            part = getattr(pipe, name)
            part.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "made")
            kept = get_peft_model_state_dict(part, adapter_name="made")
            state |= {f"{name}.{key}": value.clone() for key, value in kept.items()}
    return state


def scale_of(pipe: Any) -> int:
    return int(pipe.text_encoder.config.hidden_size) // CLIP_WIDTH


def load(pipe: Any) -> None:
    pipe.load_lora_weights(dict(lora(scale_of(pipe))), adapter_name="made")


def steps(*names: str) -> Script:
    """Do each step of LORA in turn, and draw after each; "fit" and "undo" are tightfit's, "draw" only draws."""

    def script(pipe: Any, fit: Fit) -> Pictures:
        found, handle = Pictures(), None
        for name in names:
            if name == "fit":
                handle = fit(pipe)
            elif name == "undo":
                assert handle is not None
                handle.undo()
            elif name.startswith("only "):
                LORA[name.removeprefix("only ")](pipe)
                continue
            else:
                LORA[name](pipe)
            found.append(draw(pipe))
        return found

    return script


LORA: dict[str, Callable[[Any], object]] = {
    "load": load,
    "weaker": lambda pipe: pipe.set_adapters("made", 0.5),
    "off": lambda pipe: pipe.disable_lora(),
    "on": lambda pipe: pipe.enable_lora(),
    "fuse": lambda pipe: pipe.fuse_lora(),
    "unfuse": lambda pipe: pipe.unfuse_lora(),
    "unload": lambda pipe: pipe.unload_lora_weights(),
    "delete": lambda pipe: pipe.delete_adapters("made"),
    "to host": lambda pipe: pipe.set_lora_device(["made"], "cpu"),
    "to device": lambda pipe: pipe.set_lora_device(["made"], pipe.device),
}


def lora_in_a_callback(pipe: Any, fit: Fit, *, after: bool = False) -> Pictures:
    for do in (fit, load) if after else (load, fit):
        do(pipe)

    def weaker(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe.set_adapters("made", 1 - step / 4)
        return {}

    def fuse(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            pipe.fuse_lora()
        return {}

    return [draw(pipe, callback_on_step_end=weaker), draw(pipe, callback_on_step_end=fuse), draw(pipe)]


def load_in_a_callback(pipe: Any, fit: Fit) -> Pictures:
    handle = fit(pipe)

    def there(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 0:
            load(pipe)
        return {}

    found = [draw(pipe), draw(pipe, callback_on_step_end=there), draw(pipe)]
    handle.undo()
    return [*found, draw(pipe)]


def hot_swapped(pipe: Any, fit: Fit) -> Pictures:
    """Two LoRAs of the U-Net at once, one of which is given other weights while the pipeline is fitted."""
    made = {name: value.clone() for name, value in lora(scale_of(pipe)).items() if name.startswith("unet.")}
    pipe.load_lora_weights(dict(made), adapter_name="made")
    pipe.load_lora_weights({name: value.flip(0) for name, value in made.items()}, adapter_name="other")
    pipe.set_adapters(["made", "other"], [0.7, 0.4])
    handle = fit(pipe)
    found = [draw(pipe)]
    pipe.load_lora_weights({name: value.flip(-1) for name, value in made.items()}, adapter_name="made", hotswap=True)
    found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


# IP-Adapter


def adapter(pipe: Any) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter for the pipeline's U-Net, in the format of its files."""
    seeded, width = torch.Generator().manual_seed(4), pipe.unet.config.cross_attention_dim

    def some(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=seeded)

    layers = {}
    cross = [name for name in pipe.unet.attn_processors if name.endswith("attn2.processor")]
    for index, name in enumerate(cross):
        keys = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k
        for kind in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * index + 1}.{kind}.weight"] = some(*keys.weight.shape)
    projection = {"proj.weight": some(4 * width, width), "proj.bias": some(4 * width)}
    projection |= {"norm.weight": torch.ones(width), "norm.bias": some(width)}
    return {"image_proj": projection, "ip_adapter": layers}


def load_adapter(pipe: Any) -> None:
    pipe.load_ip_adapter(adapter(pipe), subfolder=None, weight_name=None, image_encoder_folder=None)
    pipe.unet.eval()


def embeds(pipe: Any) -> dict[str, Any]:
    width = pipe.unet.config.cross_attention_dim
    made_up = torch.randn(2, 1, width, generator=torch.Generator().manual_seed(5))
    return {"ip_adapter_image_embeds": [made_up]}


def ip_adapter(pipe: Any, fit: Fit) -> Pictures:
    handle = fit(pipe)
    found = [draw(pipe)]
    load_adapter(pipe)
    found.append(draw(pipe, **embeds(pipe)))
    pipe.set_ip_adapter_scale(0.4)
    found.append(draw(pipe, **embeds(pipe)))
    pipe.unload_ip_adapter()
    found.append(draw(pipe))
    load_adapter(pipe)
    handle.undo()
    return [*found, draw(pipe, **embeds(pipe))]


def ip_adapter_before(pipe: Any, fit: Fit) -> Pictures:
    load_adapter(pipe)
    handle = fit(pipe)
    found = [draw(pipe, **embeds(pipe))]
    pipe.unload_ip_adapter()
    found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


def ip_adapter_with_encoder(pipe: Any, fit: Fit) -> Pictures:
    """The adapter brings its own image encoder, after `fit`."""
    handle = fit(pipe)
    draw(pipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        parts = vision(scale_of(pipe))
    pipe.register_modules(**{name: part.eval() if hasattr(part, "eval") else part for name, part in parts.items()})
    load_adapter(pipe)
    noise = torch.rand(3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(7))
    picture = Image.fromarray((noise.permute(1, 2, 0) * 255).byte().numpy())
    found = [draw(pipe, ip_adapter_image=picture), draw(pipe, ip_adapter_image=picture)]
    handle.undo()
    return [*found, draw(pipe, ip_adapter_image=picture)]


# what moves and casts


def each_part(change: Callable[[Any], object]) -> Script:
    """`change` each component after `fit`, before the first call and after it."""

    def script(pipe: Any, fit: Fit) -> Pictures:
        handle = fit(pipe)
        found = Pictures()
        for _ in range(2):
            for name in ("text_encoder", "unet", "vae"):
                change(getattr(pipe, name))
            found.append(draw(pipe))
        handle.undo()
        return [*found, draw(pipe)]

    return script


def switch(throw: Callable[[Any], object]) -> Script:
    """`throw` a switch of the pipeline after `fit`."""

    def script(pipe: Any, fit: Fit) -> Pictures:
        handle = fit(pipe)
        found = [draw(pipe)]
        throw(pipe)
        found.append(draw(pipe))
        handle.undo()
        return [*found, draw(pipe)]

    return script


def before(throw: Callable[[Any], object]) -> Script:
    """`throw` a switch of the pipeline before `fit`."""

    def script(pipe: Any, fit: Fit) -> Pictures:
        throw(pipe)
        handle = fit(pipe)
        found = [draw(pipe), draw(pipe)]
        handle.undo()
        return [*found, draw(pipe)]

    return script


def to_itself(part: Any) -> None:
    part.to(part.device)


def casting(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


# parts shared, added and replaced


def other(pipe: Any, name: str, seed: int = 9) -> Any:
    """A component like `name` of `pipe` with other weights."""
    part = getattr(pipe, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (type(part).from_config(part.config) if hasattr(part, "from_config") else type(part)(part.config)).eval()


def replaced(*names: str) -> Script:
    def script(pipe: Any, fit: Fit) -> Pictures:
        others = {name: other(pipe, name) for name in names}
        handle = fit(pipe)
        found = [draw(pipe)]
        for name, part in others.items():
            before = getattr(pipe, name)
            setattr(pipe, name, part)
            found.append(draw(pipe))
            setattr(pipe, name, before)
            found.append(draw(pipe))
            setattr(pipe, name, part)
        found.append(draw(pipe))
        handle.undo()
        return [*found, draw(pipe)]

    return script


def new_scheduler(pipe: Any, fit: Fit) -> Pictures:
    handle, found, config = fit(pipe), Pictures(), pipe.scheduler.config
    for kind in ("EulerDiscrete", "DPMSolverMultistep", "EulerAncestralDiscrete", "LMSDiscrete", "UniPCMultistep"):
        pipe.scheduler = getattr(diffusers, f"{kind}Scheduler").from_config(config)
        found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


CONTROLLED = next(case for case in MORE_CASES if case.name == "StableDiffusionControlNet")
EDGES = Image.effect_noise((PIXELS, PIXELS), 64).convert("RGB")


def controlled(scale: int) -> Any:
    pipe: Any = CONTROLLED.make(scale)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def controlnet(pipe: Any, fit: Fit) -> Pictures:
    """Another ControlNet, then both, then the first one."""
    first, second = pipe.controlnet, other(pipe, "controlnet")
    for layer in (*second.controlnet_down_blocks, second.controlnet_mid_block):
        torch.nn.init.constant_(layer.weight, 0.1)
    handle = fit(pipe)
    found = [draw(pipe, image=EDGES)]
    pipe.controlnet = second
    found.append(draw(pipe, image=EDGES))
    pipe.controlnet = diffusers.MultiControlNetModel([first, second])
    found.append(draw(pipe, image=[EDGES, EDGES]))
    pipe.controlnet = first
    found.append(draw(pipe, image=EDGES))
    handle.undo()
    return [*found, draw(pipe, image=EDGES)]


def controlnet_beside(pipe: Any, fit: Fit) -> Pictures:
    """A pipeline with the parts of a fitted one and a ControlNet of its own."""
    net = controlled(scale_of(pipe)).controlnet
    handle = fit(pipe)
    both = diffusers.StableDiffusionControlNetPipeline(**pipe.components, controlnet=net, requires_safety_checker=False)
    both.set_progress_bar_config(disable=True)
    both.to(pipe.device)
    found = [draw(both, image=EDGES), draw(pipe), draw(both, image=EDGES)]
    handle.undo()
    both.to("cpu")
    return [*found, draw(both, image=EDGES), draw(pipe)]


def picture_to_picture(pipe: Any) -> Any:
    twin = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    twin.set_progress_bar_config(disable=True)
    return twin


def redraw(pipe: Any) -> torch.Tensor:
    with torch.no_grad():
        found = pipe(
            "a fox", image=EDGES, num_inference_steps=4, strength=0.7, output_type="pt",
            generator=torch.Generator().manual_seed(4),
        )  # fmt: skip
    pictures: torch.Tensor = found[0]
    return pictures.cpu().clone()


def shared(pipe: Any, fit: Fit) -> Pictures:
    """Two pipelines with the same parts, one of which is fitted; both go on after undo."""
    twin = picture_to_picture(pipe)
    handle = fit(pipe)
    found = [draw(pipe), redraw(twin), draw(pipe)]
    handle.undo()
    return [*found, redraw(twin), draw(pipe)]


def both_fitted(pipe: Any, fit: Fit) -> Pictures:
    twin = picture_to_picture(pipe)
    fit(pipe)
    fit(twin)
    return [draw(pipe), redraw(twin)]


def two_on_one_card(pipe: Any, fit: Fit) -> Pictures:
    """Two pipelines with their own parts, in turns."""
    second = made(scale_of(pipe))
    second.unet = other(pipe, "unet")
    handles = [fit(pipe), fit(second)]
    found = [draw(pipe), draw(second), draw(pipe, PIXELS // 2), draw(second)]
    handles[0].undo()
    found += [draw(pipe), draw(second)]
    handles[1].undo()
    return [*found, draw(second)]


def noise_after(pipe: Any, fit: Fit) -> Pictures:
    """The scheduler's own methods, after undo."""
    scheduler = pipe.scheduler
    handle = fit(pipe)
    found, one = [draw(pipe)], torch.ones(1, 4, 4, 4)
    redraw(picture_to_picture(pipe))
    handle.undo()
    tables = [value for value in vars(scheduler).values() if isinstance(value, torch.Tensor)]
    assert {table.device for table in tables} == {HERE}
    return [*found, scheduler.add_noise(one, one, scheduler.timesteps[:1])]


# words


def word_learnt(pipe: Any, fit: Fit) -> Pictures:
    """Textual inversion: a word of the user's own, added and removed."""
    handle = fit(pipe)
    found = [draw(pipe)]
    width = pipe.text_encoder.get_input_embeddings().embedding_dim
    embedding = torch.randn(1, width, generator=torch.Generator().manual_seed(3))
    pipe.load_textual_inversion({"<thing>": embedding}, token="<thing>")
    found += [draw(pipe), draw(pipe, prompt="a <thing> fox"), draw(pipe, prompt="a <thing> fox")]
    pipe.unload_textual_inversion()
    found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


# callbacks, threads, copies


def failing_callback(pipe: Any, fit: Fit) -> Pictures:
    """A user's function runs out of memory: the call raises that, once, and the next one is as before."""
    handle, calls = fit(pipe), list[int]()
    found = [draw(pipe)]
    plan = getattr(handle, "plan", None)

    def fail(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        calls.append(step)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB: of the user's own")

    with pytest.raises(torch.OutOfMemoryError, match="of the user's own"):
        draw(pipe, callback_on_step_end=fail)
    assert calls == [0]
    found.append(draw(pipe))
    assert getattr(handle, "plan", None) == plan
    return found


def previews(pipe: Any, fit: Fit) -> Pictures:
    """Each step's latents are decoded in a callback, and changed."""
    fit(pipe)
    found = Pictures()

    def look(pipe: Any, step: int, _: Any, values: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            found.append(pipe.vae.decode(values["latents"] / 8, return_dict=False)[0].cpu().clone())
        return {"latents": values["latents"] * 0.9}

    found.append(draw(pipe, callback_on_step_end=look))
    return [*found, draw(pipe)]


def nested(pipe: Any, fit: Fit) -> Pictures:
    fit(pipe)
    found = Pictures()

    def inner(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 2:
            found.append(draw(pipe))
        return {}

    found.append(draw(pipe, callback_on_step_end=inner))
    return [*found, draw(pipe)]


class Stop(Exception):
    """What a callback raises."""


def other_words(pipe: Any, fit: Fit) -> Pictures:
    """Callbacks that change the embeddings of the prompt, end the loop early, and raise an error of the user's own."""
    handle = fit(pipe)

    def weaker(pipe: Any, step: int, _: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": values["prompt_embeds"] * 0.5}

    def interrupt(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe._interrupt = step == 0
        return {}

    def stop(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        raise Stop

    inputs = {"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    found = [draw(pipe, callback_on_step_end=weaker, **inputs), draw(pipe, callback_on_step_end=interrupt)]
    assert not torch.equal(*found)
    for _ in range(2):
        with pytest.raises(Stop):
            draw(pipe, callback_on_step_end=stop)
        found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


# what is asked for


def in_turn(pipe: Any, fit: Fit) -> Pictures:
    """Six sizes and numbers of steps, twice."""
    handle, asked = fit(pipe), [(64, 3), (32, 1), (96, 2), (48, 5), (80, 4), (32, 2)]
    found = [draw(pipe, height, num_inference_steps=count) for height, count in (*asked, *asked)]
    handle.undo()
    return [*found, draw(pipe)]


def several(pipe: Any, fit: Fit) -> Pictures:
    """Batches, a generator for each picture, embeddings and latents instead of a prompt and a seed."""
    handle, side = fit(pipe), PIXELS // 2
    seeded, width = torch.Generator().manual_seed(8), pipe.unet.config.cross_attention_dim
    words = torch.randn(2, 1, 77, width, generator=seeded)
    embedded = {"prompt": None, "prompt_embeds": words[0], "negative_prompt_embeds": words[1]}
    latents = torch.randn(1, 4, side // 4, PIXELS // 4, generator=seeded)
    found = [
        draw(pipe, side, prompt=["a fox", "an owl"], generator=[torch.Generator().manual_seed(n) for n in (1, 2)]),
        draw(pipe, side, num_images_per_prompt=2, negative_prompt="an owl"),
        draw(pipe, side, **embedded),
        draw(pipe, side, latents=latents, guidance_scale=1.0),
    ]
    handle.undo()
    return [*found, draw(pipe)]


def read(pipe: Any, fit: Fit) -> Pictures:
    """All weights, as `state_dict` and `parameters` have them; what the pipeline consists of, and its configuration."""

    def weights() -> Pictures:
        parts = [pipe.text_encoder, pipe.unet, pipe.vae]
        every = [*(each for part in parts for each in part.state_dict().values())]
        every += [each for part in parts for each in part.parameters()]
        return [each.detach().double().sum().cpu() for each in every]

    def said() -> list[object]:
        names = [name for name, _ in pipe.unet.named_parameters()]
        return [dict(pipe.config), dict(pipe.unet.config), pipe.components, names, pipe.unet.num_parameters()]

    before = said()
    handle = fit(pipe)
    assert said() == before
    found = [*weights(), draw(pipe), *weights()]
    assert said() == before
    handle.undo()
    assert said() == before
    return [*found, draw(pipe)]


SIZES = (PIXELS, PIXELS // 2, 2 * PIXELS)


def threads(pipe: Any, fit: Fit) -> Pictures:
    """Three threads ask for pictures of three sizes at once, twice each."""
    handle = fit(pipe)
    if not handle.fitted:
        return [draw(pipe, size) for size in SIZES]
    with ThreadPoolExecutor(len(SIZES)) as pool:
        found = list(pool.map(lambda size: draw(pipe, size), [*SIZES, *SIZES]))
    assert all(torch.equal(one, other) for one, other in zip(found[:3], found[3:], strict=True))
    return found[:3]


def threads_of_two(pipe: Any, fit: Fit) -> Pictures:
    """Two pipelines, each in a thread of its own."""
    second = made(scale_of(pipe))
    second.unet = other(pipe, "unet")
    handles = [fit(pipe), fit(second)]
    work = [(each, size) for size in SIZES[:2] for each in (pipe, second)]
    if not handles[0].fitted:
        return [draw(*each) for each in work]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda each: draw(*each), work))


def fitted_in_a_thread(pipe: Any, fit: Fit) -> Pictures:
    with ThreadPoolExecutor(1) as pool:
        handle = pool.submit(fit, pipe).result()
        found = [pool.submit(draw, pipe).result()]
    found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


def copied(copier: Callable[[Any], Any]) -> Script:
    """Copies of the pipeline and of its U-Net, before and after a call, which outlive the plan."""

    def script(pipe: Any, fit: Fit) -> Pictures:
        handle = fit(pipe)
        early, drawn, late, net = copier(pipe), draw(pipe), copier(pipe), copier(pipe.unet)
        found = [drawn, draw(early), draw(late), draw(pipe)]
        handle.undo()
        with torch.no_grad():
            next(iter(pipe.unet.parameters())).zero_()
        early.unet = net
        return [*found, draw(early), draw(late)]

    return script


def copy_fitted(pipe: Any, fit: Fit) -> Pictures:
    """A copy that is made while the pipeline is fitted follows a plan of its own."""
    handle = fit(pipe)
    draw(pipe)
    twin = copy.deepcopy(pipe)
    own = fit(twin)
    found = [draw(twin), draw(pipe)]
    handle.undo()
    found += [draw(twin), draw(pipe)]
    own.undo()
    return [*found, draw(twin)]


def dropped(pipe: Any, fit: Fit) -> Pictures:
    """A pipeline that nobody has any more is freed, though its handle is kept."""
    unet = weakref.ref(pipe.unet.conv_in.weight)
    second = made(scale_of(pipe))
    second.unet = pipe.unet
    seen = weakref.ref(second.text_encoder.text_model if hasattr(second.text_encoder, "text_model") else second.vae)
    second.unet = other(pipe, "unet")
    handle = fit(second)
    found = [draw(second)]
    del second, unet
    gc.collect()
    assert seen() is None
    handle.undo()
    return found


def dressed(pipe: Any) -> None:
    """diffusers' own switches for attention and the autoencoder."""
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    pipe.fuse_qkv_projections()
    pipe.vae.enable_slicing()
    pipe.unet.to(memory_format=torch.channels_last)


def undressed(pipe: Any, fit: Fit) -> Pictures:
    """Switched on before, off after."""
    dressed(pipe)
    handle = fit(pipe)
    found = [draw(pipe)]
    pipe.disable_freeu()
    pipe.unfuse_qkv_projections()
    found.append(draw(pipe))
    handle.undo()
    return [*found, draw(pipe)]


_folder = tempfile.TemporaryDirectory()  # kept: the weights are read from it at each call


def group_to_disk(pipe: Any) -> None:
    apply_group_offloading(
        pipe.unet, HERE, HERE, offload_type="leaf_level", offload_to_disk_path=tempfile.mkdtemp(dir=_folder.name)
    )


def mapped(pipe: Any) -> None:
    pipe.hf_device_map = {"unet": "cpu"}


def flux(scale: int) -> Any:
    pipe: Any = next(case for case in CASES if case.name == "Flux").make(scale)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cached(pipe: Any) -> None:
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))


def tiled(pipe: Any) -> None:
    """Decode in tiles, of which a tiny picture has several."""
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = PIXELS // 2, PIXELS // 8


def sliced(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def products(pipe: Any) -> None:
    """Attention by plain products, whose scores take memory."""
    pipe.transformer.set_attention_backend("_native_math")


def broadcast(pipe: Any) -> None:
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe.current_timestep,
    )  # fmt: skip
    pipe.transformer.enable_cache(config)


def faster(pipe: Any) -> None:
    config = diffusers.FasterCacheConfig(
        spatial_attention_timestep_skip_range=(0, 1000), current_timestep_callback=lambda: pipe.current_timestep,
        is_guidance_distilled=True, tensor_format="BCHW",
    )  # fmt: skip
    pipe.transformer.enable_cache(config)


def predicted(pipe: Any) -> None:
    config = diffusers.TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32
    )
    pipe.transformer.enable_cache(config)


CACHES = {
    "FirstBlockCache": cached,
    "PyramidAttentionBroadcast": broadcast,
    "FasterCache": faster,
    "TaylorSeer": predicted,
}


def everywhere(said: str) -> dict[str, str]:
    """Refused in all ways, with what is said."""
    return dict.fromkeys(WAYS, said)


def fused(name: str, *names: str) -> Trial:
    return Trial(name, steps(*names), tolerance=FUSED)


def not_after(name: str, throw: Callable[[Any], object], what: str = "this pipeline") -> Trial:
    """A switch that is refused after `fit`, by its name."""
    method = name.rpartition(".")[2]
    said = rf"AlreadyFitted: {what} follows a plan, which moves and casts its weights: undo\(\) before {method}\(\)"
    return Trial(name, switch(throw), refused=everywhere(said))


BY_GROUPS = r"PlanError: unet is offloaded by groups, which diffusers has no call to end: load the pipeline anew"
CASTS = r"PlanError: unet casts its layers in each pass \(layerwise casting\), which cannot be measured for a budget"
ALREADY = r"AlreadyFitted: \w+ already follows the plan of another pipeline: undo\(\) that one first"
SCORES = r"BudgetTooSmall: FluxPipeline cannot do 64×64 within .* MiB would do"
TO_META = r"AlreadyFitted: this pipeline follows a plan, which runs it on \S+: undo\(\) before to\('meta'\)"

# gradients


def guided(pipe: Any, fit: Fit) -> Pictures:
    fit(pipe)

    def guide(pipe: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        latents, prompts = tensors["latents"].detach().requires_grad_(), tensors["prompt_embeds"]
        with torch.enable_grad():
            found = pipe.unet(latents, timestep, encoder_hidden_states=prompts[:1]).sample.square().mean()
            found = found + pipe.vae.decode(latents).sample.square().mean()
            (gradient,) = torch.autograd.grad(found, latents)
        return {"latents": latents.detach() - 10 * gradient}

    tensors = ["latents", "prompt_embeds"]
    return [draw(pipe, callback_on_step_end=guide, callback_on_step_end_tensor_inputs=tensors), draw(pipe)]


def guided_with_checkpoints(pipe: Any, fit: Fit) -> Pictures:
    """Gradient checkpointing of diffusers, switched on before and after, in a call that uses gradients."""
    pipe.unet.enable_gradient_checkpointing()
    found = guided(pipe, fit)
    pipe.unet.disable_gradient_checkpointing()
    found.append(draw(pipe))
    pipe.unet.enable_gradient_checkpointing()
    return [*found, draw(pipe)]


def learnt(pipe: Any, fit: Fit, **more: Any) -> Pictures:
    """Losses of a LoRA's training steps, and a picture."""
    pipe.unet.requires_grad_(False)
    fit(pipe, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), "learnt")
    optimizer = torch.optim.SGD([each for each in pipe.unet.parameters() if each.requires_grad], lr=0.1)
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2)).to(pipe.device)
    prompts = torch.randn(1, 77, pipe.unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(3))
    losses = Pictures()
    for _ in range(3):
        loss = pipe.unet(latents, 10, encoder_hidden_states=prompts.to(pipe.device)).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, draw(pipe)]


def compiled(pipe: Any, fit: Fit) -> Pictures:
    pipe.unet.compile_repeated_blocks(backend="aot_eager")
    fit(pipe)
    return [draw(pipe), draw(pipe)]


def compiled_after(pipe: Any, fit: Fit) -> Pictures:
    handle = fit(pipe)
    found = [draw(pipe)]
    pipe.unet.compile(backend="aot_eager")
    found += [draw(pipe), draw(pipe)]
    handle.undo()
    return [*found, draw(pipe), draw(pipe)]


GROUPS: dict[str, list[Trial]] = {
    "LoRA of the U-Net and the text encoder": [
        fused("loaded before; scaled, switched off and on, fused, unfused, unloaded after",
              "load", "fit", "weaker", "off", "on", "fuse", "unfuse", "unload", "undo"),
        fused("loaded, scaled, fused, unfused, deleted after",
              "fit", "load", "weaker", "fuse", "unfuse", "delete", "undo"),
        fused("loaded and fused after, undone without a call",
              "fit", "only load", "only fuse", "undo", "unfuse", "unload"),
        fused("loaded after, undone, then fused and unloaded", "fit", "load", "undo", "fuse", "unfuse", "unload"),
        fused("moved to the host and back (`set_lora_device`)", "load", "fit", "only to host", "to device", "undo"),
        Trial("two of the U-Net loaded before, one of them hot-swapped after", hot_swapped),
        fused("loaded after, moved to the host and back (`set_lora_device`)",
              "fit", "load", "only to host", "to device", "undo"),
        Trial("scaled and fused in a callback", lora_in_a_callback, tolerance=FUSED),
        Trial("loaded after, scaled and fused in a callback", functools.partial(lora_in_a_callback, after=True),
              tolerance=FUSED),
        Trial("loaded in a callback", load_in_a_callback),
    ],
    "IP-Adapter": [
        Trial("loaded before, unloaded after", ip_adapter_before),
        Trial("loaded, scaled, unloaded and loaded after", ip_adapter),
        Trial("loaded with an image encoder after", ip_adapter_with_encoder),
    ],
    "ControlNet": [
        Trial("replaced, doubled and put back after", controlnet, controlled),
        Trial("in another pipeline, with the parts of a fitted one", controlnet_beside,
              refused={"budget": "BudgetTooSmall: .*, of which other tensors of this process take"}),
    ],
    "Components": [
        Trial("U-Net and autoencoder replaced after", replaced("unet", "vae")),
        Trial("text encoder replaced after", replaced("text_encoder")),
        Trial("scheduler replaced after, by five others", new_scheduler),
        Trial("scheduler used by itself after `undo`", noise_after),
        Trial("two pipelines with the same parts, one of them fitted", shared),
        Trial("two pipelines with the same parts, both fitted", both_fitted,
              refused=everywhere(ALREADY)),
        Trial("two fitted pipelines on one device, in turns", two_on_one_card),
    ],
    "Textual inversion": [
        Trial("a word loaded, used and unloaded after", word_learnt,
              only=("level", "disk")),  # a simulated card's weights cannot be set as those of a host's module
    ],
    "Callbacks": [
        Trial("decode previews and change latents", previews),
        Trial("call the pipeline", nested),
        Trial("change embeddings, interrupt, raise", other_words),
        Trial("run out of memory themselves", failing_callback),
    ],
    "Calls": [
        Trial("six sizes and numbers of steps in turn", in_turn),
        Trial("batches, generators, embeddings, latents", several),
        Trial("weights, components and configurations read in between", read),
    ],
    "Gradients": [
        Trial("guidance by gradients of the U-Net and the autoencoder in a callback", guided, tolerance=FUSED),
        Trial("the same with diffusers' gradient checkpointing", guided_with_checkpoints, tolerance=FUSED),
        # a budget is planned for pictures: the activations that a training step keeps are beyond it
        Trial("a LoRA added and trained after", learnt),
        Trial('the same, fitted with `request={"backward": "lora:2"}`',
              functools.partial(learnt, request={"backward": "lora:2", "height": PIXELS, "width": PIXELS})),
    ],
    "Compiled": [
        Trial("repeated blocks compiled before (`compile_repeated_blocks`)", compiled,
              only=("disk",)),  # no simulated card runs it
        Trial("U-Net compiled after (`compile`)", compiled_after, only=("disk",)),
    ],
    "Threads": [
        Trial("three threads ask for three sizes at once", threads),
        Trial("two fitted pipelines on one device, each in its thread", threads_of_two),
        Trial("fitted in another thread", fitted_in_a_thread),
    ],
    "Copies": [
        Trial("`copy.deepcopy` of the pipeline and of its U-Net", copied(copy.deepcopy)),
        Trial("`pickle` of the pipeline and of its U-Net", copied(lambda each: pickle.loads(pickle.dumps(each)))),
        Trial("`copy.deepcopy` of the pipeline, fitted too", copy_fitted),
        Trial("pipeline dropped, handle kept: memory is freed", dropped),
    ],
    "Moved and cast after": [
        Trial("`module.to(module.device)`", each_part(to_itself)),
        Trial("`module.to('cpu')`", each_part(lambda part: part.to("cpu"))),
        Trial("`module.to(torch.float64)`", each_part(lambda part: part.to(torch.float64))),
        Trial("`pipe.to(pipe.device)`", switch(lambda pipe: pipe.to(pipe.device))),
        Trial("`pipe.to(torch.float64)`", switch(lambda pipe: pipe.to(torch.float64))),
        Trial("`pipe.to('meta')`", switch(lambda pipe: pipe.to("meta")),
              refused=everywhere(TO_META)),
    ],
    "diffusers' own switches, before": [
        Trial("`enable_model_cpu_offload`", before(by_model)),
        Trial("`enable_sequential_cpu_offload`", before(by_layer)),
        Trial("`enable_group_offload`, in memory", before(by_group)),
        Trial("`enable_group_offload`, to disk", before(group_to_disk), refused=everywhere(BY_GROUPS)),
        Trial("device map", before(mapped)),
        Trial("`enable_layerwise_casting`", before(casting), refused={"budget": CASTS}),
        *(Trial(f"`enable_cache` ({name})", before(throw), flux) for name, throw in CACHES.items()),
        Trial("`set_attention_backend`", before(products), flux, refused={"budget": SCORES}),
        Trial("`enable_attention_slicing`", before(sliced)),
        Trial("`enable_tiling` of the autoencoder", before(tiled)),
        Trial("FreeU, fused QKV, sliced decoding, channels-last; off after", undressed),
    ],
    "diffusers' own switches, after": [
        not_after("pipe.enable_model_cpu_offload", lambda pipe: pipe.enable_model_cpu_offload(device="cuda")),
        not_after("pipe.enable_sequential_cpu_offload", lambda pipe: pipe.enable_sequential_cpu_offload(device="cuda")),
        not_after("pipe.enable_group_offload", lambda pipe: pipe.enable_group_offload(HERE, HERE)),
        not_after("unet.enable_group_offload", lambda pipe: pipe.unet.enable_group_offload(HERE, HERE), "unet"),
        Trial("`enable_layerwise_casting`", switch(casting),
              refused={"budget": r"AlreadyFitted: unet follows a plan.*before enable_layerwise_casting\(\)"}),
        *(Trial(f"`enable_cache` ({name})", switch(throw), flux) for name, throw in CACHES.items()),
        Trial("`set_attention_backend`", switch(products), flux, refused={"budget": SCORES}),
        Trial("`enable_attention_slicing`", switch(sliced)),
        Trial("`enable_tiling` of the autoencoder", switch(tiled)),
        # on disk, channels-last ends with `undo()`: the last picture is drawn by other kernels
        Trial("FreeU, fused QKV, sliced decoding, channels-last", switch(dressed), tolerance=ROUNDING),
    ],
}  # fmt: skip
