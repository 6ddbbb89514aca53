"""Names of pictures, and files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tightfit.errors import InputError, RunError
from tightfit.files import replacing
from tightfit.run.files import check_writable, output_paths, save_pictures


def picture(colour: str = "red") -> Image.Image:
    return Image.new("RGB", (8, 8), colour)


class Unsaveable:
    """A picture that fails when half of it is in the file."""

    def save(self, path: Path, **kwargs: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# names


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red circle, on the LEFT!", "a-red-circle-on-the-left.png"),
        ("../../etc/passwd", "etc-passwd.png"),
        ("кот", "picture.png"),
        ("x" * 300, "x" * 60 + ".png"),
    ],
)
def test_without_a_name_it_is_made_from_the_prompt(prompt: str, name: str) -> None:
    assert output_paths(None, prompt, 1) == [Path(name)]


def test_without_a_name_nothing_is_overwritten(tmp_path: Path) -> None:
    for name in ("fox.png", "fox-2.png"):
        (tmp_path / name).touch()
    (tmp_path / "fox-3.png").symlink_to("nowhere")
    assert output_paths(None, "fox", 1) == [Path("fox-4.png")]
    assert output_paths(tmp_path, "fox", 1) == [tmp_path / "fox-4.png"]


def test_several_pictures_get_numbers_and_are_kept_together(tmp_path: Path) -> None:
    assert output_paths(None, "fox", 2) == [Path("fox-0.png"), Path("fox-1.png")]
    (tmp_path / "fox-1.png").touch()
    assert output_paths(None, "fox", 2) == [Path("fox-2-0.png"), Path("fox-2-1.png")]
    assert output_paths(Path("a.PNG"), "fox", 2) == [Path("a-0.PNG"), Path("a-1.PNG")]


def test_a_name_that_is_given_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.png").touch()
    assert output_paths(Path("mine.png"), "fox", 1) == [Path("mine.png")]


@pytest.mark.parametrize("out", ["fox", "fox.jpg", "missing/", f"{'x' * 300}.gif"])
def test_other_names_are_refused(out: str) -> None:
    with pytest.raises(InputError, match=r"--out .* must be a \.png file or a folder that exists"):
        output_paths(Path(out), "fox", 1)


# what can be written


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("missing/fox.png", "No such file or directory"),
        ("file/fox.png", "Not a directory"),
        ("folder.png", "it is a folder"),
        ("x" * 300 + ".png", "File name too long"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, path: str, cause: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"cannot write .*: {cause}"):
        check_writable(Path(path))
    assert sorted(tmp_path.iterdir()) == before


def test_looking_whether_it_can_be_written_writes_nothing(tmp_path: Path) -> None:
    check_writable(Path("fox.png"))
    assert list(tmp_path.iterdir()) == []


# writing


def test_a_picture_carries_its_metadata(tmp_path: Path) -> None:
    said = {"prompt": "a «red» fox\nin the snow 🦊", "seed": "3"}
    save_pictures([picture()], [tmp_path / "fox.png"], said)
    with Image.open(tmp_path / "fox.png") as saved:
        assert saved.text == said
        assert saved.getpixel((0, 0)) == (255, 0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["fox.png"]


def test_a_file_is_replaced_whole_with_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    path = tmp_path / "fox.png"
    path.write_bytes(b"old")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / f"{'x' * 250}.png"  # the longest name there can be
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as partial:  # noqa: PT012
        partial.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_pictures_all_are_written_or_none(tmp_path: Path) -> None:
    paths = output_paths(tmp_path / "fox.png", "fox", 2)
    paths[0].write_bytes(b"old")
    with pytest.raises(RunError, match=r"cannot write .*fox-1\.png: no space left"):
        save_pictures([picture(), Unsaveable()], paths, {})
    assert paths[0].read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [paths[0]]


def test_a_video_is_an_animated_png(tmp_path: Path) -> None:
    colours = ("red", "green", "blue")
    save_pictures([[picture(colour) for colour in colours]], [tmp_path / "fox.png"], {"prompt": "a fox"})
    with Image.open(tmp_path / "fox.png") as saved:
        assert saved.n_frames == 3
        assert saved.info["duration"] == 125
        assert saved.text["prompt"] == "a fox"
        for index, colour in enumerate(colours):
            saved.seek(index)
            assert saved.convert("RGB").tobytes() == picture(colour).tobytes()
