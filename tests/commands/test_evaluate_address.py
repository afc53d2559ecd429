"""`slipstream eval` at an OpenAI-compatible address: a small server that adds, well or badly."""

import asyncio
import base64
import contextlib
import io
import json
import threading

import pytest
from aiohttp import web
from PIL import ExifTags, Image

from slipstream.errors import ConfigError
from slipstream.inference.chat_server import ChatServer, MessageTokens
from slipstream.records import GenerateRequest, Message, SamplingParams
from slipstream.runlog.evaluations import read_evaluation

KEY = "sk-very-secret"
ENVIRONMENT = """
def tasks(split, num_tasks, seed):
    return [
        {"prompt": f"{i} + 1", "answer": str(i + 1), "data_source": ("even", "odd")[i % 2]}
        for i in range(min(num_tasks, 6))
    ]

def reward(task, completion):
    return {"reward": float(completion == task.answer), "length": len(completion)}
"""
RUN_FILE = """
[model]
path = "{folder}/there-is-no-model"
[environment]
name = "{folder}/adds.py"
system_prompt = "Add."
[algorithm]
kind = "grpo"
[training]
steps = 1
[evaluation]
num_tasks = 6
"""


class Server:
    """In a thread of its own. `answer(body)` gives the text; `fail` the statuses of the next requests."""

    def __init__(self):
        self.bodies, self.keys, self.fail, self.models = [], set(), [], ["adder"]
        self.ended = {}
        self.answer = lambda body: str(int(body["messages"][-1]["content"].split()[0]) + 1)

    async def chat(self, request):
        self.keys.add(request.headers.get("Authorization", ""))
        if self.fail:
            return web.Response(status=self.fail.pop(0), text=f"not now, {KEY}")
        body = await request.json()
        self.bodies.append(body)
        choice = {"message": {"role": "assistant", "content": self.answer(body)}, "finish_reason": "stop", **self.ended}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 3}})

    async def list(self, request):
        if request.headers.get("Authorization", "") == "Bearer another":
            return web.Response(status=401, text="who?")
        return web.json_response({"data": [{"id": name} for name in self.models]})

    @contextlib.contextmanager
    def running(self):
        loop, started = asyncio.new_event_loop(), threading.Event()

        async def serve():
            app = web.Application()
            app.add_routes([web.get("/v1/models", self.list), web.post("/v1/chat/completions", self.chat)])
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
            started.set()
            self.stop = asyncio.Event()
            await self.stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert started.wait(60)
        yield self
        loop.call_soon_threadsafe(self.stop.set)
        thread.join(60)


@pytest.fixture
def server():
    with Server().running() as running:
        yield running


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "adds.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    return tmp_path / "run.toml"


@pytest.mark.parametrize(
    ("ended", "expected", "num_unknown"),
    [
        ({"stop_reason": "</a>"}, "2</a>", 0),
        ({"matched_stop": "</a>"}, "2</a>", 0),
        ({"stop_reason": None}, "2", 0),
        ({"stop_reason": 7}, "2", 0),
        ({}, "2", 1),
        ({"finish_reason": "length"}, "2", 0),
    ],
)
async def test_a_stop_string_that_the_server_names_is_part_of_the_text(server, ended, expected, num_unknown):
    server.ended = ended
    async with ChatServer(server.url) as asked:
        prompt = list(b'[{"role": "user", "content": "1 + 1"}]')
        answer = await asked.generate(GenerateRequest("a", prompt, SamplingParams(4, stop=("</a>",))))
        assert (bytes(answer.token_ids).decode(), asked.num_stops_unknown) == (expected, num_unknown)


