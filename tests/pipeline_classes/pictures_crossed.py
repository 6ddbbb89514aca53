"""Recipes of denoisers that read the prompt by cross-attention, or beside the picture in one stream."""

from functools import partial

import diffusers
import transformers

from more_pipelines import SPACE, _pixart_sigma, _sana, _size, _speak, _vocab
from pipeline_classes.pictures_parts import _again, _case, _control_picture, _eightfold_vae
from tiny_pipelines import (
    FLOW_VAE,
    LATENT_PIXELS,
    SQUARE,
    T5_SQUARE,
    T5_WIDTH,
    TRANSFORMER_WIDTH,
    Parts,
    TinyCase,
    _image_vae,
    _picture,
    _t5,
    heads,
)


def _pixart_alpha(scale: int = 1) -> Parts:
    """PixArt-α hears of the picture's size beside the time, in thirds, where it is made for 128 latents a side."""
    base = _pixart_sigma(scale)
    size: Parts = {"sample_size": 128, "num_attention_heads": 3 * scale, "cross_attention_dim": 3 * scale * 16}
    return {**base, "transformer": _again(base["transformer"], use_additional_conditions=True, **size)}


def _sana_control(scale: int = 1) -> Parts:
    base = _sana(scale)
    config = base["transformer"].config
    net = diffusers.SanaControlNetModel(
        **heads(scale),
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_cross_attention_heads=config["num_cross_attention_heads"],
        cross_attention_head_dim=config["cross_attention_head_dim"],
        cross_attention_dim=config["cross_attention_dim"],
        caption_channels=config["caption_channels"],
        sample_size=LATENT_PIXELS,
    )
    _speak(*net.controlnet_blocks, net.input_block)
    return {**base, "controlnet": net}


def _sana_sprint(scale: int = 1) -> Parts:
    base = _sana(scale)
    transformer = _again(base["transformer"], guidance_embeds=True, qk_norm="rms_norm_across_heads")
    return {**base, "transformer": transformer, "scheduler": diffusers.SCMScheduler()}


def _gemma(scale: int, family: str) -> Parts:
    tokenizer = transformers.GemmaTokenizer(
        vocab=_vocab("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACE), merges=[]
    )
    config = getattr(transformers, f"{family}Config")(**_size(tokenizer, scale), head_dim=16)
    return {"tokenizer": tokenizer, "text_encoder": getattr(transformers, f"{family}Model")(config)}


def _lumina(scale: int = 1) -> Parts:
    """Lumina-Next: cross-attention whose gates begin closed."""
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=LATENT_PIXELS // 2,
        in_channels=4,
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_layers=3,
        num_attention_heads=2 * scale,
        num_kv_heads=scale,
        multiple_of=8,
        cross_attention_dim=scale * T5_WIDTH,
    )
    for layer in transformer.layers:
        layer.gate.data.fill_(0.5)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {**_gemma(scale, "Gemma"), "vae": _eightfold_vae(), "transformer": transformer, "scheduler": scheduler}


def _lumina_2(scale: int = 1) -> Parts:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=LATENT_PIXELS // 2,
        in_channels=4,
        hidden_size=scale * TRANSFORMER_WIDTH,
        num_layers=3,
        num_refiner_layers=1,
        num_attention_heads=2 * scale,
        num_kv_heads=scale,
        multiple_of=8,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(300, 32, 32),
        cap_feat_dim=scale * T5_WIDTH,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    vae = _eightfold_vae(**FLOW_VAE)
    return {**_gemma(scale, "Gemma2"), "vae": vae, "transformer": transformer, "scheduler": scheduler}


def _bert(scale: int) -> Parts:
    """A BERT and the tokenizer that spells for it."""
    vocab = _vocab(
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    )
    tokenizer = transformers.BertTokenizer(vocab=vocab)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=scale * T5_WIDTH,
        intermediate_size=scale * 2 * T5_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2 * scale,
        max_position_embeddings=128,
    )
    return {"tokenizer": tokenizer, "text_encoder": transformers.BertModel(config)}


def _hunyuan_size(scale: int) -> Parts:
    return {
        **heads(scale),
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": LATENT_PIXELS // 2,
        "hidden_size": scale * TRANSFORMER_WIDTH,
        "cross_attention_dim": scale * T5_WIDTH,
        "cross_attention_dim_t5": scale * T5_WIDTH,
        "pooled_projection_dim": scale * 16,
    }


