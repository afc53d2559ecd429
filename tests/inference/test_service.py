"""The engine's service state by itself: legal transitions, who waits and who is refused, and when vLLM is paused."""

import asyncio
import itertools

import pytest

from slipstream.inference.plugin.service import IllegalTransition, OutOfService, Service, State, Steps, StepState

TRANSITIONS = {
    "started": lambda service: service.started(),
    "fence": lambda service: service.fence(),
    "begin_proof": lambda service: service.begin_proof("0.1"),
    "begin_apply": lambda service: service.begin_apply("0.1"),
    "proved": lambda service: service.proved(),
    "fail": lambda service: service.fail("why"),
    "sleep": lambda service: service.sleep(),
    "wake": lambda service: service.wake(),
}
PATHS = {
    State.STARTING: (),
    State.SERVING: ("started",),
    State.FENCED: ("started", "fence"),
    State.PROVING: ("started", "fence", "begin_proof"),
    State.APPLYING: ("started", "begin_apply"),
    State.FAILED: ("started", "begin_apply", "fail"),
    State.ASLEEP: ("started", "sleep"),
}
"""How each state is reached."""
UPDATES = {"fence": State.FENCED, "begin_proof": State.PROVING, "begin_apply": State.APPLYING}
LEGAL = {
    State.STARTING: {"started": State.SERVING},
    State.SERVING: {**UPDATES, "fail": State.FAILED, "sleep": State.ASLEEP},
    State.FENCED: {**UPDATES, "fail": State.FAILED},
    State.PROVING: {**UPDATES, "fail": State.FAILED},
    State.APPLYING: {"proved": State.SERVING, "fail": State.FAILED},
    State.FAILED: {**UPDATES, "fail": State.FAILED},
    State.ASLEEP: {"wake": State.SERVING},
}


def reached(state):
    service = Service()
    for name in PATHS[state]:
        TRANSITIONS[name](service)
    assert service.state is state
    return service


@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_every_transition_is_legal_or_raises_and_changes_nothing(state):
    for name, transition in TRANSITIONS.items():
        service = reached(state)
        reason = service.reason
        if name in LEGAL[state]:
            transition(service)
            assert service.state is LEGAL[state][name], name
        else:
            with pytest.raises(IllegalTransition, match=f"cannot go from {state.value} to"):
                transition(service)
            assert (service.state, service.reason) == (state, reason), name
        assert (service.reason == "") == service.is_serving


@pytest.mark.parametrize("state", [State.STARTING, State.FAILED, State.ASLEEP])
async def test_requests_are_refused_with_the_reason_where_no_update_is_under_way(state):
    service = reached(state)
    with pytest.raises(OutOfService, match=service.reason):
        await asyncio.wait_for(service.until_serving(), 60.0)


async def test_requests_enter_vllm_during_an_update_where_they_are_admitted():
    service = reached(State.FENCED)
    waiting = asyncio.create_task(service.until_admitted())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    service.admit()
    await asyncio.wait_for(waiting, 60.0)
    await asyncio.wait_for(service.until_admitted(), 60.0)
    for change in (service.fence, lambda: service.begin_proof("0.1"), lambda: service.begin_apply("0.2")):
        change()
        waiting = asyncio.create_task(service.until_admitted())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done(), "vLLM may be about to pause, or to go on with other weights"
        service.admit()
        await asyncio.wait_for(waiting, 60.0)
    service.proved()
    service.begin_proof("0.1")
    service.compute_unproved("0.1")
    service.admit()
    service.begin_apply("0.1", proves_running=True)
    await asyncio.wait_for(service.until_admitted(), 60.0)
    service.fail("why")
    with pytest.raises(OutOfService, match="why"):
        await asyncio.wait_for(service.until_admitted(), 60.0)


def test_only_a_version_that_was_announced_is_computed_without_a_proof():
    for state in set(State) - {State.PROVING}:
        with pytest.raises(IllegalTransition):
            reached(state).compute_unproved("0.1")


def test_a_contradiction_takes_the_engine_out_of_service_but_an_update_that_is_under_way_decides():
    service = reached(State.SERVING)
    service.contradict("two answers")
    assert (service.state, service.reason) == (State.FAILED, "two answers")
    service.begin_apply("0.2")
    service.contradict("two answers")
    assert (service.state, service.reason) == (State.APPLYING, "two answers")
    service.proved()
    assert service.is_serving


class Host:
    """Notes its calls; the next one is cut short where `fails`."""

    def __init__(self):
        self.calls, self.fails = [], False

    async def _note(self, name):
        self.calls.append(name)
        if self.fails:
            self.fails = False
            raise RuntimeError("cut short")

    async def pause(self):
        await self._note("pause")

    async def resume(self):
        await self._note("resume")


@pytest.mark.parametrize(("first", "then"), itertools.product(["pause", "resume"], repeat=2))
async def test_after_a_call_that_was_cut_short_the_next_one_is_made(first, then):
    steps = Steps(host := Host())
    if first == "resume":
        await steps.pause()
    host.fails, host.calls = True, []
    with pytest.raises(RuntimeError):
        await getattr(steps, first)()
    assert steps.state is StepState.UNKNOWN
    assert (steps.is_running, steps.is_paused) == (False, False)
    await getattr(steps, then)()
    assert host.calls == [first, then]
