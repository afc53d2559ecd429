"""Steps of learners and optimizers, and what must not depend on an interruption between them."""

import torch

from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.optim.base import MasterAdamW


def apply(optimizer, rate):
    """One update by the gradients that are there."""
    stats = optimizer.prepare(rate)
    optimizer.commit()
    return stats


def learner_of(model, micro_batch_tokens=512, **settings):
    optimizer = MasterAdamW(model.network.named_parameters(), **settings)
    return Learner(model, optimizer, micro_batch_tokens=micro_batch_tokens)


def advance(learner, batch, rate=1e-2, objective=None):
    learner.forward_backward(batch, objective or SFTObjective())
    stats = learner.optim_prepare(rate)
    learner.optim_commit()
    return stats


def check_interruption(make, make_batch, folder, load=lambda learner, folder: learner.load(folder)):
    """Four steps are the same bit for bit with a save and a load between them; returns the state after them."""
    whole, first, resumed = (make() for _ in range(3))
    for seed in range(4):
        advance(whole, make_batch(seed=seed), 1e-3)
    for seed in range(2):
        advance(first, make_batch(seed=seed), 1e-3)
    first.save(folder)
    load(resumed, folder)
    for seed in range(2, 4):
        advance(resumed, make_batch(seed=seed), 1e-3)
    expected, found = whole.optimizer.state(), resumed.optimizer.state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for (name, weight), (_, other) in zip(resumed.named_weights(), whole.named_weights(), strict=True):
        assert torch.equal(weight, other), name
    return found


def side_by_side(kinds, shape, steps, gradient_of, **settings):
    """Two equal networks, trained by two optimizers with equal gradients; both, and the optimizers."""
    torch.manual_seed(0)
    networks = [torch.nn.Linear(*shape) for _ in kinds]
    networks[1].load_state_dict(networks[0].state_dict())
    optimizers = [kind(each.named_parameters(), **settings) for kind, each in zip(kinds, networks, strict=True)]
    for _ in range(steps):
        gradient, stats = gradient_of(torch.randn(*reversed(shape))), []
        for network, optimizer in zip(networks, optimizers, strict=True):
            ((network.weight * gradient).sum() + network.bias.sum()).backward()
            stats.append(apply(optimizer, 1e-2))
        assert stats[0] == stats[1]
    return networks, optimizers
