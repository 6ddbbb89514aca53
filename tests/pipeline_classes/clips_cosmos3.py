"""Cosmos 3: one transformer that reads the prompt and makes clip and sound."""

import diffusers

from pipeline_classes.clips_cosmos import Lenient
from pipeline_classes.clips_modular import modular
from pipeline_classes.clips_shared import CLIP_SIZE, recipe, tokenizer_of
from tiny_pipelines import TRANSFORMER_WIDTH, Parts, TinyCase, _picture, _wan

LATENTS = 16
SOUND_LATENTS = 8


def _cosmos_3(scale: int = 1) -> Parts:
    tokenizer = tokenizer_of("Qwen2", "<|im_start|>", "<|im_end|>", "<|vision_start|>", first=("<|endoftext|>",))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    transformer = diffusers.Cosmos3OmniTransformer(
        hidden_size=scale * TRANSFORMER_WIDTH,
        intermediate_size=scale * 64,
        head_dim=16,
        num_attention_heads=2 * scale,
        num_key_value_heads=scale,
        num_hidden_layers=3,
        latent_channel=LATENTS,
        patch_latent_dim=4 * LATENTS,
        rope_axes_dim=(4, 2, 2),
        sound_gen=True,
        sound_dim=SOUND_LATENTS,
        vocab_size=len(tokenizer),
    )
    sound = diffusers.Cosmos3AVAEAudioTokenizer(
        sampling_rate=800,
        vocoder_input_dim=SOUND_LATENTS,
        dec_dim=8,
        dec_c_mults=(1, 2, 2),
        dec_strides=(2, 4, 4),
        encoder_enabled=False,
    )
    return {
        "text_tokenizer": tokenizer,
        "transformer": transformer,
        "vae": _wan()["vae"],
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "sound_tokenizer": sound,
        "safety_checker": Lenient(),
        "enable_safety_checker": False,
    }


def _distilled(scale: int = 1) -> Parts:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {**_cosmos_3(scale), "scheduler": scheduler, "distilled_sigmas": [1.0, 0.6]}


WORLD: Parts = {**CLIP_SIZE, "use_system_prompt": False}

CASES: tuple[TinyCase, ...] = (
    recipe("Cosmos3Omni", _cosmos_3, _picture, **WORLD, enable_sound=True),
    modular("Cosmos3OmniModular", _cosmos_3, _picture, **WORLD),
    modular("Cosmos3DistilledModular", _distilled, _picture, **WORLD),
)

OPTIONAL_PARTS: dict[str, str] = {}
