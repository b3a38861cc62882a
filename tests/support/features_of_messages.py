"""Features of Celery, as rows of the matrix: messages."""

from __future__ import annotations

from matrix_feature import Section

MESSAGES = Section("Messages")
