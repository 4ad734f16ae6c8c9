"""A replica actor: generates tokens greedily all the while, and commits new versions between two tokens.

It starts with NaN in every weight. One thread owns the model, commits, generates and checks; the actor's own
thread only starts and stops it, and Ray starts it anew in a fresh process when it is killed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec
import ray
import torch

import wsync
from wsync.demo.check import addresses, digest_tensors, fingerprint
from wsync.demo.models import blank_model
from wsync.demo.records import Check, Failed, Joined, RecordWriter, Span
from wsync.demo.trainer import CHANNEL

MAX_NEW_TOKENS = 24
CHECK_CHANCE = 1 / 24
SPAN_S = 0.5


class ReplicaTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is told when it starts."""

    name: str
    model_name: str
    seed: int
    config: wsync.Config
    prompts: tuple[tuple[int, ...], ...]
    records_dir: str
    join_timeout_s: float
    think_s: float
    """Rest between two tokens, so that small models leave some of the processor to the others."""


class ServingReplica:
    """The actor. Its constructor returns at once; `Joined`, `Check` and `Span` records tell how it goes."""

    def __init__(self, task: ReplicaTask) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(task,), name="serve", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Generate the token at hand, leave the channel. True when the thread has ended."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, task: ReplicaTask) -> None:
        writer = RecordWriter(Path(task.records_dir), task.name, os.getpid())
        try:
            _serve(task, writer, self._stop)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            writer.write(Failed(task.name, os.getpid(), time.monotonic(), text))
            raise
        finally:
            writer.close()


def _serve(task: ReplicaTask, writer: RecordWriter, stop: threading.Event) -> None:
    torch.set_num_threads(1)
    model = blank_model(task.model_name)
    watch = Watch(task, model, writer)
    replica = wsync.Replica(CHANNEL, model, config=task.config)
    try:
        writer.write(Joined(task.name, os.getpid(), ray.get_runtime_context().get_node_id(), time.monotonic()))
        commit = replica.wait_version(1, timeout_s=task.join_timeout_s)
        watch.committed(commit.version, commit.pause_s)
        writing = Greedy(model, task.prompts)
        while not stop.wait(task.think_s):
            newer = replica.commit_latest()
            if newer is not None:
                watch.committed(newer.version, newer.pause_s)
            writing.step()
            watch.stepped(replica.version)
        watch.finished(replica.version)
    finally:
        replica.close()


class Greedy:
    """Endless greedy decoding, prompt after prompt, with a key/value cache that outlives commits."""

    def __init__(self, model: torch.nn.Module, prompts: tuple[tuple[int, ...], ...]) -> None:
        self._model = model
        self._prompts = cycle(prompts)
        self._cache: Any = None
        self._next = torch.empty(0)
        self._num_left = 0

    @torch.no_grad()
    def step(self) -> None:
        """One more token."""
        if self._num_left == 0:
            self._num_left, self._cache = MAX_NEW_TOKENS, None
            self._next = torch.tensor([next(self._prompts)])  # int64, [1, token]
        output = self._model(input_ids=self._next, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        self._next = output.logits[:, -1:].argmax(-1)
        self._num_left -= 1


class Watch:
    """Looks at the live weights of one replica between its steps, and writes down what it sees."""

    def __init__(self, task: ReplicaTask, model: torch.nn.Module, writer: RecordWriter) -> None:
        self._name, self._pid = task.name, os.getpid()
        self._model, self._writer = model, writer
        self._random = random.Random(f"{task.seed}/{task.name}/{self._pid}")
        self._addresses = addresses(model.state_dict())
        self._fingerprint: tuple[int, ...] = ()
        self._version = 0
        self._num_tokens = self._num_torn = 0
        self._longest_gap_s = 0.0
        self._last_token_s = self._last_span_s = time.monotonic()

    def committed(self, version: int, pause_s: float) -> None:
        """The weights have just been changed to `version`, as the replica says."""
        self.flush()
        if not self._version:
            self._last_token_s = time.monotonic()  # serving begins here
        self._version = version
        self._check("commit", version, pause_s)
        self._fingerprint = fingerprint(self._model.state_dict())

    def stepped(self, version: int) -> None:
        """A token has been generated; nothing may have changed since the last look."""
        now = time.monotonic()
        self._num_tokens += 1
        self._longest_gap_s = max(self._longest_gap_s, now - self._last_token_s)
        self._last_token_s = now
        if fingerprint(self._model.state_dict()) != self._fingerprint:
            self._num_torn += 1
        if self._random.random() < CHECK_CHANCE:
            self._check("step", version, 0.0)
        if now - self._last_span_s > SPAN_S:
            self.flush()

    def finished(self, version: int) -> None:
        """Serving has ended; a last look."""
        self.flush()
        self._check("step", version, 0.0)

    def flush(self) -> None:
        """Write down the tokens since the last time."""
        self._last_span_s = time.monotonic()
        if self._num_tokens:
            gap_s, torn = self._longest_gap_s, self._num_torn
            span = Span(self._name, self._pid, self._last_span_s, self._version, self._num_tokens, gap_s, torn)
            self._writer.write(span)
        self._num_tokens = self._num_torn = 0
        self._longest_gap_s = 0.0

    def _check(self, moment: Literal["commit", "step"], version: int, pause_s: float) -> None:
        start_s = time.monotonic()
        tensors = self._model.state_dict()
        is_in_place = addresses(tensors) == self._addresses
        check = Check(self._name, self._pid, start_s, moment, version, digest_tensors(tensors), is_in_place, pause_s)
        self._writer.write(check)
        self._last_token_s += time.monotonic() - start_s  # the check's own time is no gap in serving
