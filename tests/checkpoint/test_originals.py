"""`tightfit shard` of single files: what diffusers' own conversion makes of them, tensor by tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_model, single_file_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file

from anonymous_memory import anonymous_bytes, highest_anonymous
from original_files import NETWORKS, PIPELINES, THIN, Tensors
from shard_checks import assert_same, complaint, content, names, shard, weights
from tightfit.checkpoint.loading import quietly
from tightfit.checkpoint.originals import tensor_source
from tightfit.checkpoint.output_files import ChunkReader, TensorFile
from tightfit.checkpoint.recorded_tensors import ConvertedTensor, RecordedTensor
from tightfit.checkpoint.tensors import read_locations
from tightfit.errors import ModelError

# loading diffusers' own conversion warns of what nobody asked about
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def layout_of(pipe: Any, folder: Path) -> Path:
    """The folder of `pipe` without its weights."""
    pipe.save_pretrained(folder)
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    return folder


def nothing_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr(single_file_utils, "fetch_diffusers_config", refused)


@pytest.fixture(params=list(PIPELINES), scope="module")
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A pipeline, the single file with its weights, and its layout."""
    folder = tmp_path_factory.mktemp("original")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipe, tensors = PIPELINES[request.param]()
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "all.safetensors")
    return pipe, folder / "all.safetensors", layout_of(pipe, folder / "layout")


