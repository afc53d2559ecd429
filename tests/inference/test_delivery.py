"""What the patches of delivery change of vLLM's classes, with others in their place."""

from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.inference.plugin.patches import delivery
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded

from .fakes import put


class Flat(SimpleNamespace):
    """As `FlatLogprobs`."""

    def __init__(self):
        names = ("start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens")
        super().__init__(**{name: [] for name in names})


@pytest.mark.parametrize(
    ("tokens", "wrong"), [([[0], [], [9]], None), ([], None), ([[], []], None), ([[3], [-1]], -1), ([[10], [3]], 10)]
)
def test_a_token_outside_of_the_vocabulary_ends_the_engine(tokens, wrong, monkeypatch):
    kind = type("Scheduler", (), {"update_from_output": lambda self, *given: given})
    put(monkeypatch, v1__core__sched__scheduler={"Scheduler": kind})
    delivery.check_tokens()
    scheduler = kind()
    config = SimpleNamespace(get_vocab_size=lambda: 10)
    scheduler.vllm_config = SimpleNamespace(model_config=config)
    result = SimpleNamespace(sampled_token_ids=tokens)
    if wrong is None:
        assert scheduler.update_from_output("scheduled", result) == ("scheduled", result)
        return
    with pytest.raises(RuntimeError, match=f"made the token {wrong}, and there are 0 to 9:"):
        scheduler.update_from_output("scheduled", result)


def test_whole_arrays_of_log_probabilities_are_appended(monkeypatch):
    left = []
    kind = type("LogprobsProcessor", (), {"_update_sample_logprobs": lambda self, lists: left.append(lists)})
    put(
        monkeypatch,
        sampling_params={"SamplingParams": SimpleNamespace(__struct_fields__=("flat_logprobs",))},
        v1__engine__logprobs={"LogprobsProcessor": kind},
        logprobs={"FlatLogprobs": Flat},
    )
    delivery.take_arrays()
    made = kind()
    made.tokenizer, made.logprobs, made.cumulative_logprob = None, Flat(), -1.0

    def lists(*values):
        column = np.array(values, np.float64)[:, None]
        ids = np.arange(len(values))[:, None] + 40
        return SimpleNamespace(logprobs=column, logprob_token_ids=ids, sampled_token_ranks=np.arange(len(values)) + 1)

    made._update_sample_logprobs(lists(-0.5, -0.25))
    made._update_sample_logprobs(lists(-2.0))
    assert vars(made.logprobs) == {
        "start_indices": [0, 1, 2],
        "end_indices": [1, 2, 3],
        "token_ids": [40, 41, 40],
        "logprobs": [-0.5, -0.25, -2.0],
        "ranks": [1, 2, 1],
        "decoded_tokens": [None] * 3,
    }
    assert (made.cumulative_logprob, left) == (-3.75, [])
    wide = SimpleNamespace(logprobs=np.zeros((1, 2)))
    made._update_sample_logprobs(wide)
    made.logprobs = []
    made._update_sample_logprobs(narrow := lists(-1.0))
    made.logprobs, made.tokenizer = Flat(), "one"
    made._update_sample_logprobs(narrow)
    assert (left, made.cumulative_logprob, made.logprobs.logprobs) == ([wide, narrow, narrow], -3.75, [])


def test_messages_of_several_parts_are_sent_as_copies_where_vllm_makes_none(monkeypatch):
    kind = type("MsgpackEncoder", (), {"encode_into": lambda self, message, buffer: [buffer, *message]})
    core = type("EngineCoreProc", (), {})
    put(monkeypatch, v1__engine__core={"EngineCoreProc": core}, v1__serial_utils={"MsgpackEncoder": kind})
    delivery.send_copies()
    buffer = bytearray(b"one")
    assert kind().encode_into([], buffer)[0] is buffer
    first, *others = kind().encode_into(["two", "three"], buffer)
    buffer[:] = b"six"
    assert (first, others) == (b"one", ["two", "three"])
    core._send_msg_tracking_payload = 1
    with pytest.raises(NotNeeded):
        delivery.send_copies()


def test_a_flush_is_sent_before_it_is_answered(monkeypatch):
    core = type("EngineCore", (), {})
    put(monkeypatch, v1__engine={"EngineCoreOutputs": dict}, v1__engine__core={"EngineCore": core})
    delivery.add_flush()
    made, queue = core(), []
    made.output_queue = SimpleNamespace(put_nowait=queue.append)
    made.scheduler = SimpleNamespace()
    monkeypatch.setattr(delivery, "token_counts", lambda core: {"a": len(queue)})
    assert (getattr(made, delivery.FLUSH)(), delivery.flush(made)) == ({"a": 0}, [])
    held = SimpleNamespace(drain=lambda scheduler: {0: ["x"], 1: ["y"]})
    made.scheduler._slipstream_delivery = held, None
    assert delivery.flush(made) == ["x"]
    assert getattr(made, delivery.FLUSH)() == {"a": 2}
    assert queue == [(0, {"outputs": ["x"]}), (1, {"outputs": ["y"]})]


