"""Routes of the service's pages: forms without script, and what they lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool

from slipstream.errors import ConfigError
from slipstream.service import deployment_pages, page, run_pages
from slipstream.service.deployments.chatting import say
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.runs import LocalRuns, Shown, ShownPlace
from slipstream.service.submission import unix_user

_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
HEADERS = {"Content-Security-Policy": _CSP, "Referrer-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
_MAX_MESSAGES = 200


def html(text: str, status: int = 200) -> Response:
    """A page."""
    return HTMLResponse(text, status, HEADERS)


def page_routes(
    runs_of: Callable[[Request], LocalRuns],
    deployments_of: Callable[[Request], LocalDeployments],
    places_of: Callable[[Request], Sequence[ShownPlace]],
    submit: Callable[[Request, str, str], Shown],
) -> APIRouter:
    """All pages. `submit` gets a name and the text of a run file."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def list_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return html(page.runs_page(runs_of(request).all(), places_of(request)))

    @router.get("/submit")
    def submit_page() -> Response:  # pyright: ignore[reportUnusedFunction]
        return html(run_pages.submit_page())

    @router.post("/submit")
    async def submit_form(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        fields = await _fields(request)
        name, settings = fields.get("name", ""), fields.get("settings", "").replace("\r\n", "\n")
        try:
            run = await run_in_threadpool(submit, request, name, settings)
        except ConfigError as error:
            return html(run_pages.submit_page(name, settings, str(error)), 400)
        return RedirectResponse(f"/runs/{run.id}", 303)

    @router.get("/compare")
    def compare_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        runs = runs_of(request)
        names = request.query_params.getlist("run")
        return html(run_pages.compare_page(runs.all(), [runs.one(name) for name in dict.fromkeys(names)]))

    @router.get("/runs/{name}")
    def run_page(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        runs, there = runs_of(request), deployments_of(request)
        run = runs.one(name)
        checkpoints = deployment_pages.checkpoints(run.id, runs.checkpoints(name), there.all())
        return html(page.run_page(run, runs.log(name, -1).data, checkpoints))

    @router.get("/runs/{name}/rollouts")
    def rollouts_page(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return html(run_pages.rollouts_page(runs_of(request).one(name)))

    @router.post("/runs/{name}/cancel")
    def cancel(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return RedirectResponse(f"/runs/{runs_of(request).cancel(name).id}", 303)

    @router.post("/runs/{name}/deploy")
    async def deploy(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        step = (await _fields(request)).get("step", "")
        if not step.isdecimal():
            raise ConfigError("name the step of a checkpoint")
        await run_in_threadpool(deployments_of(request).deploy, name, int(step[:9]))
        return RedirectResponse("/deployments", 303)

    @router.get("/deployments")
    def list_deployments(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        there = deployments_of(request)
        is_own = request.scope["user"] == unix_user()
        return html(deployment_pages.list_page(there.all(), str(there.key_file) if is_own else ""))

    @router.post("/deployments/{name}/undeploy")
    def undeploy(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        deployments_of(request).undeploy(name)
        return RedirectResponse("/deployments", 303)

    @router.get("/deployments/{name}")
    def chat_page(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        found = deployments_of(request).one(name)
        return html(deployment_pages.chat_page(found, deployment_pages.first_messages(found)))

    @router.post("/deployments/{name}")
    async def chat(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        there, fields = deployments_of(request), await _fields(request)
        found = there.one(name)
        messages, text = _conversation(fields.get("messages", "")), fields.get("text", "").strip()
        if not text:
            return html(deployment_pages.chat_page(found, messages))
        asked = [*messages, {"role": "user", "content": text.replace("\r\n", "\n")}]
        answer, fault = await run_in_threadpool(say, there, name, asked)
        if fault:
            return html(deployment_pages.chat_page(found, messages, text, fault))
        return html(deployment_pages.chat_page(found, [*asked, {"role": "assistant", "content": answer}]))

    return router


async def _fields(request: Request) -> dict[str, str]:
    """The fields of a form."""
    try:
        found = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise ConfigError(f"the form cannot be read ({error}): send it again") from None
    return {name: values[-1] for name, values in found.items()}


def _conversation(text: str) -> list[dict[str, str]]:
    """The messages that a page has kept in its form."""
    try:
        found = msgspec.json.decode(text.encode() or b"[]", type=list[dict[str, str]])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ConfigError("the conversation cannot be read: begin it anew") from None
    return found[-_MAX_MESSAGES:]
