"""What a request is answered that cannot be served, or was not wanted any more."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from trtree.runtime.executor import QueueFullError
from trtree.runtime.service import ServiceUnavailableError
from trtree.runtime.session import RequestError
from trtree.runtime.triton_repo.inputs import InputError

_log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The client went away or said stop."""


def triton_error(error: Exception) -> Any:
    """As Triton tells it to the client; what is nobody's expectation is logged too."""
    kind = pb_utils.TritonError
    code = kind.INTERNAL
    if isinstance(error, InputError | RequestError):
        code = kind.INVALID_ARG
    elif isinstance(error, QueueFullError | ServiceUnavailableError):
        code = kind.UNAVAILABLE
    elif isinstance(error, Cancelled):
        code = kind.CANCELLED
    else:
        _log.error("a request failed", exc_info=error)
    return kind(str(error), code)


def send_error(sender: Any, error: Exception) -> None:
    """Answer with an error, and nothing after it."""
    response = pb_utils.InferenceResponse(error=triton_error(error))
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception:
        _log.exception("an error could not be sent")
