"""The endpoints: a request becomes a job, and its result an answer."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from esm_turbo import __version__
from esm_turbo.files.writing import is_full_disk
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.serve.engine import Engine
from esm_turbo.serve.errors import RequestError, busy, failure, invalid, printable
from esm_turbo.serve.jobs import CheckJob, Job
from esm_turbo.serve.schemas import (
    ContextAnswer,
    ContextId,
    ContextRequest,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    ErrorAnswer,
    GenerateAnswer,
    GenerateRequest,
    ProteinVariantsRequest,
    ScoreAnswer,
    ScoreRequest,
    VariantsAnswer,
    VariantsRequest,
)
from esm_turbo.serve.service import Service
from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS

_log = logging.getLogger("esm_turbo")
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The body cannot be read."},
    401: {"model": ErrorAnswer, "description": "The token is missing or wrong."},
    404: {"model": ErrorAnswer, "description": "There is no such context."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    422: {"model": ErrorAnswer, "description": "A field is wrong; `loc` names it."},
    429: {"model": ErrorAnswer, "description": "Too many requests are waiting; see Retry-After."},
}
_ANY_ERROR: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorAnswer, "description": "Any other error."}}
_CANDIDATE = ("candidate", "pseudo_perplexity", "pseudo_log_likelihood", "mean_log_probability")
# Bytes of a body that are parsed at once.
_SMALL_BODY = 16 << 10
Render = Callable[[Any], dict[str, Any]]
_Checked = TypeVar("_Checked")


class _Request(Request):
    """Reads large bodies in another thread."""

    async def json(self) -> Any:
        body, parse = await self.body(), partial(json.loads, object_pairs_hook=_distinct)
        return parse(body) if len(body) < _SMALL_BODY else await asyncio.to_thread(parse, body)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which parsers would otherwise keep the last of equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise invalid("an object of the body has a key twice")
    return found


class _Route(APIRoute):
    """Its requests are of `_Request`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


def router(service: Service) -> APIRouter:
    """The endpoints of a service."""
    routes = APIRouter(responses=_ANY_ERROR)
    version_1 = APIRouter(prefix="/v1", responses=_ERRORS, route_class=_Route)

    def variant_scores(context: str | list[str] | None, scores: Any) -> dict[str, Any]:
        return {
            "context": context,
            "wild_type": scores.wild_type,
            "first_position": scores.first_position,
            "method": scores.method,
            "refresh": scores.refresh,
            "variants": [{"variant": one.variant, "score": one.score} for one in scores.scores],
            "run": service.run(contexts=scores.arm != "full"),
        }

    @version_1.post("/contexts", response_model=ContextAnswer, summary="Store the context of a protein, or of homologs")
    async def add_context(request: Request, body: ContextRequest) -> Response:
        job = await _checked(service, request, service.context_job, body.sequence)
        return await _answer(service, request, job, service.describe_context)

    @version_1.get("/contexts/{id}", response_model=ContextAnswer, summary="Look a context up")
    async def get_context(request: Request, id: ContextId) -> Response:
        return JSONResponse(await _checked(service, request, service.describe_context, id))

    @version_1.post("/contexts/{id}/score", response_model=ScoreAnswer, summary="Score candidates after a protein")
    async def score(request: Request, id: ContextId, body: ScoreRequest) -> Response:
        job = await _checked(service, request, service.score_job, id, body)

        def render(scores: Any) -> dict[str, Any]:
            ranks = {index: rank for rank, index in enumerate(scores.ranking(), start=1)}
            rows = []
            for index, one in enumerate(scores.scores):
                row = {name: getattr(one, name) for name in _CANDIDATE} | {"rank": ranks[index]}
                if body.background != "none":
                    row |= {name: getattr(one, name) for name in SPECIFICITY_COLUMNS}
                    row["background"] = None if one.background is None else one.background._asdict()
                if body.log_probabilities:
                    row["log_probabilities"] = list(one.log_probabilities)
                rows.append(row)
            run = service.run()
            return {"context": id, "place": scores.place, "refresh": scores.refresh, "candidates": rows, "run": run}

        return await _answer(service, request, job, render, body.stream)

    @version_1.post("/contexts/{id}/variants", response_model=VariantsAnswer, summary="Score variants of a protein")
    async def variants(request: Request, id: ContextId, body: VariantsRequest) -> Response:
        job = await _checked(service, request, service.variants_job, id, body)
        return await _answer(service, request, job, partial(variant_scores, id), body.stream)

    @version_1.post("/variants", response_model=VariantsAnswer, summary="Score variants, also after homologs")
    async def protein_variants(request: Request, body: ProteinVariantsRequest) -> Response:
        job = await _checked(service, request, service.protein_variants_job, body)
        return await _answer(service, request, job, partial(variant_scores, body.context), body.stream)

    @version_1.get("/models", summary="The model, in the shape of OpenAI's API")
    async def models() -> Response:
        one = {"id": service.name, "object": "model", "created": 0, "owned_by": "esm_turbo"}
        return JSONResponse({"object": "list", "data": [one]})

    @version_1.post("/embeddings", response_model=EmbeddingsAnswer, summary="Mean embeddings, in OpenAI's shape")
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        job = await _checked(service, request, service.embed_job, body)

        def render(means: Any) -> dict[str, Any]:
            data = []
            for index, mean in enumerate(means.numpy().astype("<f4")):
                coded: Any = mean.tolist()
                if body.encoding_format == "base64":
                    coded = base64.b64encode(mean.tobytes()).decode()
                data.append({"object": "embedding", "index": index, "embedding": coded})
            usage = {"prompt_tokens": job.tokens, "total_tokens": job.tokens}
            run = service.run(contexts=body.context is not None)
            return {"object": "list", "data": data, "model": service.name, "usage": usage, "run": run}

        return await _answer(service, request, job, render)

    @version_1.post("/generate", response_model=GenerateAnswer, summary="Generate residues")
    async def generate(request: Request, body: GenerateRequest) -> Response:
        job = await _checked(service, request, service.generate_job, body)

        def render(made: Any) -> dict[str, Any]:
            names = ("sequence", "new_residues", "positions", "log_probs", "mean_log_prob")
            columns = made.sequences, made.new_residues, made.positions, made.log_probs, made.mean_log_probs
            rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
            run = service.run(contexts=service.homologs is None or bool(body.context))
            return {"sequences": rows, "seed": body.seed, "run": run}

        return await _answer(service, request, job, render)

    @routes.get("/healthz", summary="Whether the service works")
    async def health() -> Response:
        engines, limits = service.engines, service.limits
        if not all(one.alive for one in engines):
            raise RequestError(503, "the engine has stopped")
        if (seconds := max(one.batch_seconds for one in engines)) > limits.seconds:
            raise RequestError(503, f"a batch has been running for {seconds:.0f} s")
        queue = {"requests": service.jobs, "running": service.running, "seconds": round(service.engine.backlog, 3)}
        about = {"status": "ok", "version": __version__, "model": service.name}
        homologs = None if service.homologs is None else vars(service.homologs)
        return JSONResponse({**about, "queue": queue, "limits": vars(limits), "homologs": homologs})

    @routes.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics_text(), media_type="text/plain; version=0.0.4")

    routes.include_router(version_1)
    return routes


