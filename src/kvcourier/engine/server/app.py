"""The routes of the embedded engine's HTTP server.

Decides which path does what. Refuses to know how: reading requests is `job`, running them
`generation`, showing them `render` and `answer`.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcourier.api_keys import ApiKeys, RequireApiKey
from kvcourier.config import Limits
from kvcourier.core.params import PullIntent, PushIntent, parse_params
from kvcourier.engine.server.answer import GenerationAnswer
from kvcourier.engine.server.body import parse_body, read_body
from kvcourier.engine.server.draining import Drain
from kvcourier.engine.server.errors import ApiError, json_response
from kvcourier.engine.server.generation import (
    ActiveGenerations,
    Generation,
    ServedEngine,
)
from kvcourier.engine.server.job import JobReader
from kvcourier.engine.server.metrics import EngineCollector, ServerMetrics
from kvcourier.engine.server.prompts import PromptReader, Tokenizer
from kvcourier.engine.server.render import Renderer
from kvcourier.engine.server.traces import RequestTraces, StoryTeller
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, TransferId
from kvcourier.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from kvcourier.runtime.diary import Diary
from kvcourier.runtime.interface import Endpoint, let_holder_go
from kvcourier.tracing.interface import Tracing

DEFAULT_MAX_BODY_BYTES = 16 << 20
_LIVENESS_PERIOD_S = 0.25


def create_app(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    *,
    endpoint: Endpoint | None,
    role: str,
    limits: Limits,
    served_model_name: str,
    metrics_text: Callable[[], bytes] | None = None,
    registry: CollectorRegistry | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    api_keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The server as an ASGI application; run it with `serve`.

    Whatever runs it should call `app.state.begin_stop()`, on the event loop, when it begins to
    stop: requests under way then end with an error instead of holding up the shutdown.

    Args:
        endpoint: what moves KV, or None for an instance that works alone.
        role: told to routers in /kvcourier/instance, as it is.
        metrics_text: body of /metrics; by default what is in `registry`.
        registry: takes the metrics of this server and of `engine.stats()`; by default a new one.
        max_body_bytes: longer bodies get HTTP 413.
        api_keys: of which a call must have one, but for /health and /metrics; None: open to all.
        tracing: takes a span of each request, and of what it went through.
    """
    registry = CollectorRegistry() if registry is None else registry
    registry.register(EngineCollector(engine.stats, served_model_name))
    active = ActiveGenerations()
    diary = Diary(limits)
    traces = None if tracing is None else RequestTraces(tracing, StoryTeller(endpoint, diary))
    generation_routes = _GenerationRoutes(
        engine=engine,
        tokenizer=tokenizer,
        jobs=JobReader(
            PromptReader(tokenizer, engine.info, limits.max_parts),
            engine.info,
            served_model_name,
            limits,
        ),
        active=active,
        metrics=ServerMetrics(registry, served_model_name),
        served_model_name=served_model_name,
        max_body_bytes=max_body_bytes,
        endpoint=endpoint,
        limits=limits,
        diary=diary,
        traces=traces,
    )
    text = metrics_text or (lambda: generate_latest(registry))
    models = ModelList(
        [
            ModelCard(
                id=served_model_name,
                created=int(time.time()),
                root=engine.info.name,
                max_model_len=engine.info.max_model_len,
            )
        ]
    )

    async def list_models(_: Request) -> Response:
        return json_response(models)

    async def health(_: Request) -> Response:
        if not engine.is_alive:
            return _engine_dead(engine).response()
        return json_response({"status": "ok"})

    async def show_metrics(_: Request) -> Response:
        return Response(text(), media_type=CONTENT_TYPE_LATEST)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watches = [asyncio.create_task(_watch_engine(engine, active))]
        if traces is not None:
            watches.append(asyncio.create_task(traces.watch()))
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            active.stop()

    app = Starlette(
        routes=[
            Route("/v1/completions", generation_routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation_routes.chat_completions, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/health", health),
            Route("/metrics", show_metrics),
            Route("/drain", Drain(engine, active).serve, methods=["GET", "POST", "DELETE"]),
            *_endpoint_routes(endpoint, role, active, diary, engine),
        ],
        exception_handlers={
            ApiError: _show_api_error,
            HTTPException: _show_http_exception,
            Exception: _show_bug,
        },
        lifespan=lifespan,
    )
    if api_keys is not None:
        app.add_middleware(RequireApiKey, keys=api_keys)
    app.state.begin_stop = active.stop
    return app


class _GenerationRoutes:
    """The two routes that generate text."""

    def __init__(
        self,
        *,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        jobs: JobReader,
        active: ActiveGenerations,
        metrics: ServerMetrics,
        served_model_name: str,
        max_body_bytes: int,
        endpoint: Endpoint | None,
        limits: Limits,
        diary: Diary,
        traces: RequestTraces | None,
    ) -> None:
        self._endpoint = endpoint
        self._diary = diary
        self._traces = traces
        self._limits = limits
        self._engine = engine
        self._tokenizer = tokenizer
        self._jobs = jobs
        self._active = active
        self._metrics = metrics
        self._served_model_name = served_model_name
        self._max_body_bytes = max_body_bytes

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatCompletionRequest)

    async def _answer(
        self, request: Request, kind: type[CompletionRequest] | type[ChatCompletionRequest]
    ) -> ASGIApp:
        # Time to the first token includes reading and tokenizing the prompt.
        arrival = self._metrics.now_s()
        try:
            if not self._engine.is_alive:
                raise _engine_dead(self._engine)
            body = parse_body(await read_body(request, self._max_body_bytes), kind)
            try:
                self._active.require_open()
                job = await self._jobs.read(body, request.headers.get("x-request-id"))
            except ApiError:
                self._let_holder_go(body.kv_transfer_params)
                raise
        except ApiError as error:
            self._metrics.count_failed(error.status)
            return error.response()
        except ClientDisconnect:
            return _say_nothing
        generation = Generation(
            job, self._engine, self._decode, self._metrics, arrival, self._diary
        )
        if self._traces is not None:
            self._traces.follow(job, request.headers.items())
        renderer = Renderer(generation, self._served_model_name)
        return GenerationAnswer(generation, renderer, self._active, self._metrics)

    def _let_holder_go(self, params: object) -> None:
        """A refused request may have KV waiting for it on another instance."""
        with contextlib.suppress(ParamsError):
            intent = parse_params(params, self._limits)
            if self._endpoint is not None and isinstance(intent, PullIntent | PushIntent):
                request_id = RequestId(f"refused-{secrets.token_hex(8)}")
                let_holder_go(self._endpoint, request_id, intent)

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Cleaning up spaces changes text that was already sent.
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def _endpoint_routes(
    endpoint: Endpoint | None,
    role: str,
    active: ActiveGenerations,
    diary: Diary,
    engine: ServedEngine,
) -> list[Route]:
    async def instance(_: Request) -> Response:
        if endpoint is None:
            raise ApiError(404, "this instance moves no KV: it was started without an endpoint")
        of_server = {"role": role, "draining": active.is_draining}
        return json_response(endpoint.instance_info() | of_server)

    async def story(request: Request) -> Response:
        key = request.path_params["key"]
        entries = StoryTeller(endpoint, diary).story(key)
        if entries:
            answer = json_response(entries)
        else:
            unknown = f"no transfer {key[:200]!r} is known here, or it was forgotten"
            answer = ApiError(404, unknown).response()
        answer.headers.update(diary.clock_header())
        return answer

    async def progress(request: Request) -> Response:
        transfer_id = request.path_params["transfer_id"]
        found = engine.progress(TransferId(transfer_id))
        if found is None:
            raise ApiError(404, f"no prompt of transfer {transfer_id[:200]!r} is computed here")
        return json_response({"num_tokens": found[0], "num_prompt_tokens": found[1]})

    async def let_go(request: Request) -> Response:
        transfer_id = request.path_params["transfer_id"]
        if endpoint is None or not endpoint.let_go(TransferId(transfer_id)):
            raise ApiError(404, f"no transfer {transfer_id[:200]!r} is held here")
        return Response(status_code=204)

    return [
        Route("/kvcourier/instance", instance),
        Route("/kvcourier/transfers/{transfer_id:path}", let_go, methods=["DELETE"]),
        Route("/kvcourier/transfers/{transfer_id:path}", progress),
        # A request id is the client's choice and may contain slashes.
        Route("/kvcourier/story/{key:path}", story),
    ]


async def _watch_engine(engine: ServedEngine, active: ActiveGenerations) -> None:
    """A dead engine sends no events; this is what ends the requests that wait for one."""
    while True:
        await asyncio.sleep(_LIVENESS_PERIOD_S)
        if not engine.is_alive:
            active.fail_all(_engine_dead(engine))


async def _say_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a client that has gone."""


def _engine_dead(engine: ServedEngine) -> ApiError:
    reason = engine.error or "its log says why"
    return ApiError(503, f"the engine has stopped: {reason}", code="engine_dead")


async def _show_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _show_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = ApiError(error.status_code, error.detail).response()
    response.headers.update(error.headers or {})
    return response


async def _show_bug(_: Request, error: Exception) -> Response:
    return ApiError(500, f"internal error: {type(error).__name__}; the log has details").response()
