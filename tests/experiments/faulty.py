"""``launch/train.py`` with the planted fault that FAULT names: micro-batches or messages that come late."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddpm_ds.cli.train import main
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.messages import Channel
from ddpm_ds.training import session

LATE_SECONDS = 0.1
batches, receive = session.replica_batches, Channel.receive


def late_batches(*words: Any, **options: Any) -> Iterator[MicroBatch]:
    for micro_batch in batches(*words, **options):
        time.sleep(LATE_SECONDS)
        yield micro_batch


def late_receive(channel: Channel) -> Any:
    time.sleep(LATE_SECONDS)
    return receive(channel)


if os.environ["FAULT"] == "data wait":
    setattr(session, "replica_batches", late_batches)  # noqa: B010
if os.environ["FAULT"] == "communication":
    setattr(Channel, "receive", late_receive)  # noqa: B010
sys.exit(main())
