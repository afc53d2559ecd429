"""The commands that run a model with vLLM: `chat` in the terminal and `serve-model` over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from slipstream.cli.commands import TrustRemoteCode
from slipstream.cli.output import Json, print_json, tell
from slipstream.config.addresses import check_port
from slipstream.errors import ConfigError, DataError
from slipstream.progress import printable

if TYPE_CHECKING:
    from slipstream.commands.chat import Answer, Conversation

_NAMED = "a run (its best, or else latest checkpoint), a checkpoint, a model, a LoRA adapter, or a hub id"
Base = Annotated[str | None, Parameter(help="Base model of a LoRA adapter; default: the one that the adapter names.")]
Thinking = Annotated[
    bool | None,
    Parameter(help="Think before answering, or not; default: as in the run, or as the chat template does."),
]
MaxModelLen = Annotated[
    int | None,
    Parameter(help="Maximum tokens of a conversation; default: the model's context, at most 8192 (on a GPU 32768)."),
]
GpuMemory = Annotated[float, Parameter(help="Fraction of GPU memory for vLLM.")]


def chat(
    model: Annotated[
        str | None,
        Parameter(
            help=f"A deployment; the address of an OpenAI-compatible server, up to /v1; or {_NAMED}. Default: the only "
            "deployment."
        ),
    ] = None,
    /,
    *,
    message: str | None = None,
    system: str | None = None,
    temperature: float = 0.7,
    max_tokens: int | None = None,
    thinking: Thinking = None,
    single_turn: Annotated[bool, Parameter(negative="")] = False,
    base: Base = None,
    seed: int | None = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: GpuMemory = 0.8,
    trust_remote_code: TrustRemoteCode = False,
    start_timeout: float = 600.0,
    served_name: str = "",
    key_variable: str = "",
    json: Json = False,
) -> int:
    """Chat with a model in the terminal: deployed, at an address, or served by vLLM on this machine meanwhile.

    vLLM takes up to a minute to start on a CPU. Every line is a message of one conversation; /new begins another
    conversation, Ctrl-D exits. Input from a pipe is read the same way, and standard output gets the answers only,
    without the thinking.

        slipstream chat runs/my-run
        slipstream chat my-run-step-100
        slipstream chat http://127.0.0.1:8000/v1
        slipstream chat runs/my-run --message "Hello" --temperature 0
        slipstream chat runs/my-run --single-turn < questions.txt > answers.txt

    Args:
        message: Send this message, print the answer, and exit.
        system: System prompt; default: that of the run, if the model is from one.
        temperature: Sampling temperature; 0 is greedy.
        max_tokens: Maximum tokens of an answer; default: the rest of the context.
        single_turn: Answer each message without the earlier ones.
        seed: Sampling seed: the same seed gives the same answers.
        start_timeout: Seconds to wait for vLLM to start.
        served_name: The model's name at the address; default: the only one there.
        key_variable: Environment variable that holds the address's key.
        json: Print one JSON object for each answer.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g} is no temperature: use 0 for greedy answers, or more")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} leaves no room for an answer: use 1 or more")
    from slipstream.commands.chat import Conversation, chat_tokenizer, model_at, started_server
    from slipstream.commands.evaluate_address import key_of
    from slipstream.commands.evaluation_target import is_address
    from slipstream.plan.deployable import ServeOptions, find_deployable

    request: dict[str, Any] = {"temperature": temperature}
    request |= {} if max_tokens is None else {"max_tokens": max_tokens}
    request |= {} if seed is None else {"seed": seed}
    screen = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    is_terminal = message is None and sys.stdin.isatty() and sys.stdout.isatty() and not json
    with contextlib.ExitStack() as stack:
        deployed = _deployed(model)
        if deployed is not None or (model is not None and is_address(model)):
            if thinking is not None or base is not None or max_model_len is not None:
                raise ConfigError(
                    "--thinking, --base and --max-model-len are for a server that is started: remove them"
                )
            if deployed is not None:
                talk = Conversation(*deployed[:3], deployed[3] if system is None else system)
            else:
                key = key_of(key_variable)
                talk = Conversation(str(model), model_at(str(model), served_name, key), key, system or "")
        else:
            assert model is not None
            deployable = find_deployable(model, base, trust_remote_code=trust_remote_code, quantized=True)
            tokenizer = chat_tokenizer(deployable, system, thinking, trust_remote_code=trust_remote_code)
            options = ServeOptions(
                max_model_len=max_model_len,
                max_num_seqs=1,
                gpu_memory_utilization=gpu_memory_utilization,
                enforce_eager=True,
                trust_remote_code=trust_remote_code,
            )
            with screen.status(f"starting vLLM on {escape(deployable.name)}"):
                url, key = stack.enter_context(started_server(deployable, tokenizer, options, start_timeout))
            talk = Conversation(url, deployable.name, key, tokenizer.system_prompt)
            request["stop_token_ids"] = list(tokenizer.stop_token_ids)
            talk.unknown = tokenizer.vocabulary.unknown_in
        talk.single_turn, talk.request = single_turn, request
        if is_terminal:
            return _chat_in_terminal(talk, Console(highlight=False, soft_wrap=True, emoji=False))
        for text in [message] if message is not None else _lines():
            if text == "/new":
                talk.messages = []
                continue
            _warn_of_unknown(talk.unknown(text), screen)
            _print_answer(text, talk.ask(text), screen, as_json=json)
    return 0


