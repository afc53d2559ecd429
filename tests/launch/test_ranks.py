"""Several trainer processes against one: the same losses, gradients, weights and fingerprints, however many there are;
state that any number of them reads; and what is said when one of them fails."""

import asyncio
import concurrent.futures
import contextlib
import gc
import random
import signal
import time

import pytest
import torch
import uvloop

from slipstream import records
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import RunConfig
from slipstream.errors import ConfigError, RankError, TrainingError, ZeroGradientError
from slipstream.launch.build import build, build_objective, build_sharded
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.plan.decided import planned_config
from slipstream.processes import heartbeat, stacks
from slipstream.records import SamplingParams
from slipstream.trainer.checkpoints.state_files import read_state
from slipstream.trainer.packing import StepBatch
from slipstream.weights.fingerprint import describe
from tests.trainer.test_vision_towers import save_with_tower

SAMPLING = SamplingParams(max_tokens=32, temperature=0.9)
RATE = 1e-3
GRPO = {"kind": "grpo", "kl_coef": 0.05}
PPO = {"kind": "ppo", "kl_coef": 0.0}
GSPO = {"kind": "gspo", "kl_coef": 0.05, "importance_sampling": "sequence_masked", "entropy_coef": 0.01}
"""Ratios, weights and means of whole sequences."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # 7 rows in some matrices and 97 words: nothing divides by 2 or 4.
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=48, num_layers=2, intermediate_size=95, context_length=256)


def make_config(model, ranks, algorithm=GRPO, dtype="float32", lora=None, fp32_head=False, **training):
    chosen = {"steps": 4, "ranks": ranks, "micro_batch_tokens": 160, "gradient_checkpointing": False}
    sections = {"lora": lora} if lora else {}
    if algorithm["kind"] == "ppo":
        sections["critic"] = {"learning_rate": RATE}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "fp32_head": fp32_head, "fp32_residual": False},
            "environment": {"name": "reasoning_gym/spell_backward"},
            "algorithm": algorithm,
            "training": chosen | {"max_grad_norm": 1e9, "rank_timeout_s": 120.0} | training,
            "run": {"threads": 2},
            **sections,
        }
    )
    return planned_config(config)


@contextlib.contextmanager
def trained(config, logs, workers=()):
    """What a run trains, and the other ranks while it does; in the memory of `workers` where there are some."""
    if 0 < torch.cuda.device_count() < config.training.ranks:
        pytest.skip(f"{config.training.ranks} ranks need a GPU each, and there are {torch.cuda.device_count()}")
    torch.manual_seed(0)
    if config.training.ranks == 1:
        yield build(config, None, 0), None
        return
    crew = RankProcesses(config, SAMPLING, logs, tuple(worker.shared for worker in workers))
    try:
        yield build_sharded(config, SAMPLING, crew, 0), crew
    finally:
        crew.close()


def make_batch(seed, groups=3, size=3):
    """Groups that share a prompt."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(groups):
        prompt = [rng.randrange(1, 90) for _ in range(rng.randint(1, 20))]
        for _ in range(size):
            length = rng.randint(1, 30)
            ids = prompt + [rng.randrange(1, 90) for _ in range(length)]
            mask = [False] * len(prompt) + [True] * length
            sequences.append(records.Sequence(ids, mask, [-4.5 * float(trained) for trained in mask]))
    return StepBatch(sequences, [rng.gauss(0, 1) for _ in sequences])


BATCHES = [make_batch(1, 8, 4), make_batch(2, 1, 1), make_batch(3, 2, 1), make_batch(4, 3, 3)]
"""Many sequences, one, two, and some: less than there are ranks, too."""


def one_step(parts, config, batch):
    """The numbers of an optimizer step."""
    learner, objective = parts.learner, build_objective(config, SAMPLING)
    if parts.reference is not None:
        batch.fill("reference_logprobs", parts.reference.forward(batch.sequences, SAMPLING).logprobs)
    metrics = learner.forward_backward(batch, objective)
    stats = learner.optim_prepare(RATE)
    learner.optim_commit()
    return {**metrics, "grad_norm": stats.grad_norm}


