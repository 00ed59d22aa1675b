"""The modelled device of a rank of an `ElasticJob`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from support.devices.cuda_model import ModelArray, ModelProcess
from support.devices.device_worlds import model_host, of_device, on_device
from support.jobs.elastic_rank import INCARNATION


@cache
def device() -> ModelProcess:
    """Return this process's device, made at the first call."""
    return model_host(seed=INCARNATION).process()


def look(x: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return the values of an array of the device or of the host."""
    return of_device(x, np.dtype(dtype)) if hasattr(x, "span") else np.asarray(x)


def made_late(values: np.ndarray) -> tuple[ModelArray, int]:
    """Return an array and the stream that makes it, which the model runs when it likes."""
    x, stream = on_device(device(), values), device().stream_create()
    event = device().event_create()
    device().event_record(event, device().default_stream)
    device().stream_wait_event(stream, event)
    return x, stream
