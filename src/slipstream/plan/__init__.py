"""Derives every `auto` from facts, with a reason: a pure function. `measure` gathers the facts.

Importing this package imports neither torch, transformers nor vLLM.
"""

from slipstream.plan.derive import Plan, make_plan
from slipstream.plan.facts import DataFacts, Facts, ModelFacts
from slipstream.plan.measure import gather_facts
from slipstream.plan.render import plan_as_json, render_plan
from slipstream.plan.summary import Note

__all__ = [
    "DataFacts",
    "Facts",
    "ModelFacts",
    "Note",
    "Plan",
    "gather_facts",
    "make_plan",
    "plan_as_json",
    "render_plan",
]
