"""Why a plan is as it is: each module simulates the plan again with one thing changed.

All other decisions stay; nothing is planned again. So a figure shows the worth of that one thing.
"""
