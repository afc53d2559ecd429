import random

import pytest
import torch
import transformers

from slipstream import records
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.trainer.distributed.fsdp import RankGroup
from slipstream.trainer.learner import Learner
from slipstream.trainer.model import layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one rank, in this process."""
    found = RankGroup(str(tmp_path_factory.mktemp("ranks") / "store"), 0, 1, timeout_s=60.0)
    yield found
    found.leave()


@pytest.fixture(scope="session")
def save_model():
    """Writes a small model of the architecture `kind` to `folder`."""

    def save(folder, kind, **changes):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
        network = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        # Wider than usual, so that what one token does to another is far above rounding.
        for parameter in network.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        network.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A two-layer Qwen3 of 60 thousand parameters, grouped heads, tied embeddings."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=48, num_layers=2, intermediate_size=96, context_length=256)


@pytest.fixture
def make_learner(model_folder):
    def make(
        micro_batch_tokens=256,
        *,
        folder=model_folder,
        dtype="float32",
        packing=True,
        checkpointing=False,
        kind=MasterAdamW,
        **settings,
    ):
        model = PolicyModel.load(folder, dtype, packing=packing, checkpointing=checkpointing)
        optimizer = kind(model.network.named_parameters(), **settings)
        return Learner(model, optimizer, micro_batch_tokens=micro_batch_tokens)

    return make


@pytest.fixture
def make_batch():
    """Sequences of uneven lengths, some with several trainable turns, with made-up engine logprobs."""

    def make(num=9, seed=0, longest=90, advantages=True):
        rng = random.Random(seed)
        sequences = []
        for _ in range(num):
            length = rng.randint(6, longest)
            prompt = rng.randint(1, length - 3)
            mask = [i >= prompt and (i < prompt + 2 or rng.random() < 0.8) for i in range(length)]
            logprobs = [rng.uniform(-6.0, -3.0) if trained else 0.0 for trained in mask]
            ids = [rng.randrange(1, 97) for _ in range(length)]
            sequences.append(records.Sequence(ids, mask, logprobs))
        return StepBatch(sequences, [rng.gauss(0, 1) for _ in range(num)] if advantages else None)

    return make


@pytest.fixture
def gradients_of():
    """Gradients by parameter name, as accumulated on the masters."""

    def gradients(learner):
        return {name: master.grad.clone() for name, master in learner.optimizer.masters().items()}

    return gradients


@pytest.fixture
def fresh_compiler(monkeypatch):
    """Dynamo and AOTAutograd as they are, without the minutes of a C++ compiler; yields dynamo's counters."""
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def one_thread():
    """The machine may be shared; results do not depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
