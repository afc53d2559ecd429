"""Plans with engine servers."""

import pytest

from slipstream.config.inference import InferenceServer
from slipstream.inference.lending import ServerFacts

from .test_plan import GRPO, LORA, plan, refusal

CONFIG = {"model_type": "qwen3", "hidden_size": 32}
SERVER = {"config": CONFIG | {"dtype": "float32"}, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 7}
SERVER |= {"model": "m", "kv_cache_bytes": 0, "world_size": 1, "on_gpu": False}


def measured(*servers, **more):
    """Facts with these servers, and the addresses of as many."""
    facts = tuple(ServerFacts(**SERVER | changes) for changes in servers or ({},))
    urls = tuple(InferenceServer(url=f"unix:/{number}") for number in range(len(facts)))
    return {"inference.servers": urls}, {"servers": facts, "model_config": CONFIG, **more}


def test_servers_decide_type_length_and_number():
    values, facts = measured({}, {"max_num_seqs": 5})
    made = plan(values, **facts).config
    assert (made.model.dtype, made.inference.replicas, made.weights.bridge) == ("float32", 2, "broadcast")
    assert (made.inference.max_num_seqs, made.inference.max_model_len <= 512) == (5, True)
    assert (made.inference.sleep, made.run.placement) == (False, "separate")


@pytest.mark.parametrize(
    ("said", "servers", "values"),
    [
        ("has another model, m, by hidden_size", [{"config": CONFIG | {"hidden_size": 64}}], {}),
        ("was started with --dtype bfloat16", [{"dtype": "bfloat16"}], {"model.dtype": "float32"}),
        ("different values of --dtype", [{}, {"dtype": "bfloat16"}], {}),
        ("model.fp32_head = true", [{}], {"model.fp32_head": True}),
    ],
)
def test_others_are_refused(said, servers, values):
    own, facts = measured(*servers)
    assert said in refusal(own | values, **facts)


def test_environments_of_atropos_must_reach_the_servers():
    there = InferenceServer(url="http://10.0.0.2:1", token_variable="T")
    values = {"inference.servers": (there,), "environment.name": "atropos"}
    run = GRPO.model_copy(update={"evaluation": None})
    _, facts = measured({"inference": "http://127.0.0.1:8000"})
    assert "start it with --host 10.0.0.2" in refusal(values, run, **facts)
    _, facts = measured({"inference": "http://10.0.0.2:8000"})
    plan(values, run, **facts)
    assert "leave it out" in refusal(values | {"environment.settings": {"model_port": 8000}}, run, **facts)


def test_bridges_by_files_need_the_folder_and_adapters_room():
    values, facts = measured(blind_servers=("unix:/0",))
    assert "does not see the run folder" in refusal(values | {"weights.bridge": "disk"}, **facts)
    values, facts = measured()
    assert plan(values | {"weights.bridge": "disk"}, GRPO, **facts).config.weights.bridge == "disk"
    assert "servers have none" in refusal(values | {"weights.bridge": "lora"}, LORA, **facts)
