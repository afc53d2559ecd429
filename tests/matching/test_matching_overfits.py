"""Rollout matching learns: on a few images repeated steps of both channels find more objects, and find them better."""

import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import transformers
from tests.matching.matching_runs import new_detector, rollout

from slipstream.config.environment import EnvironmentConfig
from slipstream.data.images.families import image_processor
from slipstream.envs.registry import load_environment
from slipstream.orchestrator.method import Material
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch
from slipstream_matching.objective import MatchingObjective
from slipstream_matching.reader import MatchingReader
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import examples_of

DRAW = Path(__file__).parents[2] / "examples" / "detection" / "rectangles.py"
CONFIG = MatchingConfig(pattern=("B", "A"), soft_ce_weight=1.0, max_invalid=1.0)
NUM_IMAGES, LONGEST = 3, 180
WRITTEN, STEPS = 150, 120
"""So many that a processor with other roundings finds the objects too."""


def _moved(described):
    x1, y1, x2, y2 = described["bbox_2d"]
    return described | {"bbox_2d": [x1 // 2, y1 // 2, x2 // 2, y2 // 2]}


class Trained:
    """A small detector, its images, and greedy answers of the weights that are trained."""

    def __init__(self, folder):
        self.detector = new_detector(folder / "model")
        runpy.run_path(str(DRAW))["write"](folder / "boxes", NUM_IMAGES)
        path = str(folder / "boxes/rows.jsonl")
        given = {"path": path, "eval_path": path, "prompt": "Detect."}
        environment = load_environment(EnvironmentConfig(name="detection", settings=given))
        self.tasks = self.detector.tasks = environment.tasks("train", NUM_IMAGES)
        self.examples = examples_of(self.tasks, self.detector.tokenizer, self.detector.tokens, CONFIG, 512)
        policy = PolicyModel.load(self.detector.folder, train_tower=True)
        self.learner = Learner(policy, MasterAdamW(policy.network.named_parameters()), micro_batch_tokens=4096)
        self.plain = transformers.AutoModelForImageTextToText.from_pretrained(self.detector.folder).eval()

    def moved_examples(self):
        """Answers with each box at another place: what teaches to write them, and not where they are."""
        tasks = [
            msgspec.structs.replace(task, info={"objects": list(map(_moved, task.info["objects"]))})
            for task in self.tasks
        ]
        return examples_of(tasks, self.detector.tokenizer, self.detector.tokens, CONFIG, 512)

    def step(self, sequences, objective, learning_rate):
        self.learner.forward_backward(StepBatch(list(sequences)), objective)
        self.learner.optim_prepare(learning_rate)
        self.learner.optim_commit()

    @torch.no_grad()
    def roll_out(self, step, items, *, seed, temperature):
        """Greedy answers, by transformers alone. All prompts are of one length."""
        self.plain.load_state_dict(self.learner.model.network.state_dict())
        chat, end = self.detector.tokenizer, self.detector.tokens.end_id
        prompts = [self.tasks[item].prompt for item in items]
        ids = [chat.render(prompt) for prompt in prompts]
        images = [media for prompt, each in zip(prompts, ids, strict=True) for media in chat.place_images(prompt, each)]
        pixels, grids = image_processor(self.detector.folder).pixels(images).values()
        inputs = torch.tensor(ids)
        said = self.plain.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            pixel_values=pixels,
            image_grid_thw=grids,
            mm_token_type_ids=(inputs == chat.images.token_id).int(),
            do_sample=False,
            max_new_tokens=LONGEST,
            eos_token_id=end,
            pad_token_id=end,
        )[:, inputs.shape[1] :].tolist()
        answers = [each[: each.index(end) + 1] if end in each else each for each in said]
        return [rollout(self.detector, item, answer, step) for item, answer in zip(items, answers, strict=True)]


@pytest.fixture
def one_thread():
    """On a busy machine several are many times slower at matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_steps_of_both_channels_raise_f1_and_overlap(tmp_path):
    trained = Trained(tmp_path)
    moved = trained.moved_examples()
    for _ in range(WRITTEN):
        trained.step(moved, SFTObjective(), 2e-3)
    config = SimpleNamespace(run=SimpleNamespace(seed=0), sampling=SimpleNamespace(max_tokens=LONGEST))
    detector = trained.detector
    given = (config, trained.tasks, trained.examples, detector.tokenizer, 512, lambda step: list(range(NUM_IMAGES)))
    reader = MatchingReader(CONFIG, detector.tokens, Material(*given, roll_out=trained.roll_out))
    objective = MatchingObjective(CONFIG, trained.detector.tokens.coordinate_ids)
    found = []
    for step in range(STEPS + 1):
        batch = reader.take(step)
        if step % 2 == 0:
            found.append([batch.metrics.get(f"rollout/{name}", 0.0) for name in ("f1", "matched_maskiou_mean")])
        trained.step([each.sequences[0] for each in batch.rollouts], objective, 1e-3)
    before, after = found[0], [statistics.fmean(values) for values in zip(*found[-5:], strict=True)]
    assert after[0] > before[0] + 0.3
    assert after[1] > before[1] + 0.3
