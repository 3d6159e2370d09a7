"""Failing exports write a file with details: in tests, into the folder of the test."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
