"""What a client is told when something goes wrong.

Decides status codes and the error object. Refuses to know where errors come from.

status  type                   when
400     invalid_request_error  the request cannot be served as it is
404     invalid_request_error  unknown model (code model_not_found), path or story
405     invalid_request_error  a known path with the wrong method
413     invalid_request_error  the body is too large
500     server_error           the engine failed at this request, or a bug of ours
503     server_error           another instance, or a retry, can serve the request: its KV could
                               not be received (code kv_transfer_failed), the engine has died
                               (engine_dead) or is stopping (shutting_down)
"""

import msgspec
from starlette.responses import Response

from kvcourier.errors import KVCourierError
from kvcourier.openai import ErrorBody, ErrorDetail


class ApiError(KVCourierError):
    """A request ends with this status and error object.

    Args:
        status: HTTP status.
        message: one sentence.
        param: the field of the request, as a path like `messages[0].role`.
        code: a word for programs, where the status does not say enough.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))

    def response(self) -> Response:
        """The HTTP answer."""
        return json_response(self.body, self.status)


def bad_field(param: str, message: str) -> ApiError:
    """A field of the body cannot be used: HTTP 400."""
    return ApiError(400, f"{param}: {message}", param=param)


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
