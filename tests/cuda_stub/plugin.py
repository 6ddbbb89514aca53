"""pytest -p cuda_stub.plugin: tests on the stub's cards, with numbers, and without races.

A test in which the stub found a race or a hazard fails, however it ended. Tests marked `realtime` are skipped: the
stub's clock is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cuda_stub import driver

COUNTED = "launches mallocs refused host_registers host_unregisters copies_P2D copies_H2D copies_D2P copies_D2H"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not driver.loaded():
        raise pytest.UsageError("the stub's libraries are not preloaded: use tests/cuda_stub/run.sh")
    torch.cuda.init()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("realtime"):
            item.add_marker(pytest.mark.skip(reason="needs real time: the stub's clock is made up"))


@contextmanager
def rates_without_numbers() -> Iterator[None]:
    """Rates are those of the stub's clock: nobody needs the products."""
    from tightfit.run import planning_context as machines

    measured = {name: getattr(machines, name) for name in ("measure_rates", "layer_overheads")}

    def without_numbers(measure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return measure(*args, **kwargs)

        return run

    for name, measure in measured.items():
        setattr(machines, name, without_numbers(measure))
    yield
    for name, measure in measured.items():
        setattr(machines, name, measure)


@pytest.fixture(autouse=True, scope="session")
def _rates_without_numbers() -> Iterator[None]:
    with rates_without_numbers():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    from cuda_stub.compute import computing

    before = {name: driver.count(name) for name in ("races", "hazards")}
    with computing():
        outcome: Any = yield
    found = {name: driver.count(name) - count for name, count in before.items()}
    if any(found.values()) and outcome.excinfo is None and not item.get_closest_marker("racing"):
        outcome.force_exception(AssertionError(f"the stub's detector found {found}: its lines are in stderr"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from cuda_stub.compute import not_computed

    terminalreporter.write_line("stub: " + ", ".join(f"{name} {driver.count(name)}" for name in COUNTED.split()))
    for name, why in not_computed.items():
        terminalreporter.write_line(f"not computed: {name}: {why}")
