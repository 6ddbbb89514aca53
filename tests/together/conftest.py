"""Footprints that several tests need."""

from __future__ import annotations

from run.conftest import shared_footprints  # noqa: F401  another folder's fixture