def _hunyuan_dit(scale: int = 1) -> Parts:
    """Hunyuan-DiT, whose later blocks hear of what its earlier blocks said."""
    transformer = diffusers.HunyuanDiT2DModel(**_hunyuan_size(scale), num_layers=6)
    return {
        **_bert(scale),
        **_t5(scale, "_2"),
        "vae": _eightfold_vae(),
        "transformer": transformer,
        "scheduler": diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.018, beta_schedule="scaled_linear", prediction_type="v_prediction"
        ),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _hunyuan_dit_control(scale: int = 1) -> Parts:
    base = _hunyuan_dit(scale)
    net = diffusers.HunyuanDiT2DControlNetModel(**_hunyuan_size(scale), transformer_num_layers=6)
    _speak(*net.controlnet_blocks, net.input_block)
    return {**base, "controlnet": net}


def _aura_flow(scale: int = 1) -> Parts:
    transformer = diffusers.AuraFlowTransformer2DModel(
        **heads(scale),
        sample_size=LATENT_PIXELS,
        num_mmdit_layers=2,
        num_single_dit_layers=3,
        joint_attention_dim=scale * T5_WIDTH,
        caption_projection_dim=scale * TRANSFORMER_WIDTH,
        pos_embed_max_size=24 * 24,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73)
    return {**_t5(scale, family="UMT5"), "vae": _image_vae(), "transformer": transformer, "scheduler": scheduler}


def _cogview_size(scale: int) -> Parts:
    size: Parts = {**heads(scale), "in_channels": 4, "out_channels": 4, "num_layers": 3, "sample_size": LATENT_PIXELS}
    return {**size, "text_embed_dim": scale * T5_WIDTH, "time_embed_dim": scale * 16, "condition_dim": 8}


def _cogview_3(scale: int = 1) -> Parts:
    transformer = diffusers.CogView3PlusTransformer2DModel(**_cogview_size(scale), pos_embed_max_size=LATENT_PIXELS)
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    return {**_t5(scale), "vae": _image_vae(), "transformer": transformer, "scheduler": scheduler}


def _cogview_4(scale: int = 1, in_channels: int = 4) -> Parts:
    """CogView 4 reads the prompt with GLM, in pieces of sixteen tokens."""
    tokenizer = transformers.Qwen2Tokenizer(vocab=_vocab("<|endoftext|>", "\u0120"), merges=[])
    config = transformers.GlmConfig(**_size(tokenizer, scale), head_dim=16)
    transformer = diffusers.CogView4Transformer2DModel(
        **_cogview_size(scale) | {"in_channels": in_channels}, rope_axes_dim=(16, 16)
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=1.0, use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.GlmModel(config),
        "vae": _image_vae(**FLOW_VAE),
        "transformer": transformer,
        "scheduler": scheduler,
    }


UNBINNED: Parts = {"use_resolution_binning": False}
PIXART: Parts = {**T5_SQUARE, **UNBINNED, "clean_caption": False}
SANA: Parts = {**T5_SQUARE, **UNBINNED, "complex_human_instruction": None}
LUMINA: Parts = {**T5_SQUARE, "clean_caption": False}

CASES: tuple[TinyCase, ...] = (
    _case("PixArtAlpha", _pixart_alpha, **PIXART),
    _case("PixArtSigmaPAG", _pixart_sigma, **PIXART),
    _case("SanaPAG", _sana, **SANA),
    _case("SanaControlNet", _sana_control, _control_picture, **SANA),
    _case("SanaSprint", _sana_sprint, **SANA),
    _case("SanaSprintImg2Img", _sana_sprint, _picture, **SANA, strength=0.5),
    _case("Lumina", _lumina, **LUMINA),
    _case("Lumina2", _lumina_2, **T5_SQUARE),
    _case("HunyuanDiT", _hunyuan_dit, **SQUARE, **UNBINNED),
    _case("HunyuanDiTPAG", _hunyuan_dit, **SQUARE, **UNBINNED),
    _case("HunyuanDiTControlNet", _hunyuan_dit_control, _control_picture, draws=True, **SQUARE, **UNBINNED),
    _case("AuraFlow", _aura_flow, **T5_SQUARE),
    _case("CogView3Plus", _cogview_3, **T5_SQUARE),
    _case("CogView4", _cogview_4, **T5_SQUARE),
    _case("CogView4Control", partial(_cogview_4, in_channels=8), _control_picture, draws=True, **T5_SQUARE),
)
OPTIONAL_PARTS: dict[str, str] = {}
