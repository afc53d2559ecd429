"""A character-level tokenizer in Hugging Face format, made in a second, with whatever chat template a test needs."""

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """`make_folder(template, generation_eos=None, bos=False)` -> the folder of a tokenizer whose eos is `<|end|>`; with
    `bos` there is `<bos>`, which begins a text unless it is "unused"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    def make(
        template: str | None = CHATML, generation_eos: int | list[int] | None = None, bos: bool | str = False
    ) -> Path:
        symbols = ["<unk>", *string.printable]
        backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [], unk_token="<unk>"))
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in ("<|end|>", "<|im_start|>", "<|im_end|>")]
        )
        if bos:
            backend.add_special_tokens([AddedToken("<bos>", special=True, normalized=False)])
        if bos is True:
            begins = [("<bos>", backend.token_to_id("<bos>"))]
            backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begins)
        named = {"bos_token": "<bos>"} if bos else {}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>", chat_template=template, **named
        )
        folder = tmp_path / "tokenizer"
        fast.save_pretrained(folder)
        if generation_eos is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        return folder

    return make
