"""Prefetch and eviction of units in a run: the driver of the policy in planning/fetch_policy.py."""
