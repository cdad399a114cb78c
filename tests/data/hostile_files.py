"""The table of hostile tars, tables and folders, which tests and benchmarks read: HOSTILE_FILES."""

from tests.data.hostile_cases import Hostile
from tests.data.hostile_tables import HOSTILE_TABLES
from tests.data.hostile_tars import HOSTILE_TARS

HOSTILE_FILES: dict[str, Hostile] = {case.name: case for case in (*HOSTILE_TARS, *HOSTILE_TABLES)}
assert len(HOSTILE_FILES) == len(HOSTILE_TARS) + len(HOSTILE_TABLES), "two cases have the same name"