def test_is_evaluated_and_kept(server, run_file, slipstream, tmp_path, monkeypatch):
    """Needs no model here. The key comes from a variable and is kept nowhere."""
    monkeypatch.setenv("THE_KEY", KEY)
    asked = set()

    def answer(body):
        """The first sample of each task is wrong."""
        question = body["messages"][-1]["content"]
        is_first = question not in asked
        asked.add(question)
        return "7" if is_first else str(int(question[0]) + 1)

    server.answer = answer
    server.fail = [429, 503]
    how = ("--model", server.url, "--key-variable", "THE_KEY", "--evaluation.samples_per_task", "4")
    code, out, err = slipstream("eval", run_file, *how, "--out", "kept.json", "--json")
    assert code == 0, err
    metrics = json.loads(out)
    assert metrics["results"] == "kept.json"
    assert metrics["eval/num_failed"] == 0
    assert metrics["eval/length"] == 3.0
    assert 0.7 <= metrics["eval/accuracy"] <= 0.8
    assert metrics["eval/maj@4"] > metrics["eval/mean@4"]
    assert {"eval/source/even/best@4", "eval/source/odd/pass@2"} <= metrics.keys()
    assert server.keys == {f"Bearer {KEY}"}
    assert len(server.bodies) == 24
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Add."}
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in server.bodies} == {("adder", 1, 2048)}
    assert len({body["seed"] for body in server.bodies}) == 24
    kept = read_evaluation(tmp_path / "kept.json")
    assert KEY not in (tmp_path / "kept.json").read_text() + err
    assert kept.model == f"adder at {server.url}"
    assert [len(task.samples) for task in kept.tasks] == [4] * 6
    assert kept.tasks[1].source == "odd"
    assert kept.tasks[0].samples[0].metrics == {"length": 1.0}
    assert kept.tasks[0].samples[0].num_tokens is None
    assert kept.metrics == {name: value for name, value in metrics.items() if name != "results"}

    server.bodies.clear()
    code, _, err = slipstream("eval", run_file, *how, "--out", "kept.json")
    assert code == 2
    assert "kept.json exists already" in err
    assert server.bodies == [], "it is refused before anything is asked"


def test_images_go_with_the_messages(server, run_file, slipstream, tmp_path):
    """In their places, as files of PNG or JPEG: a BMP becomes a PNG of the same pixels, and a photo that lies on its
    side one that stands."""
    for name, colour in (("a.png", "red"), ("b.jpg", "green"), ("c.bmp", "blue")):
        Image.new("RGB", (8, 6), colour).save(tmp_path / name)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 6), "black").save(tmp_path / "d.jpg", exif=turned)
    (tmp_path / "adds.py").write_text(
        f"""
def tasks(split, num_tasks, seed):
    part = lambda name: {{"type": "image", "image": "{tmp_path}/" + name}}
    text = lambda words: {{"type": "text", "text": words}}
    one = [part("a.png"), text("Which?")]
    two = [text("First "), part("b.jpg"), text(" then "), part("c.bmp"), part("d.jpg")]
    return [{{"prompt": [{{"role": "user", "content": content}}], "answer": "it"}} for content in (one, two)]

def reward(task, completion):
    return float(completion == task.answer)
"""
    )
    server.answer = lambda body: "it"
    code, out, err = slipstream("eval", run_file, "--model", server.url, "--evaluation.num_tasks", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["eval/accuracy"] == 1.0
    one, two = sorted((body["messages"][-1]["content"] for body in server.bodies), key=len)
    assert [part["type"] for part in one] == ["image_url", "text"]
    assert [part.get("text") for part in two] == ["First ", None, " then ", None, None]
    png, jpeg, bmp, photo = (part["image_url"]["url"] for part in (one[0], two[1], *two[3:]))
    assert png == f"data:image/png;base64,{base64.b64encode((tmp_path / 'a.png').read_bytes()).decode()}"
    assert jpeg == f"data:image/jpeg;base64,{base64.b64encode((tmp_path / 'b.jpg').read_bytes()).decode()}"
    for sent, size, colour in ((bmp, (8, 6), (0, 0, 255)), (photo, (6, 8), (0, 0, 0))):
        head, _, data = sent.partition(",")
        assert head == "data:image/png;base64"
        again = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (again.size, again.getpixel((3, 3))) == (size, colour)


def test_two_are_compared(server, run_file, slipstream, tmp_path):
    for name, answer in (("good", server.answer), ("bad", lambda body: "no")):
        server.answer = answer
        code, _, err = slipstream("eval", run_file, "--model", server.url, "--out", name, "--plain")
        assert code == 0, err
    code, out, err = slipstream("compare", "bad", "good")
    assert code == 0, err
    assert "B is better than A by 100.0 points on 6 tasks" in out
    code, out, _ = slipstream("compare", "good", "bad", "--json")
    assert json.loads(out)["better"] == "A"
    assert json.loads(out)["by_source"]["odd"]["value"] == -1.0


def test_the_terminal_shows_the_figures(server, run_file, slipstream):
    several = ("--evaluation.samples_per_task", "2")
    code, out, err = slipstream("eval", run_file, "--model", server.url, *several, "--plain")
    assert code == 0, err
    assert "accuracy:   100.0 % of 6 held-out tasks, 2 completions of each" in out
    assert "best:       @2 100.0 (61.0 to 100.0)" in out
    assert "  odd: 100.0 % of 3 tasks" in out
    assert "--out FILE keeps them" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--key-variable", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE holds no key: set it"),
        (("--key-variable", "sk-SECRET"), "--key-variable"),
        (("--served-name", "other"), "does not serve 'other' (it has: adder): give --served-name"),
        (("--out", "nowhere/kept.json"), "nowhere is not a folder"),
        (("--evaluation", "false"), "must not be turned off"),
    ],
)
def test_what_cannot_work_is_one_sentence(server, run_file, slipstream, arguments, problem):
    code, _, err = slipstream("eval", run_file, "--model", server.url, *arguments, "--plain")
    assert code == 2
    assert problem in err
    assert "Traceback" not in err
    assert "SECRET" not in err


