"""Features of Celery, as rows of the matrix: results."""

from __future__ import annotations

from matrix_feature import Section

RESULTS = Section("Results")
