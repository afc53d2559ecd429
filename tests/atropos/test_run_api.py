"""The run as the trainer of a real `run-api`."""

import asyncio

import aiohttp
import pytest

from slipstream.atropos.groups import Refused
from slipstream.atropos.protocol import Registration
from slipstream.atropos.run_api import RunApi
from slipstream.errors import EnvironmentFault

from .programs import programs  # noqa: F401 (a fixture)
from .test_api import BATCH, GROUP, PROMPTS, REGISTRATION, environment, group


class Trainer:
    def __init__(self, url, **options):
        self.taken, self.warnings, self.is_wanted = [], [], True
        self.client = RunApi(
            url, Registration(**REGISTRATION), is_wanted=lambda: self.is_wanted, take_in=self.take_in,
            warn=self.warnings.append, **{"patience_s": 30.0} | options,
        )  # fmt: skip

    def take_in(self, data, name):
        if len(data.tokens) != GROUP:
            raise Refused("shape", "of another size")
        self.taken.append(data)

    async def until(self, condition):
        running = asyncio.create_task(self.client.run())
        async with asyncio.timeout(60):
            while not condition():
                if running.done():
                    await running
                await asyncio.sleep(0.05)
        running.cancel()


async def post(url, path, body):
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return await answer.json()


async def send(url):
    while (await post(url, "/register-env", environment()))["status"] != "success":
        await asyncio.sleep(0.1)
    for number in range(2 * PROMPTS):
        await post(url, "/scored_data", group(overrides=[{"number": number}] * GROUP))


async def test_batches_are_taken_while_they_are_wanted(programs):  # noqa: F811
    url = await asyncio.to_thread(programs.run_api)
    trainer = Trainer(url)
    trainer.is_wanted = False
    sending = asyncio.create_task(send(url))
    await trainer.until(sending.done)
    assert trainer.taken == [], "a poll is made for the environments, not for groups"
    trainer.is_wanted = True
    await trainer.until(lambda: len(trainer.taken) == 2 * PROMPTS)
    assert sorted(each.overrides[0]["number"] for each in trainer.taken) == list(range(2 * PROMPTS))
    assert trainer.warnings == []


async def test_an_earlier_trainers_registration_is_reported(programs):  # noqa: F811
    url = await asyncio.to_thread(programs.run_api)
    await post(url, "/register", REGISTRATION | {"batch_size": 5})
    trainer = Trainer(url)
    await trainer.until(lambda: trainer.warnings)
    assert f"with 5 sequences in a batch and not {BATCH}: restart run-api" in trainer.warnings[0]


async def test_a_run_api_that_takes_no_trainer_any_more_ends_the_run(programs):  # noqa: F811
    url = await asyncio.to_thread(programs.run_api)
    await post(url, "/scored_data", group())
    with pytest.raises(EnvironmentFault, match=r"a group came before the first one registered.*restart run-api"):
        await Trainer(url).client.run()


async def test_a_run_api_that_is_not_there_ends_the_run():
    with pytest.raises(EnvironmentFault, match=r"http://127.0.0.1:9/register did not answer for 0.1 s.*start run-api"):
        await Trainer("http://127.0.0.1:9", patience_s=0.1).client.run()
