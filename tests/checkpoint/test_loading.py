"""load_pipeline on a tiny Stable Diffusion: what comes back, what is refused, and that it leaves no trace."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.loading import load_pipeline
from tightfit.errors import ModelError

UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
LOGS = [import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers")]


def tiny_pipeline() -> StableDiffusionPipeline:
    sizes: dict[str, Any] = {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1}
    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>"]
    return StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            **sizes, sample_size=8, cross_attention_dim=8, attention_head_dim=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        vae=AutoencoderKL(
            **sizes, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2
        ),
        text_encoder=CLIPTextModel(CLIPTextConfig(
            hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2, vocab_size=4,
            max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )),
        tokenizer=CLIPTokenizer(vocab=dict(zip(words, range(4), strict=True)), merges=[], model_max_length=16),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pipe() -> StableDiffusionPipeline:
    torch.manual_seed(0)
    return tiny_pipeline()


@pytest.fixture(scope="module")
def saved(pipe: StableDiffusionPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def networks(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def first_weight(pipe: DiffusionPipeline) -> torch.Tensor:
    return next(networks(pipe)["unet"].parameters())


def complaint(model: Path, dtype: torch.dtype | None = None) -> str:
    """The one line that load_pipeline has against a folder which check_folder lets pass."""
    with pytest.raises(ModelError) as caught:
        load_pipeline(check_folder(model), dtype)
    message = str(caught.value)
    assert "\n" not in message
    assert model.name in message
    json.dumps(caught.value.facts)
    return message


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(file: Path, **changes: torch.Tensor | None) -> None:
    """Saves the file again with other tensors; None leaves one out."""
    tensors = {name: value for name, value in (load_file(file) | changes).items() if value is not None}
    save_file(tensors, file, metadata={"format": "pt"})


# what comes back


def test_the_same_weights_come_back(model: Path, pipe: StableDiffusionPipeline) -> None:
    loaded = load_pipeline(check_folder(model))
    assert type(loaded) is StableDiffusionPipeline
    for name, network in networks(pipe).items():
        found = networks(loaded)[name].state_dict()
        assert all(torch.equal(value, found[key]) for key, value in network.state_dict().items())
    assert not any(network.training for network in networks(loaded).values())


def test_what_is_counted_is_what_is_loaded(model: Path) -> None:
    folder = check_folder(model)
    loaded = networks(load_pipeline(folder))
    counted = {part.name: part.weight_bytes for part in folder.components if part.weight_files}
    assert counted == {name: sum(p.nbytes for p in network.parameters()) for name, network in loaded.items()}


def test_the_asked_dtype(model: Path) -> None:
    loaded = load_pipeline(check_folder(model), torch.bfloat16)
    assert {p.dtype for network in networks(loaded).values() for p in network.parameters()} == {torch.bfloat16}


def test_a_variant_where_there_is_nothing_else(model: Path, pipe: StableDiffusionPipeline) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    loaded = load_pipeline(check_folder(model))
    assert torch.equal(first_weight(loaded), first_weight(pipe))


def test_shards(model: Path, pipe: StableDiffusionPipeline) -> None:
    (model / UNET).unlink()
    pipe.unet.save_pretrained(model / "unet", max_shard_size="40KB")
    folder = check_folder(model)
    assert len(folder.components[-2].weight_files) > 1
    loaded = load_pipeline(folder)
    assert torch.equal(first_weight(loaded), first_weight(pipe))


# what is refused


def test_a_misspelt_pipeline_class(model: Path) -> None:
    edit(model / "model_index.json", _class_name="StableDifusionPipeline")
    said = "model_index.json has an unknown pipeline class 'StableDifusionPipeline'"
    assert f"{said}: did you mean 'StableDiffusionPipeline'?" in complaint(model)


def test_a_class_that_is_no_pipeline(model: Path) -> None:
    edit(model / "model_index.json", _class_name="AutoencoderKL")
    assert f"cannot load {model} as AutoencoderKL: " in complaint(model)


def test_an_unknown_component_class(model: Path) -> None:
    edit(model / "model_index.json", unet=["diffusers", "UNet2DConditionModl"])
    said = "unknown class of diffusers for unet 'UNet2DConditionModl': did you mean 'UNet2DConditionModel'?"
    assert f"model_index.json has an {said}" in complaint(model)


def test_weights_that_diffusers_would_leave_without_values(model: Path) -> None:
    edit_weights(model / UNET, **{"conv_in.weight": None, "conv_in.bias": None})
    assert "lacks weights that its models need: unet.conv_in.weight, unet.conv_in.bias" in complaint(model)


def test_weights_that_transformers_would_make_up(model: Path) -> None:
    edit_weights(model / TEXT, **{"encoder.layers.0.layer_norm1.weight": None})
    assert "lacks weights that its models need: encoder.layers.0.layer_norm1.weight" in complaint(model)


def test_weights_of_another_shape(model: Path) -> None:
    edit_weights(model / UNET, **{"conv_in.bias": torch.zeros(3, 3)})
    said = complaint(model)
    assert "conv_in.bias" in said
    assert "[4]" in said
    assert "[3, 3]" in said


def test_weights_of_another_shape_for_transformers(model: Path) -> None:
    edit_weights(model / TEXT, **{"encoder.layers.0.layer_norm1.weight": torch.zeros(3, 3)})
    said = complaint(model)
    assert "encoder.layers.0.layer_norm1.weight" in said
    assert "[8]" in said
    assert "[3, 3]" in said


def test_weights_that_went_away_after_the_check(model: Path) -> None:
    folder = check_folder(model)
    (model / UNET).unlink()
    with pytest.raises(ModelError, match=r"no file named diffusion_pytorch_model.safetensors") as caught:
        load_pipeline(folder)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.facts["cause"] == "OSError"


def test_a_config_that_no_model_can_have(model: Path) -> None:
    """diffusers leaves torch's default dtype changed when this happens."""
    edit(model / "unet/config.json", down_block_types=["NoSuchBlock", "NoSuchBlock"])
    assert "NoSuchBlock does not exist" in complaint(model, torch.float16)
    assert torch.get_default_dtype() == torch.float32


