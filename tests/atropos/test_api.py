"""The API of a run beside a real `run-api`: the same calls, status by status and body by body."""

import asyncio
import gzip
import json
import math

import aiohttp
import pytest
import pytest_asyncio

from slipstream.atropos import environments
from slipstream.atropos.api import Desk, serve
from slipstream.atropos.environments import Environments
from slipstream.atropos.groups import Terms, rollouts_of
from slipstream.atropos.protocol import RegisterEnv, Registration
from slipstream.config.addresses import url_of
from slipstream.orchestrator.batches.arrivals import Arrivals
from slipstream.records import Version

from .programs import programs  # noqa: F401 (a fixture)

PROMPTS, GROUP = 4, 4
BATCH = PROMPTS * GROUP
REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": BATCH,
    "max_token_len": 64,
    "checkpoint_dir": "somewhere",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 9,
}
TERMS = Terms(max_tokens=64, vocab_size=1000, temperature=1.0, needs_logprobs=True)


def group(size=GROUP, env_id=0, **more):
    return {
        "tokens": [[1, 2, 3 + number] for number in range(size)],
        "masks": [[-100, 2, 3 + number] for number in range(size)],
        "scores": [float(number) for number in range(size)],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * size,
        "env_id": env_id,
        **more,
    }


def environment(name="letter", **more):
    return {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": GROUP, **more}


class Ours:
    """The run's API, whose trainer waits for a batch, gets it, and trains at once."""

    def __init__(self):
        self.now = 0.0
        self.step = 0
        self.arrivals = Arrivals(
            lambda: Version(0, self.step), capacity=PROMPTS, patience_s=60.0, whom="", clock=lambda: self.now
        )
        registered = Environments(BATCH, GROUP, clock=lambda: self.now)
        self.desk = Desk(
            Registration(**REGISTRATION), registered, take_in=self.take_in, held=self.held, step=lambda: self.step
        )
        self.waiting = []

    def take_in(self, data, name):
        self.arrivals.offer(rollouts_of(data, TERMS, name), data.env_id)

    def held(self):
        held = [(each.maker, len(each.rollouts)) for each in self.arrivals.held]
        return held, self.arrivals.num_held - len(held)

    async def trainer(self, path):
        """What the run does by itself where another trainer would send this."""
        if path == "/register":
            self.desk.has_registered = True
        elif not self.desk.has_started:
            self.desk.has_started = True
            await self.want()
        elif all(task.done() for task in self.waiting):
            self.step += 1
            await self.want()

    async def want(self):
        self.waiting = [asyncio.create_task(self.arrivals.take()) for _ in range(PROMPTS)]
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def both(programs):  # noqa: F811
    ours = Ours()
    api = await serve(ours.desk, host="127.0.0.1", port=0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Both(session, ours, url_of("127.0.0.1", api.port), await asyncio.to_thread(programs.run_api))
    for task in ours.waiting:
        task.cancel()
    await api.close()


class Both:
    def __init__(self, session, ours, url, theirs):
        self.session, self.ours, self.urls = session, ours, (theirs, url)
        self.num_calls = 0

    async def ask(self, url, method, path, body=None, data=None, headers=None):
        async with self.session.request(method, url + path, json=body, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if "json" in answer.content_type else text

    async def same(self, method, path, body=None, **how):
        """A call with the same answer from both."""
        self.num_calls += 1
        theirs, ours = [await self.ask(url, method, path, body, **how) for url in self.urls]
        assert ours == theirs, f"{method} {path}"
        return ours

    async def mended(self, method, path, body=None, *, theirs, ours, **how):
        """A call with other answers: as `docs/atropos.md` lists them."""
        self.num_calls += 1
        assert [await self.ask(url, method, path, body, **how) for url in self.urls] == [theirs, ours]

    async def trainer(self, path, body=None):
        """A call of a trainer, which the run does without."""
        method = "POST" if body else "GET"
        await self.ask(self.urls[0], method, path, body)
        await self.ours.trainer(path)

    async def statuses(self, *env_ids):
        await self.same("GET", "/status")
        for number in env_ids:
            await self.same("GET", "/status-env", {"env_id": number})


async def test_a_hundred_calls_have_the_answers_of_a_real_run_api(both):
    same = both.same
    # Nobody has registered.
    for path in ("/", "/info", "/wandb_info", "/status", "/batch", "/latest_example"):
        await same("GET", path)
    await same("POST", "/register-env", environment())
    for number in (0, 5):
        await both.mended(
            "POST", "/disconnect-env", {"env_id": number},
            theirs=(200, {"status": "failure", "error": "'State' object has no attribute 'envs'"}),
            ours=(200, {"status": "failure", "error": "list index out of range"}),
        )  # fmt: skip
    for body in ({}, {"env_id": "x"}, [], {"env_id": 1.5}):
        for path in ("/disconnect-env", "/register-env", "/register", "/scored_data", "/scored_data_list"):
            await same("POST", path, body)
    await same("POST", "/scored_data", data=b"{", headers={"content-type": "application/json"})
    await same("POST", "/scored_data", data=b"{}", headers={"content-type": "text/plain"})
    await same("GET", "/nowhere")
    await same("GET", "/scored_data")

    # A trainer registers, and asks for a first batch.
    await both.trainer("/register", REGISTRATION)
    for path in ("/info", "/wandb_info", "/status"):
        await same("GET", path)
    await same("POST", "/register-env", environment())
    await both.trainer("/batch")
    await same("GET", "/batch")

    # Environments come.
    for name in ("letter", "letter", "word"):
        await same("POST", "/register-env", environment(name))
    await both.statuses(0, 1, 2)

    # They send groups, of which the run makes batches.
    for step in range(3):
        for number in range(PROMPTS):
            env_id = (step + number) % 3
            await same("POST", "/scored_data", group(env_id=env_id))
            await both.statuses(env_id, (env_id + 1) % 3)
        await both.trainer("/batch")
        await both.statuses(0)
    await same("GET", "/latest_example")
    packed = gzip.compress(json.dumps(group(messages=[[{"role": "user", "content": "say 1"}]] * GROUP)).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    await same("POST", "/scored_data", data=packed, headers=headers)
    await same("GET", "/latest_example")
    await same("POST", "/scored_data", data=b"no gzip", headers=headers)
    await same("POST", "/scored_data_list", [group(env_id=1), group(env_id=2)])
    await same("POST", "/scored_data_list", [])
    await same("POST", "/scored_data", group(messages=[[{"role": "user"}]]))
    await same("POST", "/scored_data", {**group(), "tokens": [["x"]]})
    await both.statuses(0, 1, 2)

    # They leave.
    for number in (2, 2, 7):
        await same("POST", "/disconnect-env", {"env_id": number})
    await both.statuses(0, 1)
    assert both.num_calls >= 100


async def test_the_mends(both):
    """All that `docs/atropos.md` lists."""
    await both.trainer("/register", REGISTRATION)
    await both.trainer("/batch")
    for size in (3, 5):
        await both.same("POST", "/register-env", environment(group_size=size))
    ask = both.mended
    await both.same("GET", "/status-env", {"env_id": 0})
    async with asyncio.timeout(10):
        theirs = (500, "Internal Server Error")
        await ask("GET", "/status-env", {"env_id": 9}, theirs=theirs,
                  ours=(404, {"detail": "no environment has the number 9: register first"}))  # fmt: skip
        cut = gzip.compress(b"{}" * 99)[:-3]
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        await ask("POST", "/scored_data", data=cut, headers=headers, theirs=theirs, ours=(400, "Invalid gzip payload"))
        buffered = (200, {"status": "buffered", "buffer_size": 5})
        await ask("POST", "/scored_data", group(5, env_id=0), theirs=buffered, ours=(200, {"status": "received"}))
        received = (200, {"status": "received"})
        labels = "masks has 9 at place 2, and tokens has 3: give the token, or -100 to mask it"
        await ask(
            "POST", "/scored_data", group(3, masks=[[-100, 2, 9]] * 3), theirs=received, ours=(422, {"detail": labels})
        )
        status, answer = await both.ask(both.urls[1], "POST", "/scored_data", group(3, inference_logprobs=None))
        assert (status, "collect_trajectories" in answer["detail"]) == (422, True)
        refusal = (403, "the run keeps its groups")
        await ask("GET", "/reset_data", theirs=(200, "Reset successful"), ours=refusal)


async def test_groups_of_three_and_five_starve_there_and_not_here(both):
    await both.trainer("/register", {**REGISTRATION, "batch_size": 8})
    await both.trainer("/batch")
    for size in (3, 5):
        await both.same("POST", "/register-env", environment(group_size=size))
    for number in range(12):
        size = (3, 5)[number % 2]
        await both.same("POST", "/scored_data", group(size, env_id=number % 2))
    assert await both.ask(both.urls[0], "GET", "/batch") == (200, {"batch": None})
    assert await both.ask(both.urls[0], "GET", "/status") == (200, {"current_step": 0, "queue_size": 12})
    sizes = [len((await task).rollouts) for task in both.ours.waiting]
    assert sizes == [3, 5, 3, 5]


@pytest.mark.parametrize("prompts", [1, 4, 7])
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("off_policy", [1, 2, 3])
def test_an_environment_of_any_group_size_fills_all_places(prompts, group_size, off_policy):
    """As `BaseEnv` decides: it begins groups while this is above 0."""
    batch = prompts * group_size
    for size in range(1, batch + 1):
        registered = Environments(batch, group_size)
        registered.register(RegisterEnv(**environment(group_size=size)))
        held = []
        while True:
            queue = registered.status(0, held, 0)["queue_size"]
            if queue * size >= off_policy * batch or off_policy * batch // size - queue <= 0:
                break
            held.append((0, size))
            assert len(held) <= off_policy * prompts + max(1, size), "it never stops"
        assert len(held) >= off_policy * prompts


def test_a_lease_ends_and_begins_again():
    now, told = [0.0], []
    registered = Environments(BATCH, GROUP, clock=lambda: now[0], on_change=lambda *change: told.append(change))
    for name, share in (("alive", None), ("dead", 0.5)):
        registered.register(RegisterEnv(**environment(name, min_batch_allocation=share)))
    assert (registered.status(0, [], 0)["unallocated_fraction"], registered.status(0, [], 0)["env_weight"]) == (
        0.5,
        0.5,
    )
    now[0] = environments.LEASE_S + 1
    found = registered.status(0, [], 0)
    assert (found["unallocated_fraction"], found["env_weight"]) == (1.0, 1.0)
    assert math.isclose(registered.status(1, [], 0)["env_weight"], 0.5)
    assert [change for change in told if "dead" in change[0]] == [
        ("dead_0", "connected"), ("dead_0", "lost"), ("dead_0", "back"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": "Bearer token"}, 200),
        ({"x-api-key": "token"}, 200),
        ({"Authorization": aiohttp.BasicAuth("", "token").encode()}, 200),
        ({"Authorization": "Basic !"}, 401),
    ],
)
async def test_a_token_is_asked_for(headers, status):
    api = await serve(Ours().desk, host="127.0.0.1", port=0, token="token")
    try:
        url = f"{url_of('127.0.0.1', api.port)}/info"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            assert answer.status == status
    finally:
        await api.close()


async def test_other_names_and_large_bodies_are_refused(monkeypatch):
    monkeypatch.setattr("slipstream.atropos.api.MAX_BODY_BYTES", 1 << 20)
    api = await serve(Ours().desk, host="127.0.0.1", port=0)
    url = url_of("127.0.0.1", api.port)
    bomb = gzip.compress(b" " * (8 << 20))
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/info", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421
            for body, more in ((bomb, {"content-encoding": "gzip"}), (b" " * (2 << 20), {})):
                async with session.post(f"{url}/scored_data", data=body, headers=more) as answer:
                    assert answer.status == 413
    finally:
        await api.close()
