"""The demo: a small shop under a burst of triggers, with and without protection. Needs the extra `demo`."""
