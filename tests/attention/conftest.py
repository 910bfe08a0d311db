"""Attention on CUDA: the CPU's tests ask for results bit by bit, so sums are in order."""

from __future__ import annotations

import pytest

from tests.attention.cuda_cases import judge_one_draw_first


@pytest.fixture
def one_draw_first(cuda, monkeypatch):
    """Emulated CUDA in the place of every operator, and no more of a case than it takes."""
    judge_one_draw_first(monkeypatch)


@pytest.fixture
def executor(executor, monkeypatch):
    if executor.is_cuda:
        executor.calls.keywords["deterministic"] = True
    if executor.name == "emulated":
        judge_one_draw_first(monkeypatch)
    return executor
