"""Stable Diffusion with other inputs, and with networks beside its U-Net."""

from functools import partial
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_diffusion import CLIPImageProjection
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

from more_pipelines import _controlnet
from pipeline_classes.unets_parts import (
    STEPS,
    VIEW,
    joined,
    picture_as,
    prior_transformer,
    recipe,
    seeded,
    speak_zeros,
    unet_of_blocks,
    vision,
    without,
)
from tiny_pipelines import (
    CLIP_WIDTH,
    HALFWAY,
    LATENT_PIXELS,
    PIXELS,
    SQUARE,
    Parts,
    TinyCase,
    _clip,
    _image_vae,
    _masked_picture,
    _picture,
    _pictures,
    _stable_diffusion,
    _unet,
)


def _unet_of(scale: int, **settings: Any) -> diffusers.UNet2DConditionModel:
    return _unet(scale, cross_attention_dim=scale * CLIP_WIDTH, **settings)


def _unchecked(scale: int = 1, **others: Any) -> Parts:
    """Stable Diffusion's parts for pipelines that know of no safety checker."""
    return {
        **without(_stable_diffusion(scale), "safety_checker", "feature_extractor", "requires_safety_checker"),
        **others,
    }


def _depth(scale: int = 1) -> Parts:
    config = transformers.DPTConfig(
        hidden_size=scale * 16,
        intermediate_size=scale * 32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=VIEW,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=8,
    )
    estimator = transformers.DPTForDepthEstimation(config)
    speak_zeros(estimator)
    return _unchecked(
        scale,
        unet=_unet_of(scale, in_channels=5),
        depth_estimator=estimator,
        feature_extractor=transformers.DPTImageProcessorPil(size={"height": VIEW, "width": VIEW}),
    )


def _upscale(scale: int = 1) -> Parts:
    parts = without(_stable_diffusion(scale), "requires_safety_checker")
    unet = _unet_of(scale, in_channels=7, num_class_embeds=1000)
    return {**parts, "unet": unet, "low_res_scheduler": diffusers.DDPMScheduler()}


