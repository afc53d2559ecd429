"""The service: an HTTP API and pages over `LocalRuns`, and a thread to keep the queue going.

It runs the code of all its users as one Unix user. Runs do not end with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, Field

from slipstream.config import load_config
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.http_listener import limited_protocol
from slipstream.processes.identity import this_machine
from slipstream.processes.temporary import temporary
from slipstream.service import bundles, page
from slipstream.service.access import MAX_BODY, Access, tokens_of
from slipstream.service.index import Index
from slipstream.service.runs import LocalRuns, NoSuchRun
from slipstream.service.store import Store, name_from
from slipstream.service.submission import unix_user

_TICK_S = 1.0
_CSP = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
_HEADERS = {"Content-Security-Policy": _CSP, "Referrer-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}


class Submission(BaseModel, extra="forbid"):
    """A run to submit."""

    name: str = Field(max_length=100)
    settings: str = Field(max_length=MAX_BODY)
    """A run file with absolute paths, and paths of `code` as `code/NAME`."""
    code: dict[str, str] = {}
    """Python files in base64 by their names."""
    digest: str = ""
    """Of `code`, see `bundles.digest_of`."""


def make_app(store: Store, index: Index, folder: Path, *, needs_token: bool) -> Access:
    """The application; new runs are below `folder`."""
    keeper = Keeper(LocalRuns(store, records=index.records))

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
        return HTMLResponse(page.problem(str(error)), status, _HEADERS)

    @app.get("/v1/health")
    def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json({"status": "ok", "machine": this_machine()})

    @app.post("/v1/runs", status_code=201)
    def submit(request: Request, submission: Submission) -> Response:  # pyright: ignore[reportUnusedFunction]
        with temporary("submission") as place:
            run_file = place / f"{name_from(submission.name)}.toml"
            run_file.write_text(submission.settings, encoding="utf-8")
            if submission.code:
                code = bundles.unpack(store.root, submission.digest, submission.code)
                (place / bundles.FOLDER).symlink_to(code)
            loaded = load_config(run_file)
        return _json(runs_of(request).submit(loaded, run_file.stem), 201)

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
        return _json(_places(store, index, str(request.scope["user"])))

    @app.get("/")
    def list_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        user = str(request.scope["user"])
        return HTMLResponse(page.runs_page(runs_of(request).all(), _places(store, index, user)), headers=_HEADERS)

    @app.get("/runs/{name}")
    def run_page(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        runs = runs_of(request)
        return HTMLResponse(page.run_page(runs.one(name), runs.log(name, -1).data), headers=_HEADERS)

    @app.post("/runs/{name}/cancel")
    def cancel_page(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return RedirectResponse(f"/runs/{runs_of(request).cancel(name).id}", 303)

    return Access(app, store, unix_user(), needs_token)


def _places(store: Store, index: Index, user: str) -> list[Any]:
    """All places; runs of others have no names there."""
    mine = {record.id for _, record in index.records() if record.owner == user}
    return [
        msgspec.structs.replace(each, runs=tuple(run if run in mine else "another user's" for run in each.runs))
        for each in LocalRuns(store, records=index.records).places()
    ]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, _HEADERS, "application/json")


class Keeper:
    """A thread for the queue."""

    def __init__(self, runs: LocalRuns) -> None:
        self._runs, self._over = runs, threading.Event()
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
            try:
                self._runs.keep_going()
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
