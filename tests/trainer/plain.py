"""What transformers computes by itself, one unpadded sequence at a time: what our rows are compared with."""

import torch
import transformers


def plain(folder, dtype=torch.float32, attention="sdpa", kind="CausalLM", **options):
    """The model in a folder, by transformers alone; `kind` is "CausalLM" or "ImageTextToText"."""
    load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    return load(folder, dtype=dtype, attn_implementation=attention, **options).eval()


def logprobs_of(network, sequence, **inputs):
    """Of a sequence's trainable tokens."""
    ids = torch.tensor([sequence.token_ids])
    logits = network(input_ids=ids, **inputs).logits[0, :-1]
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return found[torch.tensor(sequence.mask)[1:]]


def loss_of(network, sequences):
    """The mean over all trainable tokens, as SFT has it."""
    total = sum(sequence.num_trainable for sequence in sequences)
    return -sum(logprobs_of(network, sequence).sum() for sequence in sequences) / total


def loss_and_gradients(network, sequences):
    loss = loss_of(network, sequences)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
