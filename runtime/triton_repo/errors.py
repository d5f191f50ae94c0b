"""What a request is answered that cannot be served, or was not wanted any more."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from trtree.runtime.executor import QueueFullError
from trtree.runtime.service import ServiceUnavailableError
from trtree.runtime.session import RequestError
from trtree.runtime.triton_repo.inputs import InputError

_log = logging.getLogger(__name__)


def triton_error(error: Exception) -> Any:
    """As Triton tells it to the client; what is nobody's expectation is logged too."""
    kind = pb_utils.TritonError
    code = kind.INTERNAL
    if isinstance(error, InputError | RequestError):
        code = kind.INVALID_ARG
    elif isinstance(error, QueueFullError | ServiceUnavailableError):
        code = kind.UNAVAILABLE
    else:
        _log.error("a request failed", exc_info=error)
    return kind(str(error), code)


def send_error(sender: Any, error: Exception, *, in_stream: bool = False) -> None:
    """Answer with an error, and nothing after it. ``in_stream``: other responses went before."""
    response = pb_utils.InferenceResponse(error=triton_error(error))
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    try:
        if in_stream:
            # Apart: a model that called this one would wait for ever for the end of a stream
            # whose last response is an error.
            sender.send(response)
            sender.send(flags=final)
        else:
            sender.send(response, flags=final)
    except Exception:
        _log.exception("an error could not be sent")
