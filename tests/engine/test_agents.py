"""Agents on real clients against a real engine: whatever a client sends back, the tokens that were sampled are trained.

The model knows its turns by heart: it thinks, and calls two tools at once. Its template drops the thinking of earlier
turns, trims their text and writes their calls with other spaces, so that rendering them again gives other tokens.
"""

import asyncio
import contextlib
import json

import aiohttp
import anthropic
import openai
import pytest
import torch
from benchmarks.bridges import create_bridge

from slipstream.commands.small_models.tiny_qwen3 import END, new_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.policy import RecordingPolicy
from slipstream.orchestrator.gateway import MODEL, Gateway, SessionLost
from slipstream.orchestrator.rollouts import _record
from slipstream.records import Message, SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report
from slipstream.weights.model_files import read_model_folder
from tests.engine.conftest import start

pytestmark = [pytest.mark.engine, pytest.mark.servers]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last and message.reasoning_content %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ ((message.content or '').split('</think>') | last) | trim }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
    '<tool_call>{"name":"now","arguments":{}}</tool_call>'
)
FIRST, SECOND, THIRD = f"<think>two calls</think>Wait. {CALLS}", "<think>so </think> 3", "<think></think>done "
ADD = {
    "name": "add",
    "description": "",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
NOW = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": each} for each in (ADD, NOW)]
SAMPLING = SamplingParams(180, temperature=0.4, top_p=0.9)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A small model that knows its turns by heart, in the rows that an agent's requests make."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parent = tmp_path_factory.mktemp("taught")
    folder = new_model(parent / "model", hidden_size=64, num_layers=2, seed=3, context_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    head = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tools=TOOLS, tokenize=False)
    bare = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False)
    turns = [
        (f"{head}<|im_start|>assistant\n", f"{FIRST}{END}"),
        (
            "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n",
            f"{SECOND}{END}",
        ),
        ("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", f"{THIRD}{END}"),
    ]
    rows = [turns, [(f"{bare}<|im_start|>assistant\n", f"{SECOND}{END}"), turns[2]]]
    made = []
    for row in rows:
        ids, mask = [], []
        for given, said in row:
            for text, is_said in ((given, False), (said, True)):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                ids, mask = ids + tokens, mask + [is_said] * len(tokens)
        made.append((ids, mask))
    longest = max(len(ids) for ids, _ in made)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in made])
    mask = torch.tensor([row + [False] * (longest - len(row)) for _, row in made])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(800):
        logits = model(input_ids=ids).logits[:, :-1]
        right = torch.where(mask, ids, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            break
    torch.set_num_threads(threads)
    assert loss < 0.01
    learned = parent / "learned"
    model.save_pretrained(learned)
    tokenizer.save_pretrained(learned)
    return learned


@pytest.fixture(scope="module")
def live(taught, tmp_path_factory):
    how = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "inference_socket": True}
    with start(taught, tmp_path_factory.mktemp("agents"), **how) as engine:
        yield engine


class Episode:
    """One session; after it `turns`, and the rows that are trained."""

    def __init__(self, live, taught, **how):
        self.live, self.tokenizer = live, ChatTokenizer(taught)
        self.how = {"request_timeout_s": 60, "max_requests": 9, **how}
        self.sampling = SamplingParams(
            SAMPLING.max_tokens, SAMPLING.temperature, SAMPLING.top_p, stop_token_ids=self.tokenizer.stop_token_ids
        )

    def play(self, agent):
        """What `agent(address)` returns."""

        async def work():
            gateway = Gateway(**self.how)
            try:
                async with gateway.session(self.live.engine, self.sampling, 7, "group") as session:
                    found = await agent(session.address)
                self.session, self.turns = session, session.turns
                return found
            finally:
                await gateway.close()

        found = self.live.call(work())
        self.policy = RecordingPolicy(None, self.tokenizer, call_tool=None)
        self.conversations = _record(self.session, self.policy, self.sampling)
        self.policy.close()  # raises unless the tokens to train on are those that were sampled
        self.rows = self.policy.sequences
        return found

    def said(self):
        """The sampled tokens of each turn as text."""
        tokenizer = self.tokenizer._tokenizer
        return [tokenizer.decode(turn.completion.token_ids).replace(END, "") for turn in self.turns]

    def check(self, taught, num_rows=1):
        """The log-probabilities are those that the trainer computes at the run's sampling, at these very tokens."""
        assert len(self.rows) == num_rows
        found = score(PolicyModel.load(str(taught), "float32"), self.rows, self.sampling, micro_batch_tokens=2048)
        for row, logprobs in zip(self.rows, found.logprobs, strict=True):
            own = [value for value, sampled in zip(row.logprobs, row.mask, strict=True) if sampled]
            assert len(own) == len(logprobs)
            assert max(abs(a - b) for a, b in zip(own, logprobs.tolist(), strict=True)) < 2e-3
        assert {span.version for row in self.rows for span in row.versions} == {""}


