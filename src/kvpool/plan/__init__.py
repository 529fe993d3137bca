"""Budget in, groups, pools and planes out: the one place where a size, offset or stride is computed."""

from __future__ import annotations

from kvpool.plan.geometry import BlockRange, GroupPlan, PlanePlan, PoolPlan, align
from kvpool.plan.make import make_plan
from kvpool.plan.plan import Plan, TierPlan
from kvpool.plan.sizing import Capacity

__all__ = ["BlockRange", "Capacity", "GroupPlan", "Plan", "PlanePlan", "PoolPlan", "TierPlan", "align", "make_plan"]