def test_a_config_of_wrong_types(model: Path) -> None:
    edit(model / "text_encoder/config.json", hidden_size="eight")
    assert "hidden_size" in complaint(model)


def test_a_broken_tokenizer(model: Path) -> None:
    (model / "tokenizer/tokenizer.json").write_text('{"version": "1.0", "model": {"type": "None such"}}')
    assert f"cannot load {model}/tokenizer as CLIPTokenizer: " in complaint(model)


CAUSES: list[tuple[Exception, str]] = [
    (KeyError("metadata"), "KeyError 'metadata'"),
    (RuntimeError("Error(s) in loading:\n\tsize mismatch\n\tand more"), "Error(s) in loading: size mismatch"),
    (ImportError("\n\nX needs Y.\nInstall Y."), "X needs Y."),
    (ValueError(""), "ValueError"),
    (OSError("long " * 1000), "long …"),
]


@pytest.mark.parametrize(("cause", "said"), CAUSES, ids=[type(cause).__name__ for cause, _ in CAUSES])
def test_one_line_of_the_cause(model: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception, said: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fail)
    message = complaint(model)
    assert message.startswith(f"cannot load {model} as StableDiffusionPipeline: ")
    assert message.endswith(said)
    assert len(message) < 400 + len(str(model))


def test_running_out_of_memory_is_not_the_models_fault(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fail)
    with pytest.raises(MemoryError):
        load_pipeline(check_folder(model))


# what is left behind


def state() -> list[object]:
    seen: list[object] = [torch.get_default_dtype(), list(warnings.filters)]
    for log in LOGS:
        seen += [log.get_verbosity(), log.is_progress_bar_enabled(), set(log.get_logger().handlers)]
    return seen


def test_nothing_is_written_to_the_terminal(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even what diffusers says of an old scheduler, of an unknown option and of weights too many."""
    edit(model / "scheduler/scheduler_config.json", steps_offset=0, clip_sample=True)
    edit(model / "unet/config.json", no_such_option=1)
    edit_weights(model / UNET, superfluous=torch.zeros(1))
    with contextlib.ExitStack() as stack:
        for log in LOGS:  # the libraries' own handlers keep the stderr that they began with
            handler = logging.StreamHandler()
            log.add_handler(handler)
            stack.callback(log.remove_handler, handler)
        load_pipeline(check_folder(model))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("verbosity", [logging.INFO, logging.ERROR])
@pytest.mark.parametrize("bars", [True, False])
def test_everything_is_as_before(model: Path, verbosity: int, bars: bool) -> None:
    with contextlib.ExitStack() as stack:
        for log in LOGS:
            stack.callback(log.set_verbosity, log.get_verbosity())
            stack.callback(log.enable_progress_bar)
            log.set_verbosity(verbosity)
            if not bars:
                log.disable_progress_bar()
        before = state()
        load_pipeline(check_folder(model))
        assert state() == before
        edit_weights(model / TEXT, **{"encoder.layers.0.layer_norm1.weight": None})
        assert "lacks weights" in complaint(model)
        (model / TEXT).write_bytes(b"")
        (model / "tokenizer/tokenizer.json").write_text("{}")
        with pytest.raises(ModelError):
            load_pipeline(check_folder(model))
        assert state() == before


def test_torch_still_knows_its_factories_after_loading(tiny_model: Path) -> None:
    """transformers replaces torch.linspace for a while; torch looks its factories up once, and keeps what it finds."""
    torch.utils._device._device_constructors.cache_clear()
    load_pipeline(check_folder(tiny_model))
    with torch.device("meta"):
        assert torch.linspace(0, 1, 3).is_meta