def _deployed(named: str | None) -> tuple[str, str, str, str] | None:
    """Address, name, key and system prompt of a ready deployment; None if another model is named. Raises ConfigError
    for one that is not ready."""
    if named is not None and (set(named) & {"/", ":"} or os.path.exists(os.path.expanduser(named))):
        return None
    from slipstream.service.deployments.deployments import deployments_here

    there = deployments_here()
    found = {each.name: each for each in there.all()}
    if named is None and len(found) != 1:
        shown = ", ".join(found) or "there is none"
        raise ConfigError(f"name a model, or a deployment: {shown}")
    deployment = found.get(named) if named is not None else next(iter(found.values()))
    if deployment is None:
        return None
    if deployment.state != "ready":
        raise ConfigError(f"{deployment.name} is {deployment.state} {deployment.reason}".rstrip())
    return there.address(deployment), deployment.name, there.key(), deployment.system_prompt


def _lines() -> Iterator[str]:
    """Read messages from standard input, without blank lines."""
    return (line.strip() for line in sys.stdin if line.strip())


def _print_answer(text: str, answer: Answer, screen: Console, *, as_json: bool) -> None:
    if as_json:
        found = dataclasses.asdict(answer)
        print_json({"message": text, "answer": found.pop("text")} | found, is_result=False)
        return
    tell(answer.text, flush=True)
    if answer.finish_reason == "length":
        screen.print(f"warning: the answer was cut at {answer.num_tokens} tokens", markup=False)


def _warn_of_unknown(unknown: Sequence[str], screen: Console) -> None:
    if unknown:
        named = ", ".join(map(repr, unknown))
        screen.print(f"warning: the model does not see {named}: its tokenizer has no token for it", markup=False)


def _chat_in_terminal(talk: Conversation, screen: Console) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - gives `input` line editing

    screen.print(f"[dim]{escape(printable(talk.model))}: /new begins a new conversation, Ctrl-D ends it[/]")
    # Many users leave with Ctrl-C instead of Ctrl-D.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            text = input("> ").strip()
            if text == "/new":
                talk.messages = []
                screen.print("[dim]a new conversation[/]")
            elif text:
                _warn_of_unknown(talk.unknown(text), screen)
                _show_answer(talk, text, screen)
    screen.print()
    return 0


def _show_answer(talk: Conversation, text: str, screen: Console) -> None:
    try:
        with screen.status(""):
            answer = talk.ask(text)
    except DataError as error:
        screen.print(f"[red]{escape(printable(str(error)))}[/]")
        return
    if answer.thinking:
        screen.print(f"[dim]{escape(printable(answer.thinking))}[/]")
    screen.print(printable(answer.text), markup=False)
    if answer.finish_reason == "length":
        screen.print(f"[dim](cut at {answer.num_tokens} tokens)[/]")


def serve_model(
    model: Annotated[str, Parameter(help=f"{_NAMED[0].upper()}{_NAMED[1:]}.")],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    thinking: Thinking = None,
    base: Base = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: GpuMemory = 0.8,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> NoReturn:
    """Serve a model over an OpenAI-compatible API: becomes vLLM's own server, with the arguments that the model needs.

    Prints the address and an example request; standard error gets vLLM's log. If the environment variable
    SLIPSTREAM_API_KEY is set, clients must send its value as the API key; without it the server accepts only
    connections from this machine. A LoRA adapter is served together with its base model, which clients call NAME-base.

        slipstream serve-model runs/my-run
        slipstream serve-model runs/my-run --port 0 --json
        SLIPSTREAM_API_KEY=... slipstream serve-model runs/my-run --host 0.0.0.0

    Args:
        host: Address to listen on; one that other machines can reach needs a key.
        port: Port to listen on; 0 chooses a free one.
        name: Model name for clients; default: the name of its folder or run.
        max_num_seqs: Maximum concurrent requests; default: 16 on a CPU, 256 on a GPU.
        json: Print the address as one line of JSON.
    """
    check_port(port)
    if max_num_seqs is not None and max_num_seqs < 1:
        raise ConfigError(f"--max-num-seqs {max_num_seqs} answers nobody: use 1 or more")
    from slipstream.commands.chat import chat_tokenizer
    from slipstream.commands.serve import KEY_SOURCE, Address, serve
    from slipstream.plan.deployable import ServeOptions, find_deployable

    options = ServeOptions(
        name=name,
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
    )
    deployable = find_deployable(model, base, trust_remote_code=trust_remote_code, quantized=True)
    tokenizer = chat_tokenizer(deployable, thinking=thinking, trust_remote_code=trust_remote_code)

    def announce(address: Address) -> None:
        if json:
            print_json({"url": address.url, "model": address.model, "needs_key": address.needs_key}, is_result=False)
            return
        body = {"model": address.model, "messages": [{"role": "user", "content": "Hello"}]}
        key = f' -H "Authorization: Bearer ${KEY_SOURCE}"' if address.needs_key else ""
        tell(f"starting vLLM's server, which serves {address.model} at {address.url}; Ctrl-C stops it")
        tell(f"  curl {address.url}/chat/completions{key} -H 'Content-Type: application/json' \\")
        tell(f"    -d {shlex.quote(dumps(body, ensure_ascii=False))}", flush=True)

    serve(deployable, tokenizer, options, announce)
