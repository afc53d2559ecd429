"""In the place of Weights & Biases: answers with an address, and keeps nothing."""

from types import SimpleNamespace

URL = "https://wandb.example/me/slipstream/runs/key"
Table = Settings = dict


def init(**_):
    nothing = SimpleNamespace(starting_step=0, url=URL, log=lambda *_, **__: None, finish=lambda *_: None)
    nothing.define_metric = lambda *_, **__: None
    return nothing
