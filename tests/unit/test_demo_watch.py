"""The watch over a replica's live weights sees what it is there to see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

import wsync  # noqa: E402
from wsync.demo.records import Check, RecordReader, RecordWriter, Span  # noqa: E402
from wsync.demo.replica import ReplicaTask, Watch  # noqa: E402


class Watched:
    """A small model under watch, and the records of it."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Linear(4, 4)
        self._reader = RecordReader(folder)
        task = ReplicaTask(
            name="r0",
            model_name="tiny",
            seed=0,
            config=wsync.Config(),
            prompts=((1,),),
            records_dir=str(folder),
            join_timeout_s=1.0,
            think_s=0.0,
        )
        self.writer = RecordWriter(folder, "r0", 1)
        self.watch = Watch(task, self.model, self.writer)

    def spans(self) -> list[Span]:
        self.watch.flush()
        return [record for record in self._reader.poll() if isinstance(record, Span)]

    def checks(self) -> list[Check]:
        return [record for record in self._reader.poll() if isinstance(record, Check)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.writer.close()


def test_steps_that_leave_the_weights_alone_are_whole(watched: Watched) -> None:
    watched.watch.committed(1, 0.01)
    for _ in range(5):
        watched.watch.stepped(1)
    assert sum(span.num_tokens for span in watched.spans()) == 5


def test_a_weight_that_changes_between_commits_is_torn(watched: Watched) -> None:
    watched.watch.committed(1, 0.01)
    watched.watch.stepped(1)
    with torch.no_grad():
        watched.model.weight[0, 0] += 1
    watched.watch.stepped(1)
    assert sum(span.num_torn for span in watched.spans()) == 1


def test_a_weight_that_changes_with_a_commit_is_not_torn(watched: Watched) -> None:
    watched.watch.committed(1, 0.01)
    watched.watch.stepped(1)
    with torch.no_grad():
        watched.model.weight[0, 0] += 1
    watched.watch.committed(2, 0.01)
    watched.watch.stepped(2)
    spans = watched.spans()
    assert [(span.version, span.num_torn) for span in spans] == [(1, 0), (2, 0)]


def test_checks_carry_the_digests_of_the_version_and_its_pause(watched: Watched) -> None:
    watched.watch.committed(1, 0.25)
    with torch.no_grad():
        watched.model.bias[0] += 1
    watched.watch.finished(1)
    first, last = watched.checks()
    assert (first.moment, first.version, first.commit_pause_s, first.is_in_place) == ("commit", 1, 0.25, True)
    assert [name for name in last.digests if first.digests[name] != last.digests[name]] == ["bias"]


def test_a_replaced_tensor_is_not_in_place(watched: Watched) -> None:
    watched.watch.committed(1, 0.01)
    watched.model.weight = torch.nn.Parameter(watched.model.weight.detach().clone())
    watched.watch.finished(1)
    assert [check.is_in_place for check in watched.checks()] == [True, False]


def test_the_wait_for_the_first_version_is_no_gap_in_serving(watched: Watched) -> None:
    watched.watch._last_token_s -= 100.0
    watched.watch.committed(1, 0.01)
    watched.watch.stepped(1)
    assert all(span.longest_gap_s < 50.0 for span in watched.spans())
