"""A file of requests, one a line → checked requests with seeds, names and digests. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightfit.errors import InputError, RequestError, TightfitError
from tightfit.files import check_regular
from tightfit.run.files import check_count, numbered
from tightfit.run.plan_options import check_steps, demo_request
from tightfit.run.prompt import Prompt, slug_of
from tightfit.schema.batch import PromptLine
from tightfit.schema.request import Request

__all__ = ["BatchRequest", "LineDefaults", "file_names", "name_requests", "read_lines"]

EXAMPLE = '{"prompt": "a red fox", "seed": 1}'
MOST_LISTED = 10  # line numbers in a message


@dataclass(frozen=True)
class LineDefaults:
    """What the command line says for lines that do not say it themselves."""

    request: Request
    negative: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch."""

    line: int  # number of its line in the file, from 1
    prompt: Prompt
    request: Request
    name: str = ""  # of its files, without suffix; unique in the batch
    digest: str = ""  # of all that its pictures depend on

    @property
    def work(self) -> int:
        """About how long it takes, in pixels and steps; unknown fields count as usual ones."""
        asked = self.request
        pixels = (asked.height or 512) * (asked.width or 512) * (asked.frames or 1)
        return pixels * asked.batch * (asked.steps or 30)


def read_lines(path: Path, defaults: LineDefaults, *, demo: bool = False) -> list[BatchRequest]:
    """Return the requests in the JSON lines of the file `path`; `demo`: with the defaults of the demo model.

    A line without a seed has that of `defaults`, or one made from its prompt. Empty lines are left out. RequestError
    for wrong lines, with the first one's number and field; InputError for a file that cannot be read or has no request.
    """
    found, wrong, prompts = [], [], Counter[str]()
    for number, text in enumerate(_read(path).split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            line = _parsed(text)
            prompts[line.prompt] += 1
            found.append(_merged(number, line, defaults, prompts[line.prompt], demo=demo))
        except TightfitError as error:
            wrong.append((number, error))
    if wrong:
        (number, first), others = wrong[0], [str(number) for number, _ in wrong[1 : MOST_LISTED + 1]]
        more = f" and {len(wrong) - 1 - MOST_LISTED} more" if len(wrong) - 1 > MOST_LISTED else ""
        also = f"; also wrong: line {', '.join(others)}{more}" if others else ""
        raise RequestError(f"{path} line {number}: {first}{also}", line=number, **first.facts)
    if not found:
        raise InputError(f"{path} has no requests: write one a line, e.g. {EXAMPLE}", path=str(path))
    return found


def _read(path: Path) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:  # ValueError: a null byte
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the requests {path}: {cause}", path=str(path)) from None


def _parsed(text: bytes) -> PromptLine:
    try:
        given = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"byte {error.start + 1} of the line is not UTF-8: save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        cause = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise RequestError(f"this is not JSON ({cause}): write {EXAMPLE}, or the prompt alone in quotes") from None
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, dict):
        raise RequestError(f"a request is {EXAMPLE}, or the prompt alone in quotes, not {given!r:.60}")
    return PromptLine.from_mapping(given)


def _merged(number: int, line: PromptLine, defaults: LineDefaults, nth: int, *, demo: bool) -> BatchRequest:
    """The request of `line`, the `nth` with its prompt."""
    said = {name: getattr(line, name) for name in Request.model_fields if name in line.model_fields_set}
    arguments = defaults.request.arguments | line.arguments
    negative = line.negative_prompt if "negative_prompt" in line.model_fields_set else defaults.negative
    arguments |= {} if negative is None else {"negative_prompt": "text"}
    request = Request(**dict(defaults.request) | said | {"arguments": arguments})
    check_steps(request)
    check_count(request.batch)
    seed = line.seed if line.seed is not None else defaults.seed
    prompt = Prompt(line.prompt, _seed_of(line.prompt, nth) if seed is None else seed, negative)
    return BatchRequest(number, prompt, demo_request(request) if demo else request, line.name or "")


def _seed_of(prompt: str, nth: int) -> int:
    """A seed made from the prompt, another one for each line with the same."""
    return int.from_bytes(hashlib.sha256(f"{nth} {prompt}".encode()).digest()[:4])


def name_requests(requests: Sequence[BatchRequest], mark: Mapping[str, Any]) -> tuple[BatchRequest, ...]:
    """Return `requests` with digests, and with names where they have none.

    `mark` is what all of their pictures depend on: the model, and options that change values. RequestError if two would
    write the same file.
    """
    named = [_identified(asked, mark) for asked in requests]
    lines: dict[str, BatchRequest] = {}
    for asked in named:
        for file in file_names(asked.name, asked.request.batch):
            earlier = lines.setdefault(file.casefold(), asked)
            if earlier is not asked:
                same = "asks for the same pictures" if earlier.digest == asked.digest else f"would write {file}, too"
                raise RequestError(
                    f"line {asked.line} {same} as line {earlier.line}: give it another seed or another name",
                    line=asked.line,
                )
    return tuple(named)


def _identified(asked: BatchRequest, mark: Mapping[str, Any]) -> BatchRequest:
    prompt = asked.prompt
    parts = [dict(mark), prompt.text, prompt.negative, prompt.seed, asked.request.to_mapping()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return replace(asked, digest=digest, name=asked.name or f"{slug_of(prompt.text)}-{digest[:8]}")


def file_names(name: str, count: int) -> list[str]:
    """Return the names of the files of a request with `count` pictures."""
    return [path.name for path in numbered(Path(f"{name}.png"), count)]
