"""From a request to a plan: variants, their competition, the plan and its file, its verification, remedies."""
