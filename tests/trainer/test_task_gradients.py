"""Gradients of several tasks, from the optimizer that keeps them apart to the learner that combines them."""

import pytest
import torch
from torch import nn

from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.optim.task_gradients import combine, inner


def test_inner_products_are_over_the_parameters_that_both_have():
    one = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])}
    assert inner(one, {"a": torch.full((2, 2), 2.0), "c": torch.tensor([7.0])}) == 20.0
    assert inner(one, one) == 55.0
    assert inner(one, {"c": torch.tensor([7.0])}) == 0.0


def test_gradients_without_conflict_are_added_up_and_used_up():
    given = [{"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}, {"a": torch.tensor([1.0, 3.0])}]
    combined, found = combine(given, "seed", None)
    assert {name: gradient.tolist() for name, gradient in combined.items()} == {"a": [2.0, 3.0], "b": [2.0]}
    assert given == [{}, {}]
    assert found.conflict_fraction == 0.0


def test_gradients_that_conflict_lose_what_they_have_against_each_other():
    combined, found = combine([{"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([-1.0, 1.0])}], "seed", None)
    torch.testing.assert_close(combined["a"], torch.tensor([0.5, 1.5]))
    assert (found.conflict_fraction, found.lowest_cosine) == (1.0, pytest.approx(-(0.5**0.5)))


def test_over_ranks_products_are_those_of_all_shards():
    """The other rank's shards are as long as to turn the conflict here into agreement."""
    asked = []

    def over_ranks(products):
        asked.append(products)
        return [own + other for own, other in zip(products, [0.0, 5.0, 5.0, 25.0], strict=True)]

    combined, _ = combine([{"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([-1.0, 1.0])}], "seed", over_ranks)
    assert asked == [[1.0, -1.0, -1.0, 2.0]]
    assert combined["a"].tolist() == [0.0, 1.0]


def test_the_seed_decides_the_order_of_the_projections():
    def of(seed):
        generator = torch.Generator().manual_seed(1)
        given = [{"a": torch.randn(3, generator=generator)} for _ in range(5)]
        return combine(given, seed, None)[0]["a"]

    assert torch.equal(of("3/1"), of("3/1"))
    assert len({tuple(of(f"3/{number}").tolist()) for number in range(6)}) > 1


def test_an_optimizer_keeps_tasks_apart_until_they_are_combined_or_discarded():
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    optimizer = MasterAdamW(model.named_parameters())
    a, b = (model[name].weight for name in "ab")
    (a[0, 0] + 2.0 * b.sum()).backward()
    optimizer.set_aside()
    assert all(master.grad is None for master in optimizer.masters().values())
    (a[0, 1] - a[0, 0]).backward()
    optimizer.set_aside()
    found = optimizer.combine("seed")
    assert found.conflict_fraction == 1.0
    # The products are -1, 5 and 2: each gradient less its part along the other.
    gradients = {name: master.grad.flatten().tolist() for name, master in optimizer.masters().items()}
    assert gradients["a.weight"] == pytest.approx([1 - 1 / 2 - 1 + 1 / 5, 1 / 2 + 1])
    assert gradients["b.weight"] == pytest.approx([2 + 2 / 5])
    optimizer.discard_gradients()
    a.sum().backward()
    optimizer.set_aside()
    optimizer.discard_gradients()
    a.sum().backward()
    optimizer.set_aside()
    optimizer.combine("seed")
    assert optimizer.masters()["a.weight"].grad.tolist() == [[1.0, 1.0]], "what was set aside before is gone"


def test_a_learner_combines_the_gradients_of_a_batchs_tasks(make_learner, make_batch, gradients_of):
    """Two tasks of the same sequences agree: their sum is the gradient of the whole."""
    batch = make_batch(num=4)
    batch.sequences = batch.sequences[:2] * 2
    whole = make_learner()
    plain = whole.forward_backward(batch, SFTObjective())
    batch.tasks = ["a", "a", "b", "b"]
    apart = make_learner()
    metrics = apart.forward_backward(batch, SFTObjective(), by_task="0/0")
    assert (metrics["task_conflict_fraction"], metrics["task_lowest_cosine"]) == (0.0, pytest.approx(1.0))
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert (metrics["num_micro_batches"], metrics["num_tokens"]) == (2.0, plain["num_tokens"])
    expected = gradients_of(whole)
    for name, gradient in gradients_of(apart).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)
    batch.tasks = ["a"] * 4
    alone = make_learner().forward_backward(batch, SFTObjective(), by_task="0/0")
    assert (alone["task_conflict_fraction"], alone["task_lowest_cosine"]) == (0.0, 1.0)
    assert "task_conflict_fraction" not in plain


def test_tasks_are_combined_again_where_their_gradients_overflow(make_learner, make_batch, monkeypatch):
    batch = make_batch(num=2, longest=12)
    batch.tasks = ["a", "b"]
    learner, seeds = make_learner(dtype="float16"), []
    learner.optimizer.loss_scale.value = 2.0**21
    combine = learner.optimizer.combine
    monkeypatch.setattr(learner.optimizer, "combine", lambda seed: seeds.append(seed) or combine(seed))
    learner.forward_backward(batch, SFTObjective(), by_task="0/7")
    stats = learner.optim_prepare(1e-3)
    assert stats.num_overflows > 0
    assert seeds == ["0/7"] * (1 + stats.num_overflows)
