"""Pictures that stand in for those that a pipeline starts from: their size matters, what they show does not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from PIL import Image

from tightfit.errors import RequestError
from tightfit.records import Request
from tightfit.run.arguments import GREY
from tightfit.run.request import usual_side

__all__ = ["dummy_inputs"]


def dummy_inputs(pipe: Any, request: Request, given: Mapping[str, Any]) -> tuple[dict[str, Any], Request]:
    """Arguments `image`, `mask_image` or `video` where `pipe` takes them and they are not `given`.

    Also what is left of `request` to ask for: the size of a pipeline that takes its pictures' size is theirs.
    RequestError where a clip is needed and the request names no number of frames.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    height, width = (side or usual_side(pipe) for side in (request.height, request.width))
    found: dict[str, Any] = {}
    if "image" in taken:
        found["image"] = Image.new("RGB", (width, height), GREY)
        if "mask_image" in taken:
            found["mask_image"] = Image.new("L", (width, height), 255)
    elif "video" in taken and not {"video"} & {*given, *request.arguments}:
        if request.frames is None:
            raise RequestError(
                f"{type(pipe).__name__} starts from a clip: say of how many frames, e.g. frames=49",
                pipeline=type(pipe).__name__,
            )
        found["video"] = [Image.new("RGB", (width, height), GREY)] * request.frames
    theirs = {"height", "width"} if found and "height" not in taken else set()
    theirs |= {"frames"} if "video" in found and "num_frames" not in taken else set()
    left = Request(**{name: value for name, value in request if name not in theirs})
    said = {*given, *request.arguments}
    return {name: value for name, value in found.items() if name not in said}, left