def test_a_wrong_key_and_a_wrong_address(server, run_file, slipstream, monkeypatch):
    monkeypatch.setenv("THE_KEY", "another")
    code, _, err = slipstream("eval", run_file, "--model", server.url, "--key-variable", "THE_KEY", "--json")
    assert (code, "status 401" in err, "another" in err) == (2, True, False)
    monkeypatch.setattr("slipstream.inference.chat_server._CONNECT_S", 0.5)
    code, _, err = slipstream("eval", run_file, "--model", "http://127.0.0.1:9/v1", "--json")
    assert code == 2
    assert "cannot be asked" in err
    code, _, err = slipstream("eval", run_file, "--key-variable", "THE_KEY")
    assert code == 2
    assert "--key-variable is for the model at an address" in err


def test_no_password_of_an_address_is_shown_or_kept(server, run_file, slipstream, tmp_path):
    url = server.url.replace("http://", "http://me:open-sesame@")
    code, out, err = slipstream("eval", run_file, "--model", url, "--out", "kept.json", "--plain")
    assert code == 0, err
    assert "open-sesame" not in out + err + (tmp_path / "kept.json").read_text()
    assert server.keys == {"Basic bWU6b3Blbi1zZXNhbWU="}


def request(timeout_s=60.0):
    prompt = MessageTokens().render([Message("user", "1 + ü")])
    return GenerateRequest("r", prompt, SamplingParams(8, top_p=0.5), timeout_s=timeout_s)


async def test_requests_that_are_given_up_are_counted(server):
    server.answer = lambda body: "ü " + body["messages"][-1]["content"]
    async with ChatServer(server.url, key=KEY) as chat:
        done = await chat.generate(request())
        assert MessageTokens().decode(done.token_ids) == "ü 1 + ü"
        assert (server.bodies[0]["top_p"], "top_k" in server.bodies[0]) == (0.5, False)
        server.fail = [400]
        refused = await chat.generate(request())
        assert (refused.finish_reason, refused.cause) == ("abort", "invalid")
        assert "status 400: not now, ***" in refused.error
        for timeout_s in (0.8, 10.0):  # on a busy machine there may be no answer in less than a second
            server.fail = [503] * 20
            late = await chat.generate(request(timeout_s))
            if "status 503" in late.error:
                break
        assert (late.finish_reason, late.cause) == ("abort", "late")
        assert "status 503" in late.error
        assert (chat.num_tokens, chat.num_counted) == (3, 1)


async def test_of_several_models_one_is_named(server):
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match="needs the name of a model"):
        async with ChatServer(server.url):
            pass
    async with ChatServer(server.url, "b") as chat:
        assert chat.model == "b"