def test_a_vllm_without_what_is_patched_is_told_so(monkeypatch):
    params = SimpleNamespace(__struct_fields__=())
    put(
        monkeypatch,
        v1__core__sched__scheduler={"Scheduler": type("Scheduler", (), {})},
        v1__engine__logprobs={"LogprobsProcessor": type("LogprobsProcessor", (), {})},
        sampling_params={"SamplingParams": params},
    )
    for patch in (delivery.check_tokens, delivery.deliver_at_the_end):
        with pytest.raises(Absent, match=r"Scheduler\.update_from_output"):
            patch()
    with pytest.raises(Absent, match="flat_logprobs"):
        delivery.take_arrays()
    params.__struct_fields__ = ("flat_logprobs",)
    with pytest.raises(Absent, match="_update_sample_logprobs"):
        delivery.take_arrays()


@pytest.fixture
def scheduler(monkeypatch):
    """One whose step brings an output to client 0 and none to client 2, with what delivery keeps for it."""
    made = SimpleNamespace(seen=[], flushed=0, is_usual=True, collected=[])

    class Scheduler:
        vllm_config = SimpleNamespace(max_concurrent_batches=3)

        def update_from_output(self, scheduled, result):
            made.seen.append((scheduled.num_scheduled_tokens, result.logprobs))
            return {0: SimpleNamespace(outputs=["theirs"]), 2: SimpleNamespace(outputs=[])}

    def collect(scheduler, scheduled, result, step, undelivered):
        made.collected.append((scheduled, step))
        return {"b": 1}, {1}

    def flush(scheduler):
        made.flushed += 1

    put(
        monkeypatch,
        v1__core__sched__scheduler={"Scheduler": Scheduler},
        v1__engine={"EngineCoreOutputs": lambda outputs: SimpleNamespace(outputs=outputs)},
    )
    monkeypatch.setattr(delivery, "StepLogprobs", lambda lists: ("step", lists))
    monkeypatch.setattr(delivery.decoding, "is_usual", lambda *given: made.is_usual)
    monkeypatch.setattr(delivery.decoding, "flush", flush)
    made.undelivered = SimpleNamespace(deliver=lambda scheduler, client, outputs, step: [*outputs, (client, step)])
    made.plain = SimpleNamespace(collect=collect)
    delivery.deliver_at_the_end()
    made.it, made.kind = Scheduler(), Scheduler
    return made


LISTS, PARTS = SimpleNamespace(cu_num_generated_tokens=None), SimpleNamespace(cu_num_generated_tokens=[1])


@pytest.mark.parametrize(("lists", "step"), [(LISTS, ("step", LISTS)), (None, None)])
def test_vllm_takes_what_is_not_plain_and_clients_get_what_is_due(lists, step, scheduler):
    scheduler.it._slipstream_delivery = scheduler.undelivered, scheduler.plain
    given = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1})
    answers = scheduler.it.update_from_output(given, SimpleNamespace(logprobs=lists))
    assert {client: answer.outputs for client, answer in answers.items()} == {
        0: ["theirs", (0, step)],
        1: [(1, step)],
        2: [],
    }
    assert scheduler.collected == [({"a": 1, "b": 1}, step)]
    assert scheduler.seen == [({"b": 1}, step)]
    assert (given.num_scheduled_tokens, scheduler.flushed) == ({"a": 1, "b": 1}, 0)


@pytest.mark.parametrize("why", ["unusual", "parts", "no fast path"])
def test_any_other_step_is_all_vllms_after_a_flush(why, scheduler):
    scheduler.it._slipstream_delivery = scheduler.undelivered, None if why == "no fast path" else scheduler.plain
    scheduler.is_usual = why != "unusual"
    lists = PARTS if why == "parts" else None
    given = SimpleNamespace(num_scheduled_tokens={"a": 1})
    answers = scheduler.it.update_from_output(given, SimpleNamespace(logprobs=lists))
    assert {client: answer.outputs for client, answer in answers.items()} == {0: ["theirs", (0, None)], 2: []}
    assert (scheduler.seen, scheduler.collected, scheduler.flushed) == ([({"a": 1}, lists)], [], 1)


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_is_kept_for_a_scheduler_is_made_once(is_plain, scheduler, monkeypatch):
    made = []
    plain = "plain" if is_plain else None
    monkeypatch.setattr(delivery.PlainTokens, "of", lambda scheduler: plain)
    monkeypatch.setattr(delivery, "Undelivered", lambda *given, **options: made.append((given, options)) or "kept")
    assert [delivery._state(scheduler.it) for _ in range(2)] == [("kept", plain)] * 2
    ends = delivery.decoding.end_conditions if is_plain else delivery.never_plain
    assert made == [((2,), {"end_conditions": ends, "flush": delivery.decoding.flush})]
