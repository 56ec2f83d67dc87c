"""Why a plan is what it is: everything here simulates the plan again with one thing changed.

Decisions are kept but for that one thing, never planned again, so that a figure says what that thing alone is worth.
"""
