"""Decides which requests run next: budgets, admission, preemption, turns.
Must not know tensors, clocks or optional features.
"""
