"""Clients of deployments that compare every answer with PEFT's merged model."""

import concurrent.futures
import threading
from collections import Counter

import openai
import torch

PROMPTS = ("4+5=", "abc", "the end of it")
NUM_TOKENS = 4


class Expected:
    """Log-probabilities by PEFT's merged model, in float32."""

    def __init__(self, base, run):
        self._base, self._run = base, run
        self._models, self._known, self._lock = {}, {}, threading.Lock()

    def logprobs(self, step, prompt, tokens):
        with self._lock:
            key = (step, tuple(prompt), tuple(tokens))
            if key not in self._known:
                row = torch.tensor([[*prompt, *tokens]])
                with torch.no_grad():
                    found = torch.log_softmax(self._model(step)(row).logits[0, len(prompt) - 1 : -1].float(), -1)
                self._known[key] = found[range(len(tokens)), tokens].tolist()
            return self._known[key]

    def _model(self, step):
        import peft
        from transformers import AutoModelForCausalLM

        if step not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
            if step:
                folder = self._run / f"checkpoints/step-{step:06d}/weights"
                model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
            self._models[step] = model.eval()
        return self._models[step]


class Load:
    """Clients that ask ready names without a pause, and compare each answer."""

    def __init__(self, url, key, steps, expected, num_clients=3):
        self.steps, self._expected = steps, expected
        self.withdrawn, self.failures, self.largest = set(), [], 0.0
        self.answers, self.late = Counter(), 0
        self._url, self._key, self._over = url, key, threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, num_clients))
        self._clients = [self._pool.submit(self._ask_on, number) for number in range(num_clients)]

    def _ask_on(self, number):
        with openai.OpenAI(base_url=self._url, api_key=self._key, max_retries=0, timeout=120) as client:
            while not self._over.is_set():
                ready = [name for name in self.steps if name not in self.withdrawn]
                if not ready:
                    continue
                number += 1
                self._ask(client, ready[number % len(ready)], PROMPTS[number % len(PROMPTS)])

    def _ask(self, client, name, prompt):
        try:
            self.compare(client, name, prompt)
            self.answers[name] += 1
        except openai.NotFoundError:
            if name not in self.withdrawn:
                self.failures.append(f"404 of {name}")
            self.late += 1
        except Exception as error:  # noqa: BLE001 (each is a finding)
            self.failures.append(f"{name}: {error!r}")

    def compare(self, client, name, prompt):
        options = {"return_token_ids": True, "ignore_eos": True, "stop_token_ids": []}
        found = client.completions.create(
            model=name, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, logprobs=1, extra_body=options
        )
        choice = found.choices[0]
        wanted = self._expected.logprobs(self.steps[name], choice.prompt_token_ids, choice.token_ids)
        difference = max(abs(a - b) for a, b in zip(choice.logprobs.token_logprobs, wanted, strict=True))
        self.largest = max(self.largest, difference)
        if difference > 1e-4 or len(wanted) != NUM_TOKENS:
            self.failures.append(f"{name} differs by {difference}")

    def end(self):
        self._over.set()
        for client in self._clients:
            client.result(180)
        self._pool.shutdown()
