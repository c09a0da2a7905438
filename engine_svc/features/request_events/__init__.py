"""Reports to frontends when requests were queued, scheduled, preempted and resumed."""
