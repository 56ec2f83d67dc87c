"""From a request to a plan: search over variants, plan.json, verification and remedies."""
