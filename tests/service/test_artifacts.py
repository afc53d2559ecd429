"""Artifacts of real small runs in a store: uploaded, resumed from elsewhere, taken as a model."""

import json
import os
import secrets
import shutil
import signal

import fsspec
import msgspec
import pytest
from tests.s3_server import KEY, SECRET, TOKEN, Server, give_credentials

from slipstream.artifacts.facts import read_facts
from slipstream.artifacts.store import DONE, Done, RunStore
from slipstream.cli import main
from slipstream.runlog import read_events, read_metrics
from tests.waiting import until

pytestmark = pytest.mark.real_start


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.end()


@pytest.fixture
def bucket(request, monkeypatch):
    pytest.importorskip("s3fs", reason="needs s3fs: the extra `dev` brings it")
    give_credentials(monkeypatch, request.getfixturevalue("server").url)
    name = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3", use_listings_cache=False).mkdir(name)
    return f"s3://{name}/runs"


def check_store(address, name, steps):
    """`DONE` is there, and all that it names, with these steps; the last alone can be resumed from."""
    there = RunStore(address, name)
    done, found = there.done(), there.steps()
    assert done is not None
    assert [*found] == steps
    files = there._files.sizes(name)
    for step, manifest in found.items():
        for file, facts in manifest.files.items():
            assert files[f"checkpoints/step-{step:06d}/{file}"] == facts.size_bytes
    assert {file: files[file] for file in done.files} == {n: each.size_bytes for n, each in done.files.items()}
    return done


def test_a_run_leaves_its_artifacts_in_a_folder_of_the_store(place, tmp_path):
    store = str(tmp_path / "store")
    name = place.submit("run", 5, store=store)
    place.until(name, "done")
    check_store(store, name, [5])
