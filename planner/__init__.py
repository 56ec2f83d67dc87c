"""What should happen, and when: model, decisions, schedule, simulation, search. Never imports torch."""
