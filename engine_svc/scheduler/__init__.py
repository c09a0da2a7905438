"""Who runs next: budgets, admission, preemption, stops. Knows no tensors, clock or optional feature."""