@pytest.fixture
def episode(live, taught):
    return Episode(live, taught)


def history(message, **more):
    return {"role": "assistant", "content": message.content, **more}


@pytest.mark.parametrize("sends_thinking", [True, False])
@pytest.mark.parametrize("streams", [False, True])
def test_openai_chat_completions(episode, taught, sends_thinking, streams):
    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            messages, ids = [{"role": "user", "content": "go"}], []
            for number in range(3):
                options = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0.1, "top_p": 0.5}
                body = {"return_token_ids": True}
                if streams:
                    async with client.chat.completions.stream(**options, extra_body=body) as stream:
                        async for _ in stream:
                            pass
                        message = (await stream.get_final_completion()).choices[0].message
                else:
                    choice = (await client.chat.completions.create(**options, extra_body=body)).choices[0]
                    ids.append(choice.token_ids)
                    message = choice.message
                calls = [call.model_dump(exclude={"index"}) for call in message.tool_calls or ()]
                for call in calls:  # clients parse arguments and write them again
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"] = {"name": call["function"]["name"], "arguments": json.dumps(arguments, indent=1)}
                more = {"tool_calls": calls} if calls else {}
                if sends_thinking:
                    more["reasoning"] = message.model_extra.get("reasoning")
                messages.append(history(message, **more))
                if number == 0:
                    assert message.content.strip() == "Wait."
                    results = zip(calls, ("3", "noon"), strict=True)
                    messages += [{"role": "tool", "tool_call_id": c["id"], "content": text} for c, text in results]
                else:
                    messages.append({"role": "user", "content": "more"})
            return ids

    ids = episode.play(agent)
    assert episode.said() == [FIRST, SECOND, THIRD]
    if ids:
        assert ids == [turn.completion.token_ids for turn in episode.turns]
    episode.check(taught)
    tokenizer, (row,) = episode.tokenizer._tokenizer, episode.rows
    again = tokenizer.apply_chat_template([m.as_chat() for m in episode.conversations[0]], tools=TOOLS, tokenize=False)
    assert not tokenizer.decode(row.token_ids).startswith(again[:-20]), "rendered again, it is another text"
    assert episode.session.overridden == {"temperature": 0.1, "top_p": 0.5}
    (conversation,) = episode.conversations
    assert [message.role for message in conversation] == [
        *("user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    ]


def test_the_text_of_an_answer_ends_before_its_stop_token(taught, tmp_path):
    """Parsers of calls read special tokens: with tools vLLM keeps them in a text, but for the stop token."""

    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "go"}]}
            kept, whole = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}
            bodies = ({}, {"tools": TOOLS}, kept, kept | whole)
            answers = [await client.chat.completions.create(**ask, extra_body=body) for body in bodies]
            return [answer.choices[0].message.content for answer in answers]

    with start(taught, tmp_path, tool_parser="hermes", inference_socket=True) as live:
        *found, whole = Episode(live, taught).play(agent)
    assert [END in text for text in found] == [False] * 3
    assert whole.endswith(END)


