"""Configurations that cannot be meant: refused with the file and the field, by what a plan reads and by what runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from pipeline_classes import cases
from tightfit.catalog.known import known_model, model_names
from tightfit.checkpoint.configurations import LARGEST, check_configuration, check_configurations, check_sizes
from tightfit.checkpoint.folder import ComponentFolder, check_folder
from tightfit.checkpoint.lazy_loading import build_folder, build_lazily
from tightfit.errors import ModelError
from tiny_pipelines import CASES

UNET, TEXT, VAE = "unet/config.json", "text_encoder/config.json", "vae/config.json"
SCHEDULER, TOKENIZER = "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"
GONE = ...  # the field is left out


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not GONE}))


def complaint(model: Path) -> str:
    """What both ways of building say, which is the same."""
    said = []
    for build in (build_folder, lambda folder, dtype: build_lazily(model, folder, dtype)):
        with pytest.raises(ModelError) as caught:
            build(check_folder(model), torch.float32)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    return said[0]


# field by field: the file, the value, and what is said of it

WRONG: list[tuple[str, str, object, str]] = [
    (UNET, "in_channels", "x", "has 'x' as in_channels: UNet2DConditionModel takes int, by default 4"),
    (UNET, "in_channels", None, "makes no UNet2DConditionModel: unsupported operand type(s) for %"),
    (UNET, "in_channels", 1.5, "has 1.5 as in_channels"),
    (UNET, "in_channels", True, "has True as in_channels"),
    (UNET, "in_channels", {"a": 1}, "has {'a': 1} as in_channels"),
    (UNET, "in_channels", -1, "has -1 as in_channels, which must be positive: by default 4"),
    (UNET, "in_channels", 10**9, "has 1000000000 as in_channels, more than its files can mean: 16,777,216 at the most"),
    (UNET, "in_channels", 5, "'conv_in.weight' as [16, 4, 3, 3], and unet needs [16, 5, 3, 3]"),
    (UNET, "block_out_channels", [10**9, 1], "has 1000000000 as block_out_channels.0, more than its files can mean"),
    (UNET, "block_out_channels", ["x", 1], "has ['x', 1] as block_out_channels"),
    (UNET, "block_out_channels", [], "makes no UNet2DConditionModel: Must provide the same number"),
    (UNET, "block_out_channels", GONE, "makes no UNet2DConditionModel: Must provide the same number"),
    (UNET, "layers_per_block", 10**6, "makes no UNet2DConditionModel: the network has more than "),
    (UNET, "act_fn", "gleu", "makes no UNet2DConditionModel: activation function gleu not found"),
    (UNET, "norm_num_groups", 0, "makes no UNet2DConditionModel: ZeroDivisionError"),
    (VAE, "scaling_factor", "x", "has 'x' as scaling_factor: AutoencoderKL takes float"),
    (VAE, "scaling_factor", 0, "has 0 as scaling_factor, by which latents are divided"),
    (VAE, "scaling_factor", float("nan"), "has NaN as scaling_factor, which is no number"),
    (VAE, "latents_mean", ["x"], "has ['x'] as latents_mean"),
    (TEXT, "hidden_size", "x", "makes no CLIPTextModel: Validation error for field 'hidden_size': TypeError"),
    (TEXT, "num_hidden_layers", 10**9, "has 1000000000 as num_hidden_layers, more than its files can mean"),
    (TEXT, "num_hidden_layers", 10**7, "makes no CLIPTextModel: the network has more than "),
    (TEXT, "num_hidden_layers", 2, "which is no weight of text_encoder"),
    (TEXT, "max_position_embeddings", 10**9, "has 1000000000 as max_position_embeddings"),
    (TEXT, "max_position_embeddings", -1, "makes no CLIPTextModel: Trying to create tensor with negative dimension"),
    (TEXT, "vocab_size", 10**7, "and text_encoder needs [10000000, 16]"),
    (SCHEDULER, "beta_end", "x", "has 'x' as beta_end: DDIMScheduler takes float"),
    (SCHEDULER, "num_train_timesteps", 10**9, "has 1000000000 as num_train_timesteps, more than"),
    (SCHEDULER, "num_train_timesteps", -1, "has -1 as num_train_timesteps, which must be positive"),
    (SCHEDULER, "beta_schedule", "x", "model/scheduler as DDIMScheduler: x is not implemented"),
    (TOKENIZER, "model_max_length", 10**9, "has 1000000000 as model_max_length, more than its files can mean"),
    (TOKENIZER, "model_max_length", "x", "has 'x' as model_max_length: it must be a number of tokens"),
    (TOKENIZER, "model_max_length", -1, "has -1 as model_max_length"),
    ("model_index.json", "requires_safety_checker", "x", "has 'x' as requires_safety_checker"),
    ("model_index.json", "_class_name", "StableDifusionPipeline", "pipeline class 'StableDifusionPipeline': did you"),
    ("model_index.json", "unet", ["diffusers", "UNet"], "has an unknown class of diffusers for unet 'UNet'"),
    ("model_index.json", "unet", ["diffusers", "utils"], "has an unknown class of diffusers for unet 'utils'"),
]


@pytest.mark.parametrize(("file", "field", "value", "said"), WRONG, ids=lambda each: str(each)[:25])
def test_the_file_and_the_field_are_named(model: Path, file: str, field: str, value: object, said: str) -> None:
    edit(model / file, **{field: value})
    found = complaint(model)
    assert said in found
    assert file.partition("/")[0] in found
    assert len(found) < 3000


def test_absurd_numbers_end_soon_and_take_no_memory(model: Path) -> None:
    """A billion layers and as many time steps took a minute and 11 GB."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file, field in ((TEXT, "num_hidden_layers"), (UNET, "layers_per_block"), (SCHEDULER, "num_train_timesteps")):
        text = (model / file).read_text()
        for value in (10**9, 10**7, 10**6):
            edit(model / file, **{field: value})
            if not (file == SCHEDULER and value < 10**7):
                complaint(model)
        (model / file).write_text(text)
    assert time.monotonic() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB


