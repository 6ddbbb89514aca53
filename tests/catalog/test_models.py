"""Known models' configurations: well formed, buildable, and as large as published."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch

from tightfit.catalog.known import known_model, model_called, model_names
from tightfit.checkpoint.loading import quietly
from tightfit.errors import InputError
from tightfit.measure.build_models import part_class
from tightfit.run.argument_values import described, dummy_value

FIELDS = {"name", "title", "repository", "source", "pipeline", "options", "request", "components", "absent"}
FIELDS |= {"request_source", "dtype_source"}
PLACES = ("https://", "diffusers 0.42.1, ", "from memory")  # what a source names, one of them at least
SIZES = {"height": "height", "width": "width", "frames": "num_frames", "steps": "num_inference_steps"}
NETWORK = {"library", "class", "dtype", "config", "parameters", "source"}
OTHER = {"library", "class", "config", "source"}  # tokenizers and schedulers: nothing to count
LIBRARIES = {"diffusers", "transformers", "ltx2"}
DTYPES = {"float32", "float16", "bfloat16"}
BILLION, MILLION = 10**9, 10**6

# What others say the networks hold; "a+b" is both together.
PUBLISHED = {
    ("flux.1-dev", "transformer"): 11.90 * BILLION,  # flux1-dev.safetensors: 23.80 GB of bfloat16
    ("flux.1-dev", "text_encoder_2"): 4.762 * BILLION,  # its two shards on the hub: 9.52 GB of bfloat16
    ("flux.1-dev", "vae"): 83.82 * MILLION,  # its file on the hub: 167.7 MB of bfloat16
    ("flux.1-schnell", "transformer"): 23_782_357_120 / 2,  # bytes of its weights, by their index on the hub
    ("flux.1-kontext-dev", "transformer"): 12 * BILLION,  # the model card
    ("flux.1-krea-dev", "transformer"): 12 * BILLION,  # the model card
    ("sdxl", "unet"): 5_135_149_760 / 2,  # bytes of diffusion_pytorch_model.fp16.safetensors
    ("sdxl", "text_encoder+text_encoder_2"): 817 * MILLION,  # arxiv.org/abs/2307.01952, table 1
    ("sd-1.5", "unet"): 3_438_167_536 / 4,  # bytes of diffusion_pytorch_model.safetensors, float32
    ("sd-1.5", "text_encoder"): 492_265_879 / 4,  # bytes of model.safetensors, float32
    ("sd-1.5", "vae"): 334_643_268 / 4,  # bytes of diffusion_pytorch_model.safetensors, float32
    ("sd3-medium", "transformer"): 2.03 * BILLION,  # the hub's file: 4.17 GB of float16 with its 57 M fixed positions
    ("sd3.5-large", "transformer"): 8.1 * BILLION,  # stability.ai/news/introducing-stable-diffusion-3-5
    ("sd3.5-medium", "transformer"): 2.245 * BILLION,  # the hub's 5.11 GB, less its autoencoder and fixed positions
    ("chroma1-hd", "transformer"): 8.9 * BILLION,  # the model card
    ("kandinsky-5-t2i-lite", "transformer"): 6 * BILLION,  # the page kandinsky5_image of diffusers' documentation
    ("auraflow", "transformer"): 6.8 * BILLION,  # huggingface.co/collections/fal/auraflow
    ("flux.2-dev", "transformer"): 32 * BILLION,  # the model card
    ("flux.2-dev", "text_encoder"): 24.01 * BILLION,  # the hub's count for Mistral-Small-3.2-24B-Instruct-2506
    ("flux.2-klein-4b", "transformer"): 3.875 * BILLION,  # flux-2-klein-4b.safetensors: 7.75 GB of bfloat16
    ("flux.2-klein-9b", "transformer"): 9 * BILLION,  # the model's name
    ("flux.2-klein-9b", "text_encoder"): 8.2 * BILLION,  # the model card of Qwen3-8B
    ("z-image", "text_encoder"): 4.0 * BILLION,  # the model card of Qwen3-4B, without its output layer
    ("z-image-turbo", "transformer"): 6.15 * BILLION,  # z_image_turbo_bf16.safetensors: 12.3 GB of bfloat16
    ("qwen-image", "transformer"): 20.43 * BILLION,  # its nine shards on the hub: 40.86 GB of bfloat16
    ("qwen-image-edit-2511", "transformer"): 20.43 * BILLION,  # qwen_image_edit_2511_bf16.safetensors: 40.86 GB
    ("qwen-image-2512", "transformer"): 20.43 * BILLION,  # qwen_image_2512_fp8_e4m3fn.safetensors: 20.43 GB of float8
    ("qwen-image-layered", "transformer"): 20.43 * BILLION,  # qwen_image_layered_bf16.safetensors: 40.86 GB
    ("qwen-image", "text_encoder"): 8.29 * BILLION,  # the hub's count for Qwen2.5-VL-7B-Instruct
    ("sana-1.6b", "transformer"): 1.6 * BILLION,  # arxiv.org/abs/2410.10629
    ("sana-1.6b", "text_encoder"): 2.61 * BILLION,  # the hub's count for google/gemma-2-2b-it
    ("sana-1.6b", "vae"): 1_249_001_100 / 4,  # bytes of values in its float32 file on the hub
    ("sana-sprint-1.6b", "transformer"): 1.6 * BILLION,  # the model's name
    ("playground-v2.5", "unet"): 5_135_149_760 / 2,  # the same network as Stable Diffusion XL's
    ("pixart-sigma", "transformer"): 2_443_492_488 / 4,  # bytes of the 512 model's float32 file, the same network
    ("cogvideox-2b", "transformer"): 1.69 * BILLION,  # the hub's count
    ("cogvideox-5b", "transformer"): 5_570_283_072,  # a full fine-tuning log in cogvideox-factory's README
    ("ltx-video-2b", "transformer"): 1.92 * BILLION,  # the hub's count
    ("ltx-video-2b", "vae"): 1_676_798_532 / 4,  # bytes of diffusion_pytorch_model.safetensors, float32
    ("ltx-video-13b", "transformer"): 13 * BILLION,  # the model card
    ("wan-2.1-14b", "transformer"): 14.3 * BILLION,  # the hub's count
    ("wan-2.1-14b", "text_encoder"): 5.68 * BILLION,  # models_t5_umt5-xxl-enc-bf16.pth: 11.36 GB
    ("wan-2.1-14b", "vae"): 127 * MILLION,  # arxiv.org/abs/2503.20314
    ("wan-2.1-1.3b", "transformer"): 1.42 * BILLION,  # the hub's count
    ("wan-2.2-a14b", "transformer+transformer_2"): 28.6 * BILLION,  # two experts, each the hub's 14.3 billion
    ("wan-2.1-i2v-14b-480p", "transformer"): 16.4 * BILLION,  # the hub's count for city96/Wan2.1-I2V-14B-480P-gguf
    ("wan-2.1-i2v-14b-720p", "transformer"): 32.8 * BILLION / 2,  # bytes of Comfy-Org's bfloat16 file on the hub
    ("wan-2.2-animate-14b", "transformer"): 69.1 * BILLION / 4,  # bytes of its 15 shards on the hub, float32
    ("wan-2.2-animate-14b", "image_encoder"): 1.26 * BILLION / 2,  # bytes of model.safetensors, bfloat16
    ("wan-2.2-5b", "transformer"): 5 * BILLION,  # the model card
    ("wan-2.2-5b", "vae"): 705 * MILLION,  # Wan2.2_VAE.pth: 2.82 GB of float32
    ("hunyuanvideo", "transformer"): 12.82 * BILLION,  # its six shards on the hub: 25.64 GB of bfloat16
    ("hunyuanvideo-1.5", "transformer"): 8.3 * BILLION,  # the model card
    ("skyreels-v2-i2v-14b", "image_encoder"): 632 * MILLION,  # arxiv.org/abs/2010.11929, table 1: ViT-H
    ("svd-xt", "unet"): 3.05 * BILLION / 2,  # bytes of diffusion_pytorch_model.fp16.safetensors
    ("ltx-2", "transformer"): 19 * BILLION,  # ltx-2-19b-dev.safetensors, by its name
    ("ltx-2", "text_encoder"): 12.2 * BILLION,  # the hub's count for google/gemma-3-12b-it
    ("mochi-1", "transformer"): 10 * BILLION,  # the model card
}


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key stands twice: {sorted(keys)}"
    return dict(pairs)


def read() -> dict[str, dict[str, Any]]:
    folder = resources.files("tightfit.catalog").joinpath("models")
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    return {
        file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=distinct)
        for file in files
    }


MODELS = read()
COMPONENTS = [(model, name) for model, facts in sorted(MODELS.items()) for name in facts["components"]]
NETWORKS = [(model, name) for model, name in COMPONENTS if "parameters" in MODELS[model]["components"][name]]


def class_of(component: dict[str, Any]) -> Any:
    made = part_class(component["library"], component["class"])
    assert made is not None, component["class"]
    return made


@cache
def built(library: str, name: str, config: str) -> torch.nn.Module:
    """The network of that configuration, without memory behind its parameters."""
    made = class_of({"library": library, "class": name})
    with quietly(), torch.device("meta"):
        network = (
            made(made.config_class(**json.loads(config)))
            if library == "transformers"
            else made.from_config(json.loads(config))
        )
    assert isinstance(network, torch.nn.Module)
    return network


@pytest.mark.parametrize(
    ("name", "own"),
    [("wan2.1-14b", "wan-2.1-14b"), ("FLUX1 dev", "flux.1-dev"), ("SD_1.5", "sd-1.5"), ("sdxl", "sdxl")],
)
def test_a_name_may_be_written_otherwise(name: str, own: str) -> None:
    assert model_called(name) == own
    assert known_model(name).name == own


def test_no_two_models_have_the_same_name_without_punctuation() -> None:
    assert [model_called(name.replace("-", "").replace(".", "")) for name in model_names()] == list(model_names())


@pytest.mark.parametrize("name", ["", "-", "wan2.1", "flux.1-dex"])
def test_an_unknown_model_comes_with_the_nearest(name: str) -> None:
    with pytest.raises(InputError, match=r"unknown model in the catalog .*: (did you mean|there are)"):
        known_model(name)


def test_there_are_models() -> None:
    assert len(MODELS) >= 60


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_file_is_well_formed(model: str) -> None:
    facts = MODELS[model]
    assert set(facts) == FIELDS | ({"options_source"} if facts["options"] else set())
    assert facts["name"] == model
    assert facts["source"] == f"https://huggingface.co/{facts['repository']}"
    for component in facts["components"].values():
        assert set(component) in (NETWORK, OTHER)
        assert component["library"] in LIBRARIES
        assert component["source"].startswith("https://")
        assert component.get("dtype", "float32") in DTYPES
        assert isinstance(component["config"], dict)
        assert not [key for key in component["config"] if key.startswith("_")]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_usual_request_is_one_of_the_pipeline(model: str) -> None:
    """Of each field that the pipeline's call takes; inputs under its own names, of kinds and sizes that can be made."""
    facts = MODELS[model]
    taken = inspect.signature(class_of({"library": "diffusers", "class": facts["pipeline"]}).__call__).parameters
    request = dict(facts["request"])
    guidance = request.pop("guidance", None)
    arguments = request.pop("arguments", {})
    if "guidance_scale" in taken:  # some guide by two passes if there is a negative prompt, under another name
        assert isinstance(arguments.get("true_cfg_scale") if guidance is None else guidance, float)
    sizes = {"height", "width"} if "resolution" in taken else set()  # of the pictures that it makes from that
    assert set(request) == {field for field, name in SIZES.items() if name in taken} | sizes
    assert all(isinstance(number, int) and number > 0 for number in request.values())
    assert set(arguments) <= set(taken)
    for name, described_as in arguments.items():
        assert described(name, dummy_value(described_as)) == described_as


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_choice_has_its_source(model: str) -> None:
    """Or says that it is from memory; files of diffusers that are named exist."""
    for source in [text for field, text in MODELS[model].items() if field.endswith("_source")]:
        assert any(place in source for place in PLACES)
        for file in re.findall(r"pipelines/\w+/\w+\.py", source):
            assert resources.files("diffusers").joinpath(file).is_file(), file


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_components_are_those_of_the_pipeline(model: str) -> None:
    facts = MODELS[model]
    pipeline = class_of({"library": "diffusers", "class": facts["pipeline"]})
    arguments = inspect.signature(pipeline.__init__).parameters
    assert not set(facts["components"]) & set(facts["absent"])
    named = {*facts["components"], *facts["absent"], *facts["options"]}
    assert named <= set(arguments)
    required = {key for key, argument in arguments.items() if argument.default is inspect.Parameter.empty}
    assert required - {"self"} <= named
    assert set(pipeline._optional_components) <= named
    assert set(facts["absent"]) <= set(pipeline._optional_components)


@pytest.mark.parametrize(("model", "name"), COMPONENTS)
def test_a_class_exists_and_knows_every_key(model: str, name: str) -> None:
    component = MODELS[model]["components"][name]
    made = class_of(component)
    if component["library"] != "transformers":
        assert set(component["config"]) <= set(inspect.signature(made.__init__).parameters)
        if "parameters" not in component:
            made.from_config(component["config"])


@pytest.mark.parametrize(("model", "name"), NETWORKS)
def test_a_network_has_its_parameters(model: str, name: str) -> None:
    component = MODELS[model]["components"][name]
    network = built(component["library"], component["class"], json.dumps(component["config"], sort_keys=True))
    assert sum(parameter.numel() for parameter in network.parameters()) == component["parameters"]


@pytest.mark.parametrize(("model", "names"), PUBLISHED)
def test_the_parameters_are_as_published(model: str, names: str) -> None:
    components = MODELS[model]["components"]
    parameters = sum(components[name]["parameters"] for name in names.split("+"))
    assert parameters == pytest.approx(PUBLISHED[model, names], rel=0.01)
