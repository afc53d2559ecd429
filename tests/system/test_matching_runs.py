"""Channel B with a scripted engine: what the engine is asked, and how a run ends whose engine fails."""

import re
import time

import pytest

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import EngineError
from slipstream_matching.answers import answer_tokens
from slipstream_matching.coordinates import LITERALS
from tests.matching.matching_runs import answer_ids
from tests.system.boxes import SYSTEM

from .conftest import LETTERS, Scripted

RUN = """
[model]
path = "{model}"
[environment]
name = "{environment}"
[algorithm]
kind = "sft"
[matching]
pattern = ["B"]
[sampling]
max_tokens = 120
[training]
steps = 2
prompts_per_batch = 2
learning_rate = 1e-3
[weights]
probe_tasks = 2
[inference]
request_timeout_s = 2
[run]
threads = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "detector"
    return new_vision_model(folder, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, added_tokens=LITERALS)


@pytest.fixture
def run_file(model, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(model=model, environment=LETTERS.with_name("boxes.py")))
    return path


class Detector(Scripted):
    """Runs whose engine finds the same box wherever it looks, and what it was asked, probes apart."""

    def __init__(self, model, run_file, folder):
        super().__init__(model, run_file, folder)
        self.tokenizer = ChatTokenizer(model)
        self.tokens = answer_tokens(self.tokenizer)
        self.asked = []
        self.box = (0, 20, 300, 400)

    def _logprobs(self, location, request, tokens):
        # A greedy answer's are not looked at.
        return super()._logprobs(location, request, tokens) if request.sampling.temperature else [0.0] * len(tokens)

    def find(self, *overrides, on_rollout=lambda engine: None):
        """Train; `on_rollout` is told of each request of a rollout before it is answered."""

        def on_request(engine, request):
            if not request.id.startswith("probe"):
                self.asked.append(request)
                on_rollout(engine)

        return self.run("--no-evaluation", *overrides, script=self.say_box, on_request=on_request)

    def say_box(self, prompt_ids, seed):
        return answer_ids(self, ("red", self.box))


@pytest.fixture
def detector(model, run_file, tmp_path):
    return Detector(model, run_file, tmp_path / "run")


def test_a_request_has_the_system_prompt_and_no_answer(detector):
    report = detector.find()
    assert (report.status, report.step) == ("finished", 2), report.message
    assert len(detector.asked) == 4
    for request in detector.asked:
        prompt = detector.tokenizer.decode(request.prompt_ids)  # without the marks of turns
        assert re.fullmatch(rf"system\n{SYSTEM}\nuser\ntrain \d\?\nassistant\n", prompt)
        assert not set(detector.tokens.coordinate_ids) & set(request.prompt_ids), "no coordinate of the true answer"
    assert [row["stage2/channel_b"] for row in detector.metrics if "stage2/channel_b" in row] == [1, 1]


@pytest.mark.parametrize(
    ("fails", "said"),
    [(("is_alive", False), "the engine died"), (("is_hanging", True), "did not answer /generate in 2 s")],
)
def test_a_failed_engine_ends_the_run_in_bounded_time(detector, fails, said):
    began = time.monotonic()
    report = detector.find("--run.max_restarts", "0", on_rollout=lambda engine: setattr(engine, *fails))
    assert time.monotonic() - began < 60
    assert (report.status, report.exit_code) == ("failed", EngineError.exit_code)
    assert re.search(said, report.message), report.message
    assert report.step == 0


def test_a_run_of_which_no_rollout_can_be_kept_says_why(detector, tmp_path):
    """With what they missed the answers leave the context."""
    shape = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "context_length": 160}
    small = new_vision_model(tmp_path / "small", added_tokens=LITERALS, **shape)
    detector.box = (900, 900, 950, 950)
    report = detector.find("--model.path", str(small), "--sampling.max_tokens", "90")
    assert (report.status, report.error) == ("failed", "TrainingError")
    assert "no rollout could be trained on: look at dropped/too_long" in report.message
    assert [row["dropped/too_long"] for row in detector.metrics if "dropped/too_long" in row] == [2, 2]
