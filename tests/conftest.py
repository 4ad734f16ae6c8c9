"""Shared fixtures. `job` is a job of real processes that is proven to leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from _members import Job, Nursery

# The same examples on every run, and no judgement of how fast a busy machine is.
hypothesis.settings.register_profile("wsync", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("wsync")


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job with a runtime folder of its own; after the test all its processes have ended, or the test fails."""
    job = Job()
    try:
        yield job
    finally:
        request.node.add_report_section("teardown", "wsync members and holders", job.logs())
        job.close()


@pytest.fixture(scope="session", autouse=True)
def _nurseries() -> Iterator[None]:
    yield
    Nursery.close_all()
