"""From a config to a running system: the plan resolves every `auto` and gives reasons; `run` carries it out.

Importing this package imports neither torch, transformers nor vLLM.
"""

from slipstream.launch.plan.derive import Plan, make_plan
from slipstream.launch.plan.facts import DataFacts, Facts, ModelFacts
from slipstream.launch.plan.measure import gather_facts
from slipstream.launch.plan.render import plan_as_json, render_plan
from slipstream.launch.plan.summary import Note

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