def four_steps(config, folder):
    """Losses of four steps, the first gradient of every parameter, the last weights, and what they say of tokens."""
    rows = []
    with trained(config, folder) as (parts, _):
        for number, batch in enumerate(BATCHES):
            rows.append(one_step(parts, config, batch))
            if number == 0:
                parts.learner.save(folder / "first")
        scores = parts.learner.forward(BATCHES[0].sequences, SAMPLING)
        weights = parts.learner.adapter_weights() if config.lora else parts.learner.named_weights()
        described = describe(weights)
        tensors = dict(parts.learner.adapter_weights() if config.lora else parts.learner.named_weights())
        assert describe(tensors.items()) == described
        base = {spec.name: spec for spec in describe(parts.learner.base_weights())} if config.lora else {}
    state = read_state(folder / "first")
    moments = {name: tensor for name, tensor in state.items() if ".exp_avg." in name}
    return rows, moments, tensors, scores, base


def compare(several, one):
    """What `four_steps` found over ranks, and in one process."""
    for row, expected in zip(several[0], one[0], strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"num_micro_batches", "num_row_tokens"}:
            if name.startswith("memory/"):  # on a GPU
                continue
            assert row[name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name
    # The first moment after one step is the gradient times 1 - beta1.
    assert several[1].keys() == one[1].keys()
    for name, moment in several[1].items():
        assert (moment - one[1][name]).norm() <= 3e-6 * one[1][name].norm() + 1e-12, name
    assert several[2].keys() == one[2].keys()
    for name, tensor in several[2].items():
        # Where a gradient is next to nothing, rounding decides on its direction: a step is RATE at most.
        assert (tensor - one[2][name]).abs().max() <= 4 * RATE, name
        assert (tensor - one[2][name]).norm() <= 1e-3 * one[2][name].norm() + 1e-6, name
    for own, expected in zip(several[3].logprobs, one[3].logprobs, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-3, rtol=1e-3)
    assert several[4] == one[4], "the frozen base is the model's own, bit for bit"


CASES = {
    "grpo": {},
    "lora": {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}, "gradient_checkpointing": True},
    "alone": {"packing": False, "gradient_checkpointing": True},
    "gspo": {"algorithm": GSPO},
    "whole": {"reshard": "step"},
    "lazy logits": {"fp32_head": True, "gradient_checkpointing": True},
    "lazy logits of lora": {"fp32_head": True, "lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}},
    "whole lora": {"reshard": "step", "lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}},
}
OVER = [("grpo", 2), ("lora", 2), ("whole", 2)]
MORE = [("grpo", 4), ("gspo", 4), ("alone", 2), ("whole lora", 2), ("lazy logits", 2), ("lazy logits", 4)]
OVER += [pytest.param(*each, marks=pytest.mark.full) for each in (*MORE, ("lazy logits of lora", 2))]


@pytest.mark.parametrize(("case", "ranks"), OVER)
def test_losses_gradients_and_weights_are_those_of_one_process(case, ranks, model, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    one = four_steps(make_config(model, 1, **CASES[case]), tmp_path / "one")
    several = four_steps(make_config(model, ranks, **CASES[case]), tmp_path / "several")
    compare(several, one)


@pytest.mark.full
@pytest.mark.parametrize(("lora", "reshard"), [(None, "step"), ({"rank": 4}, "layer")])
def test_a_model_with_an_image_tower_over_ranks(lora, reshard, tmp_path):
    model = save_with_tower(tmp_path / "model", "qwen3-vl", vocab_size=97)
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found[ranks] = four_steps(make_config(model, ranks, lora=lora, reshard=reshard), folder)
    for several, one in zip(found[2][0], found[1][0], strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=2e-5)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
    assert found[2][2].keys() == found[1][2].keys()
    assert any("visual" in name for name in found[2][2]) == (lora is None)
    for name, tensor in found[2][2].items():
        assert (tensor - found[1][2][name]).abs().max() <= (0.0 if "visual" in name else 4 * RATE), name
    assert found[2][4] == found[1][4]


@pytest.mark.full
def test_state_is_read_by_any_number_of_ranks(model, tmp_path):
    def finish(parts, config):
        return [one_step(parts, config, batch)["loss"] for batch in BATCHES[2:]]

    config = make_config(model, 1)
    with trained(config, tmp_path) as (parts, _):
        for batch in BATCHES[:2]:
            one_step(parts, config, batch)
        parts.learner.save(tmp_path / "by-1")
        expected = finish(parts, config)
    before = "by-1"
    for ranks in (2, 4, 1):
        config = make_config(model, ranks)
        with trained(config, tmp_path) as (parts, _):
            parts.learner.load(tmp_path / before)
            assert parts.learner.step == 2
            before = f"again-by-{ranks}"
            parts.learner.save(tmp_path / before)
            assert finish(parts, config) == pytest.approx(expected, rel=1e-5)
    first, last = read_state(tmp_path / "by-1"), read_state(tmp_path / before)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first if not name.startswith("rng"))


@pytest.mark.full
def test_a_critic_over_ranks(model, tmp_path):
    found = {}
    for ranks in (1, 2):
        config = make_config(model, ranks, algorithm=PPO)
        with trained(config, tmp_path) as (parts, _):
            sequences = BATCHES[0].sequences
            rollouts = [records.Rollout(str(n), "t", "g", [s], 0.0, "done") for n, s in enumerate(sequences)]
            batch = records.Batch(0, records.Version(0, 0), rollouts)
            learner = parts.critic.learner
            step = StepBatch(sequences)
            rows = []
            for _ in range(3):
                values = [value[0] for value in parts.critic.values(batch)]
                step.fill("old_values", values)
                step.fill("returns", [torch.ones_like(value) for value in values])
                rows.append(parts.critic.train([step]))
            parts.critic.save(tmp_path / f"critic-{ranks}")
            assert learner.step == 3
            found[ranks] = rows, torch.cat([value[0] for value in parts.critic.values(batch)])
            if ranks == 2:
                parts.critic.load(tmp_path / "critic-1")
                again = torch.cat([value[0] for value in parts.critic.values(batch)])
                torch.testing.assert_close(again, found[1][1], atol=1e-6, rtol=1e-5)
    for row, expected in zip(found[2][0], found[1][0], strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[2][1], found[1][1], atol=1e-4, rtol=1e-3)


@pytest.mark.full
def test_bfloat16_without_masters(model, tmp_path):
    losses = []
    for ranks, reshard in ((1, "layer"), (2, "layer"), (2, "step")):
        config = make_config(model, ranks, dtype="bfloat16", optimizer="adamw_bf16", reshard=reshard)
        with trained(config, tmp_path) as (parts, _):
            losses.append([one_step(parts, config, batch)["loss"] for batch in BATCHES])
            assert {tensor.dtype for _, tensor in parts.learner.named_weights()} == {torch.bfloat16}
    # Packed otherwise, bfloat16 rounds otherwise; weights are rounded by chance, and otherwise for each rank.
    for several in losses[1:]:
        assert several == pytest.approx(losses[0], abs=0.03)


@pytest.mark.full
def test_gradients_in_bfloat16_are_added_up_through_a_step(model, tmp_path):
    """By each rank through a step, or over the ranks after each pass: the same sums. FSDP2 adds up in float32 and hands
    its sums over in the parameter's type: once a step, or once a pass."""
    moments = {}
    for reshard in ("layer", "step"):
        config = make_config(model, 2, dtype="bfloat16", reshard=reshard)
        with trained(config, tmp_path) as (parts, _):
            assert one_step(parts, config, BATCHES[0])["num_micro_batches"] >= 4
            parts.learner.save(tmp_path / reshard)
        state = read_state(tmp_path / reshard)
        moments[reshard] = {name: tensor for name, tensor in state.items() if ".exp_avg." in name}
    for name, moment in moments["step"].items():
        assert (moment - moments["layer"][name]).norm() <= 5e-3 * moment.norm(), name


def test_what_goes_wrong_on_all_ranks_alike_and_one_that_is_killed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_ANSWER_S", 60.0)
    other = new_model(tmp_path / "other", hidden_size=32, num_layers=2, intermediate_size=64, context_length=256)
    with trained(make_config(other, 1), tmp_path) as (parts, _):
        parts.learner.save(tmp_path / "of-another")
    config = make_config(model, 2, algorithm={"kind": "grpo"})
    with trained(config, tmp_path) as (parts, crew):
        nothing = make_batch(5)
        nothing.advantages = [0.0] * len(nothing.sequences)
        parts.learner.forward_backward(nothing, build_objective(config, SAMPLING))
        with pytest.raises(ZeroGradientError, match="teaches nothing"):
            parts.learner.optim_prepare(RATE)
        one_step(parts, config, BATCHES[0])
        # Whoever has had enough of the weights leaves the ranks in step.
        weights = iter(parts.learner.named_weights())
        next(weights)
        weights.close()
        assert one_step(parts, config, BATCHES[1])["grad_norm"] > 0
        deadline = time.monotonic() + 60  # the beat follows what it does
        while [beat.doing for beat in heartbeat.read_folder(tmp_path / "heartbeats")] != ["waiting for rank 0"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (answer,) = stacks.ask(tmp_path / "stacks")
        assert (answer.name, answer.missing) == (f"rank-1-{crew.pids[0]}", "")
        assert answer.state.startswith("waiting for rank 0, no progress for ")
        while "child.py" not in (tmp_path / "stacks" / f"{answer.name}.txt").read_text():
            assert time.monotonic() < deadline + 60
            time.sleep(0.02)
        crew._ranks[0].process.send_signal(signal.SIGKILL)
        crew._ranks[0].process.wait(60)
        with pytest.raises(RankError, match=r"trainer process 1 \(of 0 to 1\) was killed \(SIGKILL\)"):
            one_step(parts, config, BATCHES[0])
    with trained(config, tmp_path) as (parts, _), pytest.raises(TrainingError, match="another model"):
        parts.learner.load(tmp_path / "of-another")


FAILURES = """
import sys, time

def on_rank_1(inputs):
    if "slipstream.launch.ranks.child" in " ".join(sys.orig_argv):
        {action}
    return -inputs.advantages_N * (inputs.logprobs_N - inputs.old_logprobs_N).exp()
"""


@pytest.mark.full
@pytest.mark.real_start
@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("raise KeyError('apple')", "losses.py:on_rank_1 raised KeyError: 'apple' .line"),
        ("time.sleep(60)", "compute gradients within 20 s .training.rank_timeout_s."),
    ],
)
def test_a_rank_that_fails_is_named(action, says, model, tmp_path):
    losses = tmp_path / "losses.py"
    losses.write_text(FAILURES.format(action=action))
    algorithm = {"kind": "grpo", "loss": f"{losses}:on_rank_1"}
    config = make_config(model, 2, algorithm=algorithm, rank_timeout_s=20.0 if "sleep" in action else 120.0)
    with trained(config, tmp_path) as (parts, crew):
        processes = [rank.process for rank in crew._ranks]
        with pytest.raises((RankError, TrainingError), match=says):
            one_step(parts, config, BATCHES[0])
    assert all(process.poll() is not None for process in processes)


def test_after_the_first_update_the_garbage_collector_of_a_rank_looks_at_new_objects_only(model, tmp_path):
    losses = tmp_path / "losses.py"
    losses.write_text(FAILURES.format(action="import gc; assert not gc.get_freeze_count(), 'left out'"))
    config = make_config(model, 2, algorithm={"kind": "grpo", "loss": f"{losses}:on_rank_1"})
    with trained(config, tmp_path) as (parts, _):
        one_step(parts, config, BATCHES[0])
        with pytest.raises(TrainingError, match=r"losses.py:on_rank_1 raised AssertionError: left out"):
            one_step(parts, config, BATCHES[0])


def test_a_rank_that_cannot_start(model, tmp_path):
    config = make_config(model, 2, lora={"rank": 4, "target_modules": ["nonsense"]})
    with pytest.raises(ConfigError, match="nonsense"), trained(config, tmp_path):
        pass


def test_a_child_can_be_forked_by_another_thread_when_the_ranks_are_gone(model, tmp_path):
    """A forked child clears the caches of its parent's other threads; DTensor's is one, with the group in it."""
    config = make_config(model, 2, {"kind": "grpo"})
    with trained(config, tmp_path) as (parts, _):
        parts.learner.forward_backward(make_batch(0), build_objective(config, SAMPLING))
        parts.learner.optim_prepare(RATE)
    del parts
    gc.collect()

    async def start():
        process = await asyncio.create_subprocess_exec("true", stderr=asyncio.subprocess.PIPE)
        _, err = await process.communicate()
        return process.returncode, err

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # as the orchestrator's thread starts reward workers
        assert pool.submit(uvloop.run, start()).result(60) == (0, b"")