def test_a_library_that_is_a_package_of_pipelines(model: Path) -> None:
    """Some components' classes are only in the package of one pipeline."""
    edit(model / "model_index.json", unet=["stable_audio", "StableAudioProjectionModl"])
    (model / UNET).write_text('{"_class_name": "StableAudioProjectionModel"}')
    (model / "unet/diffusion_pytorch_model.safetensors").rename(model / "unet/model.safetensors")
    assert "for unet 'StableAudioProjectionModl': did you mean 'StableAudioProjectionModel'?" in complaint(model)


# tokenizers, without whose words there would be another picture


def gone(file: Path) -> None:
    file.unlink()


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere/at/all")


def huge(file: Path) -> None:
    os.truncate(file, 10**9)


DAMAGES = {
    gone: r"has no words for CLIPTokenizer, but tokenizer_config.json: it needs tokenizer.json or vocab.json and",
    folder: "tokenizer/tokenizer.json must be a file, and is none",
    pipe: "tokenizer/tokenizer.json must be a file, and is none",
    loop: "tokenizer/tokenizer.json cannot be read: Too many levels of symbolic links",
    dangling: "tokenizer/tokenizer.json cannot be read: No such file or directory",
    huge: "tokenizer/tokenizer.json has 1,000,000,000 bytes, and JSON is read up to 100,000,000",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_tokenizer_without_its_words(model: Path, damage: Callable[[Path], None]) -> None:
    damage(model / "tokenizer/tokenizer.json")
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        check_configurations(check_folder(model))


@pytest.mark.parametrize("file", [UNET, TEXT, SCHEDULER, TOKENIZER, "unet/diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize("damage", [folder, pipe, loop, dangling], ids=lambda damage: damage.__name__)
def test_what_is_no_file_is_refused_wherever_it_is(model: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(model / file)
    with pytest.raises(ModelError, match=f"{file} (must be a file|cannot be read)"):
        check_folder(model)


def test_words_in_two_files_as_older_models_have_them(model: Path) -> None:
    words = json.loads((model / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    gone(model / "tokenizer/tokenizer.json")
    (model / "tokenizer/vocab.json").write_text(json.dumps(words))
    with pytest.raises(ModelError, match="has no words"):
        check_configurations(check_folder(model))
    (model / "tokenizer/merges.txt").write_text("#version: 0.2\n")
    check_configurations(check_folder(model))


# what is right is not refused


@pytest.mark.parametrize("name", model_names())
def test_what_real_models_have_is_accepted(name: str, tmp_path: Path) -> None:
    for part in known_model(name).components.values():
        if part.library == "diffusers":
            (tmp_path / "config.json").write_text(json.dumps(part.config))
            whole = ComponentFolder("part", "diffusers", part.class_name, (tmp_path,) if part.dtype else ())
            check_configuration(tmp_path / "config.json", getattr(diffusers, part.class_name), whole)
        elif part.dtype:
            check_sizes(tmp_path / "config.json", part.config, LARGEST)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_pipelines_save_is_accepted(case: Any, tmp_path: Path) -> None:
    case.make().save_pretrained(tmp_path)
    check_configurations(check_folder(tmp_path))


@pytest.mark.slow
def test_what_any_pipeline_has_is_accepted(tmp_path: Path) -> None:
    """Annotations are not always true: those of every class that there is a recipe of."""
    for case in cases().values():
        for part in case.make().components.values():
            if type(part).__module__.startswith("diffusers.") and hasattr(part, "save_config"):
                part.save_config(tmp_path)
                here = ComponentFolder(case.name, "diffusers", type(part).__name__, (tmp_path,))
                check_configuration(tmp_path / type(part).config_name, type(part), here)
