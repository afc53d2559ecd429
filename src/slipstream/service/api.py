"""The service: an HTTP API and pages over `LocalRuns`, and a thread to keep the queue going.

It runs the code of all its users as one Unix user. Runs do not end with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, Field

from slipstream.config import load_config
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.http_listener import limited_protocol
from slipstream.processes.identity import this_machine
from slipstream.processes.temporary import temporary
from slipstream.service import bundles, page
from slipstream.service.access import MAX_BODY, Access, tokens_of
from slipstream.service.deployments.chatting import answered
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.deployments.records import Options
from slipstream.service.index import Index
from slipstream.service.page_routes import HEADERS, html, page_routes
from slipstream.service.preflight import implied_by
from slipstream.service.records import NO_OPTIONS, Asked
from slipstream.service.runs import LocalRuns, NoSuchRun, Shown, ShownPlace
from slipstream.service.store import Store, name_from
from slipstream.service.submission import unix_user

_TICK_S = 1.0


class Submission(BaseModel, extra="forbid"):
    """A run to submit."""

    name: str = Field(max_length=100)
    settings: str = Field(max_length=MAX_BODY)
    """A run file with absolute paths, and paths of `code` as `code/NAME`."""
    code: dict[str, str] = {}
    """Python files in base64 by their names."""
    digest: str = ""
    """Of `code`, see `bundles.digest_of`."""
    to: Literal["local", "slurm", "ray"] = "local"
    asked: dict[str, Any] = Field(default={}, max_length=20)
    """Options for a cluster, as in `records.Asked`."""


class Deploying(BaseModel, extra="forbid"):
    """A checkpoint to deploy."""

    run: str = Field(max_length=100)
    step: int | None = Field(default=None, ge=0)
    options: dict[str, float | None] = {}
    """See `deployments.records.Options`."""


def make_app(store: Store, index: Index, folder: Path, *, needs_token: bool) -> Access:
    """The application; new runs are below `folder`."""
    keeper = Keeper(LocalRuns(store, records=index.records), LocalDeployments(store))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        keeper.start()
        yield
        keeper.stop()
        index.close()

    app = FastAPI(title="Slipstream", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)

    def runs_of(request: Request) -> LocalRuns:
        owner = str(request.scope["user"])
        return LocalRuns(store, owner, records=index.records, folder=folder, is_service=True)

    @app.exception_handler(SlipstreamError)
    def explain(request: Request, error: SlipstreamError) -> Response:  # pyright: ignore[reportUnusedFunction]
        status = 404 if isinstance(error, NoSuchRun) else 400 if isinstance(error, ConfigError) else 500
        if request.url.path.startswith("/v1/"):
            return _json({"error": type(error).__name__, "message": str(error)}, status)
        return html(page.problem(str(error)), status)

    @app.get("/v1/health")
    def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json({"status": "ok", "machine": this_machine()})

    @app.post("/v1/runs", status_code=201)
    def submit(request: Request, submission: Submission) -> Response:  # pyright: ignore[reportUnusedFunction]
        given, asked = submission, _asked(submission.asked)
        return _json(submit_text(request, given.name, given.settings, given.code, given.digest, given.to, asked), 201)

    @app.get("/v1/runs")
    def all_runs(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(runs_of(request).all())

    @app.get("/v1/runs/{name}")
    def one_run(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(runs_of(request).one(name))

    @app.get("/v1/runs/{name}/logs")
    def logs(  # pyright: ignore[reportUnusedFunction]
        request: Request, name: str, offset: Annotated[int, Query(ge=-1, lt=1 << 62)] = 0
    ) -> Response:
        return _json(runs_of(request).log(name, offset))

    @app.post("/v1/runs/{name}/cancel")
    def cancel(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(runs_of(request).cancel(name))

    @app.get("/v1/runs/{name}/checkpoints")
    def checkpoints(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(runs_of(request).checkpoints(name))

    @app.get("/v1/gpus")
    def gpus(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(places_of(request))

    def deployments_of(request: Request) -> LocalDeployments:
        return LocalDeployments(store, str(request.scope["user"]), is_service=True)

    @app.get("/v1/deployments")
    def all_deployments(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(deployments_of(request).all())

    @app.post("/v1/deployments", status_code=201)
    def deploy(request: Request, asked: Deploying) -> Response:  # pyright: ignore[reportUnusedFunction]
        try:
            options = msgspec.convert(asked.options, Options, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"options: {error}") from None
        return _json(deployments_of(request).deploy(asked.run, asked.step, options), 201)

    @app.get("/v1/deployments/{name}")
    def one_deployment(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(deployments_of(request).one(name))

    @app.post("/v1/deployments/{name}/undeploy")
    def undeploy(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(deployments_of(request).undeploy(name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await answered(deployments_of(request), await request.body())

    def submit_text(
        request: Request,
        name: str,
        settings: str,
        files: Mapping[str, str] = MappingProxyType({}),
        digest: str = "",
        to: str = "local",
        asked: Asked = NO_OPTIONS,
    ) -> Shown:
        with temporary("submission") as place:
            run_file = place / f"{name_from(name)}.toml"
            run_file.write_text(settings, encoding="utf-8")
            if files:
                code = bundles.unpack(store.root, digest, files)
                (place / bundles.FOLDER).symlink_to(code)
            loaded = load_config(run_file, implied=implied_by(to))
        return runs_of(request).submit(loaded, run_file.stem, to=to, asked=asked)

    def places_of(request: Request) -> list[ShownPlace]:
        return _places(store, index, str(request.scope["user"]))

    app.include_router(page_routes(runs_of, deployments_of, places_of, submit_text))
    return Access(app, store, unix_user(), needs_token or None)


def _asked(given: dict[str, Any]) -> Asked:
    try:
        return msgspec.convert(given, Asked)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the options for the cluster are wrong ({error}): see slipstream submit --help") from None


def _places(store: Store, index: Index, user: str) -> list[ShownPlace]:
    """All places; runs of others have no names there."""
    mine = {record.id for _, record in index.records() if record.owner == user}
    return [
        msgspec.structs.replace(each, runs=tuple(run if run in mine else "another user's" for run in each.runs))
        for each in LocalRuns(store, records=index.records).places()
    ]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, HEADERS, "application/json")


class Keeper:
    """A thread for the queue and the host of deployments."""

    def __init__(self, runs: LocalRuns, deployments: LocalDeployments) -> None:
        self._runs, self._deployments, self._over = runs, deployments, threading.Event()
        self._thread = threading.Thread(target=self._work, name="queue", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the pass under way."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(_TICK_S):
            for each in (self._runs, self._deployments):
                try:
                    each.keep_going()
                except (SlipstreamError, OSError) as error:  # the next pass may do better
                    print(f"warning: {error}", flush=True)


def serve(store: Store, url: str, host: str, port: int, announce: Callable[[int, bool], None]) -> None:
    """Serve until a signal. Without tokens on loopback alone. Raises ConfigError."""
    from slipstream.commands.serve import free_port, is_loopback

    needs_token = bool(tokens_of(store))
    if not needs_token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and there is no token: make one with "
            "slipstream serve --new-token USER, or listen on 127.0.0.1"
        )
    app = make_app(store, Index(store, url), Path("runs").absolute(), needs_token=needs_token)
    port = free_port(host, port)
    announce(port, needs_token)
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=limited_protocol(),
        log_level="error",  # uvicorn warns of each refused connection
        proxy_headers=False,
        server_header=False,
    )
