import filecmp
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.commands.small_models.tiny_qwen3 import DEFAULT_ALPHABET, new_model, new_tokenizer
from slipstream.errors import ConfigError

TOKENIZERS = {kind: new_tokenizer(kind) for kind in ("byte", "char")}
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize("text", ["  both ends  ", "\n\n", " ", "a  b\nc", "1 + 1 = 2 .", "don't , he 's", ""])
@pytest.mark.parametrize("kind", ["byte", "char"])
def test_text_survives_the_folder(kind, text, tmp_path):
    folder = new_model(tmp_path / "model", tokenizer=kind, **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@given(st.text(alphabet=DEFAULT_ALPHABET))
def test_char_text_of_the_alphabet_decodes_to_itself(text):
    tokenizer = TOKENIZERS["char"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_survives_bytes(text):
    tokenizer = TOKENIZERS["byte"]
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_unknown_characters_become_unk():
    tokenizer = new_tokenizer("char", "01 ")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("0x1")) == ["0", "<unk>", "1"]
    assert len(tokenizer) == 3 + 1 + 3


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_chat_template_is_chatml_and_ends_with_eos(kind, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(new_model(tmp_path / "model", tokenizer=kind, **SMALL))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_folder_is_complete_and_repeats_by_seed(tmp_path):
    a, b, c = (new_model(tmp_path / name, seed=seed, **SMALL) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    names = sorted(path.name for path in a.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert filecmp.cmpfiles(a, b, names, shallow=False)[0] == names
    assert not filecmp.cmp(a / "model.safetensors", c / "model.safetensors", shallow=False)
    network = AutoModelForCausalLM.from_pretrained(a)
    assert network.generation_config.eos_token_id == AutoTokenizer.from_pretrained(a).eos_token_id
    assert network.config.vocab_size == len(AutoTokenizer.from_pretrained(a))


def test_the_callers_random_stream_is_left_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    new_model(tmp_path / "model", **SMALL)
    assert torch.equal(torch.rand(4), expected)


def test_untied_bfloat16(tmp_path):
    folder = new_model(tmp_path / "model", tie_embeddings=False, dtype="bfloat16", **SMALL)
    network = AutoModelForCausalLM.from_pretrained(folder)
    assert network.dtype == torch.bfloat16
    assert network.lm_head.weight.data_ptr() != network.model.embed_tokens.weight.data_ptr()


def test_first_predictions_are_near_uniform(model_folder):
    network = AutoModelForCausalLM.from_pretrained(model_folder)
    probs = network(input_ids=torch.arange(50)[None]).logits[0].softmax(-1)
    assert probs.max() < 0.05


@pytest.mark.parametrize(("context_length", "head_dim"), [(64, 32), (256, 32), (4096, 64)])
def test_the_slowest_rotation_makes_half_a_turn_in_the_context(context_length, head_dim, tmp_path):
    sizes = SMALL | {"context_length": context_length, "head_dim": head_dim}
    network = AutoModelForCausalLM.from_pretrained(new_model(tmp_path / "model", **sizes))
    slowest = network.model.rotary_emb.inv_freq.min().item()
    assert slowest * context_length == pytest.approx(math.pi, rel=0.01)
    given = AutoModelForCausalLM.from_pretrained(new_model(tmp_path / "given", rope_theta=5e5, **SMALL))
    assert given.config.rope_parameters["rope_theta"] == 5e5


def test_what_cannot_work_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        new_model(tmp_path)
    with pytest.raises(ConfigError, match="num_kv_heads 3 does not divide num_heads 4"):
        new_model(tmp_path / "a", num_kv_heads=3)
    with pytest.raises(ConfigError, match="head_dim 16"):
        new_model(tmp_path / "a", head_dim=16)
    with pytest.raises(ConfigError, match="leave alphabet out"):
        new_model(tmp_path / "a", tokenizer="byte", alphabet="01")


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}},
    {"type": "function", "function": {"name": "now"}},
]


def test_chat_template_renders_tools_calls_and_their_results():
    question, result = {"role": "user", "content": "1+2?"}, {"role": "tool", "content": "3"}
    calls = [
        {"type": "function", "id": "0", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}},
        {"name": "now", "arguments": "{}"},
    ]
    called = {"role": "assistant", "content": "See.", "tool_calls": calls}

    def render(*messages, **given):
        return TOKENIZERS["char"].apply_chat_template(list(messages), tokenize=False, **given)

    head = "<|im_start|>system\nTools: add(a, b), now()<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n"
    assert render(question, tools=TOOLS, add_generation_prompt=True) == f"{head}<|im_start|>assistant\n"
    text = (
        '<tool_call>{"name":"add","arguments":{"a":1,"b":[2]}}</tool_call>'
        '<tool_call>{"name":"now","arguments":{}}</tool_call>'
    )
    turn = f"<|im_start|>assistant\nSee.{text}<|im_end|>\n"
    assert render(question, called, result, tools=TOOLS) == f"{head}{turn}<|im_start|>tool\n3<|im_end|>\n"
    as_text = {"role": "assistant", "content": f"See.{text}"}
    assert render(question, as_text, tools=TOOLS) == f"{head}{turn}", "calls are what the policy itself writes"
    system = {"role": "system", "content": "Be brief."}
    assert render(system, question, tools=TOOLS).startswith(
        "<|im_start|>system\nBe brief.\nTools: add(a, b), now()<|im_end|>\n<|im_start|>user"
    )
