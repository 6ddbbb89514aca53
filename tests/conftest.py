"""What several tests share."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from a_few import mark_one_in
from diffusers_attention_backend import own_attention_backend
from tightfit.measure import forked_work
from tiny_pipelines import CASES

# transformers swaps torch.linspace while it loads, and torch would remember that one for `with torch.device`
torch.utils._device._device_constructors()


# it decides when it is loaded, for good, whether help is coloured: not within a test of colours
importlib.import_module("typer.rich_utils")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_one_in(items)


def pytest_collection_finish() -> None:
    """Libraries are no garbage: looking through their half a million objects again and again took a tenth of the time.

    All are there now, of which some would only come with the first test that needs them.
    """
    gc.collect()
    gc.freeze()


Cache = Callable[..., Path]


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Makes an empty cache, but for folders that all tests share which ask for it, whichever process they run in.

    Autoencoders taken apart are always among them.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"

    def make(*folders: str) -> Path:
        cache = tmp_path_factory.mktemp("cache")
        (cache / "tightfit").mkdir()
        for name in ("programs", "strip_plans", *folders):
            (shared / name).mkdir(parents=True, exist_ok=True)
            (cache / "tightfit" / name).symlink_to(shared / name)
        return cache

    return make


@pytest.fixture(scope="session", autouse=True)
def own_cache(new_cache: Cache) -> Iterator[None]:
    """Nothing is read of the user's cache, and nothing added to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(new_cache()))
        yield


may_fork = forked_work._may_fork


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """Tiny pipelines are measured as fast without copies of the process, and every core runs tests already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked_work, "_may_fork", lambda copies: False)
        yield


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Measurements are done by copies of the process too, which are listed here."""
    made: list[object] = []
    job = forked_work._ForkedJob
    monkeypatch.setattr(forked_work, "_may_fork", may_fork)
    monkeypatch.setattr(forked_work, "ram_free", lambda: 2**40)
    monkeypatch.setattr(forked_work, "_ForkedJob", lambda *given, **how: made.append(given) or job(*given, **how))
    return made


@pytest.fixture(autouse=True)
def attention_backend_put_back() -> Iterator[None]:
    with own_attention_backend():
        yield


@pytest.fixture(autouse=True)
def gradients_recorded_after_it() -> Iterator[None]:
    """A test that leaves torch's gradients off fails by itself, instead of all those after it that need them."""
    yield
    recorded = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert recorded


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Stable Diffusion: 64 × 64 pixels, whose sides must be multiples of 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    CASES[0].make().save_pretrained(folder, safe_serialization=True)
    return folder