async def _checked(service: Service, request: Request, check: Callable[..., _Checked], *given: Any) -> _Checked:
    """What a check of a request gives, such as its job; others are checked in turn with those of other clients."""
    request.state.end = asyncio.get_running_loop().time() + service.limits.seconds
    checked: _Checked = await _finished(service, request, service.checks, CheckJob(partial(check, *given)))
    return checked


async def _answer(service: Service, request: Request, job: Job, render: Render, stream: bool = False) -> Response:
    """Run a job and answer with its result; or at once, with lines that report its progress."""
    if stream:
        job.client = request.state.client
        service.engine.submit(job)
        return _Stream(service, job, render, request.state.end)
    result = await _finished(service, request, service.engine, job)
    return Response(await asyncio.to_thread(_json, render, result), media_type="application/json")


async def _finished(service: Service, request: Request, engine: Engine, job: Job) -> Any:
    """The result of a job, which ends when its client leaves, or with the time of the request."""
    job.client = request.state.client
    engine.submit(job)
    future = asyncio.wrap_future(job.future)
    # asyncio complains of errors that nobody took, as those of jobs whose client has left.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.ensure_future(_client_left(request))
    try:
        left = request.state.end - asyncio.get_running_loop().time()
        await asyncio.wait({future, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise RequestError(499, "the client has left") if gone.done() else _too_late(service, job)
        return await _result(future)
    finally:
        gone.cancel()
        if not future.done():
            engine.cancel(job)


class _Stream(StreamingResponse):
    """Lines of JSON: progress whenever there is some, at last the result or the error."""

    def __init__(self, service: Service, job: Job, render: Render, end: float) -> None:
        super().__init__(_lines(service, job, render, end), media_type="application/x-ndjson")
        self._engine, self._job = service.engine, job

    async def __call__(self, *arguments: Any) -> None:
        """Send the lines; the job ends with the answer, also if its client leaves before the first line."""
        try:
            await super().__call__(*arguments)
        finally:
            self._engine.cancel(self._job)


async def _lines(service: Service, job: Job, render: Render, end: float) -> AsyncIterator[bytes]:
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    job.report = lambda done, tokens: loop.call_soon_threadsafe(news.set)  # type: ignore[assignment]
    future = asyncio.wrap_future(job.future)
    future.add_done_callback(lambda _: news.set())
    try:
        async with asyncio.timeout_at(end):
            while not future.done():
                await news.wait()
                news.clear()
                yield (
                    json.dumps({"progress": {"done": min(job.done, job.tokens), "total": job.tokens}}).encode() + b"\n"
                )
        result = await _result(future)
        yield b'{"result": ' + await asyncio.to_thread(_json, render, result) + b"}\n"
    except TimeoutError:
        yield json.dumps({"error": _too_late(service, job).to_dict()}).encode() + b"\n"
    except RequestError as error:
        yield json.dumps({"error": error.to_dict()}).encode() + b"\n"
    except Exception as error:
        _log.error("an answer failed: %s: %s", type(error).__name__, printable(str(error)))
        yield json.dumps({"error": failure().to_dict()}).encode() + b"\n"
    finally:
        if not future.done():
            service.engine.cancel(job)


def _json(render: Render, result: Any) -> bytes:
    return json.dumps(render(result), allow_nan=False, separators=(",", ":")).encode()


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_late(service: Service, job: Job) -> RequestError:
    seconds = service.limits.seconds
    if job.began:
        return RequestError(504, f"the request took more than {seconds:g} s; ask for less at a time")
    return busy(f"the request waited for {seconds:g} s; try again later", seconds / 4)


async def _result(future: asyncio.Future[Any]) -> Any:
    """The result of a job, or what a client is told of its error."""
    try:
        return await future
    except RequestError:
        raise
    except Exception as error:
        message = printable(str(error))
        if is_out_of_memory(error):
            raise RequestError(503, f"not enough memory: {message}") from error
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            raise invalid(message) from error
        if is_full_disk(error):
            raise RequestError(507, "the disk of the store is full") from error
        _log.error("a request failed: %s: %s", type(error).__name__, message)
        raise failure() from error
