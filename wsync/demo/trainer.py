"""The trainer actor: real optimizer steps, one version after each, and the digests that everything is judged by.

Digests are taken while nothing changes the weights; the next optimizer step starts as soon as `publish` has
returned, while the version is still on its way. A publish that did not really take its snapshot would be seen.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import msgspec
import torch
from torch import nn
from torch.linalg import vector_norm

import wsync
from wsync.demo.check import digest_tensors
from wsync.demo.models import initial_model
from wsync.demo.records import Kill, Snapshot
from wsync.demo.text import LESSON, PROMPTS, make_tokenizer
from wsync.status import HolderPhase, ReplicaPhase, VersionStatus

CHANNEL = "demo"
STEP_SIZE = 4e-4
"""Part of a tensor's norm by which one step changes it."""
VECTOR_STEP_SIZE = 2e-3
"""The same for vectors: of a norm's 64 numbers, the smaller step could by chance change none."""


class Target(msgspec.Struct, frozen=True):
    """A receiving host that may be hit: its holder, and a replica of another host to kill at the same moment."""

    host: str
    holder_pid: int
    replica_pid: int


class Trainer:
    """Trains one model on one process. Ray runs it as an actor with several threads; one of them trains."""

    def __init__(self, model_name: str, seed: int, config: wsync.Config) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._tokenizer = make_tokenizer(model_name)
        self._model = initial_model(model_name, seed)
        lesson = self._tokenizer.encode(LESSON)
        self._batch = torch.tensor([lesson[:48], lesson[48:96]])  # int64, [sequence, token]
        self._step = 0
        self._loss = 0.0
        self._training: threading.Thread | None = None
        self._publisher = wsync.Publisher(CHANNEL, self._model, config=config)
        self._last: wsync.Publication
        self._train()

    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        return [self._tokenizer.encode(prompt) for prompt in PROMPTS]

    def publish(self, num_replicas: int, targets: list[Target], timeout_s: float) -> tuple[Snapshot, Kill | None]:
        """Publish the weights of the last step; returns once the version is staged for so many replicas.

        With `targets`, a relaying holder and a replica are killed on the way. The weights of the next step are
        being made meanwhile. Raises the errors of wsync.
        """
        if self._training is not None:
            self._training.join()
        step, loss = self._step, self._loss
        digests = digest_tensors(self._model.state_dict())
        start_s = time.monotonic()
        publication = self._publisher.publish(step=step)
        published_s = time.monotonic()
        # The first bytes are on their way since the packing: a kill must come at once to be in time.
        kill = self._kill(publication, targets, published_s) if targets else None
        self._training = threading.Thread(target=self._train, name="train")
        self._training.start()
        publication.wait_staged(timeout_s=timeout_s, num_replicas=num_replicas)
        transfer_s = time.monotonic() - start_s
        self._last = publication
        snapshot = Snapshot(
            version=publication.version,
            step=step,
            loss=loss,
            digests=digests,
            publish_pause_s=publication.pause_s,
            transfer_s=transfer_s,
            nbytes=publication.status().nbytes,
        )
        return snapshot, kill

    def wait_committed(self, num_replicas: int, timeout_s: float) -> VersionStatus:
        """Wait until so many replicas run the last version. Raises the errors of wsync."""
        self._last.wait_committed(timeout_s=timeout_s, num_replicas=num_replicas)
        return self._last.status()

    def close(self) -> None:
        """Finish the step at hand and leave the channel."""
        if self._training is not None:
            self._training.join()
        self._publisher.close()

    def _train(self) -> None:
        self._loss = train_step(self._model, self._batch)
        self._step += 1

    def _kill(self, publication: wsync.Publication, targets: list[Target], published_s: float) -> Kill:
        """SIGKILL a holder that others pull from, while it is pulling itself, and a replica of another host."""
        status = publication.status()
        parents = {parent for holder in status.holders for parent in holder.parents}
        relaying = [target for target in targets if target.host in parents]
        chosen = (relaying or targets)[0]
        os.kill(chosen.holder_pid, signal.SIGKILL)
        os.kill(chosen.replica_pid, signal.SIGKILL)
        after_s = time.monotonic() - published_s
        return Kill(
            version=publication.version,
            host=chosen.host,
            holder_pid=chosen.holder_pid,
            replica_pid=chosen.replica_pid,
            after_s=after_s,
            was_relaying=bool(relaying),
            was_whole=_is_whole(status, chosen.host) or _is_whole(publication.status(), chosen.host),
        )


def _is_whole(status: VersionStatus, host: str) -> bool:
    """The host has, or had, all of the version: its holder says so, or a replica there could commit it."""
    there = {ReplicaPhase.STAGED, ReplicaPhase.COMMITTED}
    return any(holder.host == host and holder.phase == HolderPhase.WHOLE for holder in status.holders) or any(
        replica.host == host and replica.phase in there for replica in status.replicas
    )


def train_step(model: nn.Module, batch: torch.Tensor) -> float:
    """One step of SGD on `batch` (int64, [sequence, token]), scaled per tensor to its norm (LARS, arXiv:1708.03888).

    Every parameter is changed in place; returns the loss before the step. Most of such small updates would be lost
    to rounding in bf16, so they are rounded up or down by chance, right on average (arXiv:1502.02551).
    """
    model.train()
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    torch.autograd.backward(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                length, slope = (vector_norm(t, dtype=torch.float32) for t in (parameter, parameter.grad))
                step_size = STEP_SIZE if parameter.dim() > 1 else VECTOR_STEP_SIZE
                scale = step_size * length / slope.clamp_min(1e-12)
                parameter.copy_(_round_to_bf16(parameter.grad.float().mul_(-scale).add_(parameter)))
    model.zero_grad(set_to_none=True)
    model.eval()
    return float(loss.detach())


def _round_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """float32 values that bf16 can hold: one of the two neighbours of each, the nearer one more often."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32)
    return noise.add_(values.view(torch.int32)).bitwise_and_(~0xFFFF).view(torch.float32)