def test_a_pipeline_is_what_diffusers_makes_of_the_file(
    original: tuple[Any, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file, layout = original
    nothing_of_the_network(monkeypatch)
    result = shard(file, tmp_path / "out", "--config", layout, "--max-shard-size", "20kB")
    assert result.exit_code == 0, result.output
    with quietly():
        ours = weights(type(pipe).from_pretrained(tmp_path / "out"))
        theirs = weights(type(pipe).from_single_file(file, config=str(layout), local_files_only=True))
    assert_same(ours, theirs)
    assert_same(ours, weights(pipe))  # the conversion was inverted
    assert names(layout) <= names(tmp_path / "out")
    if type(pipe) is diffusers.StableDiffusionPipeline:
        assert re.search(r"left out 103 of \d+ tensors of all.safetensors that no network has", result.stderr)


def test_one_component_of_a_pipeline(original: tuple[Any, Path, Path], tmp_path: Path) -> None:
    pipe, file, layout = original
    for name in ("vae", "text_encoder"):
        assert shard(file, tmp_path / name, "--config", layout, "--component", name).exit_code == 0
        network = getattr(pipe, name)
        assert_same(type(network).from_pretrained(tmp_path / name).state_dict(), network.state_dict())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_network_is_what_diffusers_makes_of_the_file(name: str, dtype: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network, tensors = NETWORKS[name]()
    stored = {key: value.to(getattr(torch, dtype)).contiguous().clone() for key, value in tensors.items()}
    assert stored.keys() != network.state_dict().keys()
    save_file(stored, tmp_path / "one.safetensors")
    network.save_config(tmp_path / "layout")
    assert shard(tmp_path / "one.safetensors", tmp_path / "out", "--config", tmp_path / "layout").exit_code == 0
    with quietly():
        ours = type(network).from_pretrained(tmp_path / "out")
        theirs = type(network).from_single_file(
            str(tmp_path / "one.safetensors"), config=str(tmp_path / "layout"), local_files_only=True
        )
    assert_same(ours.state_dict(), theirs.state_dict())
    written = load_file(tmp_path / "out/diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in written.values()} == {getattr(torch, dtype)}
    if dtype == "float32":
        assert_same(written, network.state_dict())


def written_by_recording(file: Path, convert: Any, folder: Path) -> tuple[Tensors, list[ConvertedTensor]]:
    """What `convert` makes of recorded tensors, written and read again; and those that are neither stored nor whole."""
    made = convert(checkpoint={name: RecordedTensor.stored(place) for name, place in read_locations([file]).items()})
    sources = {name: tensor_source(value, value.dtype) for name, value in made.items()}
    with ChunkReader() as reader, (folder / "made.safetensors").open("wb") as stream:
        for chunk in TensorFile("made", sources).chunks(reader):
            stream.write(chunk)
    return load_file(folder / "made.safetensors"), [
        each for each in sources.values() if isinstance(each, ConvertedTensor)
    ]


@pytest.mark.parametrize("name", THIN)
def test_conversions_with_fixed_widths(name: str, tmp_path: Path) -> None:
    make, class_name = THIN[name]
    tensors = make()
    save_file(tensors, tmp_path / "thin.safetensors")
    convert = SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    ours, computed = written_by_recording(tmp_path / "thin.safetensors", convert, tmp_path)
    assert computed
    assert_same(ours, dict(convert(checkpoint=dict(tensors))))


def test_every_operation_of_torch_is_followed(tmp_path: Path) -> None:
    """What no conversion of today does: the result is computed from all that it is made of."""
    tensors = {"a": torch.randn(4, 6), "b": torch.randn(6, 4), "c": torch.randn(2, 1, 4, 1), "d": torch.arange(24)}
    save_file(tensors, tmp_path / "some.safetensors")

    def convert(checkpoint: Tensors) -> Tensors:
        a, b, c, d = (checkpoint[name] for name in "abcd")
        q, k, v = a.chunk(3, dim=1)
        return {
            "q": q, "k": k.contiguous(), "v": v.t(), "rows": a[1:3], "column": a[:, 2], "first": c[:, :, 0, 0],
            "joined": torch.cat([b[3:], b[:3]]), "wide": torch.cat([a, b.T], dim=1),
            "mixed": torch.cat([a, d[:6][None]]),
            "squeezed": c.squeeze(), "flat": a.reshape(-1), "heads": d.reshape(2, 3, 4).permute(1, 0, 2).reshape(6, 4),
            "half": a.half(), "sum": a @ b + 1, "bits": a.view(torch.int32), "kept": a.to(torch.float32),
            "eye": torch.eye(2), "twice": torch.stack([b, b]), "scalar": d[5], "same": d.clone(), "flipped": d.flip(0),
            "unbound": b.unbind()[1],
        }  # fmt: skip

    ours, _ = written_by_recording(tmp_path / "some.safetensors", convert, tmp_path)
    assert_same(ours, convert(dict(tensors)))


def test_memory_is_that_of_three_tensors_at_most(tmp_path: Path) -> None:
    size = 2**26
    tensors = {name: torch.full((2**10, 2**14), index, dtype=torch.float32) for index, name in enumerate("abcdef")}
    save_file(tensors, tmp_path / "large.safetensors")
    places = read_locations([tmp_path / "large.safetensors"])
    a, b, c, d, e, f = (RecordedTensor.stored(places[name]) for name in "abcdef")
    joined = torch.cat(a.chunk(2)[::-1])  # in stretches; the others are computed
    side = torch.cat([c[:, :8], c[:, 8:]], dim=1)
    made = {"whole": joined, "turned": b.t(), "side": side, "d": d, "e": e.t(), "f": f}
    sources = {name: tensor_source(value, torch.bfloat16) for name, value in made.items()}
    del tensors
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen, ChunkReader() as reader, (tmp_path / "made").open("wb") as stream:
        for chunk in TensorFile("made", sources).chunks(reader):
            stream.write(chunk)
    assert size < seen.most - before < 3 * size + 2**25
    with highest_anonymous() as seen, ChunkReader() as reader, (tmp_path / "made").open("wb") as stream:
        for chunk in TensorFile("made", {name: sources[name] for name in ("whole", "d", "f")}).chunks(reader):
            stream.write(chunk)
    assert seen.most - before < size + 2**25


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4)}, tmp_path / "one.safetensors")
    place = read_locations([tmp_path / "one.safetensors"])["a"]
    with pytest.raises(ModelError, match="writes into a tensor"):
        RecordedTensor.stored(place).add_(1)
    with pytest.raises(RuntimeError, match="meta"):
        float(RecordedTensor.stored(place)[0])


# layouts, and files in diffusers' own names


def test_a_file_in_the_names_of_diffusers(tiny_model: Path, tmp_path: Path) -> None:
    for name, library in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        file = shutil.copy(tiny_model / name / f"{library}.safetensors", tmp_path / f"{name}.safetensors")
        result = shard(file, tmp_path / name, "--config", tiny_model, "--component", name, "--max-shard-size", "20kB")
        assert result.exit_code == 0, result.output
        kept = {path.name: path.read_bytes() for path in (tiny_model / name).glob("*.json")}
        assert kept.items() <= content(tmp_path / name).items()
        stored = {
            key: value for path in (tmp_path / name).glob("*.safetensors") for key, value in load_file(path).items()
        }
        assert_same(stored, load_file(file))
    assert shard(tiny_model / "vae/diffusion_pytorch_model.safetensors", tmp_path / "vae").exit_code == 0  # beside it
    assert names(tmp_path / "vae") == {"checksums.json", "config.json", "diffusion_pytorch_model.safetensors"}


def test_components_that_the_file_lacks_are_copied_from_the_layout(tiny_model: Path, tmp_path: Path) -> None:
    file = shutil.copy(tiny_model / "unet/diffusion_pytorch_model.safetensors", tmp_path / "new.safetensors")
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    result = shard(file, tmp_path / "out", "--config", tiny_model)
    assert result.exit_code == 0
    assert "vae is not in new.safetensors, and was copied from the layout" in result.stderr
    made, layout = (diffusers.StableDiffusionPipeline.from_pretrained(path) for path in (tmp_path / "out", tiny_model))
    assert_same(made.vae.state_dict(), layout.vae.state_dict())
    assert_same(made.unet.state_dict(), {name: value + 1 for name, value in layout.unet.state_dict().items()})


def test_a_safety_checker_is_left_out_as_diffusers_leaves_it_out(tmp_path: Path) -> None:
    pipe, tensors = PIPELINES["SD 1.x"]()
    layout = layout_of(pipe, tmp_path / "layout")
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, tmp_path / "all.safetensors")
    index = json.loads((layout / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (layout / "model_index.json").write_text(json.dumps(index))
    (layout / "safety_checker").mkdir()
    (layout / "safety_checker/config.json").write_text(json.dumps({"architectures": ["StableDiffusionSafetyChecker"]}))
    assert shard(tmp_path / "all.safetensors", tmp_path / "out", "--config", layout).exit_code == 0
    assert json.loads((tmp_path / "out/model_index.json").read_text())["safety_checker"] == [None, None]
    assert not (tmp_path / "out/safety_checker").exists()
    assert diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "out").safety_checker is None


def test_weights_are_rounded_as_they_are_converted(tmp_path: Path) -> None:
    pipe, tensors = PIPELINES["SDXL"]()
    layout = layout_of(pipe, tmp_path / "layout")
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, tmp_path / "all.safetensors")
    words = ("--config", layout, "--dtype", "bfloat16")
    assert shard(tmp_path / "all.safetensors", tmp_path / "out", *words).exit_code == 0
    made = type(pipe).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert_same(weights(made), {name: value.to(torch.bfloat16) for name, value in weights(pipe).items()})
    assert all(
        value.dtype == torch.bfloat16
        for file in (tmp_path / "out").rglob("*.safetensors")
        for value in load_file(file).values()
    )


