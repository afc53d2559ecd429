"""`POST /generate`: tokens in, tokens out, in the form that environments of Atropos ask for.

`{"prompt": {"prompt_token_ids": [...]}, "logprobs": 0, "max_tokens": 64, "n": 2, ...}` is answered with, for each
answer, its `token_ids`, `text`, `finish_reasons` and `logprobs` (`[{token id: log-probability}]` of each token), beside
`versions` and `digests` as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from slipstream.inference.plugin.http.client import GuestClient

_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Tokens(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: list[_Count]


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    prompt: _Tokens | str
    model: str = ""
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: _Count = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Count] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    stream: bool = False


def generate_route(client: GuestClient, names: Sequence[str]) -> Route:
    """The route. Refusals are raised as vLLM's own errors, which its handlers answer."""
    decoder = msgspec.json.Decoder(_Query)

    async def generate(request: Request) -> JSONResponse:
        try:
            query = decoder.decode(await request.body())
        except msgspec.DecodeError as error:
            raise VLLMValidationError(f"not a valid request: {error}") from error
        if query.model and query.model not in names:
            return _error(404, "NotFoundError", f"the model {query.model} does not exist: use {', '.join(names)}")
        if query.stream:
            raise VLLMValidationError("this route has no streams: use /v1/completions, or leave stream out")
        client.check_admission(query.n)
        prompt = {"prompt": query.prompt} if isinstance(query.prompt, str) else msgspec.to_builtins(query.prompt)
        if prompt.get("prompt_token_ids") == []:
            raise VLLMValidationError("the prompt has no tokens")
        (rendered,) = await client.renderer.render_cmpl_async([prompt])
        room = client.model_config.max_model_len - len(rendered["prompt_token_ids"])
        if room < 1:
            raise VLLMValidationError(
                f"the prompt has {len(rendered['prompt_token_ids'])} tokens, and the context ends before"
            )
        left_out = {"prompt", "model", "stream"}
        values = {name: value for name, value in msgspec.structs.asdict(query).items() if name not in left_out}
        values["max_tokens"] = min(query.max_tokens or room, room)
        params = SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)
        final: Any = None
        async for output in client.generate(rendered, params, "generate"):
            final = output
        return JSONResponse(_described(final, query))

    return Route("/generate", generate, methods=["POST"])


def _described(final: Any, query: _Query) -> dict[str, Any]:
    answers = final.outputs
    found: dict[str, Any] = {
        "text": [answer.text for answer in answers],
        "prompt": final.prompt if isinstance(query.prompt, str) else None,
        "finish_reasons": [answer.finish_reason for answer in answers],
        "prompt_token_ids": list(final.prompt_token_ids),
        "token_ids": [list(answer.token_ids) for answer in answers],
    }
    if query.logprobs is not None:
        found["logprobs"] = [[[_numbers(each)] for each in answer.logprobs] for answer in answers]
    if query.prompt_logprobs is not None:
        found["prompt_logprobs"] = [each and _numbers(each) for each in final.prompt_logprobs]
    return found


def _numbers(logprobs: Any) -> dict[str, float]:
    """By token id, as JSON has it; the sampled token comes first."""
    return {str(token): value.logprob if math.isfinite(value.logprob) else -9999.0 for token, value in logprobs.items()}


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
