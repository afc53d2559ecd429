"""vLLM's own web application over our engine, with the routes of inference and no others.

vLLM's application can also control an engine, with more routes in each version. Only the routes listed here are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route

from slipstream.inference.plugin.http.client import GuestClient
from slipstream.inference.plugin.http.tokens import generate_route
from slipstream.inference.plugin.server import EngineServer

ROUTES = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/inference/v1/generate"),
    }
)


async def create_app(server: EngineServer, names: Sequence[str]) -> Any:
    """The application. A request may name the model by any of `names`; answers carry the first one. Under LoRA
    they mean the adapter in service, and `NAME-base` the base model."""
    # vLLM's deprecated name for these; all supported versions have it.
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

    base_name = f"{names[0]}-base" if server.settings.lora_rank is not None else ""
    client = GuestClient(server, base_name)
    found = server.host.vllm.get_supported_tasks()
    if inspect.isawaitable(found):
        await found  # `AsyncLLM` keeps the answer: from here on it adds a request without waiting for anything
    arguments, tasks = _arguments(server, names), await client.get_supported_tasks()
    built: Any = build_app(**_taken(build_app, args=arguments, supported_tasks=tasks, model_config=client.model_config))
    state = built.state
    await init_app_state(
        **_taken(init_app_state, engine_client=client, state=state, args=arguments, supported_tasks=tasks)
    )
    _refuse_beam_search(state)
    _refuse_stored(state.openai_serving_responses)
    if base_name:
        _name_base(state.openai_serving_models, base_name)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, exception_handlers=built.exception_handlers)
    app.state = state
    kept = [route for route in built.routes if isinstance(route, Route) and _is_kept(route)]
    app.router.routes += [*kept, generate_route(client, names)]
    return app


def _is_kept(route: Any) -> bool:
    return any((method, route.path) in ROUTES for method in route.methods or ())


def _taken(function: Any, **arguments: Any) -> dict[str, Any]:
    """Only the arguments of this version's function."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


def _arguments(server: EngineServer, names: Sequence[str]) -> Any:
    """The arguments of `vllm serve`, as its handlers expect them."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.28
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[no-redef]
    arguments: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    settings = server.settings
    arguments.model, arguments.served_model_name = names[0], list(names)
    arguments.disable_log_stats = True
    arguments.enable_log_requests = False
    arguments.enable_scale_out = True
    arguments.tool_call_parser = settings.tool_parser or None
    arguments.enable_auto_tool_choice = bool(settings.tool_parser)
    arguments.structured_outputs_config.reasoning_parser = settings.reasoning_parser
    return arguments


def _refuse_beam_search(state: Any) -> None:
    """A beam is made of many requests; no answer could tell their versions."""
    from vllm.exceptions import VLLMValidationError

    def beam_search(*arguments: Any, **options: Any) -> Any:
        raise VLLMValidationError("use_beam_search is not possible here: use n and temperature")

    for name in ("openai_serving_chat", "openai_serving_completion", "openai_serving_chat_batch"):
        if (serving := getattr(state, name, None)) is not None:
            serving.beam_search = beam_search


def _refuse_stored(serving: Any) -> None:
    """vLLM stores no responses, and would answer `previous_response_id` with "not found"."""

    def not_found(response_id: str) -> Any:
        return serving.create_error_response(
            message=f"previous_response_id = {response_id:.80}: responses are not stored here, send the whole input",
            err_type="invalid_request_error",
            param="previous_response_id",
        )

    if serving is not None:
        serving._make_not_found_error = not_found


def _name_base(models: Any, base_name: str) -> None:
    """Add the base model to vLLM's names as if it were an adapter; `GuestClient` swaps the two. A request without a
    name then means the adapter in service, too."""
    from vllm.lora.request import LoRARequest

    models.lora_requests[base_name] = LoRARequest(base_name, 1, base_name)
