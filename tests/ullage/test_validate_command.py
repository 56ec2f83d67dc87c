import json

import pytest

from planner.cases import load_cases, predict_case
from hwprofiles.registry import load_profile
from ullage.cli import main

CASES = "tests/data/published_cases.json"