def test_diffusers_is_as_it_was(original: tuple[Any, Path, Path], tmp_path: Path) -> None:
    function = single_file_utils.load_model_dict_into_meta
    assert shard(original[1], tmp_path / "out", "--config", original[2]).exit_code == 0
    assert single_file_utils.load_model_dict_into_meta is single_file_model.load_model_dict_into_meta is function


# what is wrong


@pytest.fixture
def sd(tmp_path: Path) -> tuple[Path, Path, Tensors]:
    pipe, tensors = PIPELINES["SD 1.x"]()
    stored = {name: value.contiguous().clone() for name, value in tensors.items()}
    save_file(stored, tmp_path / "all.safetensors")
    return tmp_path / "all.safetensors", layout_of(pipe, tmp_path / "layout"), stored


def test_a_file_that_lacks_some_weights(sd: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    file, layout, tensors = sd
    tensors.pop("model.diffusion_model.input_blocks.0.0.bias")
    save_file(tensors, file)
    said = complaint(file, tmp_path / "out", "--config", layout)
    assert re.search(r"unet lacks 1 of \d+ weights: conv_in.bias", said)
    assert not (tmp_path / "out").exists()


def test_a_file_that_lacks_a_component(sd: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    file, layout, tensors = sd
    save_file({name: value for name, value in tensors.items() if not name.startswith("first_stage_model")}, file)
    said = complaint(file, tmp_path / "out", "--config", layout)
    assert re.search("all.safetensors has the weights of .*unet.*, and of vae neither it nor .*layout has any", said)
    assert "take one network with --component" in said
    assert re.search(
        "all.safetensors has no weights of vae",
        complaint(file, tmp_path / "v", "--config", layout, "--component", "vae"),
    )
    assert shard(file, tmp_path / "unet", "--config", layout, "--component", "unet").exit_code == 0


def test_weights_that_do_not_fit_the_layout(sd: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    file, layout, _ = sd
    config = layout / "unet/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"in_channels": 9}))
    said = complaint(file, tmp_path / "out", "--config", layout)
    assert re.search(r"has 'conv_in.weight' as \[16, 4, 3, 3\], and unet needs \[16, 9, 3, 3\]", said)


def test_the_layout_of_another_model(sd: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    _, tensors = NETWORKS["LTX"]()
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, tmp_path / "ltx.safetensors")
    said = complaint(tmp_path / "ltx.safetensors", tmp_path / "out", "--config", sd[1])
    assert re.search("ltx.safetensors has no weights of text_encoder: .*: is .*layout the layout of this file", said)


def test_wrong_files_and_layouts(sd: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    file, layout, _ = sd
    out = tmp_path / "out"
    assert "there is no config.json beside it: name a folder with the layout" in complaint(file, out)
    assert "nowhere does not exist" in complaint(file, out, "--config", tmp_path / "nowhere")
    assert "unknown component 'vea': did you mean 'vae'?" in complaint(
        file, out, "--config", layout, "--component", "vea"
    )
    assert "StableDiffusionPipeline" not in complaint(file, out, "--config", layout / "unet", "--component", "unet")
    for ending in (".ckpt", ".bin"):
        pickled = file.with_suffix(ending)
        pickled.write_bytes(b"cos\nsystem\n")
        assert "is a pickle, which can run code when it is read" in complaint(pickled, out, "--config", layout)
    file.with_suffix(".gguf").write_bytes(b"GGUF")
    assert "is no safetensors file: only .safetensors are read" in complaint(
        file.with_suffix(".gguf"), out, "--config", layout
    )
    (layout / "unet/config.json").write_text("{")
    assert "is no JSON" in complaint(file, out, "--config", layout)
    file.write_bytes(file.read_bytes()[:-1])
    assert "is truncated" in complaint(file, out, "--config", layout)
    save_file({}, file)
    assert "has 0 tensors" in complaint(file, out, "--config", layout)
    assert not out.exists()