def test_openai_responses(episode, taught):
    tools = [{"type": "function", **each} for each in (ADD, NOW)]

    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            items = [{"role": "user", "content": "go"}]
            for number in range(2):
                options = {"model": MODEL, "input": items, "tools": tools, "store": False}
                if number:
                    async with client.responses.stream(**options) as stream:
                        response = await stream.get_final_response()
                else:
                    response = await client.responses.create(**options)
                items += [item.model_dump(exclude_none=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                results = zip(calls, ("3", "noon"), strict=True) if calls else ()
                items += [{"type": "function_call_output", "call_id": c.call_id, "output": text} for c, text in results]
            return response.output_text

    assert episode.play(agent).strip() == "3"
    assert episode.said() == [FIRST, SECOND]
    episode.check(taught)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_messages(episode, taught, streams):
    tools = [{"name": each["name"], "description": "", "input_schema": each["parameters"]} for each in (ADD, NOW)]

    async def agent(address):
        url = address.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=address.api_key) as client:
            messages = [{"role": "user", "content": "go"}]
            for _ in range(3):
                options = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 160}
                if streams:
                    async with client.messages.stream(**options) as stream:
                        message = await stream.get_final_message()
                else:
                    message = await client.messages.create(**options, extra_body={"temperature": 0.0})
                blocks = [block.model_dump(exclude_none=True) for block in message.content]
                messages.append({"role": "assistant", "content": blocks})
                calls = [block for block in blocks if block["type"] == "tool_use"]
                results = zip(calls, ("3", "noon"), strict=True) if calls else ()
                results = [{"type": "tool_result", "tool_use_id": c["id"], "content": text} for c, text in results]
                messages.append({"role": "user", "content": results or "more"})
            return message.stop_reason

    assert episode.play(agent) == "end_turn"
    assert episode.said() == [FIRST, SECOND, THIRD]
    episode.check(taught)


def test_a_compacted_history_and_a_sub_agent_are_rows_of_their_own(episode, taught):
    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:

            async def ask(*messages, **options):
                found = await client.chat.completions.create(model=MODEL, messages=list(messages), **options)
                return found.choices[0].message

            go = {"role": "user", "content": "go"}
            first = await ask(go)
            sub = await ask({"role": "user", "content": "sub"}, max_tokens=3)
            second = await ask(go, history(first), {"role": "user", "content": "more"})
            compacted = await ask({"role": "user", "content": f"so far: {second.content} {sub.content}"}, max_tokens=3)
            fork = await ask(go, history(first), {"role": "user", "content": "else"}, max_tokens=3)
            return compacted, fork

    episode.play(agent)
    assert [turn.continues for turn in episode.turns] == [-1, -1, 0, -1, 0]
    assert [len(_runs(row.mask)) for row in episode.rows] == [2, 1, 1, 1]
    assert not episode.policy.truncated, "three tokens were the agent's own limit"
    episode.check(taught, num_rows=4)
    assert len(episode.conversations) == 4


def _runs(mask):
    return [n for n, each in enumerate(mask) if each and not (n and mask[n - 1])]