def _low_resolution(height: int) -> Parts:
    return {"image": _pictures(1, height // 4)[0].resize((LATENT_PIXELS, height // 4)), "noise_level": 20}


def _latent_upscale(scale: int = 1) -> Parts:
    unet = diffusers.UNet2DConditionModel(
        sample_size=LATENT_PIXELS,
        in_channels=8,
        out_channels=5,
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
        block_out_channels=(scale * 32, scale * 64, scale * 64),  # the time's embedding is as wide as the last two
        layers_per_block=2,
        norm_num_groups=None,
        cross_attention_dim=scale * CLIP_WIDTH,
        attention_head_dim=16,
        act_fn="gelu",
        conv_in_kernel=1,
        conv_out_kernel=1,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        time_cond_proj_dim=128 + scale * CLIP_WIDTH,
    )
    return _unchecked(scale, unet=unet, scheduler=diffusers.EulerDiscreteScheduler(prediction_type="sample"))


def _half_as_large(height: int) -> Parts:
    return {"image": _pictures(1, height // 2)[0].resize((PIXELS // 2, height // 2))}


def _variation(scale: int = 1) -> Parts:
    return {**without(_stable_diffusion(scale), "tokenizer", "text_encoder"), **vision(scale)}


def _ip_adapter(scale: int = 1) -> Parts:
    return {**_stable_diffusion(scale), **vision(scale)}


def _load_ip_adapter(pipe: Any, scale: int) -> None:
    """An adapter in memory: the layers that read a picture's embedding, and its projection to four tokens."""
    width = scale * CLIP_WIDTH
    state: dict[str, dict[str, torch.Tensor]] = {"ip_adapter": {}, "image_proj": {}}
    cross = [name for name in pipe.unet.attn_processors if name.endswith("attn2.processor")]
    for index, name in enumerate(cross):
        keys = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k
        for kind in ("to_k_ip", "to_v_ip"):
            state["ip_adapter"][f"{2 * index + 1}.{kind}.weight"] = torch.randn(keys.out_features, width) * 0.2
    state["image_proj"] = {"proj.weight": torch.randn(4 * width, width) * 0.2, "proj.bias": torch.zeros(4 * width)}
    state["image_proj"] |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    pipe.load_ip_adapter(state, subfolder=None, weight_name=None)
    pipe.unet.eval()


def _eight_times_smaller(scale: int = 1) -> Parts:
    """With an autoencoder as deep as the real ones, whose factor Panorama counts with."""
    stages: Parts = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4}
    stages |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return {**_stable_diffusion(scale), "vae": diffusers.AutoencoderKL(**stages, sample_size=PIXELS // 2)}


def _overlapping_views(pipe: Any, scale: int) -> None:
    """Views of 96 pixels instead of 512, of which this panorama has two."""
    pipe.get_views = partial(type(pipe).get_views, None, window_size=12)


def _gligen(scale: int = 1, attention_type: str = "gated") -> Parts:
    unet = _unet_of(scale, attention_type=attention_type)
    speak_zeros(unet, std=0.5)
    return {**_stable_diffusion(scale), "unet": unet}


def _gligen_text_image(scale: int = 1) -> Parts:
    parts = _gligen(scale, "gated-text-image")
    images = vision(scale)
    project = CLIPImageProjection(hidden_size=scale * CLIP_WIDTH)
    processor = transformers.CLIPProcessor(images.pop("feature_extractor"), parts["tokenizer"])
    return {**parts, **images, "processor": processor, "image_project": project}


def _boxes(height: int) -> Parts:
    return {"gligen_phrases": ["a fox", "a hill"], "gligen_boxes": [[0.1, 0.2, 0.5, 0.7], [0.4, 0.3, 0.9, 0.9]]}


def _diff_edit(scale: int = 1) -> Parts:
    inverse = diffusers.DDIMInverseScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    return {**_stable_diffusion(scale), "inverse_scheduler": inverse}


def _inverted(height: int) -> Parts:
    """The noise of each step, and where to edit, as the pipeline's other methods make them."""
    size = (height // 4, LATENT_PIXELS)
    mask = torch.zeros(1, *size)
    mask[:, size[0] // 4 : -size[0] // 4, size[1] // 4 : -size[1] // 4] = 1
    return {"mask_image": mask, "image_latents": seeded(1, 2, 4, *size)}


def _attended(height: int) -> Parts:
    return {"attn_res": (height // 8, PIXELS // 8)}


def _colours_and_depth(scale: int = 1) -> Parts:
    vae = _image_vae(in_channels=6, out_channels=6)
    return {**_stable_diffusion(scale), "vae": vae, "image_encoder": None}


def _adapter(scale: int = 1) -> Parts:
    adapter = diffusers.T2IAdapter(
        in_channels=3,
        channels=[scale * 16, scale * 32],
        num_res_blocks=2,
        downscale_factor=4,
        adapter_type="full_adapter",
    )
    return {
        **_stable_diffusion(scale),
        "adapter": adapter,
        "unet": unet_of_blocks(scale, "CrossAttnDownBlock2D", "DownBlock2D", layers=2),
    }


def _controlnet_xs(scale: int = 1) -> Parts:
    base = {**_stable_diffusion(scale), "unet": unet_of_blocks(scale, "CrossAttnDownBlock2D", "DownBlock2D", layers=2)}
    hint = (8, 8, 16)
    net = diffusers.ControlNetXSAdapter.from_unet(base["unet"], 0.5, conditioning_embedding_out_channels=hint)
    speak_zeros(net, std=0.2)
    return {**base, "controlnet": net}


def _noising(scale: int) -> Parts:
    normalizer = StableUnCLIPImageNormalizer(embedding_dim=scale * CLIP_WIDTH)
    torch.nn.init.normal_(normalizer.mean, std=0.2)
    torch.nn.init.normal_(normalizer.std, mean=1.0, std=0.1)
    unet = _unet_of(scale, class_embed_type="projection", projection_class_embeddings_input_dim=2 * scale * CLIP_WIDTH)
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    return _unchecked(scale, unet=unet, image_normalizer=normalizer, image_noising_scheduler=scheduler)


def _stable_unclip(scale: int = 1) -> Parts:
    prior = {f"prior_{name}": part for name, part in _clip(scale, projected=True).items()}
    scheduler = diffusers.UnCLIPScheduler(prediction_type="sample", variance_type="fixed_small_log")
    return {**prior, "prior": prior_transformer(scale), "prior_scheduler": scheduler, **_noising(scale)}


def _stable_unclip_images(scale: int = 1) -> Parts:
    return {**_noising(scale), **vision(scale)}


EXCITED: Parts = {"token_indices": [3, 6], "max_iter_to_alter": 1, "thresholds": {0: 0.01}}

CONTROLLED = joined(_picture, picture_as("control_image", 1))
CONTROLLED_MASK = joined(_masked_picture, picture_as("control_image", 1))
PERTURBED: Parts = {"pag_scale": 2.0}

CASES: tuple[TinyCase, ...] = (
    recipe("StableDiffusionControlNetImg2Img", _controlnet, CONTROLLED, **SQUARE, **HALFWAY),
    recipe("StableDiffusionControlNetInpaint", _controlnet, CONTROLLED_MASK, **SQUARE),
    recipe("StableDiffusionInstructPix2Pix", partial(_stable_diffusion, in_channels=8), _picture),
    recipe("StableDiffusionDepth2Img", _depth, _picture, **HALFWAY),
    recipe("StableDiffusionUpscale", _upscale, _low_resolution),
    recipe("StableDiffusionLatentUpscale", _latent_upscale, _half_as_large),
    recipe("StableDiffusionImageVariation", _variation, _picture, common=STEPS, **SQUARE),
    recipe("StableDiffusionAdapter", _adapter, _picture, **SQUARE),
    recipe("StableDiffusionPAG", _stable_diffusion, **SQUARE, **PERTURBED),
    recipe("StableDiffusionPAGImg2Img", _stable_diffusion, _picture, **HALFWAY, **PERTURBED),
    recipe("StableDiffusionPAGInpaint", _stable_diffusion, _masked_picture, **SQUARE, **PERTURBED),
    recipe("StableDiffusionControlNetPAG", _controlnet, _picture, **SQUARE, **PERTURBED),
    recipe("StableDiffusionControlNetPAGInpaint", _controlnet, CONTROLLED_MASK, **SQUARE, **PERTURBED),
    recipe("StableUnCLIP", _stable_unclip, **SQUARE, prior_num_inference_steps=2, noise_level=5),
    recipe("StableUnCLIPImg2Img", _stable_unclip_images, _picture, **SQUARE, noise_level=5),
    recipe("StableDiffusionControlNetXS", _controlnet_xs, _picture, **SQUARE),
    recipe("StableDiffusionGLIGEN", _gligen, _boxes, **SQUARE, gligen_scheduled_sampling_beta=0.5),
    recipe(
        "StableDiffusionGLIGENTextImage",
        _gligen_text_image,
        joined(_boxes, lambda height: {"gligen_images": _pictures(2, height)}),
        **SQUARE,
        gligen_scheduled_sampling_beta=0.5,
    ),
    recipe("StableDiffusionPanorama", _eight_times_smaller, adapt=_overlapping_views, height=PIXELS, width=160),
    recipe("StableDiffusionSAG", _stable_diffusion, **SQUARE, sag_scale=0.8),
    recipe("StableDiffusionDiffEdit", _diff_edit, _inverted, inpaint_strength=1.0),
    recipe(
        "StableDiffusionIPAdapter",
        _ip_adapter,
        picture_as("ip_adapter_image"),
        pipeline="StableDiffusionPipeline",
        adapt=_load_ip_adapter,
        **SQUARE,
    ),
    recipe("StableDiffusionAttendAndExcite", _stable_diffusion, _attended, **SQUARE, **EXCITED),
    recipe("StableDiffusionLDM3D", _colours_and_depth, **SQUARE, output_type="np"),
)

OPTIONAL_PARTS: dict[str, str] = {}
