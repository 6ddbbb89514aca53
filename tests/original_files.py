"""Single files as models' authors publish them, made from tiny networks of diffusers by inverting its conversions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

from tiny_pipelines import CASES

__all__ = ["NETWORKS", "PIPELINES", "THIN", "Tensors"]

Tensors = dict[str, torch.Tensor]
CASE = {case.name: case for case in CASES}


def renamed(name: str, rules: Mapping[str, str]) -> str:
    """`name` with each of the regular expressions replaced, in their order."""
    for pattern, new in rules.items():
        name = re.sub(pattern, new, name)
    return name


def all_renamed(tensors: Tensors, rules: Mapping[str, str], prefix: str = "") -> Tensors:
    return {prefix + renamed(name, rules): value for name, value in tensors.items()}


def joined(tensors: Tensors, parts: tuple[str, ...], whole: str) -> Tensors:
    """`tensors` in which those whose names have one of `parts` are one each, under the name with `whole` instead."""
    found: Tensors = {}
    for name, value in tensors.items():
        if parts[0] in name:
            found[name.replace(parts[0], whole)] = torch.cat([tensors[name.replace(parts[0], part)] for part in parts])
        elif not any(part in name for part in parts):
            found[name] = value
    return found


def swapped(value: torch.Tensor) -> torch.Tensor:
    first, second = value.chunk(2)
    return torch.cat([second, first])


# Stable Diffusion

RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
          "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}  # fmt: skip
TOP = {r"^time_embedding.linear_1": "time_embed.0", r"^time_embedding.linear_2": "time_embed.2",
       r"^conv_in": "input_blocks.0.0", r"^conv_norm_out": "out.0", r"^conv_out": "out.2",
       r"^add_embedding.linear_1": "label_emb.0.0", r"^add_embedding.linear_2": "label_emb.0.2",
       r"^mid_block.resnets.0": "middle_block.0", r"^mid_block.attentions.0": "middle_block.1",
       r"^mid_block.resnets.1": "middle_block.2"}  # fmt: skip


def unet(network: diffusers.UNet2DConditionModel, prefix: str = "model.diffusion_model.") -> Tensors:
    tensors, layers = network.state_dict(), network.config.layers_per_block + 1

    def original(name: str) -> str:
        resnet = ".resnets." in name
        name = renamed(name, TOP)
        if match := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.", name):
            side, block, kind, number = match[1], int(match[2]), match[3], int(match[4])
            rest, first = name[match.end() :], layers * block + (side == "down")
            place = {"resnets": number, "attentions": number, "downsamplers": layers - 1, "upsamplers": layers - 1}[
                kind
            ]
            inside = {"resnets": "0", "attentions": "1", "downsamplers": "0.op", "upsamplers": "1.conv"}[kind]
            if kind == "upsamplers" and f"up_blocks.{block}.attentions.0.norm.weight" in tensors:
                inside = "2.conv"
            rest = rest.removeprefix("conv.") if "samplers" in kind else rest
            name = f"{'input' if side == 'down' else 'output'}_blocks.{first + place}.{inside}.{rest}"
        return renamed(name, RESNET) if resnet else name

    return {prefix + original(name): value for name, value in tensors.items()}


def autoencoder(network: diffusers.AutoencoderKL, prefix: str = "first_stage_model.") -> Tensors:
    tensors, last = network.state_dict(), len(network.config.block_out_channels) - 1
    rules = {
        r"down_blocks\.(\d)\.resnets": r"down.\1.block", r"down_blocks\.(\d)\.downsamplers\.0": r"down.\1.downsample",
        r"up_blocks\.(\d)\.resnets": r"up.\1.block", r"up_blocks\.(\d)\.upsamplers\.0": r"up.\1.upsample",
        r"mid_block\.resnets\.0": "mid.block_1", r"mid_block\.resnets\.1": "mid.block_2",
        r"mid_block\.attentions\.0\.": "mid.attn_1.", "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v",
        r"to_out\.0": "proj_out", "conv_norm_out": "norm_out", "conv_shortcut": "nin_shortcut",
    }  # fmt: skip
    found = {}
    for name, value in tensors.items():
        new = re.sub(r"(?<=\bup\.)\d", lambda digit: str(last - int(digit[0])), renamed(name, rules))
        convolution = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", new)
        found[prefix + new] = value[:, :, None, None] if convolution else value
    return found


def clip(network: torch.nn.Module, prefix: str) -> Tensors:
    own = "" if hasattr(network, "text_model") else "text_model."
    return all_renamed(network.state_dict(), {}, prefix + own)


def replaced(name: str, table: Mapping[str, str]) -> str:
    for theirs, new in table.items():
        name = name.replace(theirs, new)
    return name


def open_clip(network: transformers.CLIPTextModelWithProjection, prefix: str) -> Tensors:
    found, tables = {}, DIFFUSERS_TO_LDM_MAPPING["openclip"]
    tensors = network.state_dict()
    for kind in ("weight", "bias"):
        parts = tuple(f"self_attn.{which}_proj.{kind}" for which in "qkv")
        tensors = joined(tensors, parts, f"self_attn.in_proj_{kind}")
    for name, value in tensors.items():
        if name in tables["layers"]:
            new = tables["layers"][name]
            found[prefix + new] = value.T.contiguous() if new == "text_projection" else value
            continue
        found[f"{prefix}transformer.{replaced(name, tables['transformer'])}"] = value
    return found


def stable_diffusion() -> tuple[Any, Tensors]:
    pipe: Any = CASE["StableDiffusion"].make()
    more = {
        "betas": torch.arange(5.0),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(3),
    }
    more |= {f"model_ema.{number}": torch.zeros(2) for number in range(101)}
    text = clip(pipe.text_encoder, "cond_stage_model.transformer.")
    return pipe, {**unet(pipe.unet), **autoencoder(pipe.vae), **text, **more}


def stable_diffusion_xl() -> tuple[Any, Tensors]:
    pipe: Any = CASE["StableDiffusionXL"].make()
    config = transformers.CLIPTextConfig(**{**pipe.text_encoder_2.config.to_dict(), "hidden_size": 32,
                                            "intermediate_size": 48, "projection_dim": 32})  # fmt: skip
    pipe.text_encoder_2 = transformers.CLIPTextModelWithProjection(config)  # which it is, is told by its width
    text = {**clip(pipe.text_encoder, "conditioner.embedders.0.transformer."),
            **open_clip(pipe.text_encoder_2, "conditioner.embedders.1.model.")}  # fmt: skip
    return pipe, {**unet(pipe.unet), **autoencoder(pipe.vae), **text}


# transformers

SD3 = {
    r"^pos_embed\.pos_embed$": "pos_embed", r"^pos_embed\.proj": "x_embedder.proj",
    r"time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    r"^proj_out": "final_layer.linear", r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    r"transformer_blocks": "joint_blocks",
    r"norm1\.linear": "x_block.adaLN_modulation.1", r"norm1_context\.linear": "context_block.adaLN_modulation.1",
    r"ff_context\.net\.0\.proj": "context_block.mlp.fc1", r"ff_context\.net\.2": "context_block.mlp.fc2",
    r"ff\.net\.0\.proj": "x_block.mlp.fc1", r"ff\.net\.2": "x_block.mlp.fc2",
    r"attn\.norm_added_(.)": r"context_block.attn.ln_\1", r"(attn2?)\.norm_(.)": r"x_block.\1.ln_\2",
    r"attn\.to_add_out": "context_block.attn.proj", r"(attn2?)\.to_out\.0": r"x_block.\1.proj",
    r"attn\.add_qkv": "context_block.attn.qkv", r"(?<!block\.)(attn2?)\.qkv": r"x_block.\1.qkv",
}  # fmt: skip


def sd3_transformer(network: diffusers.SD3Transformer2DModel) -> Tensors:
    tensors = dict(network.state_dict())
    last = f"transformer_blocks.{network.config.num_layers - 1}.norm1_context"
    tensors |= {name: swapped(value) for name, value in tensors.items() if name.startswith(("norm_out", last))}
    tensors = joined(tensors, ("add_q_proj", "add_k_proj", "add_v_proj"), "add_qkv")
    return all_renamed(joined(tensors, ("to_q", "to_k", "to_v"), "qkv"), SD3, "model.diffusion_model.")


def stable_diffusion_3() -> tuple[Any, Tensors]:
    pipe: Any = CASE["StableDiffusion3"].make()
    config = transformers.CLIPTextConfig(**{**pipe.text_encoder_2.config.to_dict(), "hidden_size": 32,
                                            "intermediate_size": 48, "projection_dim": 32})  # fmt: skip
    pipe.text_encoder_2 = transformers.CLIPTextModelWithProjection(config)
    pipe.text_encoder.text_projection.weight.data.copy_(torch.eye(pipe.text_encoder.config.projection_dim))
    first = clip(pipe.text_encoder, "text_encoders.clip_l.transformer.")
    first.pop("text_encoders.clip_l.transformer.text_projection.weight")  # files have none: it is the identity
    second = clip(pipe.text_encoder_2, "text_encoders.clip_g.transformer.")
    t5 = prefixed(pipe.text_encoder_3, "text_encoders.t5xxl.transformer.")
    return pipe, {**sd3_transformer(pipe.transformer), **autoencoder(pipe.vae), **first, **second, **t5}


def prefixed(network: torch.nn.Module, prefix: str) -> Tensors:
    return all_renamed(network.state_dict(), {}, prefix)


WAN = {
    r"condition_embedder\.time_embedder\.linear_1": "time_embedding.0",
    r"condition_embedder\.time_embedder\.linear_2": "time_embedding.2",
    r"condition_embedder\.text_embedder\.linear_1": "text_embedding.0",
    r"condition_embedder\.text_embedder\.linear_2": "text_embedding.2",
    r"condition_embedder\.time_proj": "time_projection.1", "attn1": "self_attn", "attn2": "cross_attn",
    r"\.to_out\.0\.": ".o.", r"\.to_([qkv])\.": r".\1.", r"^scale_shift_table": "head.modulation",
    r"^proj_out": "head.head", r"scale_shift_table": "modulation",
    r"ffn\.net\.0\.proj": "ffn.0", r"ffn\.net\.2": "ffn.2", r"\.norm2\.": ".norm#.", r"\.norm3\.": ".norm2.",
    r"\.norm#\.": ".norm3.",
}  # fmt: skip


def wan_transformer() -> tuple[Any, Tensors]:
    network: Any = CASE["Wan"].make().transformer  # type: ignore[attr-defined]
    return network, all_renamed(network.state_dict(), WAN)


LTX = {r"^proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm", "norm_k": "k_norm"}


def ltx_transformer() -> tuple[Any, Tensors]:
    network: Any = CASE["LTX"].make().transformer  # type: ignore[attr-defined]
    return network, all_renamed(network.state_dict(), LTX, "model.diffusion_model.")


def aura_flow() -> tuple[Any, Tensors]:
    network = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=4, num_attention_heads=2,
        joint_attention_dim=6, caption_projection_dim=8, pos_embed_max_size=16,
    )  # fmt: skip
    tensors = dict(network.state_dict())
    tensors["norm_out.linear.weight"] = swapped(tensors["norm_out.linear.weight"])
    single = {r"single_transformer_blocks\.(\d+)\.ff": r"single_layers.\1.mlp",
              r"single_transformer_blocks\.(\d+)\.norm1\.linear": r"single_layers.\1.modCX.1",
              r"single_transformer_blocks\.(\d+)\.attn\.to_out\.0": r"single_layers.\1.attn.w1o",
              r"single_transformer_blocks\.(\d+)\.attn\.to_(.)\.": r"single_layers.\1.attn.w1\2."}  # fmt: skip
    double = {r"joint_transformer_blocks": "double_layers", r"ff_context\.": "mlpC.", r"(\d)\.ff\.": r"\1.mlpX.",
              r"norm1_context\.linear": "modC.1", r"norm1\.linear": "modX.1", r"attn\.to_out\.0": "attn.w2o",
              r"attn\.to_add_out": "attn.w1o", r"attn\.to_(.)\.": r"attn.w2\1.",
              r"attn\.add_(.)_proj": r"attn.w1\1"}  # fmt: skip
    rest = {r"out_projection": "c_proj", r"(mlp\w?)\.linear_(\d)": r"\1.c_fc\2",
            r"time_step_proj\.linear_1": "t_embedder.mlp.0",
            r"time_step_proj\.linear_2": "t_embedder.mlp.2", r"context_embedder": "cond_seq_linear",
            r"^proj_out": "final_linear", r"norm_out\.linear": "modF.1", r"pos_embed\.pos_embed": "positional_encoding",
            r"pos_embed\.proj": "init_x_linear"}  # fmt: skip
    return network, all_renamed(tensors, {**single, **double, **rest})


def sana() -> tuple[Any, Tensors]:
    network = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=6,
        sample_size=8,
    )  # fmt: skip
    tensors = network.state_dict()
    for kind in ("weight", "bias"):
        tensors = joined(tensors, (f"attn2.to_k.{kind}", f"attn2.to_v.{kind}"), f"cross_attn.kv_linear.{kind}")
    tensors = joined(tensors, ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn.qkv")
    rules = {r"^patch_embed": "x_embedder", r"time_embed\.emb\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
             r"time_embed\.emb\.timestep_embedder\.linear_2": "t_embedder.mlp.2", r"time_embed\.linear": "t_block.1",
             r"caption_projection\.linear_": "y_embedder.y_proj.fc", "caption_norm": "attention_y_norm",
             r"transformer_blocks": "blocks", r"attn1\.to_out\.0": "attn.proj", r"attn2\.to_out\.0": "cross_attn.proj",
             r"attn2\.to_q": "cross_attn.q_linear", r"ff\.conv_(\w+)": r"mlp.\1_conv.conv",
             r"^proj_out": "final_layer.linear", r"^scale_shift_table": "final_layer.scale_shift_table"}  # fmt: skip
    more = {"pos_embed": torch.zeros(1, 2), "y_embedder.y_embedding": torch.zeros(3, 2)}
    return network, {**all_renamed(tensors, rules), **more}


def z_image() -> tuple[Any, Tensors]:
    network = diffusers.ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=8, in_channels=4,
        axes_dims=[4, 6, 6], axes_lens=[8, 8, 8],
    )  # fmt: skip
    tensors = joined(network.state_dict(), ("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv")
    rules = {r"all_final_layer\.2-1": "final_layer", r"all_x_embedder\.2-1": "x_embedder",
             r"attention\.to_out\.0": "attention.out", r"attention\.norm_(.)": r"attention.\1_norm"}  # fmt: skip
    return network, all_renamed(tensors, rules, "model.diffusion_model.")


def mochi() -> tuple[Any, Tensors]:
    network = diffusers.MochiTransformer3DModel(  # the conversion wants 48 layers
        num_attention_heads=2, attention_head_dim=4, num_layers=48, pooled_projection_dim=6, in_channels=2,
        text_embed_dim=6, time_embed_dim=4, max_sequence_length=8,
    )  # fmt: skip
    tensors = dict(network.state_dict())
    turned = [name for name in tensors if name.startswith("norm_out") or name.endswith("net.0.proj.weight")]
    tensors |= {name: swapped(tensors[name]) for name in turned}
    tensors = joined(tensors, ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn.qkv_x")
    tensors = joined(tensors, ("attn1.add_q_proj", "attn1.add_k_proj", "attn1.add_v_proj"), "attn.qkv_y")
    rules = {r"^patch_embed": "x_embedder", r"time_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
             r"time_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2", r"time_embed\.pooler": "t5_y_embedder",
             r"time_embed\.caption_proj": "t5_yproj", r"transformer_blocks": "blocks", r"norm1\.linear": "mod_x",
             r"norm1_context\.linear(_1)?": "mod_y", r"attn1\.norm_added_(.)": r"attn.\1_norm_y",
             r"attn1\.norm_(.)": r"attn.\1_norm_x", r"attn1\.to_out\.0": "attn.proj_x",
             r"attn1\.to_add_out": "attn.proj_y", r"ff_context\.net\.0\.proj": "mlp_y.w1",
             r"ff_context\.net\.2": "mlp_y.w2", r"ff\.net\.0\.proj": "mlp_x.w1", r"ff\.net\.2": "mlp_x.w2",
             r"^norm_out\.linear": "final_layer.mod", r"^proj_out": "final_layer.linear"}  # fmt: skip
    return network, all_renamed(tensors, rules)


def ltx_autoencoder() -> tuple[Any, Tensors]:
    network: Any = CASE["LTX"].make().vae  # type: ignore[attr-defined]
    up = {r"mid_block": "@0", r"up_blocks\.0": "@1", r"up_blocks\.1\.upsamplers\.0": "@2", r"up_blocks\.1": "@3",
          r"up_blocks\.2\.conv_in": "@4", r"up_blocks\.2\.upsamplers\.0": "@5", r"up_blocks\.2": "@6"}  # fmt: skip
    down = {r"down_blocks\.0\.downsamplers\.0": "@1", r"down_blocks\.0\.conv_out": "@2", r"down_blocks\.0": "@0",
            r"down_blocks\.1\.downsamplers\.0": "@4", r"down_blocks\.1": "@3", r"down_blocks\.2": "@6",
            r"mid_block": "@9"}  # fmt: skip
    rest = {"conv_shortcut.conv": "conv_shortcut", "resnets": "res_blocks", "norm3": "norm3.norm",
            "latents_mean": "per_channel_statistics.mean-of-means",
            "latents_std": "per_channel_statistics.std-of-means"}  # fmt: skip
    found = {}
    for name, value in network.state_dict().items():
        side = {"e": {**down, "@": "down_blocks."}, "d": {**up, "@": "up_blocks."}}.get(name[0], {})
        found["vae." + renamed(name, {**side, **rest})] = value
    return network, found


def wan_autoencoder() -> tuple[Any, Tensors]:
    network: Any = CASE["Wan"].make().vae  # type: ignore[attr-defined]
    rules = {
        r"norm1": "residual.0", r"conv1": "residual.2", r"norm2": "residual.3", r"conv2": "residual.6",
        r"mid_block\.resnets\.0": "middle.0", r"mid_block\.resnets\.1": "middle.2",
        r"mid_block\.attentions\.0": "middle.1", r"norm_out": "head.0", r"conv_out": "head.2", r"conv_in": "conv1",
        r"^quant_conv": "conv1", r"^post_quant_conv": "conv2", r"conv_shortcut": "shortcut",
        r"down_blocks": "downsamples",
    }  # fmt: skip

    def original(name: str) -> str:
        if match := re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)", name):
            number = 4 * int(match[1]) + (3 if match[2] == "upsamplers" else int(match[3]))
            name = f"decoder.upsamples.{number}{name[match.end() :]}"
        return renamed(name, rules)

    return network, {original(name): value for name, value in network.state_dict().items()}


PIPELINES: dict[str, Callable[[], tuple[Any, Tensors]]] = {
    "SD 1.x": stable_diffusion, "SDXL": stable_diffusion_xl, "SD3": stable_diffusion_3,
}  # fmt: skip
NETWORKS: dict[str, Callable[[], tuple[Any, Tensors]]] = {
    "Wan": wan_transformer, "LTX": ltx_transformer, "AuraFlow": aura_flow, "Sana": sana, "Z-Image": z_image,
    "Mochi": mochi, "autoencoder of LTX": ltx_autoencoder, "autoencoder of Wan": wan_autoencoder,
}  # fmt: skip


# conversions whose widths are constants: as high as they are cut, and one column wide


def flux() -> Tensors:
    names = [
        f"{part}.{layer}" for part in ("time_in", "vector_in", "guidance_in") for layer in ("in_layer", "out_layer")
    ]
    names += ["txt_in", "img_in", "final_layer.linear"]
    shapes = dict.fromkeys(names, 2) | {"final_layer.adaLN_modulation.1": 4}
    for stream in ("img", "txt"):
        shapes |= {
            f"double_blocks.0.{stream}_{layer}": 3 for layer in ("attn.qkv", "mod.lin", "mlp.0", "mlp.2", "attn.proj")
        }
    shapes |= {"single_blocks.0.linear1": 7 * 3072, "single_blocks.0.linear2": 3, "single_blocks.0.modulation.lin": 3}
    found = {f"{name}.weight": torch.randn(rows, 1) for name, rows in shapes.items()}
    found |= {f"{name}.bias": torch.randn(rows) for name, rows in shapes.items()}
    norms = ["double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"]
    return found | {f"{name}.norm.{each}_norm.scale": torch.randn(2) for name in norms for each in ("query", "key")}


def hunyuan_video() -> Tensors:
    shapes = {
        "img_in.proj": 2, "time_in.mlp.0": 2, "double_blocks.0.img_attn_qkv": 6, "double_blocks.0.txt_attn_qkv": 6,
        "double_blocks.0.img_mod.linear": 2, "single_blocks.0.linear1": 4 * 3072, "single_blocks.0.linear2": 2,
        "txt_in.individual_token_refiner.blocks.0.self_attn_qkv": 3, "final_layer.adaLN_modulation.1": 4,
        "final_layer.linear": 2,
    }  # fmt: skip
    found = {f"{name}.weight": torch.randn(rows, 1) for name, rows in shapes.items()}
    return found | {f"{name}.bias": torch.randn(rows) for name, rows in shapes.items()}


def lumina_2() -> Tensors:
    shapes = {"layers.0.attention.qkv": 3840, "layers.0.attention.out": 2, "context_refiner.0.attention.qkv": 3840,
              "final_layer.linear": 2, "norm_final": 1}  # fmt: skip
    return {f"{name}.weight": torch.randn(rows, 1) for name, rows in shapes.items()}


THIN: dict[str, tuple[Callable[[], Tensors], str]] = {
    "FLUX": (flux, "FluxTransformer2DModel"),
    "HunyuanVideo": (hunyuan_video, "HunyuanVideoTransformer3DModel"),
    "Lumina 2": (lumina_2, "Lumina2Transformer2DModel"),
}