def test_one_answer_to_a_repeated_request_is_trained(episode, taught):
    """A client that gives up, one that never reads, and one that repeats what it had already."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "tools": TOOLS}

    async def agent(address):
        headers = {"authorization": f"Bearer {address.api_key}"}
        url = f"{address.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as http:
            with contextlib.suppress(TimeoutError):
                await http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=0.01))
            async with http.post(url, json={**body, "stream": True}) as response:
                await response.content.readany()  # and goes away
            async with http.post(url, json=body) as response:
                await response.read()
            again = {"x-stainless-retry-count": "1"}
            async with http.post(url, json=body, headers=again) as response:
                return (await response.json())["choices"][0]["message"]["content"]

    assert episode.play(agent).strip() == "Wait."
    assert [turn.request for turn in episode.turns] == [3]
    assert episode.session.num_undelivered >= 1
    episode.check(taught)


def test_a_text_that_goes_on_keeps_its_tokens(episode, taught):
    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            text = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
            for _ in range(3):
                options = {"model": MODEL, "prompt": text, "max_tokens": 5, "logprobs": 1}
                text += (await client.completions.create(**options)).choices[0].text
            return text

    text = episode.play(agent)
    assert SECOND in text
    # The second answer ended by itself: a text that goes on after that is another one.
    assert [turn.completion.finish_reason for turn in episode.turns[:2]] == ["length", "stop"]
    sizes = [len(turn.completion.token_ids) for turn in episode.turns]
    assert [row.num_trainable for row in episode.rows] == [sizes[0] + sizes[1], sizes[2]]
    episode.check(taught, num_rows=2)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_above_the_context_becomes_the_runs(episode, taught, name):
    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            messages = [{"role": "user", "content": "go"}]
            await client.chat.completions.create(model=MODEL, messages=messages, **{name: 1_000_000})

    episode.play(agent)
    assert 1 <= len(episode.turns[0].completion.token_ids) <= SAMPLING.max_tokens
    episode.check(taught)


def test_what_is_refused(episode, taught):
    async def agent(address):
        url, found = address.base_url.removesuffix("/v1"), {}
        good = {"authorization": f"Bearer {address.api_key}"}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "go"}]}
        long = {**chat, "messages": [{"role": "user", "content": "go" * 2000}]}
        text = {"model": MODEL, "prompt": "go"}
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        seen = [{"role": "user", "content": [image]}]
        async with aiohttp.ClientSession() as http:
            for name, method, path, body, headers in (
                ("no key", "POST", "/v1/chat/completions", chat, {}),
                ("another key", "POST", "/v1/chat/completions", chat, {"x-api-key": "sk-other"}),
                ("control", "POST", "/v1/apply", {}, good),
                ("sessions", "POST", "/sessions-close", {}, good),
                ("metrics", "GET", "/metrics", None, good),
                ("another model", "POST", "/v1/chat/completions", {**chat, "model": "gpt-4o"}, good),
                ("prompt", "POST", "/v1/completions", {**text, "echo": True, "logprobs": 1}, good),
                ("two answers", "POST", "/v1/chat/completions", {**chat, "n": 2}, good),
                ("too long", "POST", "/v1/chat/completions", long, good),
                ("image", "POST", "/v1/chat/completions", {**chat, "messages": seen}, good),
                ("no JSON", "POST", "/v1/chat/completions", None, good),
                ("models", "GET", "/v1/models", None, good),
            ):
                async with http.request(method, url + path, json=body, headers=headers) as response:
                    found[name] = response.status
                    await response.read()
            big = b"{" + b" " * (17 << 20)
            async with http.post(f"{url}/v1/completions", data=big, headers=good) as response:
                found["too large"] = response.status
        return found

    found = episode.play(agent)
    assert found.pop("models") == 200
    assert found.pop("no key") == found.pop("another key") == 401
    assert found.pop("control") == found.pop("sessions") == found.pop("metrics") == found.pop("another model") == 404
    assert found.pop("too large") == 413
    assert set(found.values()) <= {400, 422}, found
    assert episode.session.filled_context
    assert episode.turns == []


def test_an_update_within_an_episode(episode, taught, tmp_path):
    """A request waits for it; each token has the version that sampled it."""
    weights = list(read_model_folder(taught))
    bridge = create_bridge("disk", folder=tmp_path / "weights", source=taught, engine=episode.live.engine)

    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            messages = [{"role": "user", "content": "go"}]
            for number in (1, 2):
                reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
                message = reply.choices[0].message
                calls = [call.model_dump() for call in message.tool_calls or ()]
                messages.append(history(message, **({"tool_calls": calls} if calls else {})))
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
                ticket = await asyncio.to_thread(bridge.publisher.publish, weights, number, 0, lambda ticket: None)
                check_report(await bridge.receiver.apply(ticket, 60), ticket)

    episode.play(agent)
    (row,) = episode.rows
    start = episode.policy.spans[1].start
    versions = [(span.start >= start, span.version) for span in row.versions]
    assert versions[-1] == (True, "0.1")
    assert not versions[0][0]


def test_an_engine_that_dies_ends_its_sessions(live, taught):
    one = Episode(live, taught)

    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 3}
            await client.chat.completions.create(**ask)
            live.engine.process.process.kill()
            with pytest.raises(openai.APIError):
                await client.chat.completions.create(**ask)

    with pytest.raises(SessionLost, match="ended within the episode"):
        one.play(agent)

    async def again(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 3}
            await client.chat.completions.create(**ask)

    one.play(again)
    assert len(one.turns) == 1
    assert live.engine.num_restarts == 1


def test_a_session_ends_with_its_key(live, taught):
    one = Episode(live, taught, max_requests=1)

    async def agent(address):
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 3}
            await client.chat.completions.create(**ask)
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                await client.chat.completions.create(**ask)
            return asyncio.create_task(client.chat.completions.create(**ask))

    one.play(agent)
    assert one.session.met_limit
    assert len(one.turns) == 1
    assert one.conversations[0][0] == Message("user", "go")
