"""Pages about deployments: a run's checkpoints, all deployments, and a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.report.markup import Child, Html, breakable, h, join, number, table
from slipstream.service.checkpoints import ShownCheckpoint
from slipstream.service.deployments.deployments import ShownDeployment
from slipstream.service.page import section, whole_page

_STATES = {"ready": "finished", "failed": "failed", "undeploying": "interrupted"}
_WHO = {"user": "you", "assistant": "model", "system": "system"}


def checkpoints(run: str, found: Sequence[ShownCheckpoint], deployed: Sequence[ShownDeployment]) -> Html:
    """The checkpoints of a run, each with a button or its deployment."""
    there = {(each.run, each.step): each for each in deployed}
    rows = [
        [
            f"step {each.step}{' (best)' if each.is_best else ''}",
            _deployment(there[run, each.step]) if (run, each.step) in there else _button(run, each.step),
            each.weights,
            number(each.size_bytes / (1 << 20), "MiB"),
        ]
        for each in found
    ]
    if not rows:
        return h("p", "There is no whole checkpoint yet.")
    return table(["checkpoint", "deployment", "weights", "size"], rows, numbers=False, caption="checkpoints")


def list_page(found: Sequence[ShownDeployment], key_file: str) -> str:
    """All deployments. `key_file`: empty for users with a token of their own."""
    rows: list[list[Child]] = [
        [
            h("a", each.name, href=f"/deployments/{each.name}"),
            _state(each),
            h("form", h("button", "Undeploy"), method="post", action=f"/deployments/{each.name}/undeploy"),
            each.kind if each.kind == "model" else f"adapter, rank {each.rank}",
            breakable(each.base),
            each.reason,
        ]
        for each in found
    ]
    names = ["model", "state", "", "kind", "base", "reason"]
    shown = table(names, rows, numbers=False, caption="deployments") if rows else h("p", "Nothing is deployed.")
    url = next((each.url for each in found if each.url), "")
    key = join("the key in ", h("code", key_file)) if key_file else "your token as the key"
    address = h("p", "All are at the OpenAI address ", h("code", url), ", with ", key, ".")
    changes = any(each.state in ("deploying", "undeploying") for each in found)
    return whole_page("Deployments", address if url else None, section("Deployments", shown), refreshes=changes)


def first_messages(found: ShownDeployment) -> list[dict[str, str]]:
    """The beginning of a conversation: the run's system prompt."""
    return [{"role": "system", "content": found.system_prompt}] if found.system_prompt else []


def chat_page(found: ShownDeployment, messages: Sequence[dict[str, str]], text: str = "", fault: str = "") -> str:
    """A conversation, which the page's form holds."""
    said = [
        h("div.attempt", h("p.note", _WHO.get(each.get("role", ""), "")), h("pre", each.get("content", "") or " "))
        for each in messages
    ]
    form = h(
        "form.fields",
        h("input", type="hidden", name="messages", value=json.dumps([*messages])),
        h(
            "label",
            "message (the button sends it)",
            h("textarea", text, name="text", rows=3, required=True, autofocus=True),
        ),
        h("p", h("button", "Send"), " ", h("a", "new conversation", href=f"/deployments/{found.name}")),
        method="post",
        action=f"/deployments/{found.name}",
    )
    ready = found.state == "ready"
    adapter = join(f"adapter of rank {found.rank} on ", breakable(found.base))
    kind = "whole model" if found.kind == "model" else adapter
    facts = [_state(found), h("a", found.run, href=f"/runs/{found.run}"), f"step {found.step}", kind]
    waits = "The chat appears here once it is ready." if found.state == "deploying" else ""
    return whole_page(
        found.name,
        h("p.facts", [h("span.fact", each) for each in facts]),
        h("p.alert", fault) if fault else None,
        h("p.alert", found.reason) if found.reason and not ready else None,
        h("p.note", waits) if waits else None,
        said,
        form if ready else None,
        refreshes=found.state == "deploying",
    )


def _state(found: ShownDeployment) -> Html:
    return h("span", found.state, class_=f"state {_STATES.get(found.state, 'running')}")


def _deployment(found: ShownDeployment) -> Html:
    text = "chat" if found.state == "ready" else found.state
    return join(h("a", text, href=f"/deployments/{found.name}"), f" {found.reason}" if found.reason else None)


def _button(run: str, step: int) -> Html:
    return h(
        "form",
        h("input", type="hidden", name="step", value=step),
        h("button", "Deploy"),
        method="post",
        action=f"/runs/{run}/deploy",
    )
